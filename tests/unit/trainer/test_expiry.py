"""A run on a machine that is taken back saves before that, by a clock of the test."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from tiny_trainer import sft_config

from hybridflow.checkpoint.layout import step_folders
from hybridflow.checkpoint.store import PendingSave
from hybridflow.trainer.sft.build import build
from hybridflow.trainer.stopping import VARIABLES, Expiry, expiry_of

MLP, SAGEMAKER = VARIABLES


def test_a_save_is_due_when_one_more_step_and_a_save_may_be_too_long() -> None:
    now = [1000.0]
    expiry = Expiry(at=2000.0, redundant=30.0, clock=lambda: now[0])
    expiry.step_took(100.0)
    expiry.step_took(40.0)
    now[0] = 1809.0
    assert not expiry.due(), "191 s are left; 100 for a step, 60 for a save, 30 by the key"
    now[0] = 1810.0
    assert expiry.due()
    expiry.save_took(20.0)
    assert not expiry.due(), "saves take 20 s here"
    now[0] = 1850.0
    assert expiry.due()
    now[0] = 2000.0
    assert not expiry.due(), "the time has passed"
    assert not Expiry(redundant=1e9).due()


@pytest.mark.parametrize("name", VARIABLES)
def test_times_in_the_environment(name: str) -> None:
    later = int(time.time()) + 10**6
    for text in (str(later), f"{later}.0", str(later * 1000)):
        assert expiry_of(5.0, {name: text}) == Expiry(float(later), 5.0)
    for text in ("2100-01-31T12:00:00", "2100-01-31T12:00:00Z", "2100-01-31T13:00:00+01:00"):
        assert expiry_of(0.0, {name: text}).at == 4_105_080_000.0


def test_what_is_no_time_to_come_is_told_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for text in ("soon", "-5", "nan", "1e40"):
            assert expiry_of(0.0, {MLP: text}).at is None
        assert expiry_of(0.0, {MLP: "100"}).at is None
        assert expiry_of(0.0, {MLP: "soon", SAGEMAKER: "4105080000"}).at == 4_105_080_000.0
        assert expiry_of(0.0, {MLP: ""}).at is None
    assert "wanted seconds since 1970" in caplog.text and "has passed and is not used" in caplog.text


@pytest.mark.slow
def test_a_run_saves_each_step_once_the_end_is_near(model: Path, tmp_path: Path) -> None:
    config = sft_config(model, tmp_path / "run", "trainer.save_freq=100", "trainer.total_training_steps=4")
    clock = [0.0]
    with build(config, patience=0.0) as trainer:
        trainer.expiry = Expiry(at=10_000.0, redundant=5_000.0, clock=lambda: clock[0])

        def after(step: int, _: object) -> bool:
            if step == 1:
                clock[0] = 5_000.0  # less is left than redundant seconds, a step and a save
            return step == 3

        trainer.fit(after)
    assert [folder.name for folder in step_folders(tmp_path / "run")] == ["global_step_2", "global_step_3"]


@pytest.mark.slow
def test_a_save_beside_the_run_is_whole_before_the_end_and_counts_with_its_writing(
    model: Path, tmp_path: Path
) -> None:
    keys = ("trainer.save_freq=1", "checkpoint.async_save=true")
    clock = [0.0]
    with build(sft_config(model, tmp_path / "run", *keys), patience=0.0) as trainer:
        trainer.expiry = Expiry(at=10_000.0, redundant=5_000.0, clock=lambda: clock[0])
        commit = trainer.store.commit

        def slow_commit(pending: PendingSave) -> Path:
            time.sleep(0.5)
            return commit(pending)

        trainer.store.commit = slow_commit  # type: ignore[method-assign]
        whole = []

        def after(step: int, _: object) -> bool:
            clock[0] = 6_000.0
            whole.append([folder.name for folder in step_folders(tmp_path / "run")])
            return step == 3

        trainer.fit(after)
    assert "global_step_2" in whole[1], "not only begun: the machine may be gone before the next step ends"
    assert trainer.expiry.longest_save >= 0.5
