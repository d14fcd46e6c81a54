"""Runs on a CUDA device as a user starts them: in bfloat16, under Ray, and with few waits of the host."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "unit" / "trainer")]

from tiny_trainer import build, ppo_config, tiny_model  # noqa: E402

from device_paths import GRPO, compare, numbers, of_run  # noqa: E402
from hybridflow.engines.micro_batch_engine import MicroBatchEngine  # noqa: E402
from hybridflow.rollout.native.session import Session  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = "trainer.device=cuda"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=128, heads=2)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_run_in_bfloat16_with_all_defaults(estimator: str, model: Path, tmp_path: Path) -> None:
    config = ppo_config(model, tmp_path / "run", CUDA, f"algorithm.adv_estimator={estimator}")
    with build(config) as trainer:
        trainer.fit()
    steps = of_run(tmp_path / "run")
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
        assert all(math.isfinite(step[name]) for step in steps), steps
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    for step in steps:  # generation and training are two ways to compute in bfloat16
        apart = step.get("training/rollout_probs_diff_mean", 0.0)
        assert apart < 0.01, step


@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_a_run_under_ray_has_the_numbers_of_one_in_a_process(
    schedule: str, model: Path, tmp_path: Path
) -> None:
    keys = (*GRPO, f"trainer.schedule={schedule}")
    if schedule != "sync":
        keys += ("algorithm.rollout_correction.rollout_is=token",)
        keys += ("actor_rollout_ref.rollout.calculate_log_probs=true",)
    here = numbers(tmp_path / "here", "cuda", model, *keys)
    there = numbers(tmp_path / "ray", "cuda", model, *keys, "trainer.controller=ray")
    compare(here, there, 1e-3)


@contextmanager
def waits(into: Counter[str]) -> Iterator[None]:
    """Count by line where the host waited for the device, as torch tells it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each in caught:
        if "synchronizing" in str(each.message):
            into[f"{each.filename.rpartition('hybridflow/')[2]}:{each.lineno}"] += 1


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> tuple[Counter[str], list[int]]:
    """Wrap a method; its waits by line, and how many each call had."""
    lines: Counter[str] = Counter()
    calls: list[int] = []
    plain = getattr(owner, method)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = sum(lines.values())
        with waits(lines):
            found = plain(self, *args, **kwargs)
        calls.append(sum(lines.values()) - before)
        return found

    monkeypatch.setattr(owner, method, call)
    return lines, calls


@pytest.mark.parametrize(
    "keys", [(), ("algorithm.adv_estimator=gae",), ("actor_rollout_ref.actor.use_prefix_grouper=true",)]
)
def test_the_host_waits_where_the_simulated_device_says(
    keys: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first step, which sets up. Events that the host waits for are no part of it."""
    update = counted(monkeypatch, MicroBatchEngine, "train_mini_batch")
    scored = counted(monkeypatch, MicroBatchEngine, "forward")
    entered = counted(monkeypatch, Session, "_enter")
    config = ppo_config(model, tmp_path / "run", CUDA, *GRPO, *keys, "trainer.total_training_steps=3")
    with build(config) as trainer:

        def after(step: int, logged: object) -> bool:
            if step == 1:
                for lines, calls in (update, scored, entered):
                    lines.clear()
                    calls.clear()
            return False

        trainer.fit(after)
    print(update, scored, entered)
    assert update[1] and max(update[1]) <= 1, update
    assert max(scored[1], default=0) <= 1, scored
    assert entered[1] and max(entered[1]) == 0, entered
