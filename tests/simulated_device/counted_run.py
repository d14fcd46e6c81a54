"""A run on the simulated device whose figures are counted: GRPO of the tiny recipe, after its first step.

python tests/simulated_device/counted_run.py KEY=VALUE ...        prints the figures of such a run
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import product_phases
import simulated_accelerator  # noqa: F401  (registers the device)
from simulated_accelerator import counts

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.ppo.build import build

STEPS = 3


def counted_run(
    *overrides: str, model: Path | None = None, recipe: str = "tiny/grpo", steps: int = STEPS
) -> tuple[PPOConfig, dict[str, float]]:
    """Train steps of 8 prompts and two updates; leave the figures of all but the first in `counts`.

    Return the configuration, and the metrics of the last step.
    """
    product_phases.install()
    with tempfile.TemporaryDirectory(prefix="counted-") as name:
        folder = Path(name)
        if model is None:
            sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 48}
            model = create_tiny_model(folder / "model", **sizes)
        keys = [
            f"actor_rollout_ref.model.path='{model}'",
            "trainer.device=sim",
            f"trainer.default_local_dir='{folder / 'run'}'",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.logger=[]",
            "trainer.num_threads=1",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.exact=false",
            "reward.num_workers=0",
            *overrides,
        ]
        config = prepare_config(PPOConfig, keys, recipe).config
        with build(config) as trainer:

            def after(step: int, logged: object) -> bool:
                if step == 1:  # what is done once, such as the first step of an engine, is not counted
                    counts.forget()
                return False

            trainer.fit(after)
        return config, read_metrics(folder / "run" / "metrics.jsonl")[steps]


def quick_run(
    *overrides: str, model: Path | None = None, steps: int = STEPS
) -> tuple[PPOConfig, dict[str, float]]:
    """Train on as few rows as there are to count: to make the task's 20,000 takes longer than a step."""
    return counted_run("data.task.size=64", "data.task.val_size=8", *overrides, model=model, steps=steps)


if __name__ == "__main__":
    counted_run(*sys.argv[1:])
    print(counts.report())
