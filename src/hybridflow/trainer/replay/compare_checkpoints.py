"""The checkpoints of one step of two runs, compared tensor by tensor and to the bit, whatever their ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint.layout import MODEL
from hybridflow.checkpoint.manifest import Manifest, read_manifest
from hybridflow.checkpoint.shard_index import read_index, read_tensors
from hybridflow.checkpoint.state import decode_tree, load_tree
from hybridflow.errors import CheckpointError
from hybridflow.trainer.replay.difference import MISSING, Difference, first_place, first_unequal


def checkpoint_differences(first: Path, second: Path, step: int, notes: list[str]) -> Iterator[Difference]:
    """Give every tensor that differs, at its first element: weights first, then optimizers, then the
    driver's state. What cannot be read, or is not what its manifest says, is added to `notes`.
    """
    manifests = [_manifest(folder, notes) for folder in (first, second)]
    if manifests[0] is None or manifests[1] is None:
        return
    damaged = False
    for folder, manifest in zip((first, second), manifests, strict=True):
        assert manifest is not None, "looked at above"
        damage = manifest.damage(folder)
        if damage is not None:
            damaged = True
            notes.append(f"damaged checkpoint: {damage}")
    engines = [manifest.engines for manifest in manifests if manifest is not None]
    for role in sorted({*engines[0], *engines[1]}):
        if role not in engines[0] or role not in engines[1]:
            values = ["there" if role in names else MISSING for names in engines]
            yield Difference("weight", role, values[0], values[1], step)
        elif damaged or _files(manifests[0], role) != _files(manifests[1], role):
            yield from _engine(first / role, second / role, role, step, notes)
    roles = [set(manifest.roles) for manifest in manifests if manifest is not None]
    for role in sorted(roles[0] & roles[1]):
        try:
            found = first_unequal(load_tree(first / role), load_tree(second / role), role)
        except CheckpointError as error:
            notes.append(f"not compared: {error}")
            continue
        if found is not None:
            yield Difference("state", *found, step)


def _files(manifest: Manifest | None, role: str) -> dict[str, Any]:
    files = {} if manifest is None else manifest.files
    return {name: digest for name, digest in files.items() if name.startswith(f"{role}/")}


def _manifest(folder: Path, notes: list[str]) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        notes.append(f"not compared: {error}")
        return None


def _engine(first: Path, second: Path, role: str, step: int, notes: list[str]) -> Iterator[Difference]:
    """Give the tensors of an engine's state that differ, those of the model first."""
    try:
        indexes = [read_index(first), read_index(second)]
        parts = dict.fromkeys([MODEL, *indexes[0].structure, *indexes[1].structure])
        for part in parts:
            if any(part not in index.structure for index in indexes):
                notes.append(f"step {step}, {role}: {part} is in one of the two checkpoints only")
                continue
            yield from _part(first, second, f"{role}/{part}", part, step)
            numbers = [decode_tree(index.structure[part], _no_tensor) for index in indexes]
            found = first_unequal(numbers[0], numbers[1], f"{role}/{part}")
            if found is not None:
                yield Difference(_kind(part), *found, step)
    except CheckpointError as error:
        notes.append(f"not compared: {error}")


def _part(first: Path, second: Path, label: str, part: str, step: int) -> Iterator[Difference]:
    tensors = [read_tensors(first, part), read_tensors(second, part)]
    for name in dict.fromkeys([*tensors[0], *tensors[1]]):
        kinds = [
            f"{str(one.dtype(name)).removeprefix('torch.')} {list(one.shape(name))}"
            if name in one
            else MISSING
            for one in tensors
        ]
        if kinds[0] != kinds[1]:
            yield Difference(_kind(part), f"{label}/{name}", kinds[0], kinds[1], step)
            continue
        one = tensors[0][name]
        other = tensors[1][name]
        place = first_place(one, other)
        if place is not None:
            values = (one[place].item(), other[place].item())
            yield Difference(_kind(part), f"{label}/{name}", *values, step, position=place)


def _kind(part: str) -> str:
    return "weight" if part == MODEL else "optimizer"


def _no_tensor(name: str) -> Tensor:
    """Return an empty tensor for every name: tensors are compared by themselves."""
    return torch.empty(0)
