"""Cuts a batch into mini-batches, whose order depends on (seed, step, epoch) and on nothing else.

A mini-batch holds whole groups; of trajectories that were drawn again (PF-PPO) it holds as many as its groups
had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import rows_of_trajectories
from hybridflow.protocol.randomness import generator
from hybridflow.workers.losses import LOSS_SHARES


@dataclass(frozen=True)
class MiniBatchPlan:
    """How a batch is cut into optimizer steps."""

    groups: int
    """Prompts (whole groups) in a mini-batch."""
    epochs: int
    shuffle: bool
    seed: int
    step: int
    """The training step, which with the seed and the epoch decides the order."""
    drawn_from: int | None = None
    """Number of prompts of the batch before its trajectories were drawn again (PF-PPO); None where they are
    as generated. Draws leave groups of any size, so mini-batches are then cut by trajectories, in proportion
    to their prompts.
    """


def mini_batch_rows(names: Sequence[Hashable], plan: MiniBatchPlan) -> Iterator[list[int]]:
    """Yield the row indices of each mini-batch, over all epochs; the last one of an epoch may be smaller.

    Rows of equal `names` stay together: the uid of their group, or where rows were drawn again the
    trajectory.

    Ranks and balancing play no part here, so the same rows meet in an optimizer step on any number of
    devices.
    """
    places: dict[Hashable, list[int]] = {}
    for row, name in enumerate(names):
        places.setdefault(name, []).append(row)
    units = list(places.values())
    num_groups = len(units) if plan.drawn_from is None else plan.drawn_from
    # in groups, then in units: the same number of mini-batches however many rows each prompt has left
    ends = [
        min(end, num_groups) * len(units) // max(1, num_groups)
        for end in range(0, num_groups + plan.groups, plan.groups)
    ]
    for epoch in range(plan.epochs):
        order = list(range(len(units)))
        if plan.shuffle:
            rng = generator(plan.seed, "mini_batch", plan.step, epoch)
            order = torch.randperm(len(units), generator=rng).tolist()
        for start, end in pairwise(ends):
            yield [row for index in order[start:end] for row in units[index]]


Prepare = Callable[[DataProto, int], tuple[DataProto, Metrics]]
"""(rows of a mini-batch, its number in the step from 0) -> rows with further columns or a narrower
`loss_mask`; metrics.
"""


def mini_batches(
    rows: DataProto, plan: MiniBatchPlan, metrics: Metrics, *, name: str, prepare: Prepare | None = None
) -> Iterator[tuple[DataProto, LossScale]]:
    """Yield the rows and the counts of each mini-batch in turn; one with nothing to learn from is counted in
    `metrics` and left out.

    `prepare` sees each mini-batch whole, before it is counted, so that it can decide over all rows. The
    counts are of the whole mini-batch, so that neither ranks nor micro-batches change the loss. Rows with
    nothing to learn from are left out.
    """
    names: list[Hashable] = list(rows.non_tensor_batch["uid"])
    if plan.drawn_from is not None:
        names = rows.batch["trajectory_id"].tolist()
    planned = list(mini_batch_rows(names, plan))
    for number, indices in enumerate(progress.each(planned, "mini-batch", len(planned))):
        mini = rows.select_idxs(indices)
        if prepare is not None:
            mini, measured = prepare(mini, number)
            metrics.update(measured)
        learned = mini.batch["loss_mask"].any(-1)
        if not bool(learned.any()):
            metrics.add_sum(f"{name}/num_empty_mini_batches", 1.0)
            continue
        if not bool(learned.all()):
            mini = mini.select_idxs(learned.nonzero().flatten())
        trajectories = mini.batch.get("trajectory_id", None)
        if trajectories is not None:
            several = rows_of_trajectories(trajectories)
            if several is not None:
                mini |= DataProto.from_dict({"trajectory_rows": several})
        weights = mini.batch.get("source_weight", None)
        positive = mini.batch.get("positive", None)
        yield mini, LossScale.count(mini.batch["loss_mask"], positive, trajectories, weights)


def add_update(metrics: Metrics, found: Metrics) -> None:
    """Add what an update by one mini-batch has found: its loss is one observation of a mean."""
    found.average_sums(LOSS_SHARES)
    metrics.update(found)
