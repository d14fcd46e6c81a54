"""The checkpoints of a run, as complete folders `global_step_N`.

    begin    .tmp_global_step_N_PID ─► the driver's states; each rank's files, at once or in a thread
    commit   all ranks are done ─► manifest ─fsync─► rename to global_step_N ─► tracker ─► rotation
    load     the newest by order of saving is checked; where it is damaged that is logged, and the one before
             is taken

A process may be killed at any of these arrows: a folder under its final name is always complete.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from hybridflow.checkpoint.durable import locked, replace_file, sync, sync_tree
from hybridflow.checkpoint.layout import LOCK, MANIFEST, STEP_PREFIX, TRACKER, step_folders, step_of
from hybridflow.checkpoint.manifest import (
    FileDigest,
    folders_by_age,
    read_manifest,
    sequence_of,
    write_manifest,
)
from hybridflow.checkpoint.remote import RemoteCheckpoints
from hybridflow.checkpoint.shard_index import check_shards, read_index
from hybridflow.checkpoint.state import State, load_tree, save_tree
from hybridflow.config.paths import why_unwritable
from hybridflow.errors import CheckpointError

logger = logging.getLogger(__name__)

FOLDER_KEY = "trainer.default_local_dir"

_LEFTOVER = re.compile(rf"\.(tmp|old|trash)_(({STEP_PREFIX})\d+|{re.escape(TRACKER)})_\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path
    state: dict[str, State]
    """The driver's states, by folder."""
    engines: dict[str, frozenset[str]]
    """The parts of an engine's state that are in each role's folder; the ranks read them."""


Fill = Callable[[Path], Mapping[str, FileDigest] | None]
"""A function that writes into a folder, or begins to.

It returns the digests, by name, of the files that need not be read again.
"""


@dataclass
class PendingSave:
    """A checkpoint that is being written. It does not count before `CheckpointStore.commit`."""

    step: int
    folder: Path
    roles: tuple[str, ...]
    known: dict[str, FileDigest]
    held: ExitStack
    """The stack that holds the run folder's lock and removes the folder."""

    def add(self, name: str, digests: Mapping[str, FileDigest]) -> None:
        """Add the digests of files in the folder `name`."""
        self.known |= {f"{name}/{file}": digest for file, digest in digests.items()}


class CheckpointStore:
    """The checkpoints in `run_dir`. The newest `keep` of them stay; with None all stay.

    With `remote`, each is copied there too. What a killed save left in the folder is removed when the store
    is created.
    """

    def __init__(
        self, run_dir: str | Path, keep: int | None = None, remote: RemoteCheckpoints | None = None
    ) -> None:
        assert keep is None or keep >= 1, f"keep must be at least 1 or None, got {keep}"
        self.run_dir = Path(run_dir).expanduser()
        self.keep = keep
        self.remote = remote
        self._damaged: set[Path] = set()  # folders that `latest` has found damaged
        if self.run_dir.is_dir() and any(_LEFTOVER.fullmatch(path.name) for path in self.run_dir.iterdir()):
            try:
                with self._lock() as free:
                    if free:
                        self._clean()
            except OSError as error:
                logger.warning("cannot remove what an interrupted save left in %s: %s", self.run_dir, error)

    def save(self, step: int, state: Mapping[str, State], folders: Mapping[str, Fill] | None = None) -> Path:
        """Write the checkpoint of a step: `state` by role, and further folders by functions that fill them.

        A checkpoint of the same step is replaced. Raises CheckpointError where it cannot be written, which
        leaves earlier ones as they were, and where another process is saving into the same run folder.
        """
        return self.commit(self.begin(step, state, folders))

    def begin(
        self, step: int, state: Mapping[str, State], folders: Mapping[str, Fill] | None = None
    ) -> PendingSave:
        """Begin a checkpoint like `save`; it counts only after `commit`.

        The functions in `folders` may leave work running until then. No other save can begin before it.
        """
        for name in [*state, *(folders or {})]:
            assert name and not name.startswith((".", "/")) and ".." not in name.split("/"), (
                f"{name!r} is not the name of a folder"
            )
        temporary = self.run_dir / f".tmp_{STEP_PREFIX}{step}_{os.getpid()}"
        with self._explained(step), ExitStack() as stack:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(self._lock()):
                raise CheckpointError(
                    f"another process is saving into {self.run_dir}: give each run its own "
                    "trainer.default_local_dir"
                )
            final = self.run_dir / f"{STEP_PREFIX}{step}"
            if final.exists() and not final.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(final))
            shutil.rmtree(temporary, ignore_errors=True)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            pending = PendingSave(step, temporary, tuple(state), {}, stack)
            for role, tree in state.items():
                (temporary / role).mkdir(parents=True)
                save_tree(temporary / role, tree)
            for name, fill in (folders or {}).items():
                (temporary / name).mkdir(parents=True, exist_ok=True)
                pending.add(name, fill(temporary / name) or {})
            pending.held = stack.pop_all()
        return pending

    def commit(self, pending: PendingSave) -> Path:
        """Complete a save whose files are all written; raise CheckpointError as `save` does."""
        final = self.run_dir / f"{STEP_PREFIX}{pending.step}"
        with self._explained(pending.step), pending.held:
            if self.remote is not None and final.exists():
                self.remote.wait()  # it may be reading the checkpoint that is replaced
            self._publish(pending, final)
            self._damaged.discard(final)
            replace_file(self.run_dir / TRACKER, str(pending.step))
            if self.remote is not None:
                self.remote.wait()  # it may be reading what is now the oldest checkpoint
            self._rotate()
        if self.remote is not None:
            self.remote.start(final)
        return final

    def abandon(self, pending: PendingSave) -> None:
        """Remove a save that cannot be completed."""
        pending.held.close()

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            in_the_way = self.run_dir / f"{STEP_PREFIX}{step}"
            folder = in_the_way if in_the_way.is_file() else self.run_dir
            why = why_unwritable(FOLDER_KEY, folder, error)
            raise CheckpointError(
                f"cannot save step {step}: {why}. Steps of the checkpoints there: {_steps(self.run_dir)}"
            ) from error

    def latest(self) -> Path | None:
        """Return the folder of the newest checkpoint whose digests are all right, or None without any.

        Damaged ones are logged as errors.
        """
        newest = self._newest()
        return None if newest is None else newest.path

    def _newest(self) -> Checkpoint | None:
        """Read checkpoints from the newest on until one is whole; log an error about each that is not."""
        for folder in reversed(folders_by_age(self.run_dir)):
            try:
                return _read(folder)
            except CheckpointError as error:
                self._damaged.add(folder)
                logger.error("checkpoint %s is damaged and is passed over: %s", folder, error)
        return None

    def newest_sequence(self) -> int:
        """Return the highest number in the order of saving among all checkpoints, or 0 without any.

        No digest is taken.
        """
        return max((sequence_of(folder) or 0 for folder in step_folders(self.run_dir)), default=0)

    def load_latest(self) -> Checkpoint | None:
        """Read the newest complete checkpoint; return None in a run folder without any.

        The order of saving is written in the checkpoints themselves, so a tracker file that is old or missing
        does no harm. Raises CheckpointError where there are checkpoints but all are damaged.
        """
        newest = self._newest()
        if newest is None and step_folders(self.run_dir):
            raise CheckpointError(
                f"all checkpoints in {self.run_dir} are damaged (steps {_steps(self.run_dir)}; the log names "
                "the files): restore one, or start anew with trainer.resume_mode=disable"
            )
        return newest

    def load(self, path: str | Path) -> Checkpoint:
        """Read the checkpoint in a `global_step_N` folder of this run or another one.

        Raises CheckpointError where it is missing or damaged.
        """
        folder = Path(path).expanduser()
        runs = folder.parent
        if step_folders(folder):
            runs = folder
        there = f"Steps in {runs}: {_steps(runs)}"
        if not folder.is_dir():
            why = "there is no such folder"
            if folder.exists():
                why = "it is a file"
            raise CheckpointError(f"no checkpoint at {folder}: {why}. {there}")
        if step_of(folder) is None and runs == folder:
            raise CheckpointError(
                f"{folder} is a run folder, not a checkpoint: name one of its {STEP_PREFIX}N folders. {there}"
            )
        try:
            return _read(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{folder} is no whole checkpoint: {error}. {there}") from error

    def _publish(self, pending: PendingSave, final: Path) -> None:
        old: Path | None = None
        try:
            newest = self.newest_sequence()
            if self.remote is not None:
                newest = max(newest, self.remote.sequence_before)
            sequence = 1 + newest
            write_manifest(
                pending.folder, step=pending.step, sequence=sequence, roles=pending.roles, known=pending.known
            )
            sync_tree(pending.folder)
            if final.exists():
                old = self._set_aside(final, "old")
            os.replace(pending.folder, final)
            sync(self.run_dir)
        finally:
            if old is not None and not final.exists():
                os.replace(old, final)
        if old is not None:
            shutil.rmtree(old)

    def _set_aside(self, folder: Path, why: str) -> Path:
        aside = self.run_dir / f".{why}_{folder.name}_{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
        return aside

    def _rotate(self) -> None:
        """Remove the checkpoints that were saved before the `keep` newest.

        Damaged ones do not count, so that none takes the place of a good one.
        """
        by_age = folders_by_age(self.run_dir)
        good = [
            folder for folder in by_age if folder not in self._damaged and sequence_of(folder) is not None
        ]
        if self.keep is None or len(good) <= self.keep:
            return
        for folder in by_age[: by_age.index(good[-self.keep])]:
            try:
                # it is renamed first, so that no half-removed folder looks like a checkpoint
                shutil.rmtree(self._set_aside(folder, "trash"))
            except OSError as error:
                logger.warning("cannot remove the old checkpoint %s: %s", folder, error)

    def _clean(self) -> None:
        """Remove what processes that have ended left behind.

        A checkpoint that was about to be replaced is put back where its successor was not completed.
        """
        for path in sorted(self.run_dir.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is None:
                continue
            final = self.run_dir / match.group(2)
            if match.group(1) == "old" and not final.exists():
                logger.warning(
                    "putting checkpoint %s back: the save that would have replaced it was not completed",
                    final,
                )
                os.replace(path, final)
                continue
            logger.info("removing %s, which a process left that ended during a save", path)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _lock(self) -> AbstractContextManager[bool]:
        return locked(self.run_dir / LOCK)


def _read(folder: Path) -> Checkpoint:
    """Read a checkpoint after checking every file of it; CheckpointError names what is wrong.

    Of the engines' states only the indexes and the headers of the files are read: the ranks read the tensors.
    """
    manifest = read_manifest(folder)
    damage = manifest.damage(folder)
    if damage is not None:
        raise CheckpointError(damage)
    engines = {}
    for role in manifest.engines:
        index = read_index(folder / role)
        unlisted = sorted(file for file in index.files if f"{role}/{file}" not in manifest.files)
        if unlisted:
            raise CheckpointError(f"{folder / role / unlisted[0]} is not listed in {folder / MANIFEST}")
        check_shards(index)
        engines[role] = frozenset(index.structure)
    state = {role: load_tree(folder / role) for role in manifest.roles}
    return Checkpoint(manifest.step, folder, state, engines)


def _steps(run_dir: Path) -> str:
    return ", ".join(str(step_of(folder)) for folder in step_folders(run_dir)) or "none"
