"""Kernels for attention that `scaled_dot_product_attention` has no fast one for on CUDA.

    causal                    sdpa; with grouped heads that flash cannot take: expanded
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
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.distributed.accelerators import features
from hybridflow.models.flex_kernel import difference, flex_works
from hybridflow.models.scores import Scores

logger = logging.getLogger(__name__)

KernelName = Literal["sdpa", "expanded", "varlen", "flex", "written out"]
Over = Literal["causal", "window", "mask"]
"""What hides keys: the future; that, and what is behind a sliding window; any mask."""

MOST_DIMS = 256
"""Largest head dimension of the flash kernels."""


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, over: Over, how: Scores) -> KernelName:
    """Return the kernel for query [n, H, Q, D], key [n, KV, K, D], value [n, KV, K, Dv] and these scores."""
    device = features(query.device.type)
    flash = _fits_flash(query, value)
    plain_window = device.varlen_attention and over == "window" and how.plain
    if plain_window and flash and _varlen_works(query.device, query.dtype):
        return "varlen"
    slow = over == "window" or not how.plain
    if device.triton and slow and over != "mask" and flex_works(query, key, value, how):
        return "flex"
    if not how.plain:
        return "written out"
    if not device.varlen_attention:
        return "sdpa"
    grouped = query.shape[1] != key.shape[1]
    if grouped and not (over == "causal" and flash):
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


def window_by_varlen(query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float | None) -> Tensor:
    """Attend to the `window` newest tokens: query [n, H, L, D], key, value [n, KV, L, D] -> [n, H, L, D]."""
    kernel, takes_groups = _varlen()
    assert kernel is not None, "it is chosen where torch has it"
    how: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if takes_groups:
            how = {"enable_gqa": True}
        else:
            key, value = expand_heads(query, key, value)
    rows, _, length, _ = query.shape
    ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
    tokens = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    bounds = (ends, ends, length, length)
    attended: Tensor = kernel(*tokens, *bounds, scale=scaling, window_size=(window - 1, 0), **how)
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
def _varlen() -> tuple[Callable[..., Any] | None, bool]:
    """Return torch's kernel if it knows windows, and whether it takes grouped heads (newer ones do)."""
    return varlen_attention("scale", "window_size"), varlen_attention("enable_gqa") is not None


@functools.cache
def _varlen_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether varlen runs here and computes what plain attention does, backward too; log why not."""
    try:
        problem = _varlen_problem(device, dtype)
    except Exception as error:  # whatever a kernel has against this device
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if problem is not None:
        logger.warning("sliding windows do without torch's varlen attention, and are slower: %s", problem)
    return problem is None


def _varlen_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how far varlen is from plain attention on a few rows with a window, or None if near."""
    if _varlen()[0] is None:
        return f"torch {torch.__version__} has none that knows windows"
    rows, heads, kv_heads, length, dims, window = 2, 4, 2, 200, 64, 70
    random = torch.Generator(device).manual_seed(0)
    behind = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    with torch.inference_mode(False), torch.enable_grad():
        states = [
            torch.randn(rows, count, length, dims, generator=random, device=device).to(dtype).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        exact = [state.detach().float().requires_grad_() for state in states]
        got = window_by_varlen(states[0], states[1], states[2], window, None)
        keys, values = expand_heads(exact[0], exact[1], exact[2])
        allowed = (behind >= 0) & (behind < window)
        wanted = scaled_dot_product_attention(exact[0], keys, values, attn_mask=allowed)
        results = [got, *torch.autograd.grad(got.float().square().sum(), states)]
        references = [wanted, *torch.autograd.grad(wanted.square().sum(), exact)]
    return difference(results, references)
