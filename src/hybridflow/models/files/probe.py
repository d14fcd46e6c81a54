"""A test that our attention computes the model's own log-probs, made once when a model is loaded.

Rows of different length are packed, and their last tokens decoded from a key-value cache; the log-probs are
compared with those of each row alone under transformers' own eager attention. A layer that never calls the
attention function, an architecture whose rows see each other when packed (recurrent and linear-attention
layers), or one that hides old tokens by a mask of its own, is found here and not in a run that quietly learns
from wrong log-probs.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from hybridflow.errors import ModelError
from hybridflow.models.attention.layouts import ATTENTION_NAME, Layout, PackedLayout, kernel_of
from hybridflow.models.attention.scores import Scores
from hybridflow.models.attention.span_layout import SpanLayout
from hybridflow.models.cache.kv_cache import LayerShape, SlotCache
from hybridflow.models.flat_decoder import ScoresSeen
from hybridflow.models.policy import PolicyModel, choose_attention, run_backbone
from hybridflow.models.vision import placeholder_ids
from hybridflow.protocol.packing import PlacedMedium
from hybridflow.protocol.prompt import Medium, make_position_ids

logger = logging.getLogger(__name__)

_LENGTHS = (7, 12, 4)
_NEWEST = 4
"""Tokens that a query sees in the probe where a layer hides older ones: two of the rows are longer."""
_HIDING = ("sliding_window", "attention_chunk_size", "index_topk")
"""Settings of configurations and layers by which a query sees a part of a long row."""
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


class _CountingLayout(PackedLayout):
    """A packed layout that counts the calls of each layer and notes their kernels."""

    calls: Counter[int]
    kernels: dict[str, list[int]]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        self.calls[scores.layer_idx] += 1
        self.kernels.setdefault(kernel_of(query, key, value, scores), []).append(scores.layer_idx)
        return super().attend(query, key, value, scores)


@torch.no_grad()
def probe_policy(policy: PolicyModel, tolerance: float | None = None) -> float:
    """Return the largest difference, in nats, of packed and of cached log-probs from those of each row alone.

    Raises ModelError above `tolerance`. Its default depends on the dtype: 1e-3 in float32, 0.3 in bfloat16
    (wrong attention shifts log-probs by 1 to 2). In half precision a position's difference is the mean over
    the vocabulary: a logit of 20 is itself rounded by 0.06, and among a hundred thousand of them the worst of
    a healthy model exceeds any limit that would find a wrong one.
    """
    kernels: dict[str, list[int]] = {}
    with _probing(policy):
        rows = _rows(policy)
        alone = _alone(policy, rows)
        try:
            packed = _packed(policy, rows, kernels)
            cached = _cached(policy, rows)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"{type(policy.hf).__name__} fails where rows are packed and masks are the layout's, so it "
                f"cannot be trained here: {type(error).__name__}: {error}"
            ) from error
    by_kernel = (f"{kernel} in layers {_ranges(layers)}" for kernel, layers in kernels.items())
    logger.info("%s: attention by %s", type(policy.hf).__name__, "; ".join(by_kernel))
    if not all(bool(row.isfinite().all()) for row in alone):
        hint = ""
        if policy.dtype.itemsize < 4:
            hint = " (this dtype may be too narrow for them)"
        raise ModelError(
            f"{type(policy.hf).__name__} gives log-probs that are not finite: look for NaN or infinity in "
            f"the weights of the model's folder{hint}"
        )
    limit = tolerance
    if limit is None:
        limit = probe_tolerance(policy.dtype)
    differences = {
        "packed": max(
            difference(ours, theirs, policy.dtype) for ours, theirs in zip(packed, alone, strict=True)
        ),
        "from the key-value cache": max(
            difference(ours, theirs[-1], policy.dtype) for ours, theirs in zip(cached, alone, strict=True)
        ),
    }
    for how, worst in differences.items():
        if not worst <= limit:  # also where it is nan
            raise ModelError(
                f"{type(policy.hf).__name__} does not give the same log-probs {how} as a row alone: they "
                f"differ by {worst:.3g} nats, at most {limit:.3g} is allowed. Its layers do something that "
                "our attention does not implement, so it cannot be trained here"
            )
    return max(differences.values())


@torch.no_grad()
def layer_facts(policy: PolicyModel) -> tuple[dict[int, LayerShape], dict[int, Scores]]:
    """Return what each layer stores per token, and how it scores keys, as seen in a pass over one token."""
    seen = ScoresSeen(PackedLayout.build([1], policy.device))
    token = torch.zeros(1, 1, dtype=torch.int64, device=policy.device)
    run_backbone(policy.text, token, token, seen)
    return seen.shapes, seen.of_layer


@torch.no_grad()
def probe_log_probs(policy: PolicyModel) -> Tensor:
    """Return packed log-probs [tokens, V] of the probe's rows, to compare two copies of a model."""
    with _probing(policy):
        return torch.cat(_packed(policy, _rows(policy)))


@contextmanager
def _probing(policy: PolicyModel) -> Iterator[None]:
    """Compute without dropout, with narrow windows, and with all tokens: transformers knows none that is
    never sampled.
    """
    was_training = policy.training
    transform = policy.transform
    policy.eval()
    policy.transform = replace(transform, forbidden=())
    wide = _hiding(policy)
    for holder, name, _ in wide:
        setattr(holder, name, _NEWEST)
    try:
        yield
    finally:
        for holder, name, width in wide:
            setattr(holder, name, width)
        policy.transform = transform
        policy.train(was_training)


def _hiding(policy: PolicyModel) -> list[tuple[object, str, int]]:
    """Return (configuration or layer, setting, its value) of whatever hides tokens in rows of full length."""
    text = policy.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or math.inf
    holders: dict[int, object] = {id(text): text}
    for module in policy.modules():
        holders |= {id(each): each for each in (module, getattr(module, "config", None)) if each is not None}
    found: list[tuple[object, str, int]] = []
    for holder in holders.values():
        for name in _HIDING:
            width = vars(holder).get(name)
            if isinstance(width, int) and _NEWEST < width < longest:
                found.append((holder, name, width))
    return found


def probe_tolerance(dtype: torch.dtype) -> float:
    """Return how far log-probs of one model may lie apart that are computed in two ways.

    The unit is nats, measured as `difference` does.
    """
    return _TOLERANCES.get(dtype, 0.3)


def difference(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of log-probs [..., V]; in half precision, of means over V."""
    apart = (ours - theirs).abs()
    if dtype.itemsize < 4:
        apart = apart.mean(-1)
    return float(apart.max())


def varied_tokens(row: int, length: int, vocabulary: int) -> list[int]:
    """Return the tokens of a row: rows differ and cover the vocabulary, without random numbers."""
    return [(1 + 7919 * (row + 1) * (place + 1)) % vocabulary for place in range(length)]


@dataclass(frozen=True)
class _ProbeRow:
    """Token ids, [length] int64 on the model's device, and the media among them."""

    ids: Tensor
    media: tuple[Medium, ...] = ()

    def first(self, count: int) -> _ProbeRow:
        """Return the row's first tokens."""
        return _ProbeRow(self.ids[:count], self.media)


def _rows(policy: PolicyModel) -> list[_ProbeRow]:
    """Return rows of different lengths; the second has a picture, where the model reads pictures."""
    vocabulary = policy.head.weight.shape[0]
    rows = [
        _ProbeRow(torch.tensor(varied_tokens(row, length, vocabulary), device=policy.device))
        for row, length in enumerate(_LENGTHS)
    ]
    if policy.vision is not None:
        medium = policy.vision.sample(start=2)
        text = rows[1].ids
        text = torch.where(torch.isin(text, text.new_tensor(placeholder_ids(policy.config))), 0, text)
        picture = text.new_full((medium.length,), policy.vision.placeholder)
        rows[1] = _ProbeRow(torch.cat([text[:2], picture, text[2:]]), (medium,))
    return rows


def _hidden(policy: PolicyModel, rows: Sequence[_ProbeRow], layout: Layout) -> Tensor:
    """Return last hidden states [1, N, H] of packed rows."""
    starts = [0, *accumulate(len(row.ids) for row in rows)]
    media = [
        PlacedMedium(start + medium.start, medium, 0, medium.length)
        for start, row in zip(starts, rows)
        for medium in row.media
    ]
    positions = [make_position_ids(len(row.ids), row.media) for row in rows]
    if any(each.dim() == 2 for each in positions):
        positions = [each.expand(3, -1) for each in positions]
    ids = torch.cat([row.ids for row in rows])
    together = torch.cat(positions, -1).to(policy.device)
    return policy.hidden(ids[None], together[..., None, :], layout, media)


def _packed(
    policy: PolicyModel, rows: list[_ProbeRow], kernels: dict[str, list[int]] | None = None
) -> list[Tensor]:
    """Return packed log-probs [length, V] of each row; ModelError if a layer avoids our attention.

    `kernels` is given the layers of each kernel.
    """
    lengths = [len(row.ids) for row in rows]
    layout = _CountingLayout.build(lengths, policy.device)
    assert isinstance(layout, _CountingLayout)
    layout.calls = Counter()
    layout.kernels = {} if kernels is None else kernels
    hidden = _hidden(policy, rows, layout)
    wanted = policy.config.get_text_config().num_hidden_layers
    if len(layout.calls) != wanted or set(layout.calls.values()) != {1}:
        raise ModelError(
            f"{type(policy.hf).__name__}: {len(layout.calls)} of {wanted} layers call the attention function "
            f"(calls by layer: {dict(layout.calls)}). Recurrent and linear-attention layers mix rows when "
            "packed, so this model cannot be trained here"
        )
    return list(policy.logits(hidden)[0].log_softmax(-1).split(lengths))


def _ranges(numbers: list[int]) -> str:
    """Return rising numbers as text in which neighbours are joined: 0-3, 6, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _cached(policy: PolicyModel, rows: list[_ProbeRow]) -> list[Tensor]:
    """Return log-probs [V] after each row, whose last token is decoded over cached keys and values."""
    prompts = [row.first(len(row.ids) - 1) for row in rows]
    lengths = [len(row.ids) for row in prompts]
    cache = SlotCache(layer_facts(policy)[0], len(rows), 1 + max(lengths), policy.device)
    whole = SpanLayout.packed(cache, range(len(rows)), [0] * len(rows), lengths)
    _hidden(policy, prompts, whole)
    last = torch.stack([row.ids[-1] for row in rows])[:, None]
    place = torch.tensor(lengths, device=policy.device)
    shifts = torch.tensor([sum(medium.shift for medium in row.media) for row in rows], device=policy.device)
    layout = SpanLayout.decoding(cache, place, max(lengths))
    hidden = policy.hidden(last, (place + shifts)[:, None], layout)
    return list(policy.logits(hidden)[:, 0].log_softmax(-1))


def _alone(policy: PolicyModel, rows: list[_ProbeRow]) -> list[Tensor]:
    """Return log-probs [length, V] of each row, run alone with transformers' eager attention."""
    choose_attention(policy.hf, "eager")
    try:
        logits = [
            policy.hf(input_ids=row.ids[None], use_cache=False, **_pictures(policy, row)).logits[0]
            for row in rows
        ]
    finally:
        choose_attention(policy.hf, ATTENTION_NAME)
    return [x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1) for x in logits]


def _pictures(policy: PolicyModel, row: _ProbeRow) -> dict[str, Tensor]:
    """Return the arguments by which transformers reads the picture of a row."""
    if policy.vision is None or not row.media:
        return {}
    return {
        name: value.to(row.ids.device)
        for name, value in policy.vision.family.arguments(
            row.ids, policy.vision.placeholder, row.media[0]
        ).items()
    }
