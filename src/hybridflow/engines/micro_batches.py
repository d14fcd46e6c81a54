"""Packed micro-batches: as many on every rank, since each forward gathers parameters from all.

A rank with fewer micro-batches first splits its heaviest ones. If that is not enough, it adds dummies: two
tokens whose outputs do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.distributed.transfers import all_to_device
from hybridflow.engines.base import BatchLimits
from hybridflow.errors import HybridFlowError, TrainingError
from hybridflow.protocol import DataProto
from hybridflow.protocol.balancing import karmarkar_karp, split_micro_batches
from hybridflow.protocol.packing import PackedBatch, pack, prompt_groups, share_prompts

Agree = Callable[[Sequence[int]], list[int]]
"""A function that returns the largest of each number over all ranks."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass; a dummy has none. It is made on the host, where reading lengths waits
    for nothing.
    """

    indices: list[int] | None
    rows: DataProto | None
    packed: PackedBatch
    """The tokens of the forward pass."""

    def on(self, device: torch.device, *, with_rows: bool = True) -> MicroBatch:
        """Return the micro-batch with its tensors on `device`, by a few copies that are queued there."""
        tensors = {f"tokens: {name}": each for name, each in self.packed.tensors().items()}
        if with_rows and self.rows is not None:
            tensors |= {f"rows: {name}": each for name, each in self.rows.tensors().items()}
        moved = all_to_device(tensors, device)

        def of(kind: str) -> dict[str, Tensor]:
            return {name.removeprefix(kind): each for name, each in moved.items() if name.startswith(kind)}

        packed = self.packed.with_tensors(of("tokens: "))
        rows = self.rows
        if with_rows and rows is not None:
            rows = rows.with_tensors(of("rows: "))
        return MicroBatch(self.indices, rows, packed)


def plan(
    batch: DataProto, limits: BatchLimits, agree: Agree | None, *, at_least: int = 0, multiple_of: int = 1
) -> list[MicroBatch]:
    """Return the micro-batches of `batch` on the host, at least `at_least` of them.

    With `agree`, all ranks get the same number, a multiple of `multiple_of`. Raises ConfigError for a row or
    group above the limits; every other rank then raises TrainingError, so that none is left waiting.
    """
    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    groups: list[int] | None = None  # equal numbers for rows that stay together
    if limits.keep_groups:
        groups = batch.batch["group_ids"].tolist()
    elif limits.share_prompts:
        groups = together(batch, lengths, limits)
    failure: HybridFlowError | None = None
    bins: list[list[int]] = []
    try:
        bins = split_micro_batches(
            lengths, max_tokens=limits.max_tokens, max_rows=limits.max_rows, groups=groups
        )
    except HybridFlowError as error:
        if agree is None:
            raise
        failure = error
    count = max(len(bins), at_least)
    if agree is not None:
        count, failed = agree([count, int(failure is not None)])
        if failed:
            raise failure or TrainingError(
                "the rows of another rank do not fit its micro-batches; its message says why"
            )
        count = -(-count // multiple_of) * multiple_of
        bins = split_further(bins, lengths, groups, count)
    found = []
    for indices in bins:
        rows = batch.select_idxs(indices)
        packed = pack(rows)
        if limits.share_prompts:
            packed = share_prompts(packed)
        found.append(MicroBatch(indices, rows, packed))
    found += [MicroBatch(None, None, dummy()) for _ in range(count - len(found))]
    return found


def together(batch: DataProto, lengths: Sequence[int], limits: BatchLimits) -> list[int]:
    """Return a number for each row, equal for rows of one prompt as long as they fit into one forward."""
    # by prompt: the number of its newest part, and that part's tokens and rows
    parts: dict[int, tuple[int, int, int]] = {}
    numbers = []
    used = 0
    for prompt, length in zip(prompt_groups(batch), lengths, strict=True):
        number, tokens, rows = parts.get(prompt, (-1, 0, 0))
        if number < 0 or tokens + length > limits.max_tokens or rows == limits.max_rows:
            number = used
            tokens = rows = 0
            used += 1
        parts[prompt] = (number, tokens + length, rows + 1)
        numbers.append(number)
    return numbers


def split_further(
    bins: list[list[int]], lengths: Sequence[int], groups: Sequence[int] | None, count: int
) -> list[list[int]]:
    """Halve the heaviest of `bins` until there are `count`, or each is one row (or group).

    The heaviest is split since all ranks wait for the slowest one in each forward.
    """
    bins = [list(rows) for rows in bins]
    while len(bins) < count:
        whole = [bin_units(rows, groups) for rows in bins]
        splittable = [index for index, units in enumerate(whole) if len(units) > 1]
        if not splittable:
            break
        heaviest = max(splittable, key=lambda index: sum(lengths[row] for row in bins[index]))
        units = whole[heaviest]
        halves = karmarkar_karp([sum(lengths[row] for row in unit) for unit in units], 2)
        bins[heaviest : heaviest + 1] = [
            sorted(row for unit in half for row in units[unit]) for half in halves
        ]
    return sorted(bins)


def bin_units(rows: Sequence[int], groups: Sequence[int] | None) -> list[list[int]]:
    """Return the rows of a micro-batch as lists of rows that must stay together."""
    if groups is None:
        return [[row] for row in rows]
    units: dict[int, list[int]] = {}
    for row in rows:
        units.setdefault(groups[row], []).append(row)
    return list(units.values())


def dummy() -> PackedBatch:
    """Return one row of two tokens, the second predicted: the least that goes through a model."""
    zero = torch.zeros(1, dtype=torch.int64)
    return PackedBatch(
        input_ids=torch.zeros(2, dtype=torch.int64),
        position_ids=torch.arange(2),
        lengths=(2,),
        prompt_lengths=(1,),
        predict_index=zero,
        predict_index_on_cpu=zero,
        targets=zero,
        rows=zero,
        columns=zero,
        shape=(1, 1),
    )
