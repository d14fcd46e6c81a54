"""Which rows or items each part of a role works on, the cutting, and the way back.

rows ──plan──► order [[0, 3, 4], [1, 2]] ──cut──► parts ──ranks──► results ──undo──► results in the driver's
order
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
    """An argument that is another value on each rank: the parts of an earlier call's result, passed on where
    they are.
    """

    values: list[Any]
    """By rank; the ranks of a part share one."""
    order: list[list[int]] | None = None
    """Where the values are rows or items that were dealt: those of each part, in the driver's numbering."""


def plan_rows(batches: Sequence[DataProto], mesh: MeshInfo) -> list[list[int]]:
    """The rows of each part, for all of these batches; their lengths and groups come from the first that has
    the column.
    """
    sizes = sorted({len(batch) for batch in batches})
    assert len(sizes) == 1, (
        f"the DataProto arguments of one call are dealt together, but they have {sizes} rows"
    )
    masks = next((batch.batch["attention_mask"] for batch in batches if "attention_mask" in batch), None)
    groups = next((batch.batch["group_ids"].tolist() for batch in batches if "group_ids" in batch), None)
    if masks is None or mesh.workload is None:
        return deal_in_order(sizes[0], mesh.num_parts, groups)
    return deal_rows(masks.sum(-1).tolist(), mesh.num_parts, mesh.workload, groups)


def plan_items(items: Sequence[Any], mesh: MeshInfo) -> list[list[int]]:
    """The items of each part: by `deal_cost` and `deal_key` of those that have them."""
    numbers: dict[Any, int] = {}
    keys = [getattr(item, "deal_key", None) for item in items]
    groups = [
        numbers.setdefault(("item", index) if key is None else key, len(numbers))
        for index, key in enumerate(keys)
    ]
    if mesh.workload is None:
        return deal_in_order(len(items), mesh.num_parts, groups)
    return deal_rows(
        [float(getattr(item, "deal_cost", 1.0)) for item in items], mesh.num_parts, Workload(), groups
    )


def cut_rows(batch: DataProto, order: Sequence[Sequence[int]]) -> list[DataProto]:
    """The rows of each part; they are views of one gathered copy, and of the batch itself where its rows stay
    in place.
    """
    rows = list(chain.from_iterable(order))
    assert len(rows) == len(batch), f"{len(batch)} rows cannot be dealt by a plan of {len(rows)}"
    gathered = batch if _is_in_order(rows) else batch.select_idxs(rows)
    return [gathered.slice(start, end) for start, end in _cuts(order)]


def cut_items(items: Sequence[Any], order: Sequence[Sequence[int]]) -> list[list[Any]]:
    """The items of each part."""
    return [[items[index] for index in part] for part in order]


def undo_rows(parts: Sequence[DataProto], order: Sequence[Sequence[int]]) -> DataProto:
    """The rows of all parts where they were before they were dealt."""
    _check(parts, order, "rows")
    joined, rows = DataProto.concat(parts), list(chain.from_iterable(order))
    return joined if _is_in_order(rows) else joined.select_idxs(_inverse(rows))


def undo_items(parts: Sequence[Sequence[Any]], order: Sequence[Sequence[int]]) -> list[Any]:
    """The items of all parts where they were before they were dealt."""
    _check(parts, order, "items")
    joined = list(chain.from_iterable(parts))
    return [joined[index] for index in _inverse(list(chain.from_iterable(order)))]


def _check(parts: Sequence[Any], order: Sequence[Sequence[int]], what: str) -> None:
    got, sent = [len(part) for part in parts], [len(part) for part in order]
    assert got == sent, (
        f"the parts were given {sent} {what} and returned {got}: a method must answer each of them"
    )


def _cuts(order: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(len(part) for part in order)]))


def _is_in_order(rows: Sequence[int]) -> bool:
    return all(row == index for index, row in enumerate(rows))


def _inverse(rows: Sequence[int]) -> list[int]:
    places = [0] * len(rows)
    for place, row in enumerate(rows):
        places[row] = place
    return places
