"""Samplers, which decide the order of the rows in an epoch; it depends on (seed, epoch) alone.

A sampler of one's own (`data.sampler.class_path`) has the `Sampler` protocol below. A curriculum sampler also
has `update(batch)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import torch

from hybridflow.protocol.randomness import generator


class Sampler(Protocol):
    """Row indices, an epoch at a time; constructed as `cls(dataset, seed)`.

    `set_epoch(epoch)` is called when an epoch begins and `iter(sampler)` then gives its `len(sampler)`
    indices, drawn one batch at a time.
    """

    def set_epoch(self, epoch: int) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


@runtime_checkable
class CurriculumSampler(Protocol):
    """A sampler that gets each finished batch (a DataProto with scores, …) and may order the rest by it."""

    def update(self, batch: Any) -> None: ...


@runtime_checkable
class StatefulSampler(Protocol):
    """A sampler that keeps its own place in an epoch.

    After `load_state_dict`, `iter(sampler)` goes on where the saved epoch stood. The state is plain data
    (numbers, strings, lists, dicts, tensors). Samplers without these methods are fast-forwarded instead,
    which is exact where the order depends on (seed, epoch) alone.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ShuffledSampler:
    """Every row once an epoch, in an order keyed by (seed, "shuffle", epoch)."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.size = len(dataset)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=generator(self.seed, "shuffle", self.epoch)).tolist()

    def __len__(self) -> int:
        return self.size


class SequentialSampler:
    """Every row once an epoch, in the order of the data."""

    def __init__(self, dataset: Sized, seed: int = 0) -> None:
        self.size = len(dataset)

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)

    def __len__(self) -> int:
        return self.size
