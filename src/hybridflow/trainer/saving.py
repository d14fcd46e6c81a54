"""Saving a run: the driver's part, and each engine's state, written at once or while the run goes on.

save ──► store.begin ─► folders filled, or copies taken and threads writing ──all at once──► store.commit
                                                 └──`async_save`──► commit_done before a later step ──┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import STEP_PREFIX
from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.sharded import ROOM
from hybridflow.checkpoint.store import CheckpointStore, Fill, PendingSave
from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.errors import CheckpointError, HybridFlowError
from hybridflow.trainer.resume import parts_to_save
from hybridflow.workers.state import StatefulGroup

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 30.0
"""Seconds that a save which is given up may go on writing before its folder is removed."""


@dataclass(frozen=True)
class SavedEngine:
    """A role whose engine's state is in a checkpoint."""

    group: StatefulGroup[Any]
    contents: CheckpointContentsConfig


@dataclass
class RunSaves:
    """The saves of a run, of which one at a time is under way."""

    longest: float = 0.0
    """Seconds that the longest save has taken until it was whole."""
    _begun: float = 0.0
    _pending: PendingSave | None = None
    _writing: dict[str, StatefulGroup[Any]] = field(default_factory=dict)
    """The groups whose ranks are writing in a thread, by role."""

    def save(
        self,
        store: CheckpointStore,
        step: int,
        state: Mapping[str, Any],
        engines: Mapping[str, SavedEngine],
        folders: Mapping[str, Fill],
    ) -> Path:
        """Save a step after the save under way; gives where its checkpoint is, or will be once whole."""
        self.commit(store)
        self._begun = time.monotonic()
        fills = {name: self._fill(name, engine) for name, engine in engines.items()}
        self._pending = store.begin(
            step, state, {name: self._or_drain(fill) for name, fill in {**fills, **folders}.items()}
        )
        if not self._writing:
            return self.commit(store) or store.run_dir
        return store.run_dir / f"{STEP_PREFIX}{step}"

    def commit_done(self, store: CheckpointStore) -> None:
        """Commit a save under way once all ranks have written; called between steps, free without one."""
        if self._pending is not None and all(group.save_done() for group in self._writing.values()):
            self.commit(store)

    def commit(self, store: CheckpointStore) -> Path | None:
        """Wait for the save that is under way, if any, and commit it.

        Raises CheckpointError with the role, the rank and the cause of a failure.
        """
        pending = self._pending
        self._pending = None
        if pending is None:
            return None
        beside = bool(self._writing)
        try:
            while self._writing:
                name, group = next(iter(self._writing.items()))
                del self._writing[name]
                pending.add(name, self._finished(pending.step, name, group))
        except BaseException:
            self._drain()
            store.abandon(pending)
            raise
        path = store.commit(pending)
        self.longest = max(self.longest, time.monotonic() - self._begun)
        if beside:
            logger.info("the checkpoint of step %d is whole: %s", pending.step, path)
        return path

    def abandon(self, store: CheckpointStore) -> None:
        """Give up the save under way, if any; its folder goes when no one writes, or in `GIVE_UP_SECONDS`."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        end = time.monotonic() + GIVE_UP_SECONDS
        try:
            while self._writing:
                name, group = self._writing.popitem()
                # its processes are lost, or it could not write: then nobody does
                with suppress(HybridFlowError):
                    if group.wait_saved(end - time.monotonic()):
                        group.finish_save()
                    else:
                        logger.warning(
                            "%s is still writing the checkpoint of step %d, which is removed all the same",
                            name,
                            pending.step,
                        )
        finally:
            self._writing.clear()
            store.abandon(pending)

    def _fill(self, name: str, engine: SavedEngine) -> Fill:
        parts = parts_to_save(engine.contents)

        def start(folder: Path) -> None:
            engine.group.start_save(folder, parts)
            self._writing[name] = engine.group

        def write(folder: Path) -> Mapping[str, FileDigest]:
            return engine.group.save(folder, parts)

        return start if engine.contents.async_save else write

    def _or_drain(self, fill: Fill) -> Fill:
        """Make sure that nobody writes into a folder that could not be filled, before it is removed."""

        def filled(folder: Path) -> Mapping[str, FileDigest] | None:
            try:
                return fill(folder)
            except BaseException:
                self._drain()
                raise

        return filled

    def _finished(self, step: int, name: str, group: StatefulGroup[Any]) -> Mapping[str, FileDigest]:
        try:
            return group.finish_save()
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written beside the run: {name}, {error}. "
                f"{ROOM}. It does not count; those before it are as they were"
            ) from error

    def _drain(self) -> None:
        """Wait after a failure for the other threads, whose folder is about to be removed."""
        while self._writing:
            _, group = self._writing.popitem()
            with suppress(HybridFlowError):
                group.finish_save()
