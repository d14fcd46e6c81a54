"""The plan of a weight exchange: which rank sends which box of which parameter to which rank.

    boxes held and boxes wanted by all ranks ──► routes (source, target, box), a piece of a parameter at a
    time
    ──► rounds of bounded bytes

The plan is made once, from shapes alone, and is equal on all ranks. A target copies what it holds itself; the
rest comes from one of the ranks that hold it, so that copies share the sending evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from hybridflow.distributed.shards import Box

Boxes = Mapping[str, Box]


class Route(NamedTuple):
    """A box that goes from one rank to another, or stays where source and target are equal."""

    source: int
    target: int
    box: Box


class Slab(NamedTuple):
    """A slab of one parameter, with the routes of its boxes."""

    name: str
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter as the plan sees it: its whole shape, and the dtype in which it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Round:
    """Pieces of one dtype that travel in one exchange."""

    dtype: torch.dtype
    pieces: list[Slab] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    """Bytes that each rank sends or receives, whichever is more."""


@dataclass(frozen=True)
class Plan:
    """All rounds of an exchange, and for each parameter the ranks that compute its checksum: together they
    hold every element once.
    """

    rounds: list[Round]
    owners: dict[str, tuple[int, ...]]


def make_plan(
    held: Sequence[Boxes], wanted: Sequence[Boxes], parameters: Mapping[str, Parameter], bucket_bytes: int
) -> Plan:
    """Return the plan that gives each rank its wanted boxes; `held` and `wanted` have one entry a rank.

    In a round no rank sends, nor receives, more than `bucket_bytes`, except where a single row of a parameter
    is larger.
    """
    rounds: list[Round] = []
    owners = {}
    # stable: the model's order in each dtype
    for name, parameter in sorted(parameters.items(), key=lambda item: str(item[1].dtype)):
        have = tuple(boxes.get(name) for boxes in held)
        want = tuple(boxes.get(name) for boxes in wanted)
        owners[name] = tuple(ranks[0] for ranks in holders(have).values())
        for routes in _pieces(have, want, parameter, bucket_bytes):
            load = _load(routes, len(held), parameter.dtype.itemsize)
            last = next(reversed(rounds), None)
            if (
                last is None
                or last.dtype != parameter.dtype
                or max(map(sum, zip(last.load, load))) > bucket_bytes
            ):
                rounds.append(Round(parameter.dtype, load=[0] * len(held)))
            rounds[-1].pieces.append(Slab(name, routes))
            rounds[-1].load = [a + b for a, b in zip(rounds[-1].load, load)]
    return Plan(rounds, owners)


@lru_cache(maxsize=1024)  # the layers of a model have the same few shapes
def _pieces(
    have: tuple[Box | None, ...], want: tuple[Box | None, ...], parameter: Parameter, bucket_bytes: int
) -> tuple[tuple[Route, ...], ...]:
    """Return the routes of one parameter, cut into slabs along its longest dim if they exceed a bucket."""
    whole = Box.whole(parameter.shape)
    routes = _routes(have, want, whole)
    load = max(_load(routes, len(have), parameter.dtype.itemsize), default=0)
    if load <= bucket_bytes:
        return (routes,)
    dim = max(range(len(parameter.shape)), key=lambda d: parameter.shape[d])
    longest = parameter.shape[dim]
    slabs = min(-(-load // bucket_bytes), longest)
    while True:  # what one rank sends may lie in few of the slabs
        cut = tuple(_routes(have, want, whole.cut(dim, part, slabs)) for part in range(slabs))
        loads = (max(_load(one, len(have), parameter.dtype.itemsize)) for one in cut)
        if slabs == longest or max(loads) <= bucket_bytes:
            return cut
        slabs = min(2 * slabs, longest)


def _routes(have: Sequence[Box | None], want: Sequence[Box | None], slab: Box) -> tuple[Route, ...]:
    parts = holders(have)
    routes = []
    for target, whole in enumerate(want):
        if whole is None:
            continue
        box = whole & slab
        if box is None:
            continue
        found = 0
        for part, ranks in parts.items():
            common = part & box
            if common is not None:
                # copies lie evenly over the ranks, so this is the copy nearest to the target, and each serves
                # as many
                source = target
                if target not in ranks:
                    source = ranks[target * len(ranks) // len(have)]
                routes.append(Route(source, target, common))
                found += common.numel
        assert found == box.numel, (
            f"{box} is wanted on rank {target}, and the ranks hold {found} of its {box.numel} elements"
        )
    return tuple(routes)


def holders(have: Sequence[Box | None]) -> dict[Box, tuple[int, ...]]:
    """Return the distinct boxes that are held, each with the ranks that hold it in ascending order."""
    found: dict[Box, tuple[int, ...]] = {}
    for rank, box in enumerate(have):
        if box is not None and box.numel:
            found[box] = (*found.get(box, ()), rank)
    return found


def _load(routes: Sequence[Route], num_ranks: int, itemsize: int) -> list[int]:
    """Return the bytes that each rank sends or receives, whichever is more."""
    sent = [0] * num_ranks
    received = [0] * num_ranks
    for route in routes:
        if route.source != route.target:
            sent[route.source] += route.box.numel * itemsize
            received[route.target] += route.box.numel * itemsize
    return [max(pair) for pair in zip(sent, received)]
