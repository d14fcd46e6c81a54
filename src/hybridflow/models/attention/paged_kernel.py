"""The kernel that reads blocks in place while decoding: whether torch has one, and whether it is correct.

It is that of `torch.nn.attention.varlen`, on CUDA. Elsewhere, and for features it lacks (soft-capped scores,
sinks, exact mode), tokens are gathered and attended to as in slots.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.models.attention.kernels import MOST_DIMS, varlen_attention
from hybridflow.models.attention.scores import Scores
from hybridflow.models.attention.span_layout import SpanLayout
from hybridflow.models.cache.kv_cache import LayerShape
from hybridflow.models.cache.paged_cache import PagedCache, PagedKernel

BLOCK_SIZE = 256
"""Number of tokens of a block that the kernel can read."""


def varlen_kernel() -> PagedKernel | None:
    """Return torch's kernel if it reads blocks (from torch 2.13), else None."""
    return varlen_attention("scale", "window_size", "enable_gqa", "seqused_k", "block_table")


def kernel_problem(
    shapes: dict[int, LayerShape],
    scores: dict[int, Scores],
    device: torch.device,
    block_size: int = BLOCK_SIZE,
) -> str | None:
    """Return the reason no kernel can attend over blocks of a model with these layers, or None.

    After the checks of sizes and dtypes the kernel is tried and compared with attention over gathered tokens.
    """
    kernel = varlen_kernel()
    if kernel is None:
        return f"torch {torch.__version__} has no attention that reads blocks: torch>=2.13 does"
    if block_size % BLOCK_SIZE:
        return f"blocks have {block_size} tokens, and the kernel wants a multiple of {BLOCK_SIZE}"
    for layer, shape in shapes.items():
        if shape.dtype not in (torch.bfloat16, torch.float16):
            return (
                f"layer {layer} computes in {str(shape.dtype).removeprefix('torch.')}, and the kernel in "
                "bfloat16 or float16"
            )
        if shape.key_dim != shape.value_dim or shape.key_dim % 8 or shape.key_dim > MOST_DIMS:
            return (
                f"layer {layer}: heads of {shape.key_dim} and {shape.value_dim}: the kernel wants one "
                f"multiple of 8, at most {MOST_DIMS}"
            )
        if not scores[layer].plain:
            return f"layer {layer} caps its scores or has sinks, which the kernel does not know"
    windows = {
        layer: seen.sliding_window and min(seen.sliding_window, BLOCK_SIZE) for layer, seen in scores.items()
    }
    for shape, window in {(shape, windows[layer]) for layer, shape in shapes.items()}:
        try:
            difference = _difference(kernel, shape, window, device)
        except (RuntimeError, ValueError, TypeError) as error:
            return f"the kernel failed: {' '.join(str(error).split())[:300]}"
        if not difference <= torch.finfo(shape.dtype).eps * 4:
            return f"the kernel differs by {difference:.1e} from attention over gathered tokens"
    return None


def _difference(kernel: PagedKernel, shape: LayerShape, window: int | None, device: torch.device) -> float:
    """Return how far the kernel is from attention over gathered tokens, on rows in scattered blocks."""
    cache = PagedCache({0: shape}, 3, 12, BLOCK_SIZE, device, kernel)
    lengths = [BLOCK_SIZE + 40, 7, 2 * BLOCK_SIZE]
    for row in (1, 2, 0):
        cache.extend([row], lengths[row] + 1)
    random = torch.Generator(device).manual_seed(0)
    for stored in (cache.keys[0], cache.values[0]):
        stored.normal_(generator=random)
    states = [
        torch.empty(3, heads * shape.kv_heads, 1, shape.key_dim, dtype=shape.dtype, device=device)
        for heads in (2, 1, 1)
    ]
    query, key, value = (x.normal_(generator=random) for x in states)
    scores = Scores(sliding_window=window)
    layout = SpanLayout.decoding(cache, torch.tensor(lengths, device=device), max(lengths))
    got = layout.attend(query, key, value, scores)
    keys, values = (x.repeat_interleave(2, dim=1) for x in cache.first_rows(0, 3, layout.num_keys))
    mask = layout.new_mask(scores.window(layout.num_keys))[:, None]
    wanted = scaled_dot_product_attention(
        query.float(), keys.float(), values.float(), attn_mask=mask
    ).transpose(1, 2)
    return float((got.float() - wanted).abs().max())
