from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.checkpoint.state import load_tree, save_tree
from hybridflow.errors import CheckpointError


def round_trip(folder: Path, tree: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    save_tree(folder, tree)
    return load_tree(folder)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right), (left, right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert (
            left.contiguous().view(-1).view(torch.uint8).equal(right.contiguous().view(-1).view(torch.uint8))
        )
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    elif isinstance(left, float):
        assert struct.pack(">d", left) == struct.pack(">d", right)
    elif isinstance(left, dict):
        assert list(left) == list(right) and [type(k) for k in left] == [type(k) for k in right]
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


def test_every_kind_of_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = {
        "none": None,
        "flags": [True, False, 1, 0],
        "ints": (-(2**80), 2**63, 0),
        "floats": [0.1, -0.0, 1e-323, math.inf, -math.inf, math.nan, 1.0, 3e38],
        "bytes": [b"\x00picture", b""],
        "odd nan": struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0],
        "text": ["", "ü 数", "\ud800", '"\n'],
        "empty": [{}, [], (), {"": {}}],
        "$keys": {"$tensor": "not one", "$": 1},
        "numbered": {0: "a", 1: {"b": (1, [2, (3,)])}, "0": "text key"},
        "tensors": [
            torch.arange(6.0).reshape(2, 3),
            torch.tensor(3),
            torch.zeros(0, 4),
            torch.tensor([True, False]),
        ],
        "halves": [torch.randn(5, dtype=torch.float64).bfloat16(), torch.tensor([math.nan, -0.0]).half()],
        "arrays": [
            np.arange(4, dtype=np.uint16),
            np.array(2.5),
            np.zeros((2, 0)),
            np.array([1, 2], dtype=">i4"),
            np.array([True]),
        ],
        "scalars": [np.float32(0.1), np.int64(-3), np.bool_(True), np.float64(0.1)],
    }
    assert_same(round_trip(tmp_path, tree), tree)


_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_trees = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(tree=_trees)
def test_any_tree_comes_back(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_same(round_trip(tmp_path_factory.getbasetemp() / "any_tree", tree), tree)


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    tree = {
        "tied": {"a": base, "b": base},
        "first": base[:4],
        "overlaps": base[2:8],
        "columns": base.view(2, 5).t(),
    }
    back = round_trip(tmp_path, tree)
    assert_same(back, tree)
    assert back["tied"]["a"] is back["tied"]["b"], "a tied weight is stored once and stays one tensor"
    back["first"].zero_()
    assert back["tied"]["a"].equal(base)


def test_names_that_collide_stay_apart(tmp_path: Path) -> None:
    tree = {
        "a/b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "__metadata__": torch.tensor([3]),
        "0": torch.tensor([4]),
        0: torch.tensor([5]),
    }
    assert_same(round_trip(tmp_path, tree), tree)


def test_a_module_and_its_optimizer(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    back = round_trip(tmp_path, {"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(back["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(back["optimizer"])
    assert other.weight.equal(module.weight)
    assert_same(back["optimizer"], optimizer.state_dict())


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": object()}}, "/a/b of type object"),
        ({"a": [1, {1.5: 2}]}, r"/a/1: its key 1\.5"),
        ({"a": np.array(["x"], dtype=object)}, "/a: a numpy value of dtype object"),
        ({"a": torch.ones(2).to_sparse()}, "/a: a tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "/a: a tensor"),
        ({"a": torch.ones(2, device="meta")}, "/a: a tensor"),
        ({"a": bytearray(b"x")}, "/a of type bytearray"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot store {message}"):
        save_tree(tmp_path, tree)


def test_ordered_dictionaries_come_back_plain(tmp_path: Path) -> None:
    assert_same(round_trip(tmp_path, OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


def test_files_of_another_make_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_tree(tmp_path)
    save_tree(tmp_path, {"w": torch.ones(2)})
    (tmp_path / "state.json").write_text(json.dumps({"w": {"$pickle": "x"}}))
    with pytest.raises(CheckpointError, match=r"\$pickle is not known"):
        load_tree(tmp_path)
