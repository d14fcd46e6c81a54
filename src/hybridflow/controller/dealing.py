"""The distribution of rows or items over the parts of a role, and the way back of rows.

rows ──plan──► order [[0, 3, 4], [1, 2]] ──cut──► parts ──ranks──► results ──undo──► the driver's order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

from hybridflow.controller.mesh import MeshInfo
from hybridflow.protocol import DataProto
from hybridflow.protocol.balancing import Workload, deal_in_order, deal_rows


@dataclass(frozen=True)
class PerRank:
    """An argument with a value for each rank: the results of the same ranks of an earlier call, which stay
    where they are.
    """

    values: list[Any]


def plan_rows(batches: Sequence[DataProto], mesh: MeshInfo) -> list[list[int]]:
    """Choose the rows of each part, the same for all of these batches, by the first that has a column.

    Raises AssertionError for batches of different lengths.
    """
    sizes = sorted({len(batch) for batch in batches})
    assert len(sizes) == 1, (
        f"the DataProto arguments of one call are dealt together, but they have {sizes} rows"
    )
    groups = next((batch.batch["group_ids"].tolist() for batch in batches if "group_ids" in batch), None)
    masks = next((batch.batch["attention_mask"] for batch in batches if "attention_mask" in batch), None)
    if masks is None or mesh.workload is None:
        return deal_in_order(sizes[0], mesh.num_parts, groups)
    return deal_rows(masks.sum(-1).tolist(), mesh.num_parts, mesh.workload, groups)


def plan_items(items: Sequence[Any], mesh: MeshInfo) -> list[list[int]]:
    """Choose the items of each part, by their `deal_cost`; items of equal `deal_key` stay together."""
    numbers: dict[Any, int] = {}
    groups = [numbers.setdefault(item.deal_key, len(numbers)) for item in items]
    if mesh.workload is None:
        return deal_in_order(len(items), mesh.num_parts, groups)
    return deal_rows([item.deal_cost for item in items], mesh.num_parts, Workload(), groups)


def cut_rows(batch: DataProto, order: Sequence[Sequence[int]]) -> list[DataProto]:
    """Return the rows of each part, as views of one gathered copy, or of the batch where its order stays."""
    rows = list(chain.from_iterable(order))
    assert len(rows) == len(batch), f"{len(batch)} rows cannot be dealt by a plan of {len(rows)}"
    if not _is_in_order(rows):
        batch = batch.select_idxs(rows)
    cuts = pairwise([0, *accumulate(len(part) for part in order)])
    return [batch.slice(start, end) for start, end in cuts]


def cut_items(items: Sequence[Any], order: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Return the items of each part."""
    return [[items[index] for index in part] for part in order]


def undo_rows(parts: Sequence[DataProto], order: Sequence[Sequence[int]]) -> DataProto:
    """Return the rows of all parts in the driver's order."""
    got = [len(part) for part in parts]
    sent = [len(part) for part in order]
    assert got == sent, (
        f"the parts were given {sent} rows and returned {got}: a method must return one for each"
    )
    joined = DataProto.concat(parts)
    rows = list(chain.from_iterable(order))
    if _is_in_order(rows):
        return joined
    places = [0] * len(rows)
    for place, row in enumerate(rows):
        places[row] = place
    return joined.select_idxs(places)


def _is_in_order(rows: Sequence[int]) -> bool:
    return all(row == index for index, row in enumerate(rows))
