"""The replay buffer of PF-PPO: rows that outlive their step, so that later steps may draw them again.

    rows of step k ──join──► rows of step k, then those of steps k-1 … k-max_age ──the step──► drawn rows
                                                                                                  │
                                                                    metrics, ledger ◄──note_drawn─┘

A row keeps what does not depend on later weights: its tokens, the log-probs and versions of the policy that
sampled it, and its scores. Each step computes everything else anew for all of these rows, by its own weights:
old log-probs, the reference's and the teacher's, values, advantages. A group is here with all of its rows, so
its statistics are those of its own rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.fields import FIELDS
from hybridflow.protocol.joining import join_rows
from hybridflow.protocol.row_state import rows_of_state, state_of_rows

NoteReplayed = Callable[[int, Mapping[str, int]], None]
"""(step, trajectories drawn again by the uid of their group): noted before the step trains them."""


def not_noted(step: int, draws: Mapping[str, int]) -> None:
    """Note nothing, where no ledger knows the groups."""


class ReplayBuffer:
    """The rows of the last `max_age` steps as these steps were given them."""

    def __init__(self, max_age: int, pad_token_id: int, note_replayed: NoteReplayed) -> None:
        """`max_age` is 1 or more: a row of step k is drawn in steps k to k + max_age."""
        self.max_age = max_age
        self.pad_token_id = pad_token_id
        self.note_replayed = note_replayed
        self._rows: dict[int, DataProto] = {}  # by step, the newest last

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that the driver holds for later steps."""
        tensors = [state_of_rows(rows)["tensors"] for rows in self._rows.values()]
        return sum(tensor.nbytes for by_name in tensors for tensor in by_name.values())

    def join(self, batch: DataProto, step: int, keep: Callable[[DataProto], DataProto]) -> DataProto:
        """Return the rows of step number `step`, then those of earlier steps, newest first; without any the
        batch itself. From now on the buffer has the rows of this step too.

        `keep` returns the remote columns of rows that have none yet, which are those of a checkpoint.
        """
        earlier = [rows for number, rows in self._rows.items() if number >= step - self.max_age]
        for rows in earlier:
            rows |= keep(rows)
        own = batch.select(None, None, [])  # the step adds columns to the batch, not to this
        for_later = {number: rows for number, rows in self._rows.items() if number > step - self.max_age}
        self._rows = {**for_later, step: own}
        if not earlier:
            return batch
        return join_rows([batch, *reversed(earlier)], self.pad_token_id)

    def note_drawn(self, drawn: DataProto, new: DataProto, step: int) -> Metrics:
        """Record which of the drawn trajectories are not among the step's own rows `new`; return metrics."""
        own = set(new.non_tensor_batch["uid"])
        groups = ByTrajectory(drawn).samples.non_tensor_batch["uid"]
        again = Counter(uid for uid in groups if uid not in own)
        self.note_replayed(step, again)
        metrics = Metrics()
        metrics.add_mean("training/replay/drawn_again", float(again.total()), float(len(groups)))
        metrics.add_last("training/replay/bytes", float(self.num_bytes))
        return metrics

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the rows by step; the tensors are shared, and must not be written into."""
        return [{"step": step, "rows": state_of_rows(rows)} for step, rows in self._rows.items()]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on with the rows of a checkpoint."""
        self._rows = {int(each["step"]): rows_of_state(each["rows"]) for each in state}


def add_columns(new: DataProto, batch: DataProto) -> None:
    """Add to a step's own rows what was computed for them; they are the first rows of `batch`, which may be
    wider.
    """
    width = new.batch["response_mask"].shape[1]
    for name, column in batch[: len(new)].batch.items():
        if name not in new or name == "loss_mask":
            of_tokens = name in FIELDS and FIELDS[name].axes == "B,R"
            new.batch[name] = column[:, :width] if of_tokens else column
