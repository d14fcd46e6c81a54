"""The rows that one call of transformers' `generate` decodes together.

    logits [B, V] ──Batch.__call__──► tokens chosen and recorded ──► scores that leave `generate` no other
    choice ──Batch.ended──► [B] bool

`generate` runs the model and keeps its cache; every choice is made here, so a request's random numbers are
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from hybridflow.rollout.hf.row import Row
from hybridflow.rollout.native.stop_text import StopTexts


class Batch(LogitsProcessor):
    """The rows of one `generate`; `abort` may come from another thread."""

    def __init__(
        self, rows: Sequence[Row], *, version: Callable[[], int], texts: StopTexts | None, filler: int
    ) -> None:
        self.rows = rows
        self._version = version
        self._texts = texts
        self.filler = filler
        self._lock = Lock()
        self.steps = 0

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Choose each unfinished row's next token; returns scores [B, V] that leave `generate` only that."""
        with self._lock:
            going = [index for index, row in enumerate(self.rows) if row.finish_reason is None]
            tokens = torch.full((len(self.rows),), self.filler, device=scores.device)
            if going:
                self.steps += 1
                version = self._version()
                chosen = [self.rows[index].choose(scores[index], version, self._texts) for index in going]
                tokens[going] = torch.tensor(chosen, device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def abort(self, request_ids: set[int]) -> list[Row]:
        """End these rows before their next token and return them; rows that have finished are left alone."""
        with self._lock:
            running = [row for row in self.rows if row.finish_reason is None]
            ended = [row for row in running if row.request.request_id in request_ids]
            for row in ended:
                row.finish_reason = "abort"
        return ended


class Ended(StoppingCriteria):
    """Tells `generate` which rows of a batch have finished."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Return whether each row has finished, [B] bool."""
        return torch.tensor(
            [row.finish_reason is not None for row in self.batch.rows], device=input_ids.device
        )
