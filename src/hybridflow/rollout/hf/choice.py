"""Sampling of one row at a time, each parameter applied in the order in which it is defined. It is the
reference that the vectorised sampling of the native engine is tested against.

logits [V] ──repetition penalty──► + bias ──► no ending before min_tokens ──/ temperature──► min-p, top-k,
top-p ──► one token
   └──────/ temperature──► log softmax: the log-prob that is kept, whatever was changed above
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybridflow.models.log_probs import log_probs_from_logits
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.native.random_numbers import stream_keys, uniforms
from hybridflow.rollout.native.sampling import draw

if TYPE_CHECKING:
    from hybridflow.rollout.hf.batch import Row

SEED_BITS = (1 << 63) - 1


class Choice(NamedTuple):
    """One token, its log-prob in nats, and the most probable tokens at its place with theirs."""

    token: int
    log_prob: float
    top: list[tuple[int, float]]


def choose(logits: Tensor, rows: Sequence[Row]) -> list[Choice]:
    """Choose the next token of each row from its logits [n, V], float32 or float64."""
    return [choose_one(row_logits, row) for row_logits, row in zip(logits, rows)]


def choose_one(logits: Tensor, row: Row) -> Choice:
    """Choose the next token of a row from its logits [V]."""
    sampling = row.request.sampling
    temperature = 1.0 if sampling.takes_argmax else sampling.temperature
    changed = changed_logits(logits, row)
    if sampling.takes_argmax:
        token = int(changed.argmax())
    else:
        token = int(draw(kept_weights(changed / temperature, sampling)[None], uniform_of(row, logits)))
    log_prob = float(
        log_probs_from_logits(logits[None], torch.tensor([token], device=logits.device), temperature)
    )
    return Choice(token, log_prob, most_probable(logits / temperature, sampling.top_log_probs))


def changed_logits(logits: Tensor, row: Row) -> Tensor:
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
    """Return unnormalised probabilities [V] after min-p, top-k and top-p, in that order.

    Tokens that are filtered out have 0; tokens of equal probability are kept or dropped together.
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


def uniform_of(row: Row, logits: Tensor) -> Tensor:
    """Return the random number [1] in [0, 1) that decides the row's next token.

    It is a function of the request's seed and of the number of tokens so far.
    """
    key = stream_keys(torch.tensor([row.request.seed & SEED_BITS], device=logits.device))
    number: Tensor = uniforms(key, torch.tensor([len(row.tokens)], device=logits.device), logits.dtype)
    return number


def most_probable(scaled: Tensor, count: int) -> list[tuple[int, float]]:
    """Return (id, log-prob) of the `count` most probable tokens of scaled logits [V], best first."""
    if not count:
        return []
    values, ids = scaled.log_softmax(-1).topk(count)
    return list(zip(ids.tolist(), values.tolist()))
