"""Checkpoints that somebody else wrote: a manifest and an index with valid digests, and wrong."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_sharded import assert_equal, save_at_two, state, whole

from hybridflow.checkpoint.layout import MANIFEST, SHARDS, STRUCTURE, TRAINER, shard_file
from hybridflow.checkpoint.shard_index import read_index, read_tensors
from hybridflow.checkpoint.sharded import load_shards
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.errors import CheckpointError
from ranks import Ranks

Edit = Callable[[Any], object]
FIRST, SECOND = shard_file("model", 0, 2), shard_file("model", 1, 2)


@pytest.fixture(scope="module")
def original(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with steps 1 and 2, whose actor was saved by two ranks."""
    shards = tmp_path_factory.mktemp("shards") / "actor"
    two_ranks.run(save_at_two, str(shards))
    run_dir = tmp_path_factory.mktemp("run")

    def fill(folder: Path) -> None:
        shutil.copytree(shards, folder, dirs_exist_ok=True)

    for step in (1, 2):
        CheckpointStore(run_dir).save(step, {TRAINER: {"step": step, "w": torch.ones(2)}}, {"actor": fill})
    return run_dir


@pytest.fixture
def run_dir(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "run")


def sign(content: dict[str, Any]) -> str:
    """The text of a manifest with these fields, and with the digest that they have."""
    content.pop("digest", None)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "digest": digest}, indent=1) + "\n"


def forge_manifest(folder: Path, edit: Edit) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    edit(content)
    (folder / MANIFEST).write_text(sign(content))


def write_and_sign(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge_manifest(folder, lambda content: content["files"].update({name: entry}))


def forge_json(folder: Path, name: str, edit: Edit) -> None:
    content = json.loads((folder / name).read_text())
    edit(content)
    write_and_sign(folder, name, json.dumps(content).encode())


def assert_passed_over(run_dir: Path, caplog: pytest.LogCaptureFixture, *said: str) -> None:
    """`auto` takes the step before and says why; asking for the forged step raises a CheckpointError."""
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        loaded = CheckpointStore(run_dir).load_latest()
    assert loaded is not None and loaded.step == 1
    assert "is damaged and is passed over" in caplog.text
    assert all(text in caplog.text for text in said), caplog.text
    with pytest.raises(CheckpointError, match=r"global_step_2.*Steps in .*: 1, 2"):
        CheckpointStore(run_dir).load(run_dir / "global_step_2")


MANIFESTS: dict[str, tuple[Edit, str]] = {
    "no files": (lambda m: m.pop("files"), "it has no field 'files'"),
    "files empty": (lambda m: m["files"].clear(), "it lists no files"),
    "nothing at all": (lambda m: (m["files"].clear(), m["roles"].clear()), "it lists no files"),
    "files a list": (lambda m: m.update(files=[]), "files is []"),
    "an entry a list": (lambda m: m["files"].update({"x": []}), "the entry of 'x'"),
    "no size": (lambda m: m["files"]["trainer/state.json"].pop("size"), "the size of 'trainer/state.json'"),
    "a size below zero": (lambda m: m["files"]["trainer/state.json"].update(size=-1), "is -1"),
    "a digest that is none": (lambda m: m["files"]["trainer/state.json"].update(sha256="x"), "sha256"),
    "no format": (lambda m: m.pop("format"), "has format None"),
    "another format": (lambda m: m.update(format=3), "has format 3"),
    "a text sequence": (lambda m: m.update(sequence="2"), "sequence is '2'"),
    "no sequence": (lambda m: m.pop("sequence"), "no field 'sequence'"),
    "a true step": (lambda m: m.update(step=True), "step is True"),
    "roles a text": (lambda m: m.update(roles="trainer"), "roles is 'trainer'"),
    "a role elsewhere": (lambda m: m.update(roles=["../../x"]), "'../../x' is not the relative path"),
    "a role without files": (lambda m: m.update(roles=["data"]), "does not list the file 'data/state.json'"),
    "a path upwards": (lambda m: m["files"].update({"../x": m["files"]["trainer/state.json"]}), "'../x'"),
    "an absolute path": (lambda m: m["files"].update({"/etc/x": m["files"]["trainer/state.json"]}), "/etc/x"),
    "a path that is no text": (lambda m: m["files"].update({"\0": m["files"]["trainer/state.json"]}), "x00"),
    "a name too long": (lambda m: m["files"].update({"x" * 5000: m["files"]["trainer/state.json"]}), "x" * 9),
    "an unlisted shard": (lambda m: m["files"].pop(f"actor/{SECOND}"), f"{SECOND} is not listed in"),
}


@pytest.mark.parametrize(("edit", "said"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_forged_manifest_is_passed_over(
    run_dir: Path, edit: Edit, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    forge_manifest(run_dir / "global_step_2", edit)
    assert_passed_over(run_dir, caplog, said, MANIFEST)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7", '"x"', "", "\ud800", "9" * 5000, '{"files": '])
def test_a_manifest_that_is_no_object_is_passed_over(
    run_dir: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / "global_step_2" / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert_passed_over(run_dir, caplog, MANIFEST)


def test_a_sequence_beyond_every_number_is_only_the_newest(run_dir: Path) -> None:
    forge_manifest(run_dir / "global_step_1", lambda content: content.update(sequence=10**400))
    loaded = CheckpointStore(run_dir).load_latest()
    assert loaded is not None and loaded.step == 1


def chunks(index: Any, name: str = "model/embed") -> Any:
    return index["tensors"][name]["chunks"]


INDEXES: dict[str, tuple[Edit, str]] = {
    "a tensor is missing": (lambda i: i["tensors"].pop("model/embed"), "'model/embed' is not in shards.json"),
    "chunks overlap": (lambda i: chunks(i).__setitem__(1, [1, [3, 0], [4, 4]]), "two of them overlap"),
    "a gap": (lambda i: chunks(i).__setitem__(1, [1, [5, 0], [2, 4]]), "one is missing"),
    "the same place twice": (lambda i: chunks(i, "model/low")[1].__setitem__(1, [0, 0]), "two of them"),
    "a negative offset": (
        lambda i: chunks(i)[0].__setitem__(1, [-1, 0]),
        "offsets of a chunk of 'model/embed",
    ),
    "negative sizes": (lambda i: chunks(i)[0].__setitem__(2, [-4, -4]), "sizes of a chunk of 'model/embed'"),
    "beyond the shape": (lambda i: chunks(i)[1].__setitem__(1, [10**30, 0]), "ends beyond its shape"),
    "a huge shape": (lambda i: i["tensors"]["model/none"].update(shape=[0, 2**70]), "larger than any tensor"),
    "a negative file": (lambda i: chunks(i)[1].__setitem__(0, -1), "the file of a chunk of 'model/embed'"),
    "no such file": (lambda i: chunks(i)[1].__setitem__(0, 99), "in file 99, and there are 4 files"),
    "another dtype": (lambda i: i["tensors"]["model/embed"].update(dtype="I32"), "and shards.json says I32"),
    "an unknown dtype": (lambda i: i["tensors"]["model/embed"].update(dtype="X"), "'X', which is unknown"),
    "a dtype that is a list": (lambda i: i["tensors"]["model/embed"].update(dtype=[]), SHARDS),
    "two chunks too few": (lambda i: chunks(i).clear(), "one is missing"),
    "a chunk in two pieces": (
        lambda i: (chunks(i)[0].__setitem__(2, [2, 4]), chunks(i).append([0, [2, 0], [2, 4]])),
        "are in one file",
    ),
    "no dimensions": (lambda i: chunks(i)[0].__setitem__(1, []), "dimensions"),
    "four fields": (lambda i: chunks(i)[0].append(0), "has 4 fields"),
    "a file upwards": (lambda i: i["files"].__setitem__(0, f"../actor/{FIRST}"), "is not the name of a file"),
    "a file twice": (lambda i: i["files"].__setitem__(0, i["files"][1]), "names a file twice"),
    "files with other contents": (lambda i: i["files"].reverse(), "cannot read"),
    "another format": (lambda i: i.update(format=2), "has format 2"),
    "no tensors": (lambda i: i.pop("tensors"), "has no field 'tensors'"),
    "tensors a list": (lambda i: i.update(tensors=[]), "tensors is []"),
}


@pytest.mark.parametrize(("edit", "said"), INDEXES.values(), ids=INDEXES)
def test_a_forged_index_is_passed_over(
    run_dir: Path, edit: Edit, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_dir / "global_step_2"
    forge_json(folder, f"actor/{SHARDS}", edit)
    assert_passed_over(run_dir, caplog, said, "actor/")
    with pytest.raises(CheckpointError):
        load_shards(folder / "actor", state(whole, scale=0.0))
    with pytest.raises(CheckpointError):
        dict(read_tensors(folder / "actor", "model"))


STRUCTURES: dict[str, bytes] = {
    "a list": b"[]",
    "a part that is a number": b'{"model": 5}',
    "an unknown tensor": b'{"model": {"w": {"$tensor": "model/w"}}}',
    "a tensor that is a list": b'{"model": {"w": {"$tensor": []}}}',
    "a second tensor": b'{"model": {"$tuple": [], "$tensor": "model/w"}}',
    "deep": b'{"model": ' + b"[" * 100_000,
    "an object dtype": b'{"model": {"w": {"$scalar": "00", "dtype": "O"}}}',
    "half a scalar": b'{"model": {"w": {"$scalar": "00", "dtype": "<f4"}}}',
    "half a float": b'{"model": {"w": {"$float": "00"}}}',
    "a key that is a list": b'{"model": {"$dict": [[[], 1]]}}',
    "no pairs": b'{"model": {"$dict": [1]}}',
    "not utf-8": b"\xff",
}


ENGINES_ONLY = ("a list", "a part that is a number", "a second tensor")  # the driver's state is any tree


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param(name, data, id=f"{name} {what}")
        for name in ("actor", "trainer")
        for what, data in STRUCTURES.items()
        if name == "actor" or what not in ENGINES_ONLY
    ],
)
def test_a_forged_structure_is_passed_over(
    run_dir: Path, data: bytes, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_and_sign(run_dir / "global_step_2", f"{name}/{STRUCTURE}", data)
    assert_passed_over(run_dir, caplog, f"global_step_2/{name}")


def test_a_shard_of_another_dtype_or_shape_is_passed_over(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_dir / "global_step_2"
    tensors = load_file(folder / "actor" / FIRST)
    for changed in (tensors["embed"].view(torch.int32), tensors["embed"].T.contiguous().reshape(2, 8)):
        save_file({**tensors, "embed": changed}, tmp_path / "forged")
        write_and_sign(folder, f"actor/{FIRST}", (tmp_path / "forged").read_bytes())
        assert_passed_over(run_dir, caplog, FIRST, "model/embed is", "and shards.json says F32 [4, 4]")
        with pytest.raises(CheckpointError, match="model/embed is"):
            load_shards(folder / "actor", state(whole, scale=0.0))
        with pytest.raises(CheckpointError, match="model/embed is"):
            read_tensors(folder / "actor", "model")["embed"]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry in a JSON value, the outermost ones first."""
    entries: Any = ()
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    for key, entry in entries:
        yield (*at, key)
        yield from places(entry, (*at, key))


ODD = [
    None,
    True,
    -1,
    0,
    1,
    7,
    2**63,
    10**400,
    0.5,
    float("nan"),
    "",
    "x",
    "../x",
    "/x",
    "\0",
    "\ud800",
    [],
    {},
]


def mutated(content: Any, chance: random.Random) -> Any:
    """The value with one to three entries removed, replaced, renamed or nested."""
    content = copy.deepcopy(content)
    for _ in range(chance.randint(1, 3)):
        paths = list(places(content))
        if not paths:
            break
        *outer, key = chance.choice(paths)
        parent = content
        for step in outer:
            parent = parent[step]
        how = chance.randrange(5)
        if how == 0:
            del parent[key]
        elif how == 1 and isinstance(parent, dict):
            parent[str(chance.choice(ODD))] = parent.pop(key)
        elif how == 2:
            parent[key] = [parent[key]]
        elif how == 3 and type(parent[key]) is int:
            parent[key] += chance.choice([-1, 1, -(2**40), 2**40])
        else:
            parent[key] = copy.deepcopy(chance.choice(ODD))
    return content


@pytest.mark.parametrize("name", [MANIFEST, f"actor/{SHARDS}", f"actor/{STRUCTURE}", f"trainer/{STRUCTURE}"])
def test_whatever_stands_in_a_file_only_a_checkpoint_error_comes_out(run_dir: Path, name: str) -> None:
    chance = random.Random(name)
    folder = run_dir / "global_step_2"
    manifest = (folder / MANIFEST).read_text()
    content = json.loads((folder / name).read_text())
    outcomes = {1: 0, 2: 0}
    for _ in range(60):
        changed = mutated(content, chance)
        (folder / MANIFEST).write_text(manifest)
        if name == MANIFEST:
            (folder / MANIFEST).write_text(sign(changed))
        else:
            write_and_sign(folder, name, json.dumps(changed).encode())
        loaded = CheckpointStore(run_dir).load_latest()
        assert loaded is not None
        outcomes[1 if loaded.path.name == "global_step_1" else 2] += 1
        for read in (
            lambda: CheckpointStore(run_dir).load(folder),
            lambda: load_shards(folder / "actor", state(whole, scale=0.0)),
            lambda: dict(read_tensors(folder / "actor", "model")),
        ):
            try:
                read()
            except CheckpointError as error:
                assert str(folder) in str(error)
    assert outcomes[1] > 3, outcomes


def test_boxes_tile_a_shape_exactly_once() -> None:
    """Random cuts of a box into smaller ones tile it; without one of them, or with one moved, they do not."""
    from hybridflow.checkpoint.shard_index import tiles

    chance = random.Random(0)
    for _ in range(200):
        shape = tuple(chance.randint(1, 6) for _ in range(chance.randint(1, 3)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(chance.randint(0, 5)):
            offsets, sizes = boxes.pop(chance.randrange(len(boxes)))
            dim = chance.randrange(len(shape))
            first = chance.randint(0, sizes[dim])
            for start, size in ((0, first), (first, sizes[dim] - first)):
                at = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
                boxes.append((at, (*sizes[:dim], size, *sizes[dim + 1 :])))
        boxes = [box for box in boxes if all(box[1])]
        chance.shuffle(boxes)
        assert tiles(shape, boxes)
        counts = torch.zeros(shape, dtype=torch.int64)
        other = [box for box in boxes if chance.random() < 0.8] + [boxes[0]] * (chance.random() < 0.3)
        for offsets, sizes in other:
            counts[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))] += 1
        assert tiles(shape, other) == bool((counts == 1).all())


def test_many_chunks_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is parsed once and counted once, so the time is linear in their number."""
    rows = 20_000
    tensors = {"format": 1, "files": [f"f{row}" for row in range(rows)]}
    entry = {"dtype": "F32", "shape": [rows], "chunks": [[row, [row], [1]] for row in range(rows)]}
    (tmp_path / SHARDS).write_text(json.dumps({**tensors, "tensors": {"model/w": entry}}))
    (tmp_path / STRUCTURE).write_text('{"model": {"w": {"$tensor": "model/w"}}}')
    parsed = []
    from hybridflow.checkpoint import shard_index

    real = shard_index._chunk
    monkeypatch.setattr(shard_index, "_chunk", lambda *a: (parsed.append(1), real(*a))[1])
    with pytest.raises(CheckpointError, match="No such file"):
        read_index(tmp_path)
    assert len(parsed) == rows
    entry["chunks"] = [[0, [0], [0]] for _ in range(rows)]
    (tmp_path / SHARDS).write_text(json.dumps({**tensors, "tensors": {"model/w": entry}}))
    with pytest.raises(CheckpointError, match="two chunks of 'model/w' are in one file"):
        read_index(tmp_path)


def test_what_was_not_forged_is_loaded(run_dir: Path) -> None:
    folder = run_dir / "global_step_2" / "actor"
    assert_equal(load_shards(folder, state(whole, scale=0.0)), state(whole))
    loaded = CheckpointStore(run_dir).load_latest()
    assert loaded is not None and loaded.step == 2
    assert loaded.engines == {"actor": frozenset({"model", "optimizer", "scheduler"})}
