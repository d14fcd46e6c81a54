"""The command `hybridflow plan`: which placement and layout of a run takes least, and what it takes.

recipe, overrides, --devices ─► Job ─► Search ─► the best plans as a table, and the overrides of each
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.planner.hardware import Cluster
    from hybridflow.planner.job import Job
    from hybridflow.planner.search import Plan

MODEL = "model="
GIB = 2**30
STEPS = 100
"""Steps for which hours are shown where trainer.total_training_steps is not set."""
EPILOG = """example: hybridflow plan --recipe grpo model=Qwen/Qwen3-8B --devices 16xH100 --device-price 2.5
data.train_batch_size=256 data.max_response_length=4096 --response-tokens 1200

model=PATH is short for actor_rollout_ref.model.path=PATH: a folder, a config.json, or the name of a known
model. No weights are read."""


def add_plan(words: Any, recipe: str, overrides: str) -> None:
    """Add the command to the grammar."""
    plan = words.add_parser(
        "plan",
        help="which placement of a run on given devices takes the least time, how long, and its memory",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("--recipe", help=recipe)
    plan.add_argument("--devices", help="number and kind of the devices, as in 16xH100")
    plan.add_argument("--device-price", type=float, help="price of a device for an hour, in any currency")
    plan.add_argument(
        "--prompt-tokens", type=float, help="mean tokens of a prompt (default: half of the longest)"
    )
    plan.add_argument(
        "--response-tokens", type=float, help="mean tokens of a response (default: half of the longest)"
    )
    plan.add_argument(
        "--reward-seconds", type=float, default=0.0, help="seconds of the reward for a response (default: 0)"
    )
    plan.add_argument(
        "--schedule",
        action="append",
        help="only this schedule (sync, one_step_off, fully_async, colocated_async); may be repeated",
    )
    plan.add_argument(
        "--check", action="store_true", help="print published runs beside predictions instead, as Markdown"
    )
    plan.add_argument("--best", type=int, default=5, help="plans to show (default: %(default)s)")
    plan.add_argument("overrides", nargs="*", help=overrides)
    plan.set_defaults(body=plan_run)


def plan_run(options: argparse.Namespace) -> int:
    """Search, and print the best plans; or the check of the cost model."""
    import time

    from hybridflow.config import PPOConfig
    from hybridflow.config.load import prepare_config
    from hybridflow.errors import ConfigError
    from hybridflow.planner.costs import Costs
    from hybridflow.planner.fitted import FITTED
    from hybridflow.planner.hardware import read_devices
    from hybridflow.planner.job import job_of
    from hybridflow.planner.known_models import shape_by_keys
    from hybridflow.planner.search import Search, first_different

    if options.check:
        from hybridflow.planner.check_page import check_page

        print(check_page())
        return 0
    if not options.devices:
        raise ConfigError("plan: say for which devices, as in --devices 16xH100")
    cluster = read_devices(options.devices)
    _check_options(options, Search.schedules)
    given = [_written_out(word) for word in options.overrides]
    config = prepare_config(
        PPOConfig, given, recipe=options.recipe, runs=False, needs_model=False, needs_files=False
    ).config
    prompt = _mean_tokens("prompt", options.prompt_tokens, config.data.max_prompt_length)
    response = _mean_tokens("response", options.response_tokens, config.data.max_response_length)
    if config.actor_rollout_ref.model.path is None:
        raise ConfigError("plan: say for which model, as in model=Qwen/Qwen3-8B")
    job = job_of(config, shape_by_keys, prompt, response, options.reward_seconds)
    began = time.perf_counter()
    costs = Costs(cluster, FITTED)
    search = Search(job, costs)
    if options.schedule:
        search.schedules = options.schedule
    found = search.run()
    seconds = time.perf_counter() - began
    best = _that_pass(first_different(found.plans), job, cluster, options, given)
    if not best:
        raise ConfigError(
            f"plan: no placement of {', '.join(job.roles)} fits into the memory of {options.devices}: use "
            "more devices, LoRA (actor_rollout_ref.model.lora_rank), shorter rows, or a smaller "
            "actor.ppo_max_token_len_per_gpu"
        )
    print(
        f"{found.placements} placements, {found.tried} ways to deal the devices out, {len(found.plans):,} "
        f"plans that fit, in {seconds:.2f} s"
    )
    _show(best, job, cluster, options.device_price)
    print(f"\na checkpoint of the actor takes about {costs.checkpoint(job.shapes['actor']):.0f} s to write")
    return 0


def _check_options(options: argparse.Namespace, schedules: Sequence[str]) -> None:
    """Raise ConfigError for schedules that are not compared, and for numbers that mean nothing."""
    from hybridflow.errors import ConfigError

    odd = [name for name in options.schedule or () if name not in schedules]
    if odd:
        raise ConfigError(f"--schedule {odd[0]}: plans compare {', '.join(schedules)}")
    if options.best < 1:
        raise ConfigError(f"--best {options.best}: wanted the number of plans to show, at least 1")
    for name, value in (("device-price", options.device_price), ("reward-seconds", options.reward_seconds)):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"--{name} {value:g}: wanted a number from 0 on")


def _mean_tokens(of: str, given: float | None, longest: int) -> float:
    """Return the mean tokens of prompts or responses; ConfigError for none, or too many."""
    from hybridflow.errors import ConfigError

    if given is None:
        return longest / 2
    if not 0 < given <= longest:
        raise ConfigError(
            f"--{of}-tokens {given:g}: wanted a mean above 0 and of at most data.max_{of}_length={longest}"
        )
    return given


def _written_out(word: str) -> str:
    """Return an override with the full name of its key."""
    if word.startswith(MODEL):
        return f"actor_rollout_ref.model.path={word.removeprefix(MODEL)}"
    return word


def _that_pass(
    plans: Sequence[Plan], job: Job, cluster: Cluster, options: argparse.Namespace, given: Sequence[str]
) -> list[tuple[Plan, list[str]]]:
    """Return the first plans whose overrides pass all checks of the configuration, with the overrides."""
    from hybridflow.config import PPOConfig
    from hybridflow.config.load import prepare_config
    from hybridflow.errors import ConfigError
    from hybridflow.planner.overrides import overrides_of

    passed = []
    for plan in plans:
        words = overrides_of(plan, cluster, job)
        try:
            prepare_config(
                PPOConfig,
                [*given, *(word.strip("'") for word in words)],
                recipe=options.recipe,
                runs=False,
                needs_model=False,
                needs_files=False,
            )
        except ConfigError:
            continue  # the recipe or a key of the user's excludes it
        passed.append((plan, words))
        if len(passed) == options.best:
            break
    return passed


def _show(best: Sequence[tuple[Plan, list[str]]], job: Job, cluster: Cluster, price: float | None) -> None:
    """Print the plans as a table, then the devices, seconds and overrides of each."""
    from rich.console import Console
    from rich.table import Table

    steps = job.config.trainer.total_training_steps or STEPS
    console = Console()
    title = f"{cluster.devices} × {cluster.hardware.name}; hours: of devices, for {steps:,} steps"
    table = Table(title=title, title_justify="left")
    for heading in ("", "step", "tokens/s", "GiB", "hours"):
        table.add_column(heading, justify="right")
    if price is not None:
        table.add_column("price", justify="right")
    table.add_column("placement")
    table.add_column("schedule")
    for number, (plan, _) in enumerate(best, 1):
        hours = plan.seconds * steps * plan.devices / 3600
        most = max(size for pool in plan.pools for size in pool.memory.values())
        cells = [str(number), f"{plan.seconds:.1f} s", f"{job.trained.tokens / plan.seconds:,.0f}"]
        cells += [f"{most / GIB:.0f}", f"{hours:,.1f}"]
        if price is not None:
            cells.append(f"{hours * price:,.0f}")
        table.add_row(*cells, plan.placement, plan.schedule)
    console.print(table)
    for number, (plan, words) in enumerate(best, 1):
        print(f"\n{number}  {plan.placement}, {plan.schedule}")
        for pool in plan.pools:
            memory = ", ".join(f"{phase} {size / GIB:.1f} GiB" for phase, size in pool.memory.items())
            print(f"   {pool.devices} devices: {', '.join(pool.roles)}; each {memory}")
        print("   seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.phases.items()))
        print("   " + " ".join(words))
