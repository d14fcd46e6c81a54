"""The order in which a stage takes its passes: one forward, one backward (1F1B, arXiv:2104.04473).

    stage 0   F0 F1 F2    B0 F3 B1 F4 B2 …       a stage holds the activations of few micro-batches, and
    stage 1      F0 F1 B0 F2 B1 F3 B2 …          waits only at the beginning and at the end
    stage 2         F0 B0 F1 B1 F2 B2 …

With several parts on a stage (interleaved), micro-batches go round the stages as often, in groups as large
as there are stages, and the waits become shorter. The orders are found by playing the passes through, so an
order that waits for itself cannot come out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Pass(NamedTuple):
    """A micro-batch's way through one part of the model, forward or backward."""

    forward: bool
    part: int
    """Number of the part among all parts of the model; part p is on stage p modulo their number."""
    micro: int


@lru_cache(maxsize=64)
def one_forward_one_backward(stages: int, parts: int, micros: int) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes of each stage, in its order, of `micros` micro-batches in `parts` parts.

    Each stage takes forward passes in the order of `forwards`, and backward passes with the parts reversed,
    so messages between two stages in one direction are sent and awaited in the same order.
    """
    assert parts % stages == 0 and micros >= 1, f"{parts} parts, {stages} stages, {micros} micro-batches"
    ahead = [forwards(stages, parts, micros, stage) for stage in range(stages)]
    behind = [[Pass(False, parts - 1 - p, m) for _, p, m in ahead[stages - 1 - s]] for s in range(stages)]
    # activations that a stage may hold: as many as keep it busy until the first gradient comes back
    limits = [stages - stage for stage in range(stages)]
    if parts > stages:
        limits = [2 * (stages - stage) - 1 + parts - stages for stage in range(stages)]
    orders: list[list[Pass]] = [[] for _ in range(stages)]
    done: set[Pass] = set()
    held = [0] * stages
    while any(behind):
        chosen = [
            _next(ahead[s], behind[s], done, parts, may_hold=held[s] < limits[s]) for s in range(stages)
        ]
        if not any(chosen):  # a limit was too small for a last, smaller group
            chosen = [_next(ahead[s], behind[s], done, parts, may_hold=True) for s in range(stages)]
        assert any(chosen), "each pass waits for another"
        for stage, each in enumerate(chosen):
            if each is None:
                continue
            queue = behind
            if each.forward:
                queue = ahead
            queue[stage].pop(0)
            orders[stage].append(each)
            held[stage] += 2 * each.forward - 1
        done.update(each for each in chosen if each is not None)
    return tuple(tuple(order) for order in orders)


def forwards(stages: int, parts: int, micros: int, stage: int) -> list[Pass]:
    """Return the forward passes of a stage in order; a pass without gradients takes these alone."""
    own = range(stage, parts, stages)
    size = stages
    if len(own) == 1:
        size = micros
    return [
        Pass(True, part, micro)
        for first in range(0, micros, size)
        for part in own
        for micro in range(first, min(first + size, micros))
    ]


def _next(
    ahead: list[Pass], behind: list[Pass], done: set[Pass], parts: int, *, may_hold: bool
) -> Pass | None:
    """Return the pass that a stage takes now, or None if it waits; gradients come before further passes."""
    if behind:
        _, part, micro = behind[0]
        after = Pass(False, part + 1, micro)
        if part == parts - 1:
            after = Pass(True, part, micro)
        if after in done and Pass(True, part, micro) in done:
            return behind[0]
    if ahead and may_hold:
        _, part, micro = ahead[0]
        if part == 0 or Pass(True, part - 1, micro) in done:
            return ahead[0]
    return None
