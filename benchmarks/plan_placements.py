"""The order of placements for the settings of HybridFlow's paper, as the planner's search finds it.

    python benchmarks/plan_placements.py        (seconds, on one core)

PPO with four models of one size, 1,024 prompts and responses of 1,024 tokens, on 16 to 128 A100: the best
plan of each placement, and what section 8.3 of the paper (arXiv 2409.19256) says was fastest there.
Writes `benchmarks/results/plan_placements.md`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.planner.costs import FITTED, Costs
from hybridflow.planner.hardware import Cluster, read_devices
from hybridflow.planner.model_shape import shape_by_keys
from hybridflow.planner.pools import StepWork, job_of
from hybridflow.planner.run_plan import RunPlan
from hybridflow.planner.search import Found, PlacementSearch

RESULT = Path(__file__).parent / "results" / "plan_placements.md"
MODELS = {"7B": "Llama-2-7B", "13B": "Llama-2-13B", "34B": "CodeLlama-34B", "70B": "Llama-2-70B"}
DEVICES = (16, 32, 64, 96, 128)
PAPER_SPLIT = ({"actor", "rollout", "reference"}, {"critic", "reward_model"})
NAMES = ("colocated", "the paper's split", "standalone", "best of all")
PAGE = """# The order of placements

`python benchmarks/plan_placements.py`

PPO as in section 8 of HybridFlow's paper (arXiv 2409.19256): actor, critic, reference and reward model of
one size, a global batch of 1,024, prompts and responses of 1,024 tokens each, one PPO epoch of 8
mini-batches, A100 of 80 GB. Seconds of a step; the fastest of the three named placements is bold, and
"best of all" is the search's own, whatever it shares out. `–`: it does not fit. Nothing of the paper was
used to fit the model, which is that of `hybridflow plan`.

{table}

## Beside the paper

Section 8.3 of the paper: from 16 to 64 devices colocating all models was fastest; for 96 to 128 devices
with 34B and for 96 devices with 13B the split into actor and reference on one half, critic and reward
model on the other; for 13B on 128 devices every model alone (64 devices for the actor, 32 for the critic,
16 each for reference and reward model).

{beside}
"""


def job(model: str) -> StepWork:
    """Return the paper's job with four models of one size."""
    path = f"model.path={model}"
    words = [
        f"actor_rollout_ref.{path}",
        f"critic.{path}",
        "reward.reward_model.enable=true",
        f"reward.reward_model.{path}",
        "data.train_batch_size=1024",
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
        "actor_rollout_ref.actor.ppo_mini_batch_size=128",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "critic.ppo_max_token_len_per_gpu=8192",
        "actor_rollout_ref.rollout.max_num_seqs=1024",
    ]
    config = prepare_config(
        PPOConfig, words, recipe="ppo", runs=False, needs_model=False, needs_files=False
    ).config
    return job_of(config, shape_by_keys, 1024, 1024)


def named(found: Found) -> dict[str, RunPlan | None]:
    """Return the fastest plan of each placement that the paper compares."""
    best: dict[str, RunPlan | None] = dict.fromkeys(NAMES)
    for plan in found.plans:
        sets = [{*pool.roles} for pool in plan.pools]
        names = ["best of all"]
        if len(sets) == 1:
            names.append("colocated")
        elif all(one in sets for one in PAPER_SPLIT):
            names.append("the paper's split")
        elif plan.placement == "standalone":
            names.append("standalone")
        for name in names:
            best[name] = best[name] or plan
    return best


def papers_choice(size: str, devices: int) -> str:
    """Return the placement that section 8.3 says was fastest; empty where it says nothing."""
    if devices <= 64:
        return "colocated"
    if size == "34B" or (size, devices) == ("13B", 96):
        return "the paper's split"
    return "standalone" if (size, devices) == ("13B", 128) else ""


def shown(plan: RunPlan | None, *, best: bool) -> str:
    """Return a cell of the table."""
    if plan is None:
        return "–"
    return f"**{plan.seconds:.1f}**" if best else f"{plan.seconds:.1f}"


def sharing(plan: RunPlan) -> str:
    """Return how a plan shares its devices out."""
    return "; ".join(f"{', '.join(pool.roles)}: {pool.devices}" for pool in plan.pools)


def _loss(three: dict[str, RunPlan], choice: str, first: str) -> str:
    """Return what the paper's choice loses here."""
    if choice not in three:
        return "does not fit here"
    return f"is {three[choice].seconds / three[first].seconds - 1:.0%} slower here than {first}"


def main() -> int:
    """Search, print, write."""
    lines = [
        "| model | devices | " + " | ".join(NAMES[:3]) + " | best of all | search |",
        "|---|---|---|---|---|---|---|",
    ]
    agreed = 0
    differed: list[str] = []
    for size, model in MODELS.items():
        work = job(model)
        for devices in DEVICES:
            cluster: Cluster = read_devices(f"{devices}xA100")
            began = time.process_time()
            found = PlacementSearch(work, Costs(cluster, FITTED), schedules=("sync",)).run()
            seconds = time.process_time() - began
            best = named(found)
            three = {name: plan for name, plan in best.items() if plan is not None and name != "best of all"}
            first = min(three, key=lambda name: three[name].seconds) if three else ""
            cells = [shown(best[name], best=name == first) for name in NAMES[:3]]
            whole = best["best of all"]
            last = "–" if whole is None else f"{whole.seconds:.1f} ({sharing(whole)})"
            lines.append(f"| {size} | {devices} | {' | '.join(cells)} | {last} | {seconds:.2f} s |")
            print(lines[-1], flush=True)
            choice = papers_choice(size, devices)
            if choice == first:
                agreed += 1
            elif choice and first:
                differed.append(f"- {size} on {devices}: {choice} {_loss(three, choice, first)}.")
    judged = agreed + len(differed)
    beside = [f"The search has the paper's order in {agreed} of {judged} settings.", "", *differed]
    RESULT.write_text(PAGE.format(table="\n".join(lines), beside="\n".join(beside)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
