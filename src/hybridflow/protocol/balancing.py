"""Dealing rows by their token counts: lengths in, lists of row indices out.

`split_micro_batches` cuts what one rank holds into forward passes under hard caps; `karmarkar_karp` deals rows to ranks.
Both are deterministic: equal lengths are taken in row order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hybridflow.errors import ConfigError


def split_micro_batches(lengths: Sequence[int], *, max_tokens: int, max_rows: int | None = None) -> list[list[int]]:
    """Pack rows into few bins, none above `max_tokens` tokens or `max_rows` rows.

    The number of bins is that of first-fit decreasing; where it is possible, the rows are then spread evenly over that many bins.
    Returns row indices, ascending inside each bin; bins are ordered by their first row. Raises ConfigError for a row that
    is longer than `max_tokens` alone.
    """
    sizes = [int(length) for length in lengths]
    if max_tokens < 1 or (max_rows is not None and max_rows < 1):
        raise ConfigError(f"micro-batch limits must be at least 1: got {max_tokens} tokens and {max_rows} rows")
    for row, size in enumerate(sizes):
        if size > max_tokens:
            raise ConfigError(
                f"row {row} has {size} tokens but a micro-batch may hold {max_tokens}: set *_max_token_len_per_gpu to at least {size}"
            )
    rows_cap = len(sizes) if max_rows is None else max_rows
    order = sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    bins = _first_fit(order, sizes, max_tokens, rows_cap)
    bins = _spread(order, sizes, max_tokens, rows_cap, len(bins)) or bins
    return sorted(sorted(members) for members in bins)


def _first_fit(order: Sequence[int], sizes: Sequence[int], max_tokens: int, max_rows: int) -> list[list[int]]:
    bins: list[list[int]] = []
    totals: list[int] = []
    open_from = 0  # bins before it are full by rows or by tokens
    for row in order:
        while open_from < len(bins) and (len(bins[open_from]) >= max_rows or totals[open_from] >= max_tokens):
            open_from += 1
        for index in range(open_from, len(bins)):
            if totals[index] + sizes[row] <= max_tokens and len(bins[index]) < max_rows:
                break
        else:
            index = len(bins)
            bins.append([])
            totals.append(0)
        bins[index].append(row)
        totals[index] += sizes[row]
    return bins


def _spread(order: Sequence[int], sizes: Sequence[int], max_tokens: int, max_rows: int, k: int) -> list[list[int]] | None:
    """Longest row first into the lightest bin with room; None where the caps do not allow it with k bins."""
    bins: list[list[int]] = [[] for _ in range(k)]
    heap = [(0, index) for index in range(k)]  # a bin leaves the heap when it has max_rows
    for row in order:
        if not heap or heap[0][0] + sizes[row] > max_tokens:
            return None
        total, index = heapq.heappop(heap)
        bins[index].append(row)
        if len(bins[index]) < max_rows:
            heapq.heappush(heap, (total + sizes[row], index))
    return [members for members in bins if members]


def karmarkar_karp(weights: Sequence[float], k: int) -> list[list[int]]:
    """Split indices into k parts of nearly equal weight by the largest differencing method (Karmarkar and Karp, 1982).

    Returns k ascending lists (some are empty where there are fewer weights than parts). Raises ConfigError for k < 1.
    """
    if k < 1:
        raise ConfigError(f"cannot split rows into {k} parts: at least 1 is needed")
    if not weights:
        return [[] for _ in range(k)]
    # A heap of partial solutions (-spread, order, [(sum, members)] heaviest first): the two that differ most inside are joined,
    # the heavy part of the one with the light part of the other.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, weight in enumerate(weights):
        heapq.heappush(heap, (-float(weight), index, [(float(weight), [index]), *((0.0, []) for _ in range(k - 1))]))
    count = len(weights)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        count += 1
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], count, joined))
    return sorted((sorted(members) for _, members in heap[0][2]), key=lambda part: (not part, part))
