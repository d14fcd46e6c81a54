"""The rows that one call of transformers' `generate` decodes together.

    logits [B, V] ──Batch.__call__──► tokens chosen and recorded ──► scores that leave `generate` no other
    choice ──Batch.ended──► [B] bool

`generate` runs the model and keeps its cache; every choice is made here, so a request's random numbers are
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from hybridflow.rollout.base import FinishReason, GenerationOutput, GenerationRequest
from hybridflow.rollout.hf.choice import Choice, choose
from hybridflow.rollout.native.stop_text import StopTexts


@dataclass
class Row:
    """One request and its response so far."""

    request: GenerationRequest
    ends: frozenset[int]
    """Token ids that end the response."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        begun = self.request.begun
        self.tokens.extend(begun.token_ids)
        self.log_probs.extend(begun.log_probs)
        self.versions.extend(begun.policy_versions)
        self.top.extend(begun.top_log_probs or ())

    def record(self, choice: Choice, version: int, texts: StopTexts | None) -> None:
        """Append the next token, and finish the row where that token ends it."""
        if not abs(choice.log_prob) < float("inf"):
            self.fail(
                f"the model's logits are not finite at response token {len(self.tokens)}; its weights may "
                "have diverged"
            )
            return
        self.tokens.append(choice.token)
        self.log_probs.append(choice.log_prob)
        self.versions.append(version)
        self.top.append(choice.top)
        sampling = self.request.sampling
        if choice.token in self.ends:
            self.finish_reason = "stop"
            self.stop_reason = choice.token
        elif (text := self._stop_text(texts)) is not None:
            self.finish_reason = "stop"
            self.stop_reason = text
        elif len(self.tokens) >= sampling.max_tokens:
            self.finish_reason = "length"

    def fail(self, problem: str) -> None:
        """End the row with an error, unless it has ended already."""
        if self.finish_reason is None:
            self.finish_reason = "error"
            self.error = f"request {self.request.request_id}: {problem}"

    def _stop_text(self, texts: StopTexts | None) -> str | None:
        """The stop text that the newest token completed; the tokens of `min_tokens` complete none."""
        sampling = self.request.sampling
        if not sampling.stop or texts is None or len(self.tokens) <= sampling.min_tokens:
            return None
        return texts.completed(self.tokens, sampling.stop)

    def output(self) -> GenerationOutput:
        """Return the row as an output; one that has not finished counts as aborted."""
        return GenerationOutput(
            self.request.request_id,
            self.tokens,
            self.log_probs,
            self.finish_reason or "abort",
            self.versions,
            self.error,
            self.stop_reason,
            self.top if self.request.sampling.top_log_probs else None,
        )


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
        """Choose the next token of each unfinished row from its scores [B, V].

        Returns scores [B, V] that leave `generate` only the chosen token.
        """
        with self._lock:
            going = [index for index, row in enumerate(self.rows) if row.finish_reason is None]
            tokens = torch.full((len(self.rows),), self.filler, device=scores.device)
            if going:
                self.steps += 1
                choices = choose(scores[going], [self.rows[index] for index in going])
                for index, choice in zip(going, choices):
                    self.rows[index].record(choice, self._version(), self._texts)
                tokens[going] = torch.tensor([choice.token for choice in choices], device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def abort(self, request_ids: set[int]) -> list[Row]:
        """End these rows before their next token and return them; rows that have finished are left alone."""
        with self._lock:
            ended = [
                row
                for row in self.rows
                if row.finish_reason is None and row.request.request_id in request_ids
            ]
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
