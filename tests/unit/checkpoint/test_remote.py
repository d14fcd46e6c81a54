"""Copies of checkpoints in another place: what counts there, what a failure leaves, what a run fetches."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hybridflow.checkpoint import remote
from hybridflow.checkpoint.layout import MANIFEST, TRACKER
from hybridflow.checkpoint.remote import RemoteCheckpoints
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import SFTConfig
from hybridflow.config.load import load_config
from hybridflow.errors import CheckpointError, ConfigError, Stopped
from hybridflow.trainer.run import _finish_copies, open_store

ADDRESS = "memory://place/run"


class Unreliable(MemoryFileSystem):
    """A file system that refuses some files, or holds them back."""

    protocol = "unreliable"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way, apart from the parent's
    pseudo_dirs = [""]  # noqa: RUF012 - as above
    cachable = False
    refused = ""
    held: threading.Event | None = None

    def put_file(self, lpath: str, rpath: str, **more: Any) -> None:
        if self.held is not None:
            self.held.wait(600)
        if self.refused and self.refused in rpath:
            raise PermissionError(13, "quota exceeded", rpath)
        super().put_file(lpath, rpath, **more)


class Flat(Unreliable):
    """A file system that knows files only, as S3 does: a folder is there once a file is in it."""

    protocol = "flat"

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        found = super().ls(path, detail=detail, **more)
        if not found:
            raise FileNotFoundError(path)
        return found


@pytest.fixture(autouse=True)
def _empty_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    fsspec.register_implementation("flat", Flat, clobber=True)
    monkeypatch.setattr(Unreliable, "refused", "")
    monkeypatch.setattr(Unreliable, "held", None)
    for each in (MemoryFileSystem, Unreliable):
        each.store.clear()
        each.pseudo_dirs[:] = [""]
    yield


def saved(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, {"trainer": {"step": step}, "data": {"row": list(range(step))}})
    assert store.remote is not None
    store.remote.wait()


def copies(address: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(address)
    return sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False))


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_checkpoints_are_copied_old_ones_go_and_a_new_folder_goes_on_from_there(
    kind: str, tmp_path: Path
) -> None:
    address = ADDRESS
    if kind == "file":
        address = f"file://{tmp_path}/place"
    store = CheckpointStore(tmp_path / "run", keep=2, remote=RemoteCheckpoints(address, keep=2))
    saved(store, 2, 10, 4)
    assert copies(address) == ["global_step_10", "global_step_4"]
    fetched = RemoteCheckpoints(address).fetch_newest(tmp_path / "other")
    assert fetched == tmp_path / "other" / "global_step_4", "by the order of saving"
    loaded = CheckpointStore(tmp_path / "other").load_latest()
    assert loaded is not None and loaded.state["data"] == {"row": [0, 1, 2, 3]}
    assert (tmp_path / "other" / TRACKER).read_text() == "4"
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["global_step_4", TRACKER]


def test_a_run_that_starts_anew_is_newer_than_what_was_there(tmp_path: Path) -> None:
    saved(CheckpointStore(tmp_path / "first", remote=RemoteCheckpoints(ADDRESS)), 1, 2, 3)
    saved(CheckpointStore(tmp_path / "second", keep=1, remote=RemoteCheckpoints(ADDRESS, keep=1)), 1)
    assert copies(ADDRESS) == ["global_step_1"]
    assert RemoteCheckpoints(ADDRESS).sequence_before == 4


def test_a_copy_that_fails_is_told_and_counted_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = RemoteCheckpoints("unreliable://run", keep=1)
    store = CheckpointStore(tmp_path / "run", keep=1, remote=place)
    saved(store, 1)
    monkeypatch.setattr(Unreliable, "refused", "global_step_2/trainer")
    with caplog.at_level(logging.WARNING):
        saved(store, 2)
    assert "global_step_2 could not be copied" in caplog.text and "quota exceeded" in caplog.text
    assert place.failed == 1 and (tmp_path / "run" / "global_step_2" / MANIFEST).is_file()
    assert copies("unreliable://run") == ["global_step_1", "global_step_2"]
    assert (
        RemoteCheckpoints("unreliable://run").fetch_newest(tmp_path / "a") == tmp_path / "a" / "global_step_1"
    )
    monkeypatch.setattr(Unreliable, "refused", "")
    saved(store, 3)
    assert copies("unreliable://run") == ["global_step_3"], "what was never completed goes too"


def test_replacing_a_copy_takes_its_manifest_away_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "run", remote=RemoteCheckpoints("unreliable://run"))
    saved(store, 1)
    monkeypatch.setattr(Unreliable, "refused", MANIFEST)
    saved(store, 1)
    assert RemoteCheckpoints("unreliable://run").fetch_newest(tmp_path / "other") is None


def test_a_copy_that_does_not_get_on_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = threading.Event()
    monkeypatch.setattr(Unreliable, "held", opened)
    monkeypatch.setattr(remote, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(remote, "LOOK_SECONDS", 0.05)
    place = RemoteCheckpoints("unreliable://run")
    store = CheckpointStore(tmp_path / "run", remote=place)
    store.save(1, {"trainer": {"step": 1}})
    thread = place._thread
    assert thread is not None
    with caplog.at_level(logging.WARNING):
        place.wait()
    assert place.failed == 1 and "nothing has arrived" in caplog.text
    opened.set()
    thread.join(600)
    assert place.failed == 1 and RemoteCheckpoints("unreliable://run").sequence_before == 0


def test_damaged_copies_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(CheckpointStore(tmp_path / "run", remote=RemoteCheckpoints(ADDRESS)), 1, 2)
    files, root = fsspec.core.url_to_fs(ADDRESS)
    spoilt = next(path for path in files.find(f"{root}/global_step_2") if path.endswith("trainer/state.json"))
    files.pipe_file(spoilt, b"{}")
    with caplog.at_level(logging.ERROR):
        fetched = RemoteCheckpoints(ADDRESS).fetch_newest(tmp_path / "other")
    assert fetched is not None and fetched.name == "global_step_1" and "is passed over" in caplog.text
    files.rm(f"{root}/global_step_1/trainer", recursive=True)
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        RemoteCheckpoints(ADDRESS).fetch_newest(tmp_path / "other")
    files.pipe_file(f"{root}/global_step_2/{MANIFEST}", b"not json")
    files.pipe_file(f"{root}/global_step_1/{MANIFEST}", b"")
    with pytest.raises(CheckpointError, match="global_step_1, global_step_2"):
        RemoteCheckpoints(ADDRESS).fetch_newest(tmp_path / "other")


def test_copies_whose_manifest_cannot_be_read_are_not_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep=1, remote=RemoteCheckpoints(ADDRESS, keep=1))
    saved(store, 1)
    files, root = fsspec.core.url_to_fs(ADDRESS)
    files.pipe_file(f"{root}/global_step_1/{MANIFEST}", b"of a newer version")
    saved(store, 2)
    assert copies(ADDRESS) == ["global_step_1", "global_step_2"]


def test_a_place_without_folders_is_empty_before_the_first_copy(tmp_path: Path) -> None:
    place = RemoteCheckpoints("flat://bucket/new/run", keep=1)
    assert place.sequence_before == 0 and place.fetch_newest(tmp_path / "other") is None
    saved(CheckpointStore(tmp_path / "run", keep=1, remote=place), 1, 2)
    assert place.failed == 0 and copies("flat://bucket/new/run") == ["global_step_2"]


def test_a_checkpoint_counts_while_the_copy_of_the_one_before_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    monkeypatch.setattr(Unreliable, "held", opened)
    store = CheckpointStore(tmp_path / "run", keep=1, remote=RemoteCheckpoints("unreliable://run", keep=1))
    store.save(1, {"trainer": {"step": 1}})
    saving = threading.Thread(target=saved, args=(store, 2))
    saving.start()
    second = tmp_path / "run" / "global_step_2" / MANIFEST
    for _ in range(6000):
        if second.exists():
            break
        saving.join(0.1)
    there = [second.exists(), (tmp_path / "run" / "global_step_1").exists(), saving.is_alive()]
    opened.set()
    saving.join(600)
    assert there == [True, True, True], "the first is read until its copy is done"
    assert copies("unreliable://run") == ["global_step_2"]


def test_a_copy_that_was_given_up_removes_nothing_when_it_ends_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = RemoteCheckpoints("unreliable://run")
    folder = CheckpointStore(tmp_path / "run").save(1, {"trainer": {"step": 1}})
    given_up = threading.Event()

    def put_last(self: Unreliable, lpath: str, rpath: str, **more: Any) -> None:
        MemoryFileSystem.put_file(self, lpath, rpath, **more)
        if rpath.endswith(MANIFEST):
            given_up.set()

    monkeypatch.setattr(Unreliable, "put_file", put_last)
    files, root = fsspec.core.url_to_fs("unreliable://run")
    files.pipe_file(f"{root}/global_step_2/begun", b"by the next copy")
    with caplog.at_level(logging.INFO):
        place._copy(folder, given_up)
    assert copies("unreliable://run") == ["global_step_1", "global_step_2"] and "copied" not in caplog.text


@pytest.mark.parametrize("at_once", [False, True])
def test_a_second_signal_does_not_wait_for_the_copy(at_once: bool) -> None:
    class Copies(RemoteCheckpoints):
        waited = False

        def wait(self) -> None:
            self.waited = True

    place = Copies(ADDRESS)
    with pytest.raises(Stopped), ExitStack() as stack:
        stack.push(partial(_finish_copies, place))
        raise Stopped(15, "here", at_once=at_once)
    assert place.waited is not at_once


def test_places_that_cannot_be_opened() -> None:
    with pytest.raises(ConfigError, match="remote_checkpoint_dir=nowhere://a cannot be opened"):
        RemoteCheckpoints("nowhere://a")
    with pytest.raises(ConfigError, match="=nowhere://…@host/a cannot be opened"):
        RemoteCheckpoints("nowhere://me:secret@host/a")
    with pytest.raises(ConfigError, match=r"cannot be reached: (PermissionError|NotADirectoryError)"):
        RemoteCheckpoints("file:///dev/null/folder")


def test_a_run_goes_on_from_there_only_where_its_own_folder_has_nothing(tmp_path: Path) -> None:
    saved(CheckpointStore(tmp_path / "before", remote=RemoteCheckpoints(ADDRESS)), 7)

    def opened(name: str, *more: str) -> CheckpointStore:
        keys = [
            f"trainer.default_local_dir='{tmp_path / name}'",
            f"trainer.default_hdfs_dir='{ADDRESS}'",
            *more,
        ]
        return open_store(load_config(SFTConfig, keys).config.trainer)

    fresh = opened("fresh")
    assert fresh.newest_sequence() == 1 and fresh.remote is not None
    assert opened("anew", "trainer.resume_mode=disable").newest_sequence() == 0
    saved(CheckpointStore(tmp_path / "own", remote=RemoteCheckpoints("memory://else")), 3)
    assert [path.name for path in (tmp_path / "own").glob("global_step_*")] == ["global_step_3"]
    assert opened("own").newest_sequence() == 1
