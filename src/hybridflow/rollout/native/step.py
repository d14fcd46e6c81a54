"""One pass of the model over spans of rows, whose keys and values go to the cache: spans to hidden states.

Span (row, start, tokens) ──► SpanLayout ──► policy ──► last hidden state of each span
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from hybridflow.models.kv_cache import KVCache
from hybridflow.models.policy import PolicyModel
from hybridflow.models.span_layout import SpanLayout
from hybridflow.models.transfers import to_device


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
    hidden = policy.hidden(input_ids, layout.places.positions[None], layout)[0]
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
    return policy.decode(tokens[:, None], lengths[:, None], layout)[:, 0]
