"""One pass of the model over spans of rows, whose keys and values go to the cache: spans to hidden states.

Span (row, start, tokens) ──► SpanLayout ──► policy ──► last hidden state of each span
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.models.kv_cache import KVCache, LayerShape
from hybridflow.models.policy import PolicyModel
from hybridflow.models.routing import RouteTape, Routing
from hybridflow.models.span_layout import SpanLayout
from hybridflow.models.transfers import to_device
from hybridflow.rollout.base import GenerationOutput
from hybridflow.rollout.native.responses import Row

ROUTES = -1
"""The layer of the cache that has the routes of tokens, where they are recorded."""


class Span(NamedTuple):
    """Tokens of one row that a pass computes."""

    row: int
    start: int
    """Place of the first of them in the row, whose earlier tokens are in the cache."""
    tokens: Sequence[int]


def prefill(policy: PolicyModel, cache: KVCache, spans: Sequence[Span]) -> Tensor:
    """Run one packed pass over prompts and chunks of prompts; the last hidden state of each, [n, H]."""
    device = policy.device
    rows, starts, tokens = zip(*spans)
    counts = [len(own) for own in tokens]
    layout = SpanLayout.packed(cache, rows, starts, counts)
    input_ids = to_device([[token for own in tokens for token in own]], device)
    recording = record_routes(policy, cache, layout, input_ids.shape[1])
    hidden = policy.hidden(input_ids, layout.places.positions[None], layout)[0]
    recording()
    return hidden.index_select(0, to_device([stop - 1 for stop in accumulate(counts)], device))


def decode_rows(
    policy: PolicyModel,
    cache: KVCache,
    tokens: Tensor,
    lengths: Tensor,
    longest: int,
    num_keys: int | None = None,
) -> Tensor:
    """Run a pass over one new token [B] int64 of each of the first B rows, which have `lengths` [B] tokens.

    Returns hidden states [B, H]. `longest` and `num_keys` are as `SpanLayout.decoding` has them.
    """
    layout = SpanLayout.decoding(cache, lengths, longest, num_keys)
    recording = record_routes(policy, cache, layout, len(tokens))
    hidden = policy.decode(tokens[:, None], lengths[:, None], layout)[:, 0]
    recording()
    return hidden


def record_routes(policy: PolicyModel, cache: KVCache, layout: SpanLayout, count: int) -> Callable[[], None]:
    """Let a pass over `count` tokens record its routes, if the cache has a place for them.

    The function that is returned puts them there, beside the keys and values of the tokens.
    """
    if ROUTES not in cache.keys:
        return lambda: None
    tape = RouteTape(count)
    layout.routes = tape

    def write() -> None:
        routes = tape.routes.flatten(1)[:, None]
        cache.write(ROUTES, routes, routes[..., :1], layout.places)

    return write


def routes_shape(routing: Routing) -> LayerShape:
    """Return what the cache stores of a token's routes, as the keys of a layer; its value is never read."""
    return LayerShape(1, routing.width, 1, torch.int16)


def add_routes(
    cache: KVCache, places: Sequence[int], rows: Sequence[Row], outputs: list[GenerationOutput]
) -> list[GenerationOutput]:
    """Return outputs with the routes of all their tokens but the last, where the cache has routes."""
    if ROUTES not in cache.keys:
        return outputs
    found = []
    for place, row, output in zip(places, rows, outputs, strict=True):
        length = len(row.request.prompt_token_ids) + len(output.token_ids) - 1
        keys, _ = cache.tokens_of(ROUTES, torch.tensor([place], device=cache.device), length)
        found.append(replace(output, routes=keys[0, 0].cpu().numpy()))
    return found
