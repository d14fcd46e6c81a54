from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import pytest

from hybridflow.errors import ConfigError, Stopped
from hybridflow.observability.trackers import SampleRow, Tracker, Trackers, base
from hybridflow.observability.trackers.base import BackgroundTracker, Outcome


class Kept(Tracker):
    """Keeps what it is told, in which thread; fails in the steps that are to fail."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.failing = failing
        self.told: list[object] = []
        self.threads: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.threads.add(threading.current_thread().name)
        if step in self.failing:
            raise OSError(f"no network in step {step}")
        self.told.append((step, dict(metrics)))

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        self.told.append((step, list(rows)))

    def close(self, outcome: Outcome = "finished") -> None:
        self.told.append(outcome)


def test_calls_come_in_order_in_one_thread_and_as_they_were_then() -> None:
    kept = Kept()
    tracker = BackgroundTracker("kept", lambda: kept)
    metrics = {"a": 1.0}
    tracker.log(metrics, 1)
    metrics["a"] = 2.0
    tracker.log_samples([{"prompt": "x"}], 1)
    tracker.log(metrics, 2)
    tracker.close("failed")
    assert kept.told == [(1, {"a": 1.0}), (1, [{"prompt": "x"}]), (2, {"a": 2.0}), "failed"]
    assert kept.threads == {"tracker kept"} and tracker.failures == 0


def test_failures_are_counted_and_told_once_and_again_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(failing=[2, 3])
    with caplog.at_level(logging.WARNING):
        tracker = BackgroundTracker("kept", lambda: kept)
        for step in (1, 2, 3, 4):
            tracker.log({"a": 0.0}, step)
        tracker.close()
    assert [told[0] for told in kept.told[:-1]] == [1, 4] and tracker.failures == 2
    first, last = [record.getMessage() for record in caplog.records]
    assert "no network in step 2. The run goes on" in first and "failed 2 times" in last


def test_a_library_that_cannot_start_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Tracker:
        raise ConnectionError("no route to host")

    with caplog.at_level(logging.WARNING):
        tracker = BackgroundTracker("kept", build)
        tracker.log({"a": 1.0}, 1)
        tracker.close()
    assert tracker.failures == 2 and "no route to host" in caplog.text


def test_a_mistake_of_the_user_is_raised() -> None:
    def build() -> Tracker:
        raise ConfigError("install it")

    with pytest.raises(ConfigError, match="install it"):
        BackgroundTracker("kept", build)


def test_a_mistake_that_comes_late_is_told_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "START_SECONDS", 0.05)
    monkeypatch.setattr(base, "MOST_WAITING", 3)
    waited = threading.Event()

    def build() -> Tracker:
        waited.wait()
        raise ConfigError("install it")

    with caplog.at_level(logging.WARNING):
        tracker = BackgroundTracker("late", build)
        tracker.log({"a": 1.0}, 1)
        waited.set()
        tracker.close()
    assert tracker.failures == 1 and "install it" in caplog.text
    assert not tracker._thread.is_alive() and "is left behind" not in caplog.text


def test_a_library_that_wants_to_end_the_process_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Leaving(Kept):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            raise SystemExit(1)

    leaving = Leaving()
    with caplog.at_level(logging.WARNING):
        tracker = BackgroundTracker("leaving", lambda: leaving)
        tracker.log({"a": 1.0}, 1)
        tracker.close()
    assert tracker.failures == 1 and leaving.told == ["finished"] and "SystemExit" in caplog.text


def test_a_library_that_hangs_neither_slows_the_run_nor_keeps_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "MOST_WAITING", 3)
    monkeypatch.setattr(base, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(base, "QUIET_SECONDS", 0.1)
    goes_on = threading.Event()

    class Hanging(Kept):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            goes_on.wait()

    with caplog.at_level(logging.WARNING):
        tracker = BackgroundTracker("hanging", Hanging)
        for step in range(10):
            tracker.log({"a": 0.0}, step)
        tracker.close()
    goes_on.set()
    assert tracker.failures >= 6 and "does not keep up" in caplog.text and "is left behind" in caplog.text


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (ValueError(), "failed"),
        (Stopped(15, "here"), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_trackers_are_told_how_the_run_ended(error: BaseException | None, outcome: Outcome) -> None:
    kept = Kept()

    def run() -> None:
        with Trackers([kept]):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert kept.told == [outcome]
