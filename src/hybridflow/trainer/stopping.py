"""Where a stopped run resumes, and machines that are reclaimed: the run saves before that.

an environment variable ──► Expiry ◄── seconds of steps and of saves
                              └── due() after a step: no further step and save would be done in time
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hybridflow.checkpoint.layout import step_folders
from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.errors import CheckpointError, Stopped
from hybridflow.stop_token import stop_token

logger = logging.getLogger(__name__)


@contextmanager
def stopping(config: PPOConfig | SFTConfig) -> Iterator[None]:
    """Catch the signals of a run; a Stopped that leaves the context says what is saved and how to go on."""
    try:
        with stop_token.listening():
            yield
    except Stopped as stopped:
        stopped.message = closing_words(config, stopped.where)
        raise


def closing_words(config: PPOConfig | SFTConfig, where: str) -> str:
    """Where a run was interrupted, its newest checkpoint, and how to resume from it."""
    trainer = config.trainer
    newest = newest_checkpoint(Path(trainer.default_local_dir).expanduser())
    if newest is None:
        return f"interrupted {where}; there is no checkpoint yet; the same command starts anew"
    ways = {
        "auto": "the same command goes on",
        "disable": "trainer.resume_mode=auto goes on from it; the same command starts anew",
        "resume_path": (
            "trainer.resume_mode=auto goes on from it; the same command starts from "
            f"{trainer.resume_from_path}"
        ),
    }
    return f"interrupted {where}; newest checkpoint {newest.name}; {ways[trainer.resume_mode]}"


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of a run folder that was saved last, by its manifest alone; None without any."""
    found: dict[int, Path] = {}
    for folder in step_folders(run_dir):
        with suppress(CheckpointError):
            found[read_manifest(folder).sequence] = folder
    if not found:
        return None
    return found[max(found)]


VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Environment variables in which platforms give the time at which the machine is reclaimed."""
FIRST_SAVE_SECONDS = 60.0
"""Seconds that a save is taken to need before one was measured."""
MILLISECONDS = 1e11
"""A larger number cannot be seconds since 1970: that would be the year 5138."""


@dataclass
class Expiry:
    """The time at which the machine is reclaimed, and the seconds that a save before it takes."""

    at: float | None = None
    """Seconds since 1970; None: not known."""
    redundant: float = 0.0
    """Further seconds that a save keeps from the end."""
    clock: Callable[[], float] = time.time
    longest_step: float = 0.0
    longest_save: float = 0.0

    def step_took(self, seconds: float) -> None:
        """Count a step; the longest one is what the next may take."""
        self.longest_step = max(self.longest_step, seconds)

    def save_took(self, seconds: float) -> None:
        """Count a save in the same way."""
        self.longest_save = max(self.longest_save, seconds)

    def due(self) -> bool:
        """Return whether to save now: after one more step there may be no time for it.

        False where it is not known when the machine ends, and where that time has passed.
        """
        if self.at is None:
            return False
        left = self.at - self.clock()
        needed = self.longest_step + (self.longest_save or FIRST_SAVE_SECONDS) + self.redundant
        if not 0 < left <= needed:
            return False
        logger.warning(
            "the machine is taken back in %.0f s, and a step and a save may take %.0f s: saving now",
            left,
            needed,
        )
        return True


def expiry_of(redundant: float, environment: Mapping[str, str] = os.environ) -> Expiry:
    """Parse the reclaim time from the environment; log and ignore an invalid value.

    A value is seconds or milliseconds since 1970, or a date and time in ISO 8601, without a zone in UTC.
    """
    for name in VARIABLES:
        value = environment.get(name, "").strip()
        if not value:
            continue
        at = _seconds(value)
        if at is None:
            logger.warning(
                "%s=%s is no time: wanted seconds since 1970, or 2026-01-31T12:00:00Z", name, value
            )
            continue
        said = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        if at <= time.time():
            logger.warning("%s=%s (%s) has passed and is not used", name, value, said)
            continue
        logger.info("the machine is taken back at %s (%s): the run saves before it", said, name)
        return Expiry(at, redundant)
    return Expiry(redundant=redundant)


def _seconds(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    if number > MILLISECONDS:
        number /= 1000
    if 0 < number < MILLISECONDS:
        return number
    return None
