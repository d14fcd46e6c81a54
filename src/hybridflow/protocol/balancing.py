"""Load balancing of rows by their token counts: lengths go in, lists of row indices come out.

`deal_rows` deals rows to ranks by their cost; `split_micro_batches` cuts the rows of one rank into forward
passes under hard caps. Both are deterministic: rows of equal length are taken in row order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hybridflow.errors import ConfigError

LARGEST_DIFFERENCING = 1 << 16
"""Units × parts up to which `deal_rows` takes `karmarkar_karp`, whose time and memory grow with that product:
some 0.1 s.
"""


@dataclass(frozen=True)
class Workload:
    """The cost of a row of L tokens, linear · L + quadratic · L², in any unit.

    `models.files.size.workload_of` gives it in FLOPs.
    """

    linear: float = 1.0
    """Cost of a token in matrix products with parameters."""
    quadratic: float = 0.0
    """Cost of a pair of tokens in attention."""

    def cost(self, length: float) -> float:
        """Return the cost of one row."""
        return self.linear * length + self.quadratic * length * length


def deal_rows(
    lengths: Sequence[float], parts: int, workload: Workload, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Deal rows to `parts` ranks so that the heaviest rank has little more than the mean.

    With `groups`, one number for each row, rows of equal number stay together. The method is Karmarkar and
    Karp's differencing where units × parts is at most LARGEST_DIFFERENCING (4,096 rows over 16 ranks). Beyond
    that the longest unit goes first to the lightest rank, which is as good to a part in a thousand where a
    rank gets tens of rows, and takes under a second for 65,536 rows over 1,024 ranks. Returns the rows of
    each part, ascending; a part may be empty.
    """
    units = _units(len(lengths), groups)
    costs = [sum(workload.cost(lengths[row]) for row in unit) for unit in units]
    deal = karmarkar_karp if len(units) * parts <= LARGEST_DIFFERENCING else _longest_first
    return [sorted(row for index in members for row in units[index]) for members in deal(costs, parts)]


def even_in_groups(num_groups: int, parts: int) -> bool:
    """Whether ranks that get whole groups of about equal size have about as much work each.

    It is for callers that may also distribute row by row.
    """
    return num_groups % parts == 0 or num_groups >= 4 * parts


def deal_in_order(num_rows: int, parts: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Distribute rows in their order, in chunks whose sizes differ by at most one, longer chunks first.

    With `groups`, one number for each row, the rows of a group stay together.
    """
    if parts < 1:
        raise ConfigError(f"cannot split rows into {parts} parts: at least 1 is needed")
    units = _units(num_rows, groups)
    each, longer = divmod(num_rows, parts)
    ends = [(index + 1) * each + min(index + 1, longer) for index in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    part = placed = 0
    for unit in units:
        # a group goes where its middle falls
        while part < parts - 1 and 2 * placed + len(unit) > 2 * ends[part]:
            part += 1
        dealt[part].extend(unit)
        placed += len(unit)
    return [sorted(rows) for rows in dealt]


def split_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_rows: int | None = None,
    groups: Sequence[int] | None = None,
) -> list[list[int]]:
    """Pack rows into few bins, none above `max_tokens` tokens or `max_rows` rows.

    The number of bins is that of first-fit decreasing; where it is possible, the rows are then spread evenly
    over that many bins. With `groups`, one number for each row, rows of equal number stay together, wherever
    they stand. Returns row indices, ascending inside each bin; bins are ordered by their first row. Raises
    ConfigError for a row, or a group, that alone exceeds the limits.
    """
    if max_tokens < 1 or (max_rows is not None and max_rows < 1):
        raise ConfigError(
            f"micro-batch limits must be at least 1: got {max_tokens} tokens and {max_rows} rows"
        )
    units = _units(len(lengths), groups)
    sizes = [sum(int(lengths[row]) for row in unit) for unit in units]
    counts = [len(unit) for unit in units]
    rows_cap = len(lengths) if max_rows is None else max_rows
    for unit, size in zip(units, sizes, strict=True):
        if size > max_tokens or len(unit) > rows_cap:
            raise ConfigError(_too_large(unit, size, max_tokens, rows_cap))
    order = sorted(range(len(units)), key=lambda index: (-sizes[index], index))
    bins = _first_fit(order, sizes, counts, max_tokens, rows_cap)
    bins = _spread(order, sizes, counts, max_tokens, rows_cap, len(bins)) or bins
    return sorted(sorted(row for index in members for row in units[index]) for members in bins)


def _units(num_rows: int, groups: Sequence[int] | None) -> list[list[int]]:
    """Return lists of rows that stay together, ordered by their first row."""
    if groups is None:
        return [[row] for row in range(num_rows)]
    assert len(groups) == num_rows, f"{len(groups)} group numbers for {num_rows} rows"
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(int(group), []).append(row)
    return list(members.values())


def _too_large(unit: Sequence[int], size: int, max_tokens: int, max_rows: int) -> str:
    if len(unit) == 1:
        return (
            f"row {unit[0]} has {size} tokens but a micro-batch may hold {max_tokens}: set "
            f"*_max_token_len_per_gpu to at least {size}"
        )
    group = (
        f"the {len(unit)} responses of the prompt in row {unit[0]} are compared with each other, so "
        "they go into one micro-batch"
    )
    if len(unit) > max_rows:
        return (
            f"{group}, which may hold {max_rows} rows: set *_micro_batch_size_per_gpu to at least "
            f"{len(unit)}, or leave it out"
        )
    return (
        f"{group}; they have {size} tokens and it may hold {max_tokens}: set *_max_token_len_per_gpu to at "
        f"least {size} (for any responses: n × the longest prompt and response), or rollout.n lower"
    )


def _first_fit(
    order: Sequence[int], sizes: Sequence[int], counts: Sequence[int], max_tokens: int, max_rows: int
) -> list[list[int]]:
    bins: list[list[int]] = []
    totals: list[int] = []
    rows: list[int] = []
    open_from = 0  # bins before it are full by rows or by tokens
    for unit in order:
        while open_from < len(bins) and (rows[open_from] >= max_rows or totals[open_from] >= max_tokens):
            open_from += 1
        for index in range(open_from, len(bins)):
            if totals[index] + sizes[unit] <= max_tokens and rows[index] + counts[unit] <= max_rows:
                break
        else:
            index = len(bins)
            bins.append([])
            totals.append(0)
            rows.append(0)
        bins[index].append(unit)
        totals[index] += sizes[unit]
        rows[index] += counts[unit]
    return bins


def _spread(
    order: Sequence[int], sizes: Sequence[int], counts: Sequence[int], max_tokens: int, max_rows: int, k: int
) -> list[list[int]] | None:
    """Put the longest unit first into the lightest bin; return None where the caps do not allow it with k
    bins.
    """
    bins: list[list[int]] = [[] for _ in range(k)]
    rows = [0] * k
    heap = [(0, index) for index in range(k)]  # a bin leaves the heap when it has max_rows
    for unit in order:
        if not heap or heap[0][0] + sizes[unit] > max_tokens or rows[heap[0][1]] + counts[unit] > max_rows:
            return None
        total, index = heapq.heappop(heap)
        bins[index].append(unit)
        rows[index] += counts[unit]
        if rows[index] < max_rows:
            heapq.heappush(heap, (total + sizes[unit], index))
    return [members for members in bins if members]


def karmarkar_karp(weights: Sequence[float], k: int) -> list[list[int]]:
    """Split indices into k parts of nearly equal weight by the largest differencing method (Karmarkar and
    Karp, 1982).

    Returns k ascending lists (some are empty where there are fewer weights than parts). Raises ConfigError
    for k < 1.
    """
    if k < 1:
        raise ConfigError(f"cannot split rows into {k} parts: at least 1 is needed")
    if not weights or k == 1:
        return [list(range(len(weights))) for _ in range(k)]
    # A heap of partial solutions (-spread, order, parts heaviest first). A part is (-weight, its smallest
    # index, members); members are nested pairs, so that joining copies nothing. The two solutions that differ
    # most inside are joined, the heavy parts of the one with the light parts of the other.
    empty: _Part = (0.0, len(weights), None)
    heap = [
        (-float(weight), index, [(-float(weight), index, index), *[empty] * (k - 1)])
        for index, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    for count in range(len(weights), 2 * len(weights) - 1):
        left = heapq.heappop(heap)[2]
        right = heap[0][2]
        joined = [_join(heavy, light) for heavy, light in zip(left, reversed(right))]
        joined.sort()
        heapq.heapreplace(heap, (joined[0][0] - joined[-1][0], count, joined))
    return sorted((sorted(_members(part)) for part in heap[0][2]), key=lambda part: (not part, part))


_Part: TypeAlias = tuple[float, int, Any]


def _join(left: _Part, right: _Part) -> _Part:
    if right[2] is None:
        return left
    if left[2] is None:
        return right
    return (left[0] + right[0], min(left[1], right[1]), (left[2], right[2]))


def _members(part: _Part) -> Iterator[int]:
    stack = [] if part[2] is None else [part[2]]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        else:
            yield node


def _longest_first(weights: Sequence[float], k: int) -> list[list[int]]:
    """Deal the heaviest unit first, each to the lightest of k parts.

    Parts differ by at most the heaviest weight.
    """
    parts: list[list[int]] = [[] for _ in range(k)]
    heap = [(0.0, index) for index in range(k)]
    for unit in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        total, index = heap[0]
        parts[index].append(unit)
        heapq.heapreplace(heap, (total + weights[unit], index))
    return parts
