"""States saved at one number of ranks and loaded at another: the same bits, whatever the shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hybridflow.checkpoint import sharded
from hybridflow.checkpoint.layout import SHARDS, shard_file
from hybridflow.checkpoint.manifest import FileDigest, file_digest
from hybridflow.checkpoint.shard_index import read_index, read_tensors
from hybridflow.checkpoint.sharded import load_shards, save_shards, start_shards
from hybridflow.distributed.transfers import HostBuffers
from hybridflow.errors import CheckpointError
from ranks import Ranks

Place = Callable[[str, Tensor], Tensor]


def state(place: Place, scale: float = 1.0) -> dict[str, dict[str, Any]]:
    """Uneven rows, one row for two ranks, 0-d, bfloat16, tied, a column dimension, nothing; by `place`."""
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return place(name, (scale * torch.randn(*shape, generator=generator)).to(dtype))

    embed, last = draw("embed", 7, 4), draw("one row", 1, 4)
    model = {
        "embed": embed,
        "head": embed,
        "one row": last,
        "tied row": last,
        "norm": draw("norm", 5),
        "none": draw("none", 0, 3),
    }
    model["low"] = draw("low", 6, 3, dtype=torch.bfloat16)
    moments = {
        "step": scale * torch.tensor(3.0),
        "exp_avg": draw("exp_avg", 7, 4),
        "master": draw("master", 7, 4),
    }
    return {
        "model": model,
        "optimizer": {"embed": moments},
        "scheduler": {"num_steps": 3 * int(scale), "lr": float("nan")},
    }


def whole(name: str, tensor: Tensor) -> Tensor:
    return tensor


def rows_of_two(name: str, tensor: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(tensor, mesh, [Replicate() if name == "norm" else Shard(0)])


def columns_of_two(name: str, tensor: Tensor) -> Tensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(tensor.ndim - 1)])


def full(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: full(value) for key, value in tree.items()}
    return tree.full_tensor() if isinstance(tree, DTensor) else tree


def assert_equal(got: Any, wanted: Any) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_equal(got[key], value)
        elif isinstance(value, Tensor):
            assert got[key].dtype == value.dtype and torch.equal(got[key], value), key
        else:
            assert repr(got[key]) == repr(value), key


def save_at_two(rank: int, folder: str) -> dict[str, FileDigest]:
    return save_shards(Path(folder), state(rows_of_two))


def load_at_two(rank: int, folder: str) -> tuple[list[tuple[int, ...]], Any]:
    """Into other shards than those saved; what a template lacks comes sharded like its neighbour."""
    templates = state(columns_of_two, scale=0.0)
    del templates["optimizer"]["embed"]["master"]
    loaded = load_shards(Path(folder), templates)
    entry = loaded["optimizer"]["embed"]
    return [tuple(tensor.to_local().shape) for tensor in (loaded["model"]["embed"], entry["master"])], full(
        loaded
    )


@pytest.fixture(scope="module")
def saved_at_two(
    two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, FileDigest]]]:
    folder = tmp_path_factory.mktemp("two") / "actor"
    return folder, two_ranks.run(save_at_two, str(folder))


def test_what_two_ranks_saved_one_loads(saved_at_two: tuple[Path, list[dict[str, FileDigest]]]) -> None:
    folder, digests = saved_at_two
    assert set(read_index(folder).structure) == {"model", "optimizer", "scheduler"}
    loaded = load_shards(folder, state(whole, scale=0.0))
    assert_equal(loaded, state(whole))
    assert loaded["model"]["head"] is loaded["model"]["embed"]
    assert loaded["model"]["tied row"] is loaded["model"]["one row"]
    assert_equal(load_shards(folder, {"model": {}}), {"model": state(whole)["model"]})
    files = {name: digest for part in digests for name, digest in part.items()}
    assert sum(map(len, digests)) == len(files), "no file is written by two ranks"
    assert files == {
        path.name: FileDigest(path.stat().st_size, file_digest(path)) for path in folder.iterdir()
    }
    assert shard_file("optimizer", 1, 2) in digests[1] and SHARDS in digests[0]


def test_what_one_saved_two_load_into_other_shards(two_ranks: Ranks, tmp_path: Path) -> None:
    digests = save_shards(tmp_path / "actor", state(whole))
    assert set(digests) == {path.name for path in (tmp_path / "actor").iterdir()}
    for shapes, loaded in two_ranks.run(load_at_two, str(tmp_path / "actor")):
        assert shapes == [(7, 2), (7, 2)]
        assert_equal(loaded, state(whole))


def test_what_two_saved_two_load_into_other_shards(two_ranks: Ranks, saved_at_two: tuple[Path, Any]) -> None:
    for shapes, loaded in two_ranks.run(load_at_two, str(saved_at_two[0])):
        assert shapes == [(7, 2), (7, 2)]
        assert_equal(loaded, state(whole))


def test_whole_tensors_are_read_without_ranks(saved_at_two: tuple[Path, Any]) -> None:
    tensors, wanted = read_tensors(saved_at_two[0], "model"), state(whole)["model"]
    assert list(tensors) == list(wanted)
    assert_equal(dict(tensors), wanted)
    assert tensors.stored_as("head") == tensors.stored_as("embed") != tensors.stored_as("low")
    assert (tensors.shape("low"), tensors.dtype("low")) == ((6, 3), torch.bfloat16)
    assert set(read_tensors(saved_at_two[0], "optimizer")) == {"embed/step", "embed/exp_avg", "embed/master"}
    with pytest.raises(CheckpointError, match="has no critic"):
        read_tensors(saved_at_two[0], "critic")


def test_each_rank_holds_a_share(saved_at_two: tuple[Path, Any]) -> None:
    folder, _ = saved_at_two
    chunks = read_index(folder).tensors["model/embed"].chunks
    assert [(chunk.file, chunk.offsets, chunk.sizes) for chunk in chunks] == [
        (shard_file("model", 0, 2), (0, 0), (4, 4)),
        (shard_file("model", 1, 2), (4, 0), (3, 4)),
    ]
    assert len(read_index(folder).tensors["model/norm"].chunks) == 1, "what all ranks hold is written once"
    assert not any(path.read_bytes().startswith(b"\x80") for path in folder.iterdir()), "no pickle"


def test_a_shape_that_differs_and_a_part_that_lacks_are_named(tmp_path: Path) -> None:
    save_shards(tmp_path, {"model": {"w": torch.ones(3, 2)}})
    with pytest.raises(CheckpointError, match=r"model/w is \(3, 2\) in the checkpoint and \(3, 4\) here"):
        load_shards(tmp_path, {"model": {"w": torch.ones(3, 4)}})
    with pytest.raises(CheckpointError, match="has no optimizer"):
        load_shards(tmp_path, {"model": {}, "optimizer": {}})


def test_a_lost_shard_is_named(saved_at_two: tuple[Path, Any], tmp_path: Path) -> None:
    folder, lost = tmp_path / "copy", shard_file("model", 1, 2)
    folder.mkdir()
    for path in saved_at_two[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / lost).unlink()
    for read in (lambda: load_shards(folder, state(whole)), lambda: dict(read_tensors(folder, "model"))):
        with pytest.raises(CheckpointError, match=lost):
            read()


def fail_on_one(rank: int, folder: str) -> str:
    """Rank 1 cannot write; what rank 0 and rank 1 are told."""
    path = Path(folder)
    if rank == 1:
        (path / "file").write_text("")
        path = path / "file" / "actor"
    else:
        path = path / "actor"
    try:
        save_shards(path, state(rows_of_two))
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_all_ranks_are_told_which_one_could_not_write(two_ranks: Ranks, tmp_path: Path) -> None:
    for told in two_ranks.run(fail_on_one, str(tmp_path)):
        assert "rank 1: " in told and "Not a directory" in told


def start_at_two(rank: int, folder: str) -> bool:
    """The state changes while it is written, and the ranks talk to each other."""
    live = state(rows_of_two)
    pending = start_shards(Path(folder), live, HostBuffers())
    for _ in range(20):
        for tensor in live["model"].values():
            tensor.add_(1.0)
            tensor.full_tensor()
    return bool(pending.wait()) and pending.done()


def test_a_save_in_a_thread_holds_the_moment_of_its_start(
    two_ranks: Ranks, saved_at_two: tuple[Path, list[dict[str, FileDigest]]], tmp_path: Path
) -> None:
    assert two_ranks.run(start_at_two, str(tmp_path / "actor")) == [True, True]
    for path in saved_at_two[0].iterdir():
        assert path.read_bytes() == (tmp_path / "actor" / path.name).read_bytes()


def test_a_thread_that_cannot_write_says_so_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path, tensors: dict[str, Tensor]) -> FileDigest:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("hybridflow.checkpoint.sharded.write_tensors", full_disk)
    pending = start_shards(tmp_path, {"model": {"w": torch.ones(2)}}, HostBuffers())
    with pytest.raises(CheckpointError, match=r"No space left on device.*model_world_size_1_rank_0"):
        pending.wait()
    with pytest.raises(CheckpointError, match=r"cannot save .*No space left"):
        sharded.save_shards(tmp_path / "other", {"model": {"w": torch.ones(2)}})
