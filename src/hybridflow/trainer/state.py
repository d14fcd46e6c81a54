"""The state of a run, from which it resumes to the bit, and how it is saved and loaded.

save ──► store.begin ─► folders filled, or copies taken and threads writing ──all at once──► store.commit
                                                 └──`async_save`──► commit_done before a later step ──┘

It holds no random state: every draw is keyed by the seed, a purpose and numbers of steps, groups or rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import ACTOR, DATA, HF_FOLDER, STEP_PREFIX, TRAINER
from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.sharded import ROOM
from hybridflow.checkpoint.store import Checkpoint, CheckpointStore, Fill, PendingSave
from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.errors import CheckpointError, HybridFlowError
from hybridflow.trainer.resume import (
    MODELS,
    check_belongs,
    check_models,
    parts_to_load,
    parts_to_save,
    say_where,
    written_by_a_run,
)
from hybridflow.trainer.source import Resumable
from hybridflow.workers.state import StatefulGroup

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 30.0
"""Seconds that a save which is given up may go on writing before its folder is removed."""


@dataclass(frozen=True)
class SavedEngine:
    """A role whose engine's state is in a checkpoint."""

    group: StatefulGroup[Any]
    contents: CheckpointContentsConfig


def _nothing(*_: object) -> None:
    """Do nothing."""


@dataclass
class RunSaves:
    """The saves of a run, of which one runs at a time."""

    longest: float = 0.0
    """Seconds that the longest save has taken until it was whole."""
    _then: Callable[[], None] = _nothing
    """Called once the running save is whole."""
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
        then: Callable[[], None] = _nothing,
    ) -> Path:
        """Save a step after the running save; gives where its checkpoint is, or will be once whole: `then` is
        called.
        """
        self.commit(store)
        self._then = then
        self._begun = time.monotonic()
        fills = {name: self._fill(name, engine) for name, engine in engines.items()}
        self._pending = store.begin(
            step, state, {name: self._or_drain(fill) for name, fill in {**fills, **folders}.items()}
        )
        if not self._writing:
            return self.commit(store) or store.run_dir
        return store.run_dir / f"{STEP_PREFIX}{step}"

    def commit_done(self, store: CheckpointStore) -> None:
        """Commit a running save once all ranks have written; called between steps, free without one."""
        if self._pending is not None and all(group.save_done() for group in self._writing.values()):
            self.commit(store)

    def commit(self, store: CheckpointStore) -> Path | None:
        """Wait for the running save, if any, and commit it.

        Raises CheckpointError with the role, the rank and the cause of a failure.
        """
        pending = self._pending
        then = self._then
        self._pending = None
        self._then = _nothing
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
        then()
        self.longest = max(self.longest, time.monotonic() - self._begun)
        if beside:
            logger.info("the checkpoint of step %d is whole: %s", pending.step, path)
        return path

    def abandon(self, store: CheckpointStore) -> None:
        """Give up the running save, if any; its folder goes when no rank writes, or in `GIVE_UP_SECONDS`."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        end = time.monotonic() + GIVE_UP_SECONDS
        try:
            while self._writing:
                name, group = self._writing.popitem()
                # its processes are lost, or it could not write: then no rank does
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
        """Make sure that no rank writes into a folder that could not be filled, before it is removed."""

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


@dataclass
class RunState:
    """The state of a run: weights, optimizers, place of the source, further parts of the driver, and step."""

    kind: str
    """`ppo`, `sft`, `dpo` or `reward_model`; a run resumes from checkpoints of its own kind only."""
    seed: int
    total_steps: int
    source: Resumable
    """The source of batches, which knows where in the data the run is."""
    engines: dict[str, SavedEngine]
    """The engines of a checkpoint by name; `actor` is the model that the run is about."""
    write_huggingface: Callable[[Path, bool], Mapping[str, FileDigest] | None]
    """(folder, with weights): writes config, tokenizer, the actor's weights if asked; gives known digests."""
    models: Mapping[str, Any] = field(default_factory=dict)
    """The facts of the run's models (`resume.py`), which a checkpoint that it resumes from has too."""
    may_change_model: bool = False
    """True: the run resumes from a checkpoint of other models all the same, with a warning."""
    parts: Mapping[str, Resumable] = field(default_factory=dict)
    """Further state of the driver, by its name in a checkpoint."""
    committed: Callable[[Mapping[str, Any]], None] = _nothing
    """Called with the state of the source that a checkpoint has, once it is whole or was loaded."""
    begin_empty: Collection[str] = ()
    """Names of the parts that stay as they are where a checkpoint has none."""
    joining: Mapping[str, SavedEngine] = field(default_factory=dict)
    """Engines that become part of the state where the checkpoint that a run resumes from has them."""
    step: int = 0
    """Steps that are done."""
    saved_step: int = 0
    """The step of the newest checkpoint that this run has saved or resumed from."""
    validation_due: bool = False
    """True: a signal has ended the run before the validation of its last step."""
    saves: RunSaves = field(default_factory=RunSaves)
    _finished: dict[str, Any] = field(default_factory=dict)
    """What the driver saves of the step last given to `finish`, beside the source's part."""

    def finish(self, step: int) -> None:
        """Note that a step is done: until the next one changes weights, `save` saves the run as it is now,
        also where the next one has taken prompts already.
        """
        self.step = step
        self._finished = self._trainers_part()

    def _trainers_part(self) -> dict[str, Any]:
        own = {"kind": self.kind, "step": self.step, "seed": self.seed, MODELS: dict(self.models)}
        further = {name: part.state_dict() for name, part in self.parts.items()}
        return {**own, **further}

    def save(self, store: CheckpointStore) -> Path:
        """Save the last whole step; gives where its checkpoint is or, with `async_save`, will be."""
        trainer = self._finished
        if not trainer or trainer["step"] != self.step:
            trainer = self._trainers_part()
        trainer = {**trainer, "validation_due": self.validation_due}
        state = {DATA: self.source.state_dict(), TRAINER: trainer}
        with_weights = "hf_model" in self.engines[ACTOR].contents.save_contents
        folders = {f"{ACTOR}/{HF_FOLDER}": lambda folder: self.write_huggingface(folder, with_weights)}
        then = partial(self.committed, state[DATA])
        path = self.saves.save(store, self.step, state, self.engines, folders, then)
        self.saved_step = self.step
        return path

    def resume(self, store: CheckpointStore, mode: str, path: str | None) -> None:
        """Resume from the checkpoint that `trainer.resume_mode` asks for, if there is one."""
        if mode == "disable":
            return
        if mode == "resume_path" and path:
            loaded: Checkpoint | None = store.load(Path(path).expanduser())
        else:
            loaded = store.load_latest()
        if loaded is not None:
            self.restore(loaded)
            say_where(self.step, self.total_steps, loaded.path)

    def restore(self, loaded: Checkpoint) -> None:
        """Restore a checkpoint, in place."""
        state = loaded.state
        check_belongs(state, kind=self.kind, seed=self.seed)
        check_models(state[TRAINER], self.models or {}, allowed=self.may_change_model, path=loaded.path)
        self.engines |= {name: engine for name, engine in self.joining.items() if name in loaded.engines}
        for name, engine in self.engines.items():
            if name not in loaded.engines:
                raise CheckpointError(f"The checkpoint has no '{name}': it was saved by a run without one.")
            parts = parts_to_load(name, loaded.engines[name], engine.contents)
            engine.group.load(loaded.path / name, parts)
        with written_by_a_run():
            self.source.load_state_dict(state[DATA])
            for name, part in self.parts.items():
                if name in state[TRAINER] or name not in self.begin_empty:
                    part.load_state_dict(state[TRAINER][name])
            self.step = int(state[TRAINER]["step"])
            self.validation_due = bool(state[TRAINER]["validation_due"])
        self.committed(state[DATA])
        self.saved_step = self.step
