"""SIGTERM and Ctrl-C: the run ends in order at any moment, and the same command goes on to the same bits."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_trainer import TIMINGS, ppo_config, sft_config, tiny_model

from hybridflow import stop_token
from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.errors import Stopped
from hybridflow.observability.progress import progress
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer import main_ppo, main_sft
from hybridflow.trainer.command import ends_in_status
from hybridflow.trainer.stopping import newest_checkpoint

PPO = (
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "trainer.test_freq=2",
    "data.train_batch_size=4",
)
STEP = 2
"""The step in which the signal comes; step 1 is done and no checkpoint has it."""


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in line.items() if not name.startswith(TIMINGS)}
        for step, line in read_metrics(run / "metrics.jsonl").items()
    }


def digests(run: Path) -> dict[str, Any]:
    newest = newest_checkpoint(run)
    assert newest is not None
    files = read_manifest(newest).files
    return {name: digest for name, digest in files.items() if "huggingface" not in name}


def send_at(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    nth: int = 1,
    *,
    step: int | None = STEP,
    number: int = signal.SIGTERM,
    times: int = 1,
) -> None:
    """Send a signal to this process before the nth call of `module:Class.function` in a step (None: before
    any).
    """
    module_name, _, path = place.partition(":")
    holder: Any = __import__(module_name, fromlist=["_"])
    *outer, name = path.split(".")
    for each in outer:
        holder = getattr(holder, each)
    original: Callable[..., Any] = getattr(holder, name)
    calls = 0

    @functools.wraps(original)  # keeps how the driver calls it
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += progress.step == step
        if calls == nth and progress.step == step:
            try:
                os.kill(os.getpid(), number)
            finally:  # also where the first one is raised here
                for _ in range(times - 1):
                    os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, wrapped)


MOMENTS = {
    "generation": ("hybridflow.rollout.native.session:Session.step", 3),
    "scoring": ("hybridflow.rewards.manager:RewardSession.result", 1),
    "log-probs": ("hybridflow.trainer.ppo.old_log_probs:OldLogProbs.__call__", 1),
    "update": ("hybridflow.workers.actor:ActorWorker.update_mini_batch", 1),
    "after the update": ("hybridflow.workers.rollout_group:RolloutGroup.update_from", 1),
    "validation": ("hybridflow.trainer.ppo.validation:Validator.__call__", 1),
    "answers of the validation": ("hybridflow.stop_token:StopToken.each", 2),
    "log": ("hybridflow.trainer.trainer:Trainer._log", 1),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny model and the run folder of a run that nobody has interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    model = tiny_model(folder / "model")
    main_ppo.run(ppo_config(model, folder / "run", *PPO))
    return model, folder / "run"


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_an_interrupted_run_saves_and_goes_on_to_the_same_bits(
    moment: str, undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = undisturbed
    config = ppo_config(model, tmp_path / "run", *PPO)
    with monkeypatch.context() as patch:
        send_at(patch, *MOMENTS[moment])
        with pytest.raises(Stopped) as caught:
            main_ppo.run(config)
    saved, place = (1, "in") if moment in ("generation", "scoring", "log-probs") else (2, "after")
    assert caught.value.message == (
        f"interrupted {place} step 2/3; newest checkpoint global_step_{saved}; the same command goes on"
    )
    assert not list((tmp_path / "run").glob(".tmp_*"))
    assert max(metrics_of(tmp_path / "run")) == saved
    main_ppo.run(config)
    assert metrics_of(tmp_path / "run") == metrics_of(whole)
    assert digests(tmp_path / "run") == digests(whole)


def test_a_signal_while_saving_lets_the_checkpoint_become_whole(
    undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ppo_config(undisturbed[0], tmp_path / "run", *PPO)
    send_at(monkeypatch, "hybridflow.checkpoint.store:CheckpointStore._publish", step=3)
    main_ppo.run(config)  # it was the last step: all is done
    assert digests(tmp_path / "run") == digests(undisturbed[1])


def test_a_run_whose_last_validation_is_left_out_is_not_done(
    undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = undisturbed
    config = ppo_config(model, tmp_path / "run", *PPO)
    with monkeypatch.context() as patch:
        send_at(patch, *MOMENTS["validation"], step=3)
        with pytest.raises(Stopped, match="step 3/3"):
            main_ppo.run(config)
    validated = {name for name in metrics_of(whole)[3] if name.startswith("val")}
    assert validated and not validated & set(metrics_of(tmp_path / "run")[3])
    main_ppo.run(config)
    assert metrics_of(tmp_path / "run") == metrics_of(whole)
    assert main_ppo.run(config) == {}, "what was made up for is not done again"


def test_a_supervised_run_whose_last_validation_is_left_out_is_not_done(
    undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sft_config(undisturbed[0], tmp_path / "run", "trainer.test_freq=2")
    send_at(monkeypatch, *SFT_MOMENTS["validation"], step=2)
    with pytest.raises(Stopped, match="step 2/2"):
        main_sft.run(replace(config, trainer=replace(config.trainer, total_training_steps=2)))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_second_signal_ends_at_once_and_leaves_nothing_half(
    async_save: bool, undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_token, "SAME_WISH_SECONDS", 0.0)
    saving = f"actor_rollout_ref.actor.checkpoint.async_save={str(async_save).lower()}"
    config = ppo_config(undisturbed[0], tmp_path / "run", *PPO, saving)
    send_at(monkeypatch, "hybridflow.checkpoint.store:save_tree", step=3, times=2)
    with pytest.raises(Stopped) as caught:
        main_ppo.run(config)
    assert caught.value.at_once
    said = "interrupted after step 3/3; there is no checkpoint yet; the same command starts anew"
    assert caught.value.message == said
    assert not list((tmp_path / "run").glob(".tmp_*"))


@pytest.mark.parametrize("moment", ["generation", "update"])
def test_a_signal_that_is_sent_twice_counts_once(
    moment: str, undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_token, "SAME_WISH_SECONDS", 600.0)
    config = ppo_config(undisturbed[0], tmp_path / "run", *PPO)
    send_at(monkeypatch, *MOMENTS[moment], times=2)
    with pytest.raises(Stopped) as caught:
        main_ppo.run(config)
    saved = 1 if moment == "generation" else 2
    assert not caught.value.at_once
    assert f"newest checkpoint global_step_{saved}; the same command goes on" in caught.value.message


def test_before_the_first_step_there_is_nothing_to_wait_for(
    undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ppo_config(undisturbed[0], tmp_path / "run", *PPO)
    send_at(
        monkeypatch, "hybridflow.trainer.roles.role_builders:build_engine", step=None, number=signal.SIGINT
    )
    with pytest.raises(Stopped) as caught:
        main_ppo.run(config)
    assert caught.value.message == (
        "interrupted while loading the model of the actor; there is no checkpoint yet; the same command "
        "starts anew"
    )
    assert not (tmp_path / "run").exists(), "a run that has written nothing leaves no folder"


def test_a_run_without_checkpoints_is_not_saved(
    undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ppo_config(undisturbed[0], tmp_path / "run", *PPO, "trainer.save_freq=-1")
    send_at(monkeypatch, *MOMENTS["scoring"])
    with pytest.raises(Stopped) as caught:
        main_ppo.run(config)
    assert "there is no checkpoint yet" in caught.value.message
    assert newest_checkpoint(tmp_path / "run") is None


SFT_MOMENTS = {
    "update": ("hybridflow.workers.sft:SFTWorker.update", 1),
    "validation": ("hybridflow.workers.sft:SFTWorker.evaluate", 1),
    "reading": ("hybridflow.trainer.sft.step:RowSource.next", 1),
}


@pytest.mark.parametrize("moment", list(SFT_MOMENTS))
def test_an_interrupted_supervised_run_goes_on_to_the_same_bits(
    moment: str, undisturbed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("trainer.test_freq=2", "trainer.total_training_steps=3")
    whole = sft_config(undisturbed[0], tmp_path / "whole", *settings)
    main_sft.run(whole)
    config = sft_config(undisturbed[0], tmp_path / "run", *settings)
    with monkeypatch.context() as patch:
        send_at(patch, *SFT_MOMENTS[moment], number=signal.SIGINT)
        with pytest.raises(Stopped) as caught:
            main_sft.run(config)
    saved = 1 if moment == "reading" else 2
    assert f"newest checkpoint global_step_{saved}; the same command goes on" in caught.value.message
    main_sft.run(config)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


def test_an_awaited_item_is_broken_off_and_its_maker_told_and_other_work_is_not() -> None:
    token = stop_token.StopToken()
    said: list[str] = []

    def items() -> Iterator[int]:
        try:
            yield 1
            os.kill(os.getpid(), signal.SIGINT)
            yield 2
        finally:
            said.append("closed")

    with pytest.raises(Stopped), token.listening(), token.training(lambda: True), token.leavable():
        with pytest.raises(Stopped):
            for number in token.each(items()):
                said.append(str(number))
        token.check()  # what ends the run now comes to its own end
        said.append("ended")
    assert said == ["1", "closed", "ended"]
    with pytest.raises(Stopped), token.listening(), token.training(lambda: True):
        os.kill(os.getpid(), signal.SIGINT)
        token.check()  # an update is finished first
        token.stop_here()
    token.stop_here()  # nobody asks outside of `listening`


def test_a_run_within_a_run_or_beside_it_leaves_the_signals_to_the_outer_one() -> None:
    token = stop_token.StopToken()
    before = signal.getsignal(signal.SIGTERM)
    ended: list[bool] = []

    def in_thread() -> None:
        with token.listening():
            pass
        ended.append(True)

    with pytest.raises(Stopped), token.listening():
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        assert ended
        with token.listening():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_status_names_the_signal(
    number: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise Stopped(number, "in step 3/8")

    assert ends_in_status(main)() == status
    assert capsys.readouterr().err == "interrupted in step 3/8\n"


def test_handlers_are_set_again_in_the_main_thread_alone() -> None:
    token = stop_token.StopToken()
    failed: list[BaseException] = []

    def elsewhere() -> None:
        try:
            token.install()
        except ValueError as error:
            failed.append(error)

    with token.listening():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not failed


def test_work_that_can_be_thrown_away_leaves_what_may_be_left_as_it_was() -> None:
    token = stop_token.StopToken()
    with token.leavable(), token.leavable():
        pass
    with pytest.raises(Stopped), token.listening():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            token.check()
