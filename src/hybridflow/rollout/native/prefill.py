"""Packed passes over parts of prompts, whose keys and values go to the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models.attention import PackedLayout
from hybridflow.models.chunk_layout import ChunkLayout
from hybridflow.models.kv_cache import KVCache, Places
from hybridflow.models.policy import PolicyModel


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of one row that a pass computes."""

    tokens: Sequence[int]
    start: int
    """Place of the first of them in the row; the first slot holds the tokens before it."""
    slots: list[int]
    """Slots that get their keys and values."""


def cut_into_passes(contexts: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[Piece]]:
    """Cut whole contexts, the i-th in slot i, into passes of at most `max_tokens` tokens each."""
    passes: list[list[Piece]] = [[]]
    left = max_tokens
    for row, tokens in enumerate(contexts):
        start = 0
        while start < len(tokens):
            if left == 0 or (passes[-1] and start == 0 and len(tokens) > left):
                passes.append([])
                left = max_tokens
            stop = min(len(tokens), start + left)
            passes[-1].append(Piece(tokens[start:stop], start, [row]))
            left -= stop - start
            start = stop
    return [pieces for pieces in passes if pieces]


def compute(policy: PolicyModel, cache: KVCache, pieces: Sequence[Piece]) -> Tensor:
    """Run one packed pass over pieces and store their keys and values in their slots.

    Returns the last hidden state of each piece, [n, H].
    """
    device = policy.device
    lengths = [len(piece.tokens) for piece in pieces]
    starts = [piece.start for piece in pieces]
    for piece in pieces:
        cache.extend(piece.slots, piece.start + len(piece.tokens))
    places = Places.of_pieces(lengths, starts, [piece.slots for piece in pieces], device)
    layout: PackedLayout | ChunkLayout
    if any(starts):
        layout = ChunkLayout(cache, [piece.slots[0] for piece in pieces], starts, lengths, places)
    else:

        def store(layer: int, key: Tensor, value: Tensor) -> None:
            cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), places)

        layout = PackedLayout.build(lengths, device, kv_sink=store)
    input_ids = torch.tensor([[token for piece in pieces for token in piece.tokens]], device=device)
    ranges = [torch.arange(start, start + length) for start, length in zip(starts, lengths)]
    hidden = policy.hidden(input_ids, torch.cat(ranges)[None].to(device), layout)[0]
    return hidden.index_select(0, torch.tensor(lengths, device=device).cumsum(0) - 1)
