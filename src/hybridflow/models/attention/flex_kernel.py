"""torch's FlexAttention over packed rows, for scores that other fast kernels do not know.

    row lengths ──FlexRows──► the row of each token, and the blocks of keys that each block of queries sees
    query, key, value [1, heads, N, D] ──padded to one of few sizes──► compiled kernel ──► [1, H, N, Dv]

The kernel is compiled for each size, so a pass is padded to one of eight sizes in each octave. Soft caps
change the scores inside of it. A sink takes weight from all keys of its query, so the output is scaled by
what it leaves, 1 − exp(sink) / (exp(sink) + Σ exp(scores)). Memory grows with N, and not with its square.

torch has no backward pass of it on a CPU, so there nothing but the forward pass can be tested.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from hybridflow.models.attention.scores import Scores, causal_mask, masked_attention

logger = logging.getLogger(__name__)

BLOCK = 128
"""Tokens in a block of queries or keys."""
_MOST_SIZES = 128
"""Number of sizes for which the kernel is compiled; torch's own limit would be 8, and then [N, N] scores."""


class FlexRows:
    """Rows that lie packed in N tokens, as the kernel needs to know them."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        """`lengths` are the tokens of each row, in the order in which they are packed."""
        self.num_tokens = sum(lengths)
        self.size = padded_size(self.num_tokens)
        counts = torch.tensor([*lengths, self.size - self.num_tokens])
        self._row_of = torch.arange(len(counts)).repeat_interleave(counts).to(device)
        self._masks: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
        """query [1, H, N, D], key [1, KV, N, D], value [1, KV, N, Dv] -> [1, H, N, Dv]."""
        query, key, value = (pad(x, (0, 0, 0, self.size - self.num_tokens)) for x in (query, key, value))
        modify = None if how.softcap is None else _soft_cap(how.softcap)
        window = how.window(self.num_tokens)
        if window not in self._masks:
            self._masks[window] = block_mask(self._row_of, window)
        kernel = partial(
            _kernel(query.device.type),
            query,
            key,
            value,
            score_mod=modify,
            block_mask=self._masks[window],
            scale=how.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        with torch._dynamo.config.patch(recompile_limit=_MOST_SIZES):
            if how.sinks is None:
                attended = kernel()
            else:
                attended, extra = kernel(return_aux=AuxRequest(lse=True))
                left = torch.sigmoid(extra.lse - how.sinks.to(extra.lse.dtype)[:, None])
                attended = attended * left[..., None].to(attended.dtype)
        whole: Tensor = attended[:, :, : self.num_tokens]
        return whole


def padded_size(num_tokens: int) -> int:
    """Return the least size that is compiled for and has room for `num_tokens`, at most an eighth larger.

    Example: 1,000 tokens have room in 1,024, and 1,025 in 1,152.
    """
    step = max(BLOCK, (1 << (num_tokens - 1).bit_length()) // 16)
    return -(-num_tokens // step) * step


def block_mask(row_of: Tensor, window: int | None) -> BlockMask:
    """Return the mask of causal attention inside of each row, and of its `window` newest tokens.

    `row_of` [N] int64 ascends; N is a multiple of `BLOCK`. Blocks of keys that all queries of a block see are
    distinguished, since there the kernel compares nothing.
    """
    num_tokens = row_of.shape[0]
    reach = num_tokens if window is None else window
    first = row_of[::BLOCK]
    last = row_of[BLOCK - 1 :: BLOCK]
    blocks = torch.arange(len(first), device=row_of.device)
    behind = (blocks[:, None] - blocks) * BLOCK  # of the first query and the first key of two blocks
    seen = (behind >= 0) & (last >= first[:, None]) & (behind - (BLOCK - 1) < reach)
    whole = (behind > 0) & (first == last[:, None]) & (behind + BLOCK - 1 < reach)

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (row_of[query] == row_of[key]) & (query >= key) & (query - key < reach)

    return BlockMask.from_kv_blocks(
        *_in_order(seen & ~whole),
        *_in_order(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=allowed,
        seq_lengths=(num_tokens, num_tokens),
    )


def _in_order(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks in each line of [n, n] bool, and their places, the others behind."""
    places = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], places.int()[None, None]


@functools.cache
def _soft_cap(cap: float) -> Callable[..., Tensor]:
    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return modify


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """Return the compiled kernel; on a CPU, where only tests use it, the plain one."""
    if device == "cpu":
        return flex_attention
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


@dataclass(frozen=True)
class _Kind:
    """The facts of a layer that the kernel is compiled for; it is compiled for each number of tokens too."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dims: int
    value_dims: int
    softcap: float | None
    has_window: bool
    has_sinks: bool


def flex_works(query: Tensor, key: Tensor, value: Tensor, how: Scores) -> bool:
    """Return whether the kernel computes these heads and scores as plain attention does, backward too.

    It is tried once for each kind of layer, and the log says where it fails. Shapes are as in `attend`.
    """
    kind = _Kind(
        device=query.device,
        dtype=query.dtype,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        dims=query.shape[3],
        value_dims=value.shape[3],
        softcap=how.softcap,
        has_window=how.sliding_window is not None,
        has_sinks=how.sinks is not None,
    )
    return _works(kind)


def alone(trial: Callable[..., str | None], *arguments: Any) -> str | None:
    """Return the result of a trial of a kernel, run in a separate thread.

    Hooks on saved tensors, such as those of a layer that is computed again in the backward pass, are this
    thread's: they would take the trial for a part of the layer.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(trial, *arguments).result()


@functools.cache
def _works(kind: _Kind) -> bool:
    try:
        problem = alone(_problem, kind)
    except Exception as error:  # whatever a compiler has against this device
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if problem is not None:
        logger.warning(
            "attention with caps, sinks or windows does without torch's FlexAttention, and is slower: %s",
            problem,
        )
    return problem is None


def _problem(kind: _Kind) -> str | None:
    """Return how far the kernel is from plain attention on two rows, or None if near."""
    lengths = [150, 80]
    shapes = ((kind.heads, kind.dims), (kind.kv_heads, kind.dims), (kind.kv_heads, kind.value_dims))
    random = torch.Generator(kind.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=kind.device).to(kind.dtype).requires_grad_()

    with torch.inference_mode(False), torch.enable_grad():
        given = [draw(1, count, sum(lengths), size) for count, size in shapes]
        if kind.has_sinks:
            given.append(draw(kind.heads))
        exact = [state.detach().float().requires_grad_() for state in given]
        got = FlexRows(lengths, kind.device).attend(given[0], given[1], given[2], _scores(kind, given))
        wanted = _plainly(lengths, exact, _scores(kind, exact))
        results = [got, *torch.autograd.grad(got.float().square().sum(), given)]
        references = [wanted, *torch.autograd.grad(wanted.square().sum(), exact)]
    return difference(results, references)


def difference(results: Sequence[Tensor], references: Sequence[Tensor]) -> str | None:
    """Return how far a kernel's results are from those of plain attention in float32, or None if near."""
    for result, reference in zip(results, references, strict=True):
        apart = float(((result.float() - reference).norm() / reference.norm()).detach())
        if not apart <= torch.finfo(result.dtype).eps ** 0.5:
            return f"it differs by {apart:.1e} from plain attention"
    return None


def _scores(kind: _Kind, given: Sequence[Tensor]) -> Scores:
    """Return scores of this kind; `given` are query, key, value and, if there are any, sinks."""
    window = None
    if kind.has_window:
        window = 70
    sinks = None
    if kind.has_sinks:
        sinks = given[3]
    return Scores(sliding_window=window, softcap=kind.softcap, sinks=sinks)


def _plainly(lengths: Sequence[int], given: Sequence[Tensor], how: Scores) -> Tensor:
    """Return [1, H, N, Dv] of packed rows, each by plain attention alone."""
    rows = zip(*(state.split(lengths, dim=2) for state in given[:3]), strict=True)
    done = []
    for query, key, value in rows:
        length = query.shape[2]
        allowed = causal_mask(length, how.window(length), query.device)
        done.append(masked_attention(query, key, value, allowed, how))
    return torch.cat(done, dim=2)
