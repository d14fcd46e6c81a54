"""What was found of a run, for those who read it: the command, its page, and a run with a changed key.

RunTimes ──found_in──► JSON data ─► `hybridflow why --json`, waits.json ─► the page of the run
RunTimes of a run, and of one with a changed key ──held──► forecasts beside what they became
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.tree import flatten, get_value, to_tree
from hybridflow.errors import HybridFlowError
from hybridflow.observability.report.follow import WAITS_FILE
from hybridflow.trainer.why.rules import Wait, waits_of
from hybridflow.trainer.why.run_times import RunTimes

logger = logging.getLogger(__name__)


def as_data(wait: Wait) -> dict[str, Any]:
    """Return a wait as JSON data."""
    return {**asdict(wait), "overrides": wait.overrides}


def found_in(run: RunTimes) -> dict[str, Any]:
    """Return the seconds of a mean step, the number of steps that count, and the waits, as JSON data."""
    waits = [as_data(wait) for wait in waits_of(run)]
    return {"seconds": run.seconds, "steps": len(run.steps), "waits": waits}


@contextmanager
def waits_written(config: PPOConfig, run: Path) -> Iterator[None]:
    """Write the waits of a run into its folder when the context ends, also after an error.

    A run that is too short for them gets none, and none fails for want of them.
    """
    try:
        yield
    finally:
        try:
            text = json.dumps(found_in(RunTimes.of(config, run)))
            (run / WAITS_FILE).write_text(text + "\n", encoding="utf-8")
        except HybridFlowError as error:
            _without_waits(run, error)
        except Exception as error:  # whatever is wrong here is no reason for a run to fail
            _without_waits(run, error)
            logger.warning("the waits of the run could not be found", exc_info=True)


def _without_waits(run: Path, error: Exception) -> None:
    """Leave the page of a run without waits, and say why."""
    logger.info("the page of the run says nothing of its waits: %s", error)
    with suppress(OSError):
        (run / WAITS_FILE).unlink(missing_ok=True)


@dataclass(frozen=True)
class TriedWait:
    """A forecast beside the measured result."""

    wait: Wait
    became: float
    """Seconds of a mean step that were saved."""


def held(before: RunTimes, after: RunTimes) -> tuple[list[TriedWait], list[str]]:
    """Return each forecast of the run `before` whose key has the value to try in the run `after`, with what
    the step has become, and the other keys in which the two differ.

    The seconds saved are those of the whole step: what one phase gains another may lose.
    """
    was = dict(flatten(to_tree(before.config)))
    now = dict(flatten(to_tree(after.config)))
    own = ("trainer.default_local_dir", "trainer.logger")
    changed = {name for name in {*was, *now} if was.get(name) != now.get(name) and not name.startswith(own)}
    tried = [
        wait
        for wait in waits_of(before)
        if wait.key in changed and get_value(after.config, wait.key) == wait.value
    ]
    saved = before.seconds - after.seconds
    others = sorted(changed - {wait.key for wait in tried})
    return [TriedWait(wait, saved) for wait in tried], others
