"""The numbers of one request as the columns of the running rows hold them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from hybridflow.rollout.base import GenerationRequest, SamplingParams

SEED_BITS = (1 << 63) - 1
INTEGERS = ("prompt_length", "generated", "stream", "top_k", "min_tokens", "greedy", "shift")
REALS = ("temperature", "top_p", "min_p", "penalty")
"""Columns of numbers that a request brings, in the order of `RowNumbers`."""


class RowNumbers(NamedTuple):
    """A request as the columns hold it."""

    integers: Sequence[int]
    """In the order of `INTEGERS`; all fit into int64."""
    reals: Sequence[float]
    """In the order of `REALS`."""
    stops: tuple[int, ...]
    """Tokens that end the response, each once."""


def end_tokens(params: SamplingParams, eos_token_ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that end a response: the request's own and, unless it ignores them, the model's.

    One of the model's that its vocabulary lacks never comes, and has no logit that `min_tokens` could lower.
    """
    ends = list(params.stop_token_ids)
    if not params.ignore_eos:
        ends += [token for token in eos_token_ids if token < vocabulary]
    return tuple(dict.fromkeys(ends))


def row_numbers(request: GenerationRequest, eos_token_ids: Sequence[int], vocabulary: int) -> RowNumbers:
    """Return a request as the columns hold it; OverflowError, TypeError where its values do not fit.

    Called when it joins, so that its own values fail it alone, and again when it enters.
    """
    params = request.sampling
    array("q", request.prompt_token_ids)  # raises where a token is no 64-bit integer
    array("q", [params.max_tokens])
    array("q", [token for token, _ in params.logit_bias])
    temperature = 1.0 if params.takes_argmax else params.temperature
    kept = (params.top_p, params.min_p) if params.limits_tokens else (1.0, 0.0)
    top_k = vocabulary
    if params.limits_tokens and params.top_k > 0:
        top_k = min(params.top_k, vocabulary)
    integers = (
        len(request.prompt_token_ids),
        len(request.begun),
        request.seed & SEED_BITS,
        top_k,
        params.min_tokens,
        params.takes_argmax,
        sum(medium.shift for medium in request.prompt.media),
    )
    reals = (temperature, *kept, params.repetition_penalty)
    stops = array("q", end_tokens(params, eos_token_ids, vocabulary))
    return RowNumbers(array("q", integers), array("d", reals), tuple(stops))
