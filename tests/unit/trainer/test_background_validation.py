"""Validation beside training: the same numbers and the same run as where training waits for it, whatever
happens to the replica and to the run. The replica is a second backend of this process, so that all is quick;
`tests/e2e/test_background_validation_run.py` has it in a process of its own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import actor_module, build, metrics_of, ppo_config

from hybridflow.api.callbacks import CallbackTracker
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.controller import RankInfo, WorkerHost
from hybridflow.controller.local import LocalBackend
from hybridflow.controller.worker import Place
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.episodes.pipeline import ValidationFailed
from hybridflow.errors import HybridFlowError, RewardError, Stopped
from hybridflow.observability.timing import Timer
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.stop_token import stop_token
from hybridflow.trainer.ppo import background_validation
from hybridflow.trainer.ppo.background_validation import BackgroundValidation
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.roles.role_builders import facts_of
from hybridflow.trainer.roles.roles import factories
from hybridflow.trainer.stopping import Expiry, newest_checkpoint
from hybridflow.workers import RolloutGroup, RolloutWorker
from validation_keys import SAMPLED_VALIDATIONS

PATIENCE = 300.0
"""Seconds after which what never comes is an error; nothing is measured by the clock."""
KEYS = (
    *SAMPLED_VALIDATIONS,
    "actor_rollout_ref.rollout.exact=false",
    "trainer.total_training_steps=5",
)
VALIDATED = [0, 2, 4, 5]
"""The steps whose weights are validated."""


@dataclass
class Scene:
    """A run whose validations are beside it, and what has happened in it, in order."""

    trainer: PPOTrainer
    module: torch.nn.Module
    """The module that trains."""
    events: list[str] = field(default_factory=list)
    groups: list[RolloutGroup] = field(default_factory=list)
    before_training: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Called before the update of a step."""
    before_validation: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Called in the thread of a validation before it measures."""

    def validated(self) -> list[str]:
        return [event for event in self.events if event.startswith("validation")]


@contextmanager
def beside(
    model: Path, run: Path, *overrides: str, patience: float = PATIENCE, close_seconds: float = PATIENCE
) -> Iterator[Scene]:
    config = ppo_config(model, run, *KEYS, *overrides)
    facts = facts_of(config, load_tokenizer(str(config.data.tokenizer), False), 1, run)
    with build(config) as trainer:
        scene = Scene(trainer, actor_module(trainer))

        def start() -> RolloutGroup:
            backend = LocalBackend(partial(factories, facts))
            own = {"validation": RankInfo("validation", 0, 1)}  # it has no actor, so it is sent the weights
            backend.host = WorkerHost(Place(), partial(factories, facts), own)
            scene.groups.append(RolloutGroup(backend, "validation"))
            return scene.groups[-1]

        validator: Any = trainer.validator
        validator.timer = Timer()
        measure = validator.measure
        step = trainer.step

        def measured(number: int, rollout: RolloutGroup) -> Any:
            scene.events.append(f"validation {number} begins")
            scene.before_validation.pop(number, lambda: None)()
            found = measure(number, rollout)
            scene.events.append(f"validation {number} ends")
            return found

        def trained(batch: Any, number: int) -> Any:
            scene.before_training.pop(number, lambda: None)()
            scene.events.append(f"step {number}")
            return step(batch, number)

        validator.measure = measured
        trainer.step = trained  # type: ignore[assignment]
        own = BackgroundValidation(
            validator,
            step.roles.actor,
            start,
            None,
            patience=patience,
            close_seconds=close_seconds,
        )
        trainer.beside = own
        with closing(own):
            yield scene


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def ordinary(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The run folder of a run that waits for its validations, and its last weights."""
    run = tmp_path_factory.mktemp("ordinary") / "run"
    with build(ppo_config(model, run, *KEYS)) as trainer:
        trainer.fit()
        return run, weights(actor_module(trainer))


def assert_same(run: Path, wanted: Path, *, without: tuple[int, ...] = ()) -> None:
    """Hold the numbers of a run against those of one that waits, but for the validations of some steps."""
    found = metrics_of(run)
    expected = metrics_of(wanted)
    for step in without:
        expected[step] = {name: value for name, value in expected[step].items() if "val-" not in name}
    assert sorted(found) == sorted(step for step, line in expected.items() if line)
    for step, line in found.items():
        assert line == expected[step], (step, {*line.items()} ^ {*expected[step].items()})
    text = (run / "metrics.jsonl").read_text()
    for step in VALIDATED:
        lines = [line for line in text.splitlines() if f'"step": {step},' in line and "val-core" in line]
        assert len(lines) == (step not in without), f"step {step} has its validation once"


def let(event: threading.Event) -> Callable[[], None]:
    """Return a function that waits for an event, which has to come."""

    def wait() -> None:
        assert event.wait(PATIENCE), "it has never come"

    return wait


# ---- the same numbers, beside the steps


def test_numbers_and_weights_are_those_of_a_run_that_waits(
    model: Path, tmp_path: Path, ordinary: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    with beside(model, tmp_path / "run") as scene:
        steps = {number: threading.Event() for number in (1, 3)}
        for number, event in steps.items():  # a validation ends only once the next step is under way
            scene.before_training[number] = event.set
            scene.before_validation[number - 1] = let(event)
        last = scene.trainer.fit()
        own = weights(scene.module)
    assert_same(tmp_path / "run", ordinary[0])
    assert {name for name in own if not torch.equal(own[name], ordinary[1][name])} == set()
    shown = metrics_of(tmp_path / "run")[5]
    assert last.items() >= {name: shown[name] for name in shown if name.startswith("val-")}.items()
    order = [scene.events.index(event) for event in ("validation 2 begins", "step 3", "validation 2 ends")]
    assert order == sorted(order)
    steps_of_lines = [
        int(line.split('"step": ')[1].split(",")[0])
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps_of_lines.index(0) > steps_of_lines.index(1), "the numbers of step 0 came after step 1"
    texts = [(run / "validation" / "2.jsonl").read_text() for run in (tmp_path / "run", ordinary[0])]
    assert texts[0] == texts[1]
    assert len(scene.groups) == 1


@pytest.mark.parametrize(
    ("schedule", "ahead"), [("one_step_off", 1), ("exact_async", 2), ("colocated_async", 0)]
)
def test_batches_made_ahead_are_those_of_a_run_that_waits(
    model: Path, tmp_path: Path, schedule: str, ahead: int
) -> None:
    keys = (
        f"trainer.schedule={schedule}",
        f"trainer.async.run_ahead={ahead}",
        "algorithm.rollout_correction.rollout_is=token",
    )
    with build(ppo_config(model, tmp_path / "waits", *KEYS, *keys)) as trainer:
        trainer.fit()
        wanted = weights(actor_module(trainer))
    with beside(model, tmp_path / "run", *keys) as scene:
        third = threading.Event()
        scene.before_training[3] = third.set
        scene.before_validation[2] = let(third)
        scene.trainer.fit()
        own = weights(scene.module)
    assert_same(tmp_path / "run", tmp_path / "waits")
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)


def test_one_is_under_way_at_a_time_and_the_next_one_waits(model: Path, tmp_path: Path) -> None:
    with beside(model, tmp_path / "run", "trainer.test_freq=1", "trainer.save_freq=-1") as scene:
        third = threading.Event()
        scene.before_training[2] = third.set
        scene.before_validation[1] = let(third)  # it lasts into step 2, whose own validation is due next
        scene.trainer.fit()
    wanted = [f"validation {step} {what}" for step in range(6) for what in ("begins", "ends")]
    assert scene.validated() == wanted


def test_a_checkpoint_of_a_later_step_waits_and_one_of_the_same_step_notes_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: dict[int, bool] = {}
    saved = CheckpointStore.begin

    def begin(self: CheckpointStore, step: int, state: Any, *args: Any) -> Any:
        scene.events.append(f"save {step}")
        due[step] = state["trainer"]["validation_due"]
        return saved(self, step, state, *args)

    monkeypatch.setattr(CheckpointStore, "begin", begin)
    keys = ("trainer.save_freq=1", "trainer.total_training_steps=4", "trainer.val_before_train=false")
    with beside(model, tmp_path / "run", *keys) as scene:
        third = threading.Event()
        scene.before_training[3] = third.set
        scene.before_validation[2] = let(third)
        scene.trainer.fit()
    assert due == {1: False, 2: True, 3: False, 4: False}
    told = ["step 3", "validation 2 ends", "save 3", "step 4", "validation 4 ends", "save 4"]
    assert [event for event in scene.events if event in told] == told


# ---- a replica that is lost


def spoil(scene: Scene, number: int, times: int = 1) -> None:
    """Have the engine that is there when a validation begins fail at its first step, so many times."""

    def fail() -> None:
        worker = scene.groups[-1].backend.worker("validation")  # type: ignore[attr-defined]
        assert isinstance(worker, RolloutWorker)

        def burn(**_: bool) -> None:
            raise RuntimeError("the card is on fire")

        worker.engine.open = burn  # type: ignore[assignment, method-assign]
        if times > 1:
            spoil(scene, number, times - 1)

    scene.before_validation[number] = fail


@pytest.mark.parametrize(
    ("failures", "missing", "told"),
    [
        (2, (), "validation of step 2, try 2 of 3, has failed"),
        (3, (2,), "the validation of step 2 is given up"),
    ],
)
def test_a_lost_replica_is_started_again_and_the_validation_repeated_until_it_is_given_up(
    model: Path,
    tmp_path: Path,
    ordinary: tuple[Path, dict[str, torch.Tensor]],
    caplog: pytest.LogCaptureFixture,
    failures: int,
    missing: tuple[int, ...],
    told: str,
) -> None:
    with beside(model, tmp_path / "run") as scene:
        spoil(scene, 2, times=failures)
        scene.trainer.fit()
    assert_same(tmp_path / "run", ordinary[0], without=missing)
    assert scene.validated().count("validation 2 begins") == 3 and len(scene.groups) == failures + 1
    assert told in caplog.text and "on fire" in caplog.text


def test_a_replica_that_does_not_start_again_is_tried_after_a_pause(
    model: Path,
    tmp_path: Path,
    ordinary: tuple[Path, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(background_validation, "FIRST_PAUSE", 0.01)
    with beside(model, tmp_path / "run") as scene:
        spoil(scene, 2)
        own: Any = scene.trainer.beside
        start = own._start

        def fail() -> RolloutGroup:
            own._start = start
            raise RewardError("no device is free")

        own._start = fail
        scene.trainer.fit()
    assert_same(tmp_path / "run", ordinary[0])
    assert "did not start: no device is free" in caplog.text and "was started again" in caplog.text


def test_a_validation_that_never_ends_is_given_up(
    model: Path,
    tmp_path: Path,
    ordinary: tuple[Path, dict[str, torch.Tensor]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    end = threading.Event()
    with beside(model, tmp_path / "run", patience=0.2) as scene:
        scene.before_validation[2] = let(end)
        own: Any = scene.trainer.beside

        def patient() -> None:  # those after it have all the time they need
            own._patience = PATIENCE

        scene.before_validation[4] = patient
        scene.before_training[1] = lambda: own._job.over.wait(PATIENCE)
        try:
            scene.trainer.fit()
        finally:
            end.set()
    assert_same(tmp_path / "run", ordinary[0], without=(2,))
    assert "it has not ended within 0.2 s (trainer.worker_timeout)" in caplog.text


@pytest.mark.parametrize("error", [RewardError("no such answer"), ValidationFailed("no such answer")])
def test_an_error_of_its_rewards_or_responses_is_raised_as_where_training_waits(
    model: Path, tmp_path: Path, error: HybridFlowError
) -> None:
    with beside(model, tmp_path / "run") as scene:

        def fail() -> None:
            raise error

        scene.before_validation[2] = fail
        with pytest.raises(type(error), match="no such answer"):
            scene.trainer.fit()
    assert len(scene.groups) == 1


# ---- a run that ends, or goes on


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved."""


def test_a_run_that_is_killed_redoes_what_was_under_way(
    model: Path, tmp_path: Path, ordinary: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    run = tmp_path / "run"
    end = threading.Event()
    with pytest.raises(Killed), beside(model, run, close_seconds=0.01) as scene:

        def die() -> None:
            raise Killed

        scene.before_validation[2] = let(end)
        scene.before_training[3] = die  # the checkpoint of step 2 is whole, and its validation is not
        scene.trainer.fit()
    end.set()
    assert metrics_of(run)[0] and not any(name.startswith("val-") for name in metrics_of(run)[2])
    with beside(model, run) as scene:
        assert scene.trainer.state.step == 2 and scene.trainer.state.validation_due
        scene.trainer.fit()
    assert scene.validated()[:2] == ["validation 2 begins", "validation 2 ends"]
    assert_same(run, ordinary[0])


@pytest.mark.parametrize("schedule", ["one_step_off", "exact_async", "fully_async", "colocated_async"])
def test_each_schedule_redoes_what_was_under_way_and_waits_for_the_last_one(
    model: Path, tmp_path: Path, schedule: str
) -> None:
    run = tmp_path / "run"
    keys = (f"trainer.schedule={schedule}", "algorithm.rollout_correction.rollout_is=token")
    end = threading.Event()
    with pytest.raises(Killed), beside(model, run, *keys, close_seconds=0.01) as scene:

        def die() -> None:
            raise Killed

        scene.before_validation[2] = let(end)
        scene.before_training[3] = die
        scene.trainer.fit()
    end.set()
    callback = Ends(4)
    with pytest.raises(Stopped), beside(model, run, *keys) as scene:
        scene.trainer.trackers.trackers.append(CallbackTracker([callback], run))
        scene.trainer.fit()
    assert callback.heard == [2, 4]
    logged = metrics_of(run)
    assert sorted(logged) == [0, 1, 2, 3, 4]
    for step in (2, 4):  # of the weights of its own step, whatever was generated and trained beside it
        checkpoint = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}/global_step_{step}")
        config = ppo_config(model, tmp_path / str(step), *KEYS, *keys, "trainer.val_only=true", *checkpoint)
        with build(config) as trainer:
            wanted = trainer.fit()
        found = {name: value for name, value in logged[step].items() if name.startswith("val-")}
        assert found == {name: value for name, value in wanted.items() if name.startswith("val-")}


def test_a_run_that_is_killed_after_it_was_logged_does_not_redo_it(
    model: Path, tmp_path: Path, ordinary: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Killed), beside(model, run) as scene:

        def die() -> None:
            raise Killed

        third = threading.Event()
        scene.before_validation[2] = let(third)
        scene.before_training[3] = third.set  # it is logged after step 3, which no checkpoint has
        scene.before_training[4] = die
        own: Any = scene.trainer.beside
        log = scene.trainer.log_samples

        def wait(*args: Any) -> Any:
            if own._job is not None and own._job.step == 2 and args[2] == 3:
                assert own._job.over.wait(PATIENCE)
            return log(*args)

        scene.trainer.log_samples = wait
        scene.trainer.fit()
    assert any(name.startswith("val-") for name in metrics_of(run)[2])
    with beside(model, run) as scene:
        assert scene.trainer.state.step == 2 and not scene.trainer.state.validation_due
        scene.trainer.fit()
    assert "validation 2 begins" not in scene.events
    assert_same(run, ordinary[0])


def test_a_signal_does_not_wait_and_the_same_command_goes_on(
    model: Path,
    tmp_path: Path,
    ordinary: tuple[Path, dict[str, torch.Tensor]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    end = threading.Event()
    with stop_token.listening(), pytest.raises(Stopped), beside(model, run, close_seconds=0.01) as scene:
        scene.before_validation[2] = let(end)
        scene.before_training[4] = lambda: os.kill(os.getpid(), signal.SIGTERM)
        scene.trainer.fit()
    end.set()
    assert "the validation of step 2 is left: its numbers are missing" in caplog.text
    with beside(model, run) as scene:
        assert scene.trainer.state.step == 3, "the last whole step is saved"
        scene.trainer.fit()
    assert "validation 4 ends" in scene.events and "validation 2 begins" not in scene.events
    assert_same(run, ordinary[0], without=(2,))


def test_a_signal_leaves_the_wait_for_the_last_one_which_is_made_up_for(
    model: Path, tmp_path: Path, ordinary: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    run = tmp_path / "run"
    end = threading.Event()
    with stop_token.listening(), pytest.raises(Stopped), beside(model, run, close_seconds=0.01) as scene:

        def stop() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            let(end)()

        scene.before_validation[5] = stop
        scene.trainer.fit()
    end.set()
    with beside(model, run) as scene:
        assert scene.trainer.state.step == 5 and scene.trainer.state.validation_due
        scene.trainer.fit()
    assert scene.events == ["validation 5 begins", "validation 5 ends"]
    assert_same(run, ordinary[0])
    with beside(model, run) as scene:
        scene.trainer.fit()
    assert scene.events == [], "it is done"


class Satisfied:
    """Ends a run by the first validation that it hears of after a step."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_validation(self, step: int, metrics: dict[str, float]) -> bool:
        self.heard.append(step)
        return step > 0


def test_a_callback_that_hears_of_it_late_ends_the_run_in_order(model: Path, tmp_path: Path) -> None:
    callback = Satisfied()
    keys = ("trainer.test_freq=1", "trainer.save_freq=4")
    with pytest.raises(Stopped), beside(model, tmp_path / "run", *keys) as scene:
        second = threading.Event()
        scene.before_training[2] = second.set
        scene.before_validation[1] = let(second)  # so the trainer waits for it after step 2
        scene.trainer.trackers.trackers.append(CallbackTracker([callback], tmp_path / "run"))
        scene.trainer.fit()
    assert callback.heard == [0, 1, 2]
    lines = metrics_of(tmp_path / "run")
    assert sorted(lines) == [0, 1, 2] and lines[2]["training/global_step"] == 2
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "global_step_2"


@dataclass
class Ends:
    """Ends a run after a step."""

    last: int
    heard: list[int] = field(default_factory=list)
    """The steps whose validations it has heard of."""

    def on_step_end(self, step: int, metrics: dict[str, float]) -> bool:
        return step == self.last

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.heard.append(step)


def test_a_callback_that_ends_the_run_after_a_step_hears_of_its_validation(
    model: Path, tmp_path: Path, ordinary: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    callback = Ends(4)
    with pytest.raises(Stopped), beside(model, tmp_path / "run") as scene:
        fourth = threading.Event()
        scene.before_training[4] = fourth.set
        scene.before_validation[2] = let(fourth)
        scene.trainer.trackers.trackers.append(CallbackTracker([callback], tmp_path / "run"))
        scene.trainer.fit()
    assert callback.heard == [0, 2, 4]
    assert metrics_of(tmp_path / "run") == {
        step: line for step, line in metrics_of(ordinary[0]).items() if step < 5
    }
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "global_step_4"
    with beside(model, tmp_path / "run") as scene:
        assert not scene.trainer.state.validation_due


def test_all_that_training_waits_is_counted_and_a_checkpoint_before_the_end_waits_for_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    ends = {step: threading.Event() for step in range(1, 6)}
    waited = BackgroundValidation.wait
    saved = CheckpointStore.begin

    def tick() -> float:
        clock[0] += 1e-3
        return clock[0]

    def wait(self: BackgroundValidation) -> None:
        assert self.step is not None
        scene.events.append(f"wait for {self.step}")
        clock[0] += 100.0
        ends[self.step].set()
        waited(self)

    def begin(self: CheckpointStore, step: int, *args: Any) -> Any:
        scene.events.append(f"save {step}")
        return saved(self, step, *args)

    monkeypatch.setattr(BackgroundValidation, "wait", wait)
    monkeypatch.setattr(CheckpointStore, "begin", begin)
    keys = ("trainer.val_before_train=false", "trainer.test_freq=1", "trainer.save_freq=100")
    with beside(model, tmp_path / "run", *keys) as scene:
        scene.trainer.timer._clock = tick
        scene.before_validation |= {step: let(event) for step, event in ends.items()}
        scene.trainer.expiry = Expiry(at=440.0, clock=lambda: clock[0])  # a step and a save are 160 seconds
        scene.trainer.fit()
    order = [event for event in scene.events if event.startswith(("wait", "save"))]
    assert order == ["wait for 1", "wait for 2", "wait for 3", "save 5", "wait for 4", "wait for 5"]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    seconds = [lines[step]["timing_s/testing"] for step in range(2, 6)]
    assert seconds == pytest.approx([100.0, 100.0, 100.0, 200.0], abs=1.0)


def test_the_seconds_beside_training_are_no_part_of_the_step(model: Path, tmp_path: Path) -> None:
    with beside(model, tmp_path / "run", "trainer.val_before_train=false") as scene:
        third = threading.Event()
        scene.before_training[3] = third.set
        scene.before_validation[2] = let(third)
        scene.trainer.fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[2]["timing_s/testing_in_background"] > 0 and lines[2]["timing_s/testing"] >= 0
    assert "timing_s/val_gen" not in lines[2] and "timing_s/val_gen" not in lines[3]


def test_a_last_validation_that_fails_is_told_and_the_callback_still_ends_the_run(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RewardError("no such answer")

    with pytest.raises(Stopped), beside(model, tmp_path / "run") as scene:
        scene.before_validation[2] = fail
        scene.trainer.trackers.trackers.append(CallbackTracker([Ends(2)], tmp_path / "run"))
        scene.trainer.fit()
    assert "the last validation beside training has failed: no such answer" in caplog.text
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "global_step_2"
