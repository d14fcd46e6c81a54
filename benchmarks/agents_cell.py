"""One job of the agents page in a process of its own: the warm-up of a task, or a run from there.

    python benchmarks/agents_cell.py {warm,run} --name calculator --seed 0     (agents.py starts these)

tiny model ──SFT──► warm start ──GRPO──► validations, and the result in results/agents/NAME_SEED.json
                        └──more SFT alone──► validations of the same kind, in warm.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import time
from pathlib import Path

from agents_settings import SFT, TASKS, WELL_FORMED, Cell
from learn_settings import write_json

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.environments.built_in import CALL_WORDS
from hybridflow.models.tiny import create_tiny_model, create_tiny_tool_tokenizer
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.sft.build import build as build_sft

HINTS = ("higher", "lower")
"""Words of guess that are one token each, as those of the tools' names are."""
KEPT = ("val-core/", "val-aux/agent/", "critic/score/mean")


def make_warm_start(cell: Cell) -> None:
    """Warm a new model up, keep it, and go on for as many conversations as the run will have."""
    start = time.process_time()
    seconds = time.perf_counter()
    folder = cell.warm
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = create_tiny_tool_tokenizer((*CALL_WORDS, *HINTS))
    model = create_tiny_model(folder / "model", tokenizer=tokenizer, seed=cell.seed)
    steps = _snapshots(cell)
    data = _config(cell, model, folder / "look").data
    keys = [
        f"model.path='{model}'",
        f"data.task.options.environment={data.environment}",
        f"data.task.options.well_formed={WELL_FORMED}",
        *(f"data.task.options.options.{name}={value}" for name, value in data.environment_options.items()),
        f"trainer.default_local_dir='{folder}/sft'",
        f"trainer.seed={cell.seed}",
        f"trainer.total_training_steps={steps[-1]}",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
    ]
    spent: dict[str, float] = {}

    def keep(step: int, logged: dict[str, float]) -> bool:
        if step in steps:
            trainer.state.write_huggingface(folder / f"step_{step}", True)
        if step == cell.task.warm_steps:
            spent.update(cpu=time.process_time() - start, seconds=time.perf_counter() - seconds)
        return False

    with build_sft(prepare_config(SFTConfig, keys, recipe=SFT).config) as trainer:
        trainer.fit(after_step=keep)
    curve = [validate(cell, folder / f"step_{step}", folder / "look") for step in steps]
    shutil.copytree(folder / f"step_{steps[0]}", folder / "warm")
    write_json(folder / "warm.json", {**spent, "steps": steps, "curve": curve})


def _snapshots(cell: Cell) -> list[int]:
    """Return the SFT steps after which as many conversations were seen since the warm-up as the run has
    trajectories at its validations.
    """
    run = prepare_config(PPOConfig, ["actor_rollout_ref.model.path=unused/model"], recipe=cell.recipe).config
    sft = prepare_config(SFTConfig, ["model.path=unused/model"], recipe=SFT).config
    per_step = run.data.train_batch_size * run.actor_rollout_ref.rollout.n / sft.data.train_batch_size
    last = int(run.trainer.total_training_steps or 0)
    looks = [*range(0, last, run.trainer.test_freq), last]
    return [cell.task.warm_steps + round(per_step * look) for look in looks]


def run(cell: Cell) -> None:
    """Train from the warm start, and write the result."""
    start = time.process_time()
    seconds = time.perf_counter()
    folder = cell.warm.parent / "runs" / cell.label
    with build(_config(cell, cell.warm / "warm", folder, *cell.task.overrides)) as trainer:
        trainer.fit()
        trainer.state.write_huggingface(folder / "model", True)
    spent = {"cpu": time.process_time() - start, "seconds": time.perf_counter() - seconds}
    lines = read_metrics(folder / "metrics.jsonl")
    result = {
        "name": cell.name,
        "seed": cell.seed,
        "digest": cell.digest,
        "date": datetime.date.today().isoformat(),
        **spent,
        "curve": [{"step": step, **_kept(lines[step])} for step in sorted(lines)],
        "warm_up": json.loads((cell.warm / "warm.json").read_text()),
    }
    if cell.task.overrides:
        result["after"] = validate(cell, folder / "model", folder / "look")
    write_json(cell.result, result)


def validate(cell: Cell, model: Path, folder: Path) -> dict[str, float]:
    """Return the validation of a model as its recipe stands, without the task's further keys."""
    with build(_config(cell, model, folder, "trainer.val_only=true")) as trainer:
        trainer.fit()
    (line,) = read_metrics(folder / "metrics.jsonl").values()
    return _kept(line)


def _config(cell: Cell, model: Path, folder: Path, *overrides: str) -> PPOConfig:
    shutil.rmtree(folder, ignore_errors=True)
    keys = [
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{folder}'",
        f"trainer.seed={cell.seed}",
        "trainer.resume_mode=disable",
        *overrides,
    ]
    return prepare_config(PPOConfig, keys, recipe=cell.recipe).config


def _kept(line: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in line.items() if name.startswith(KEPT)}


def main() -> None:
    """One job, as the command line names it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=["warm", "run"])
    parser.add_argument("--name", choices=list(TASKS), required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    setup_logging()
    cell = Cell(options.name, options.seed)
    if options.job == "warm":
        make_warm_start(cell)
    else:
        run(cell)


if __name__ == "__main__":
    main()
