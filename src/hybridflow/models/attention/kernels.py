"""Attention kernels for what `scaled_dot_product_attention` has no fast kernel for on CUDA.

    causal                    varlen for packed rows of different lengths, else sdpa; with grouped heads that
                              flash cannot take: expanded
    causal, sliding window    varlen; where it cannot: flex; else as under any mask
    any mask                  expanded, or sdpa without grouped heads
    caps and sinks            flex; under any mask, and where it cannot: written out

`sdpa` would compute grouped heads under a mask by plain matrix products over all scores; `expanded` copies
each key-value head for the query heads of its group. varlen and flex (`flex_kernel.py`) are tried once, on
this device, before they are used. On a CPU nothing is chosen: `sdpa`, and written out where scores have a cap
or sinks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.distributed.accelerators import features
from hybridflow.models.attention.flex_kernel import alone, difference, flex_works
from hybridflow.models.attention.scores import Scores

logger = logging.getLogger(__name__)

KernelName = Literal["sdpa", "expanded", "varlen", "flex", "written out"]
Over = Literal["packed", "causal", "window", "mask"]
"""What hides keys: the future, in packed rows of different lengths or in rows of one; that, and what is
behind a sliding window; any mask.
"""
Groups = Literal["told", "as they are", "expanded"]
"""How grouped heads are given to varlen: with its own argument, without it, or with a key for each head."""

MOST_DIMS = 256
"""Largest head dimension of the flash kernels."""


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, over: Over, how: Scores) -> KernelName:
    """Return the kernel for query [n, H, Q, D], key [n, KV, K, D], value [n, KV, K, Dv] and these scores."""
    device = features(query.device.type)
    flash = _fits_flash(query, value)
    fits = device.varlen_attention and over in ("packed", "window") and how.plain and flash
    if fits and _varlen_works(query.device, query.dtype):
        return "varlen"
    slow = over == "window" or not how.plain
    if device.triton and slow and over != "mask" and flex_works(query, key, value, how):
        return "flex"
    if not how.plain:
        return "written out"
    if not device.varlen_attention:
        return "sdpa"
    grouped = query.shape[1] != key.shape[1]
    if grouped and not (over in ("packed", "causal") and flash):
        return "expanded"
    return "sdpa"


def _fits_flash(query: Tensor, value: Tensor) -> bool:
    dims = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and dims == value.shape[-1] and dims % 8 == 0 and dims <= MOST_DIMS


def expand_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [n, H, K, D] with a head for each one of the query [n, H, Q, D]."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def rows_by_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    window: int | None,
    scaling: float | None,
    groups: Groups | None = None,
) -> Tensor:
    """Attend within rows that lie one after the other, to the `window` newest tokens where there is one.

    query [N, H, D], key, value [N, KV, D] -> [N, H, D]; ends [rows + 1] int32: the number of tokens before
    each row, and of all. `longest` is the longest row's number of tokens.
    """
    kernel = _varlen()
    assert kernel is not None, "it is chosen where torch has it"
    how: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        groups = groups or _varlen_groups(query.device, query.dtype)
        if groups == "told":
            how = {"enable_gqa": True}
        elif groups != "as they are":
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    behind = -1 if window is None else window - 1
    attended: Tensor = kernel(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(behind, 0), **how
    )
    return attended


def window_by_varlen(query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float | None) -> Tensor:
    """Attend to the `window` newest tokens: query [n, H, L, D], key, value [n, KV, L, D] -> [n, H, L, D]."""
    rows, _, length, _ = query.shape
    ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    attended = rows_by_varlen(query, key, value, ends, length, window, scaling)
    return attended.view(rows, length, *attended.shape[1:]).transpose(1, 2)


def varlen_attention(*wanted: str) -> Callable[..., Any] | None:
    """Return torch's attention over rows of any length if it takes these arguments, else None."""
    try:
        kernel: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    if set(wanted) <= set(inspect.signature(kernel).parameters):
        return kernel
    return None


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    """Return torch's kernel if it knows windows."""
    return varlen_attention("scale", "window_size")


def _varlen_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether varlen runs here and computes what plain attention does, backward too."""
    return _varlen_groups(device, dtype) is not None


@functools.cache
def _varlen_groups(device: torch.device, dtype: torch.dtype) -> Groups | None:
    """Return how varlen takes grouped heads here; None where it does not work, with the reason in the log."""
    ways: tuple[Groups, ...] = ("as they are", "expanded")
    if varlen_attention("enable_gqa") is not None:
        ways = ("told",)
    problem: str | None = None
    for groups in ways:
        try:
            problem = alone(_varlen_problem, device, dtype, groups)
        except Exception as error:  # whatever a kernel has against this device
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if problem is None:
            return groups
    logger.warning(
        "packed rows and sliding windows do without torch's varlen attention, and are slower: %s", problem
    )
    return None


def _varlen_problem(device: torch.device, dtype: torch.dtype, groups: Groups) -> str | None:
    """Return how far varlen is from plain attention on a few rows, or None if near.

    They have different lengths and grouped heads, and are attended over with a window and without.
    """
    if _varlen() is None:
        return f"torch {torch.__version__} has none that knows windows"
    lengths, heads, kv_heads, dims = (200, 70, 131), 4, 2, 64
    starts = [0, *accumulate(lengths)]
    with torch.inference_mode(False), torch.enable_grad():
        random = torch.Generator(device).manual_seed(0)
        ends = torch.tensor(starts, dtype=torch.int32, device=device)
        row = torch.repeat_interleave(torch.tensor(lengths)).to(device)
        place = torch.arange(starts[-1], device=device)
        behind = place[:, None] - place
        states = [
            torch.randn(starts[-1], count, dims, generator=random, device=device).to(dtype).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        exact = [state.detach().float().requires_grad_() for state in states]
        batch = [each.transpose(0, 1)[None] for each in exact]
        keys, values = expand_heads(batch[0], batch[1], batch[2])
        for window in (70, None):
            got = rows_by_varlen(states[0], states[1], states[2], ends, max(lengths), window, None, groups)
            allowed = (behind >= 0) & (behind < (window or starts[-1])) & (row[:, None] == row)
            attended = scaled_dot_product_attention(batch[0], keys, values, attn_mask=allowed)
            wanted = attended[0].transpose(0, 1)
            loss = wanted.square().sum()
            results = [got, *torch.autograd.grad(got.float().square().sum(), states)]
            references = [wanted, *torch.autograd.grad(loss, exact, retain_graph=True)]
            problem = difference(results, references)
            if problem is not None:
                return problem
    return None
