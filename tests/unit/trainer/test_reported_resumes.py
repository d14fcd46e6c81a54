"""Inputs of public bug reports about resumed runs: the learning rate, the order of rows, and what is logged.

benchmarks/results/reported_inputs.md names their threads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_trainer import build as build_ppo
from tiny_trainer import ppo_config, sft_config

from hybridflow.observability.trackers.base import Outcome, RunInfo, Tracker
from hybridflow.observability.trackers.build import TRACKERS
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.sft.build import build as build_sft

STEPS = 6
COSINE = ("lr_scheduler_type=cosine", "lr_warmup_steps=2", "min_lr_ratio=0.1")


def sft(model: Path, run: Path, *keys: str) -> Any:
    optim = [f"optim.{key}" for key in COSINE]
    return build_sft(
        sft_config(model, run, *optim, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", *keys)
    )


def ppo(model: Path, run: Path, *keys: str) -> Any:
    optim = [f"actor_rollout_ref.actor.optim.{key}" for key in COSINE]
    steps = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "algorithm.adv_estimator=grpo")
    return build_ppo(ppo_config(model, run, *optim, *steps, *keys))


KINDS = {"sft": (sft, "train/lr"), "ppo": (ppo, "actor/lr")}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Crash(Exception):
    """The end of a run between two checkpoints."""


def crash_after(last: int) -> Any:
    def after_step(step: int, logged: Any) -> bool:
        if step == last:
            raise Crash
        return False

    return after_step


@pytest.mark.parametrize("kind", KINDS)
def test_the_schedule_and_the_steps_go_on_after_three_crashes(
    kind: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved after 2 and 4 and crashed after 3, 3 again, and 5: each step is logged once, by the last of those
    that made it, with the learning rate of a run that was never stopped.
    """
    make, rate = KINDS[kind]
    with make(model, tmp_path / "whole") as trainer:
        trainer.fit()
    rates = [line[rate] for line in lines(tmp_path / "whole")]
    assert len(rates) == STEPS and len(set(rates)) > 3 and 0 < min(rates) < 1e-2
    for last in (3, 3, 5):
        with pytest.raises(Crash), make(model, tmp_path / "run") as trainer:
            trainer.fit(after_step=crash_after(last))
        found = lines(tmp_path / "run")
        assert [line["step"] for line in found] == list(range(1, last + 1))
        assert [line[rate] for line in found] == rates[:last]
    # what a step logged before its run was lost is replaced
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 5, ', '"step": 5, "of/the/lost/run": 1.0, '))
    assert "of/the/lost/run" in read_metrics(path)[5]
    caplog.clear()
    with caplog.at_level(logging.INFO), make(model, tmp_path / "run") as trainer:
        assert trainer.state.step == 4
        trainer.fit()
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line[rate] for line in found] == rates and "of/the/lost/run" not in found[4]
    assert "global_step_4" in caplog.text, "it is said where the run goes on"


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_is_opened_before_the_first_step_of_a_resumed_run(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, int | None]] = []

    class Noting(Tracker):
        def __init__(self, run: RunInfo) -> None:
            said.append(("opened", run.resume_step))

        def log(self, metrics: Mapping[str, float], step: int) -> None:
            said.append(("logged", step))

        def close(self, outcome: Outcome = "finished") -> None:
            said.append((outcome, None))

    monkeypatch.setitem(TRACKERS, "console", Noting)
    make, _ = KINDS[kind]
    keys = ("trainer.logger=[console]", "trainer.test_freq=-1")
    with pytest.raises(Crash), make(model, tmp_path / "run", *keys) as trainer:
        trainer.fit(after_step=crash_after(3))
    assert said[0] == ("opened", None) and said[-1] == ("failed", None)
    said.clear()
    with make(model, tmp_path / "run", *keys) as trainer:
        trainer.fit()
    assert said[0] == ("opened", 2) and said[-1] == ("finished", None)
    assert list(dict.fromkeys(step for what, step in said if what == "logged")) == [3, 4, 5, 6]
