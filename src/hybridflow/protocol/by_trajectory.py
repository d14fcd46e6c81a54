"""The rows of a batch by trajectory: code that counts samples reads one row for each trajectory.

    rows [B, R] ──ByTrajectory──► samples [K, L] ──estimators, filters, metrics──► [K, L] ──spread──► rows

Where every trajectory has one row the samples are the batch itself, so no number changes by a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.fields import FIELDS


class ByTrajectory:
    """The K trajectories of a batch of B rows: rows that share a `trajectory_id` are one.

    Rows of a trajectory need not be neighbours. A batch without that column has one row a trajectory, and
    one without `call` has its tokens in the order of rows.
    """

    samples: DataProto
    """One row for each trajectory, in the order of their first rows. A column [B, R] of the batch is [K, L]
    here: the sampled tokens of all rows of a trajectory in the order of calls, then zeros. Of any other
    column a trajectory has the value of its first row; columns of prompt tokens are left out.
    """
    sample_of_row: Tensor
    """[B] int64: the number of each row's trajectory among the samples."""
    first_rows: Tensor
    """[K] int64: the first row of each trajectory in the batch."""

    def __init__(self, batch: DataProto) -> None:
        ids = list(range(len(batch)))
        if "trajectory_id" in batch:
            ids = batch.batch["trajectory_id"].tolist()
        first_row: dict[int, int] = {}
        for row, trajectory in enumerate(ids):
            first_row.setdefault(trajectory, row)
        number = {trajectory: sample for sample, trajectory in enumerate(first_row)}
        self.sample_of_row = torch.tensor([number[trajectory] for trajectory in ids], dtype=torch.int64)
        self.first_rows = torch.tensor(list(first_row.values()), dtype=torch.int64)
        self.samples = batch
        self.several_rows = len(number) < len(ids)
        """Whether some trajectory has more than one row."""
        if self.several_rows:
            self._mask = batch.batch["response_mask"]
            self._place_tokens(batch)
            self.samples = self._joined(batch)

    @property
    def interleaved(self) -> bool:
        """Whether a row goes on after a later row of its trajectory has begun: branches side by side."""
        if not self.several_rows:
            return False
        goes_back = self._in_batch[0].diff() < 0
        return bool((goes_back & (self._in_samples[0].diff() == 0)).any())

    def join(self, values: Tensor) -> Tensor:
        """Return values [B, R] of tokens as [K, L], 0 after the sampled tokens of a trajectory."""
        if not self.several_rows:
            return values
        joined = values.new_zeros(len(self.first_rows), self._length)
        joined[self._in_samples] = values[self._in_batch]
        return joined

    def spread(self, values: Tensor) -> Tensor:
        """Return values [K] of trajectories as [B], values [K, L] of their tokens as [B, R].

        Tokens that were not sampled get 0 where a trajectory has several rows.
        """
        if not self.several_rows:
            return values
        if values.dim() == 1:
            return values[self.sample_of_row]
        rows = values.new_zeros(self._mask.shape)
        rows[self._in_batch] = values[self._in_samples]
        return rows

    def _place_tokens(self, batch: DataProto) -> None:
        """Find where each of the N sampled tokens stands: row and column, [N] each, in batch and samples."""
        row, column = self._mask.nonzero(as_tuple=True)
        order = torch.arange(len(row))
        if "call" in batch:
            order = batch.batch["call"][row, column].argsort(stable=True)
        order = order[self.sample_of_row[row[order]].argsort(stable=True)]
        sample = self.sample_of_row[row[order]]
        before = torch.searchsorted(sample, sample)
        position = torch.arange(len(sample)) - before
        self._in_batch = (row[order], column[order])
        self._in_samples = (sample, position)
        self._length = int(position.max()) + 1 if len(position) else 1

    def _joined(self, batch: DataProto) -> DataProto:
        tensors: dict[str, Tensor] = {}
        for name in map(str, batch.batch.keys()):
            column: Tensor = batch.batch[name]
            axes = FIELDS[name].axes if name in FIELDS else ""
            if axes in ("B,R", "") and column.shape == self._mask.shape:
                tensors[name] = self.join(column)
            elif axes not in ("B,P", "B,T"):
                tensors[name] = column[self.first_rows]
        columns = {name: column[self.first_rows.numpy()] for name, column in batch.non_tensor_batch.items()}
        return DataProto.from_dict(tensors, columns, batch.meta_info)


def rows_of_trajectories(trajectory_id: Tensor) -> Tensor | None:
    """Return the number of rows [B] int64 of each row's trajectory, or None where all have one row.

    trajectory_id [B] int64.
    """
    _, trajectory, counts = trajectory_id.unique(return_inverse=True, return_counts=True)
    if len(counts) == len(trajectory):
        return None
    rows: Tensor = counts[trajectory]
    return rows
