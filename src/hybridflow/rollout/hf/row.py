"""One request's response so far, and the sampling of its next token, each parameter in the order in which it
is defined. It is the reference that the vectorised sampling of the native engine is tested against.

logits [V] ──repetition penalty──► + bias ──► no ending before min_tokens ──/ temperature──► min-p, top-k,
top-p ──► one token
   └──────/ temperature──► log softmax: the log-prob that is kept, whatever was changed above
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.models.heads.log_probs import log_probs_from_logits
from hybridflow.rollout.base import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
    TopTokens,
)
from hybridflow.rollout.native.responses import StopTexts
from hybridflow.rollout.native.sampling import draw, stream_keys, uniforms

SEED_BITS = (1 << 63) - 1


@dataclass
class HFRow:
    """One request and its response so far."""

    request: GenerationRequest
    ends: frozenset[int]
    """Token ids that end the response."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        begun = self.request.partial_response
        self.tokens.extend(begun.token_ids)
        self.log_probs.extend(begun.log_probs)
        self.versions.extend(begun.policy_versions)
        self.top.extend(begun.top_log_probs or ())

    def choose(self, logits: Tensor, version: int, texts: StopTexts | None) -> int:
        """Choose the next token from its logits [V], float32 or float64, and append it with its log-prob in
        nats; finish the row where that token ends it.
        """
        sampling = self.request.sampling
        temperature = 1.0 if sampling.takes_argmax else sampling.temperature
        changed = changed_logits(logits, self)
        if sampling.takes_argmax:
            token = int(changed.argmax())
        else:
            token = int(draw(kept_weights(changed / temperature, sampling)[None], uniform_of(self, logits)))
        chosen = torch.tensor([token], device=logits.device)
        log_prob = float(log_probs_from_logits(logits[None], chosen, temperature))
        if not math.isfinite(log_prob):
            self.fail(
                f"the model's logits are not finite at response token {len(self.tokens)}; its weights may "
                "have diverged"
            )
            return token
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        self.top.append(most_probable(logits / temperature, sampling.top_log_probs))
        if token in self.ends:
            self.finish_reason = "stop"
            self.stop_reason = token
        elif (text := self._stop_text(texts)) is not None:
            self.finish_reason = "stop"
            self.stop_reason = text
        elif len(self.tokens) >= sampling.max_tokens:
            self.finish_reason = "length"
        return token

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
        number = self.request.request_id
        reason = self.finish_reason or "abort"
        top = None
        if self.request.sampling.top_log_probs:
            top = self.top
        return GenerationOutput(
            number, self.tokens, self.log_probs, reason, self.versions, self.error, self.stop_reason, top
        )


def changed_logits(logits: Tensor, row: HFRow) -> Tensor:
    """Return the logits [V] after bias, repetition penalty and `min_tokens`."""
    sampling = row.request.sampling
    changed = logits.clone()
    for token, bias in sampling.logit_bias:
        changed[token] += bias
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.request.prompt_token_ids, *row.tokens}), device=logits.device)
        values = changed[seen]
        changed[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if len(row.tokens) < sampling.min_tokens and row.ends:
        changed[torch.tensor(sorted(row.ends), device=logits.device)] = float("-inf")
    return changed


def kept_weights(scaled: Tensor, sampling: SamplingParams) -> Tensor:
    """Return unnormalised probabilities [V] after min-p, top-k and top-p, in that order. Tokens that are
    filtered out have 0; tokens of equal probability are kept or dropped together.
    """
    weights = (scaled - scaled.max()).exp()
    weights[weights < sampling.min_p] = 0
    if sampling.top_k > 0 or sampling.top_p < 1:
        ordered = weights.sort(descending=True).values
        if sampling.top_k > 0:
            ordered = ordered[: sampling.top_k]
        number = len(ordered)
        if sampling.top_p < 1:
            before = ordered.cumsum(-1) - ordered
            number = int((before < sampling.top_p * ordered.sum()).sum())
        weights[weights < ordered[max(number, 1) - 1]] = 0
    return weights


def uniform_of(row: HFRow, logits: Tensor) -> Tensor:
    """Return the random number [1] in [0, 1) for the row's next token, by its seed and number of tokens."""
    key = stream_keys(torch.tensor([row.request.seed & SEED_BITS], device=logits.device))
    number: Tensor = uniforms(key, torch.tensor([len(row.tokens)], device=logits.device), logits.dtype)
    return number


def most_probable(scaled: Tensor, count: int) -> TopTokens:
    """Return (id, log-prob) of the `count` most probable tokens of scaled logits [V], best first."""
    if not count:
        return []
    values, ids = scaled.log_softmax(-1).topk(count)
    return list(zip(ids.tolist(), values.tolist()))
