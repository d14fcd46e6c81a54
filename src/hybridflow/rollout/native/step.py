"""One pass of the model over spans of rows, whose keys and values go to the cache: spans to hidden states.

Span (row, start, tokens) ──► SpanLayout ──► policy ──► last hidden state of each span
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.distributed.transfers import HostCopy, to_device
from hybridflow.models.attention.span_layout import SpanLayout
from hybridflow.models.cache.kv_cache import CacheSlots, KVCache, LayerShape
from hybridflow.models.exact_mode import MIN_ROWS, RealRows
from hybridflow.models.experts.routing import RouteTape, Routing
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.packing import PlacedMedium
from hybridflow.protocol.prompt import Medium, make_position_ids
from hybridflow.rollout.base import GenerationOutput
from hybridflow.rollout.native.responses import Row

ROUTES = -1
"""The layer of the cache that has the routes of tokens, where they are recorded."""
ROUTES_AT_ONCE = 64 * 2**20
"""Bytes of routes that are gathered together for rows that end; the cache leaves little room beside it."""


class Span(NamedTuple):
    """Tokens of one row that a pass computes."""

    row: int
    start: int
    """Place of the first of them in the row, whose earlier tokens are in the cache."""
    tokens: Sequence[int]
    media: tuple[Medium, ...] = ()
    """The media of the row's prompt."""


def prefill(policy: PolicyModel, cache: KVCache, spans: Sequence[Span]) -> Tensor:
    """Run one packed pass over prompts and chunks of prompts; the last hidden state of each, [n, H]."""
    device = policy.device
    rows, starts, tokens, _ = zip(*spans)
    counts = [len(own) for own in tokens]
    layout = SpanLayout.packed(cache, rows, starts, counts)
    input_ids = to_device([[token for own in tokens for token in own]], device)
    recording = record_routes(policy, cache, layout, input_ids.shape[1])
    positions = layout.places.positions
    if any(medium.positions is not None for span in spans for medium in span.media):
        positions = to_device(torch.cat([_positions(span) for span in spans], dim=1), device)
    hidden = policy.hidden(input_ids, positions[..., None, :], layout, placed_media(spans))[0]
    recording()
    return hidden.index_select(0, to_device([stop - 1 for stop in accumulate(counts)], device))


def _positions(span: Span) -> Tensor:
    """Return the positions [3, n] of a span's tokens, which may end inside of a medium."""
    stop = span.start + len(span.tokens)
    ends = [medium.start + medium.length for medium in span.media]
    whole = make_position_ids(max(stop, *ends, 0), span.media)
    return whole[..., span.start : stop].expand(3, -1)


def placed_media(spans: Sequence[Span]) -> list[PlacedMedium]:
    """Return the media, and the parts of media, among the tokens of spans."""
    placed = []
    offset = 0
    for span in spans:
        stop = span.start + len(span.tokens)
        for medium in span.media:
            first = max(medium.start, span.start)
            count = min(medium.start + medium.length, stop) - first
            if count > 0:
                place = offset + first - span.start
                placed.append(PlacedMedium(place, medium, first - medium.start, count))
        offset += len(span.tokens)
    return placed


def decode_rows(
    policy: PolicyModel,
    cache: KVCache,
    tokens: Tensor,
    lengths: Tensor,
    longest: int,
    num_keys: int | None = None,
    shifts: Tensor | None = None,
) -> Tensor:
    """Run a pass over one new token [B] int64 of each of the first B rows, which have `lengths` [B] tokens.

    Returns hidden states [B, H]. `longest` and `num_keys` are as `SpanLayout.decoding` has them. `shifts` [B]
    say how much further positions are than places, behind media.
    """
    layout = SpanLayout.decoding(cache, lengths, longest, num_keys)
    positions = lengths
    if shifts is not None:
        positions = lengths + shifts
    recording = record_routes(policy, cache, layout, len(tokens))
    hidden = policy.decode(tokens[:, None], positions[:, None], layout)[:, 0]
    recording()
    return hidden


def verify_rows(
    policy: PolicyModel,
    cache: KVCache,
    tokens: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    shifts: Tensor | None = None,
) -> Tensor:
    """Run a pass over tokens [N] int64, counts[i] of them of row i, behind the starts[i] tokens that it has.

    Returns hidden states [N, H], each the one that `decode_rows` gives where the tokens before it are right.
    `shifts` [B] are as there. Fewer than `least_verified` tokens are padded to so many.
    """
    places = CacheSlots.of_spans(range(len(counts)), starts, counts, cache.device)
    layout = SpanLayout.verifying(cache, starts, counts, places)
    positions = places.positions
    if shifts is not None:
        positions = positions + shifts[places.rows]
    recording = record_routes(policy, cache, layout, len(tokens))
    missing = least_verified(policy.device.type) - len(tokens)
    if policy.exact is not None or layout.routes is not None or missing <= 0:
        hidden = policy.decode(tokens[:, None], positions[:, None], layout)[:, 0]
    else:
        ids, places_of = (pad(x, (0, missing))[:, None] for x in (tokens, positions))
        hidden = policy.decode(ids, places_of, RealRows(layout, len(tokens), 1))[: len(tokens), 0]
    recording()
    return hidden


def least_verified(device: str) -> int:
    """Return the fewest tokens of a pass over drafts: on a CPU products of fewer rows take as long."""
    return MIN_ROWS if device == "cpu" else 1


def record_routes(policy: PolicyModel, cache: KVCache, layout: SpanLayout, count: int) -> Callable[[], None]:
    """Record the routes of a pass over `count` tokens, if the cache has a place for them.

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
    if ROUTES not in cache.keys or not outputs:
        return outputs
    lengths = [
        len(row.request.prompt_token_ids) + len(output.token_ids) - 1
        for row, output in zip(rows, outputs, strict=True)
    ]
    copy = HostCopy()
    stored = cache.keys[ROUTES]
    chunks = list(_chunks(lengths, stored.shape[-1], ROUTES_AT_ONCE // stored.element_size()))
    for chunk in chunks:
        index = to_device([places[number] for number in chunk], cache.device)
        keys, _ = cache.tokens_of(ROUTES, index, lengths[chunk[-1]])
        copy.add([keys[:, 0]])  # [rows, tokens, W]
    found = list(outputs)
    for chunk, whole in zip(chunks, copy.arrays(), strict=True):  # one wait for all that end together
        for number, routes in zip(chunk, whole.astype(np.int16, copy=False), strict=True):
            found[number] = replace(outputs[number], routes=routes[: lengths[number]].copy())
    return found


def _chunks(lengths: Sequence[int], width: int, most: int) -> Iterator[list[int]]:
    """Yield rows by rising length, in chunks that take at most `most` numbers of `width` a token."""
    chunk: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if chunk and (len(chunk) + 1) * lengths[number] * width > most:
            yield chunk
            chunk = []
        chunk.append(number)
    yield chunk
