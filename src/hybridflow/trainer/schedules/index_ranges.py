"""Sorted indices as ranges: what lines of a ledger and messages hold instead of long lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice


def ranges(indices: Iterable[int]) -> Iterator[range]:
    """Cut ascending indices into runs without a gap: 3, 4, 5, 9 are 3..5 and 9."""
    run: range | None = None
    for index in indices:
        if run is not None and index == run.stop:
            run = range(run.start, index + 1)
            continue
        if run is not None:
            yield run
        run = range(index, index + 1)
    if run is not None:
        yield run


def ranges_text(indices: Iterable[int], most: int) -> str:
    """Return ascending indices for a message, such as `3-5, 9`, with at most so many ranges."""
    runs = list(ranges(indices))
    texts = [str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in islice(runs, most)]
    if len(runs) > most:
        texts.append(f"and {sum(map(len, runs[most:]))} more")
    return ", ".join(texts)
