from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.checkpoint import manifest
from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER, TRACKER, TRAINER
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.errors import CheckpointError


def state_of(step: int) -> dict[str, Any]:
    return {ACTOR: {"model": {"w": torch.full((50,), float(step))}}, TRAINER: {"step": step}}


def config_writer(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "tiny"}')


FOLDERS = {f"{ACTOR}/{HF_FOLDER}": config_writer}


def saved(run_dir: Path, *steps: int, keep: int | None = None) -> CheckpointStore:
    store = CheckpointStore(run_dir, keep)
    for step in steps:
        store.save(step, state_of(step), folders=FOLDERS)
    return store


def steps_on_disk(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir() if path.is_dir())


def loaded_step(store: CheckpointStore) -> int:
    loaded = store.load_latest()
    assert loaded is not None
    assert loaded.state[ACTOR]["model"]["w"].equal(torch.full((50,), float(loaded.step)))
    assert loaded.state[TRAINER] == {"step": loaded.step}
    return loaded.step


def test_saves_and_loads_with_extra_folders(tmp_path: Path) -> None:
    store = saved(tmp_path / "run", 5, 10)
    path = tmp_path / "run" / "global_step_10"
    assert store.latest() == path
    assert (path / "actor" / "huggingface" / "config.json").is_file()
    assert (tmp_path / "run" / TRACKER).read_text() == "10"
    assert loaded_step(store) == 10
    assert store.load(tmp_path / "run" / "global_step_5").step == 5


def test_a_new_run_has_nothing_to_load(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "nothing").load_latest() is None
    assert not (tmp_path / "nothing").exists()


FILES = [
    "actor/state.safetensors",
    "actor/state.json",
    "actor/huggingface/config.json",
    "trainer/state.json",
    "manifest.json",
]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_found_and_named(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    path = tmp_path / "global_step_2" / name
    whole = path.read_bytes()
    for position in {0, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert loaded_step(CheckpointStore(tmp_path)) == 1
        assert str(path) in caplog.text and "damaged" in caplog.text
        with pytest.raises(CheckpointError, match=r"global_step_2.*Steps in .*: 1, 2"):
            CheckpointStore(tmp_path).load(tmp_path / "global_step_2")
    path.write_bytes(whole)
    assert loaded_step(CheckpointStore(tmp_path)) == 2


def test_both_digests_stand_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "global_step_1" / "actor" / "state.json"
    path.write_bytes(path.read_bytes()[:-2] + b" \n")
    with pytest.raises(CheckpointError, match=r"all checkpoints .* damaged \(steps 1;.*resume_mode=disable"):
        CheckpointStore(tmp_path).load_latest()
    assert caplog.text.count("SHA-256") == 1 and "the manifest says" in caplog.text


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_missing_files(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2)
    path = tmp_path / "global_step_2" / name
    path.write_bytes(path.read_bytes()[:-3])
    assert loaded_step(CheckpointStore(tmp_path)) == 1
    path.unlink()
    assert loaded_step(CheckpointStore(tmp_path)) == 1
    assert "is missing" in caplog.text


def test_tracker_stale_missing_or_nonsense(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for content in ("1", "77", "", "nonsense"):
        (tmp_path / TRACKER).write_text(content)
        assert loaded_step(CheckpointStore(tmp_path)) == 2
    (tmp_path / TRACKER).unlink()
    assert loaded_step(CheckpointStore(tmp_path)) == 2


def test_load_says_what_is_there(tmp_path: Path) -> None:
    store = saved(tmp_path, 3, 20)
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint at .*global_step_7: there is no such folder\. Steps in .*: 3, 20",
    ):
        store.load(tmp_path / "global_step_7")
    with pytest.raises(CheckpointError, match="it is a file"):
        store.load(tmp_path / TRACKER)
    with pytest.raises(CheckpointError, match="is a run folder, not a checkpoint"):
        store.load(tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        store.load(tmp_path / "other")


def test_rotation_survives_restarts(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10):
        saved(tmp_path, step, keep=2)
    assert steps_on_disk(tmp_path) == ["global_step_10", "global_step_9"]
    saved(tmp_path, 11, keep=1)
    assert steps_on_disk(tmp_path) == ["global_step_11"]
    saved(tmp_path, 12, 13)
    assert len(steps_on_disk(tmp_path)) == 3


def test_a_run_that_went_back_goes_on_from_where_it_went_back(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    saved(tmp_path, 15, keep=2)  # from global_step_10, by resume_mode=resume_path
    assert loaded_step(CheckpointStore(tmp_path)) == 15
    assert steps_on_disk(tmp_path) == ["global_step_15", "global_step_20"]


@pytest.mark.parametrize("harm", ["manifest.json", "actor/state.safetensors"])
def test_a_damaged_checkpoint_never_pushes_out_a_good_one(tmp_path: Path, harm: str) -> None:
    saved(tmp_path, 10, 20)
    (tmp_path / "global_step_20" / harm).write_bytes(b"x")
    store = CheckpointStore(tmp_path, keep=1)
    assert loaded_step(store) == 10
    store.save(15, state_of(15))
    assert "global_step_15" in steps_on_disk(tmp_path)
    assert loaded_step(CheckpointStore(tmp_path)) == 15
    store.save(20, state_of(20))
    assert steps_on_disk(tmp_path) == ["global_step_20"]
    assert loaded_step(store) == 20


def test_a_step_that_exists_is_replaced(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    store.save(2, {ACTOR: {"model": {"w": torch.full((50,), 2.0)}}, TRAINER: {"step": 2}})
    assert loaded_step(store) == 2
    assert not (tmp_path / "global_step_2" / "actor" / "huggingface").exists()
    assert steps_on_disk(tmp_path) == ["global_step_1", "global_step_2"]


def test_leftovers_are_removed_and_an_unreplaced_one_put_back(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "global_step_2").rename(tmp_path / ".old_global_step_2_99")
    shutil.copytree(tmp_path / "global_step_1", tmp_path / ".tmp_global_step_3_99")
    shutil.copytree(tmp_path / "global_step_1", tmp_path / ".trash_global_step_0_99")
    shutil.copytree(tmp_path / "global_step_1", tmp_path / ".old_global_step_1_99")
    (tmp_path / ".tmp_notes").mkdir()
    assert loaded_step(CheckpointStore(tmp_path)) == 2
    assert steps_on_disk(tmp_path) == [".tmp_notes", "global_step_1", "global_step_2"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for run_dir in (tmp_path / "file" / "deep" / "run", tmp_path / "file"):
        with pytest.raises(
            CheckpointError,
            match=r"cannot save step 1: .*/file is a file, and a folder is wanted there.*default_local_dir",
        ):
            CheckpointStore(run_dir).save(1, state_of(1))
    store = CheckpointStore(tmp_path / "run")
    store.run_dir.mkdir()
    (store.run_dir / "global_step_1").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"global_step_1 is a file, and a folder is wanted there"):
        store.save(1, state_of(1))
    assert (store.run_dir / "global_step_1").read_text() == "in the way"


def test_a_save_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "part").write_text("x")
        raise OSError(28, "No space left on device")

    store = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"No space left on device.*Steps of the checkpoints there: 1"):
        store.save(2, state_of(2), folders={"actor/huggingface": full})
    with pytest.raises(CheckpointError, match="cannot store /model of type object"):
        store.save(2, {ACTOR: {"model": object()}})
    assert steps_on_disk(tmp_path) == ["global_step_1"]
    assert loaded_step(store) == 1


def test_two_processes_cannot_save_into_one_run(tmp_path: Path) -> None:
    def meanwhile(folder: Path) -> None:
        with pytest.raises(CheckpointError, match="another process is saving"):
            CheckpointStore(tmp_path).save(2, state_of(2))

    CheckpointStore(tmp_path).save(1, state_of(1), folders={"x": meanwhile})
    assert loaded_step(CheckpointStore(tmp_path)) == 1


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of which a digest is taken."""
    files: list[Path] = []
    digest = manifest.file_digest
    monkeypatch.setattr(manifest, "file_digest", lambda path: (files.append(path), digest(path))[1])
    return files


def test_a_folder_is_read_once_while_nobody_writes_into_it(
    tmp_path: Path, read: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    read.clear()
    newest = tmp_path / "global_step_2"
    assert CheckpointStore(tmp_path).latest() == newest
    assert sorted(read) == sorted(
        path for path in newest.rglob("*") if path.is_file() and path.name != "manifest.json"
    )
    read.clear()
    assert loaded_step(CheckpointStore(tmp_path)) == 2
    assert CheckpointStore(tmp_path).load(newest).step == 2
    assert read == []
    for harm in ("written in place, its time set back", "another file in its place"):
        victim = newest / "actor" / "huggingface" / "config.json"
        content, before = victim.read_bytes(), victim.stat()
        if harm.startswith("another"):
            victim.unlink()
        victim.write_bytes(content[:-1] + b" ")
        os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert CheckpointStore(tmp_path).latest() == tmp_path / "global_step_1", harm
        assert "global_step_2 is damaged" in caplog.text
        victim.write_bytes(content)
        assert CheckpointStore(tmp_path).latest() == newest


def test_a_step_that_was_saved_again_is_read_again(tmp_path: Path, read: list[Path]) -> None:
    store = saved(tmp_path, 1)
    assert store.latest() is not None
    store.save(1, state_of(1), folders=FOLDERS)
    read.clear()
    assert store.latest() is not None and read != []
