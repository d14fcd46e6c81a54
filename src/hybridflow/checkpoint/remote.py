"""Copies of a run's checkpoints in remote storage: HDFS, S3, or any other address that fsspec reaches.

    RUN/global_step_N ──files, then manifest.json──► ADDRESS/global_step_N    in a thread beside the run
    ADDRESS/global_step_N ──fetch_newest, digests──► RUN/global_step_N        where the run folder has none

A copy counts once its manifest is there, which is written last and removed first. A failed copy is logged
and counted, and never ends a run: the checkpoint itself is whole in the run folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from hybridflow.checkpoint.durable import replace_file, sync_tree
from hybridflow.checkpoint.layout import MANIFEST, STEP_PREFIX, TRACKER, step_of
from hybridflow.checkpoint.manifest import Manifest, parse_manifest, read_manifest
from hybridflow.config.paths import without_password
from hybridflow.errors import CheckpointError, ConfigError, install_extra
from hybridflow.observability.progress import progress

logger = logging.getLogger(__name__)

KEY = "trainer.remote_checkpoint_dir"
IDLE_SECONDS = 1800.0
"""Seconds in which nothing has arrived, after which a copy is given up."""
LOOK_SECONDS = 0.2


class RemoteCheckpoints:
    """The copies below `address`, of which the newest `keep` stay; None: all stay."""

    def __init__(self, address: str, keep: int | None = None) -> None:
        """Open the place and make the folder.

        Raises ConfigError where the file system needs a package, or the place cannot be reached.
        """
        self.address = without_password(address.rstrip("/"))
        """For messages."""
        self.keep = keep
        self.failed = 0
        """Copies of this run that could not be completed."""
        self.sequence_before = 0
        """The highest number in the order of saving among copies of earlier runs; this run's come later."""
        self._thread: threading.Thread | None = None
        self._copying = ""
        self._moved = 0.0  # when the copy last got on, by the monotonic clock
        self._given_up = threading.Event()
        try:
            self._files, self._root = fsspec.core.url_to_fs(address.rstrip("/"))
            self._files.makedirs(self._root, exist_ok=True)
            whole, _ = self._manifests()
            self.sequence_before = max((manifest.sequence for manifest in whole.values()), default=0)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{KEY}={self.address} cannot be opened: {error}; {install_extra('remote')} or the "
                "package named here"
            ) from error
        except Exception as error:  # each file system raises its own kinds: credentials, network, permissions
            raise ConfigError(
                f"{KEY}={self.address} cannot be reached: {type(error).__name__}: {error}. Mend that, or "
                "leave the key out"
            ) from error

    def start(self, folder: Path) -> None:
        """Start to copy a whole checkpoint, after the running copy."""
        self.wait()
        self._copying = folder.name
        self._moved = time.monotonic()
        self._given_up = threading.Event()
        words = (folder, self._given_up)
        self._thread = threading.Thread(target=self._copy, args=words, name="remote copy", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the running copy, if any; one that makes no progress is given up."""
        thread = self._thread
        if thread is None:
            return
        with progress.phase(f"copying {self._copying} to {self.address}"):
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
                idle = time.monotonic() - self._moved
                if thread.is_alive() and idle > IDLE_SECONDS:
                    self._given_up.set()
                    self._tell_failure(f"nothing has arrived for {idle:.0f} s")
                    break
        self._thread = None

    def fetch_newest(self, run_dir: Path) -> Path | None:
        """Copy the newest whole checkpoint into the run folder and return its place; None without any.

        Raises CheckpointError where there are copies and none of them can be had.
        """
        whole, unreadable = self._manifests()
        by_age = sorted(whole.items(), key=lambda item: item[1].sequence)
        for name, manifest in reversed(by_age):
            try:
                return self._fetch(name, manifest, run_dir)
            except Exception as error:  # as above; the copy before may be whole
                logger.error("%s/%s cannot be had and is passed over: %s", self.address, name, error)
        if by_age or unreadable:
            names = ", ".join([*whole, *unreadable])
            raise CheckpointError(
                f"none of the checkpoints in {self.address} can be had ({names}; the log says why): mend "
                "that, or start anew with trainer.resume_mode=disable"
            )
        return None

    def _fetch(self, name: str, manifest: Manifest, run_dir: Path) -> Path:
        temporary = run_dir / f".tmp_{name}_{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        logger.info("fetching %s from %s", name, self.address)
        try:
            for file in progress.each(
                [*manifest.files, MANIFEST], f"fetching {name}", len(manifest.files) + 1
            ):
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}/{file}", str(temporary / file))
            damage = read_manifest(temporary).damage(temporary)
            if damage is not None:
                raise CheckpointError(damage)
            sync_tree(temporary)
            os.replace(temporary, run_dir / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        replace_file(run_dir / TRACKER, str(manifest.step))
        return run_dir / name

    def _copy(self, folder: Path, given_up: threading.Event) -> None:
        """Copy one checkpoint, its manifest last, and remove copies that are too old."""
        target = f"{self._root}/{folder.name}"

        def moved(*_: object) -> None:
            if not given_up.is_set():
                self._moved = time.monotonic()

        try:
            self._remove(target)
            for name in [*read_manifest(folder).files, MANIFEST]:
                if given_up.is_set():
                    return
                place = f"{target}/{name}"
                self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(folder / name), place, callback=Callback(hooks={"moved": moved}))
                moved()
            if given_up.is_set():  # it has been reported as failed, and the next copy may have begun
                return
            logger.info("copied %s to %s", folder.name, self.address)
        except Exception as error:  # as above
            if not given_up.is_set():
                self._tell_failure(f"{type(error).__name__}: {error}")
            return
        try:
            self._rotate()
        except Exception as error:  # as above
            logger.warning("cannot remove old copies in %s: %s", self.address, error)

    def _tell_failure(self, why: str) -> None:
        self.failed += 1
        logger.warning(
            "%s could not be copied to %s: %s. It is whole in the run folder; the run goes on",
            self._copying,
            self.address,
            why,
        )

    def _rotate(self) -> None:
        """Remove copies that were saved before the `keep` newest, and those that were never completed."""
        whole, unreadable = self._manifests()
        by_age = sorted(whole, key=lambda name: whole[name].sequence)
        old = []
        if self.keep is not None:
            old = by_age[: -self.keep]
        for name in [*old, *(set(self._folders()) - set(whole) - set(unreadable))]:
            self._remove(f"{self._root}/{name}")

    def _remove(self, folder: str) -> None:
        """Remove a copy, its manifest first, so that the rest does not count if this is interrupted."""
        if self._files.exists(f"{folder}/{MANIFEST}"):
            self._files.rm_file(f"{folder}/{MANIFEST}")
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)

    def _folders(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:  # S3 has no empty folders
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(
            name for name in names if name.startswith(STEP_PREFIX) and step_of(Path(name)) is not None
        )

    def _manifests(self) -> tuple[dict[str, Manifest], list[str]]:
        """Return the manifest of each copy by the folder's name, and the folders whose manifest is not valid.

        Those may be of a newer version, so they are left alone.
        """
        found: dict[str, Manifest] = {}
        unreadable: list[str] = []
        for name in self._folders():
            place = f"{self._root}/{name}/{MANIFEST}"
            try:
                content: Any = self._files.cat_file(place)
                found[name] = parse_manifest(f"{self.address}/{name}/{MANIFEST}", content)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                logger.warning("%s", error)
                unreadable.append(name)
        return found, unreadable
