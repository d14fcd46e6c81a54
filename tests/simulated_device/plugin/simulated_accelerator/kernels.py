"""Twins of kernels that torch has for CUDA only, or that its CPU kernels do not take: the same interface, the
demands of the real ones checked.

    scaled_dot_product_attention    one kernel, as flash attention is on CUDA
    _flash_attention_forward        attention over rows of any length, with windows and blocks of a cache
    _grouped_mm, _scaled_mm         products of experts; float8 with a scale for each row
    convolution, histc              what the CPU has under other names, or for fewer dtypes
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulated_accelerator import counts
from simulated_accelerator.dispatch import _aten, kernel, run

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MOST_HEAD_SIZE = 256


def _demand(holds: bool, demand: str) -> None:
    if not holds:
        raise RuntimeError(f"{demand} (at {counts.place()})")


# ---- attention of equal lengths


class _Attention(torch.autograd.Function):
    """The CPU's flash kernel, which takes grouped heads, forward and backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, sums = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        ctx.how = causal, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        query, key, value, mask, out, sums = ctx.saved_tensors
        causal, scale = ctx.how
        back = _flash_backward(grad, query, key, value, out, sums, 0.0, causal, attn_mask=mask, scale=scale)
        return (*back, None, None, None)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.shape[-1] != value.shape[-1] or dropout_p or query.dim() != 4:
        written_out = torch.ops.aten._scaled_dot_product_attention_math
        return written_out(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
        return _Attention.apply(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-any-return]
    parts = (query.detach(), key.detach(), value.detach())
    return _flash(*parts, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]


for _key in ("AutogradPrivateUse1", "PrivateUse1"):
    _aten.impl("scaled_dot_product_attention", _attention, _key)


# ---- attention over rows of any length


def _check_varlen(query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Any, ...], table: Any) -> None:
    """Raise what flash attention's kernel refuses."""
    dtypes = (torch.float16, torch.bfloat16)
    _demand(query.dtype in dtypes, "FlashAttention only supports fp16 and bf16 data type")
    _demand(key.dtype == query.dtype == value.dtype, "query, key and value must have the same dtype")
    for each in (query, key, value):
        _demand(each.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    size = query.shape[-1]
    _demand(size <= MOST_HEAD_SIZE, f"FlashAttention only supports head dimension at most 256, got {size}")
    _demand(size % 8 == 0, f"head_size must be a multiple of 8, got {size}")
    _demand(query.shape[-2] % key.shape[-2] == 0, "Number of heads in key/value must divide number in query")
    for each in bounds:
        if each is not None:
            _demand(each.dtype == torch.int32, "cu_seqlens and seqused must have dtype int32")
            _demand(each.is_contiguous(), "cu_seqlens and seqused must be contiguous")
    if table is not None:
        _demand(table.dtype == torch.int32, "block_table must have dtype torch.int32")
        _demand(table.stride(-1) == 1, "block_table must have contiguous last dimension")
        _demand(key.shape[1] % 16 == 0, "Paged KV cache block size must be divisible by 16")


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor | None,
    scale: float,
    left: int,
    right: int,
    used: Tensor | None,
    table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of packed rows [T, H, D] of CPU tensors, written out; the last query sees the last key."""
    outs, sums = [], []
    for row in range(len(query_bounds) - 1):
        own = query[query_bounds[row] : query_bounds[row + 1]].transpose(0, 1).float()
        if table is not None:
            assert used is not None
            pages = table[row].long().clamp(0, len(key) - 1)
            keys, values = (each[pages].flatten(0, 1)[: int(used[row])] for each in (key, value))
        else:
            assert key_bounds is not None
            keys, values = (each[key_bounds[row] : key_bounds[row + 1]] for each in (key, value))
            if used is not None:
                keys, values = keys[: int(used[row])], values[: int(used[row])]
        groups = query.shape[1] // keys.shape[1]
        keys, values = (each.transpose(0, 1).float().repeat_interleave(groups, 0) for each in (keys, values))
        seen = _seen(own.shape[1], keys.shape[1], left, right)
        scores = ((own @ keys.transpose(1, 2)) * scale).masked_fill(~seen, float("-inf"))
        sums.append(scores.logsumexp(-1))
        outs.append((scores.softmax(-1).nan_to_num() @ values).to(query.dtype).transpose(0, 1))
    if not outs:
        return torch.empty_like(query), query.new_empty(query.shape[1], 0, dtype=torch.float32)
    return torch.cat(outs), torch.cat(sums, 1)


def _seen(queries: int, keys: int, left: int, right: int) -> Tensor:
    """Return which keys each query sees, [queries, keys] bool."""
    place = torch.arange(queries)[:, None] + keys - queries
    at = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= at >= place - left
    if right >= 0:
        seen &= at <= place + right
    return seen


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    if is_causal:
        right = 0
    return (-1 if left is None else left), (-1 if right is None else right)


@kernel("_flash_attention_forward")
def _varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    _check_varlen(query, key, value, (query_bounds, key_bounds, seqused_k), block_table)
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = _window(is_causal, window_size_left, window_size_right)
    arguments = (query, key, value, query_bounds, key_bounds, scaling, left, right, seqused_k, block_table)
    out, sums = run("_flash_attention_forward", _varlen, *arguments)
    nothing = torch.empty(0, dtype=torch.uint64, device=query.device)
    return out, sums, nothing, nothing, torch.empty(0, dtype=query.dtype, device=query.device)


@kernel("_flash_attention_backward")
def _varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    window = _window(is_causal, window_size_left, window_size_right)
    arguments = (grad, query, key, value, query_bounds, key_bounds, scaling, *window)
    return tuple(run("_flash_attention_backward", _varlen_gradients, *arguments))


def _varlen_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    scale: float,
    left: int,
    right: int,
) -> list[Tensor]:
    """The gradients of `_varlen`, written out: operators call this where autograd is off."""
    found = [torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)]
    for row in range(len(query_bounds) - 1):
        queries = slice(int(query_bounds[row]), int(query_bounds[row + 1]))
        at = slice(int(key_bounds[row]), int(key_bounds[row + 1]))
        own, back = (each[queries].transpose(0, 1).float() for each in (query, grad))
        groups = query.shape[1] // key.shape[1]
        keys, values = (x[at].transpose(0, 1).float().repeat_interleave(groups, 0) for x in (key, value))
        seen = _seen(own.shape[1], keys.shape[1], left, right)
        scores = ((own @ keys.transpose(1, 2)) * scale).masked_fill(~seen, float("-inf"))
        weights = scores.softmax(-1).nan_to_num()
        of_weights = back @ values.transpose(1, 2)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        parts = (of_scores @ keys, of_scores.transpose(1, 2) @ own, weights.transpose(1, 2) @ back)
        found[0][queries] = parts[0].transpose(0, 1)
        for total, part in zip(found[1:], parts[1:], strict=True):
            total[at] = part.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return [each.to(query.dtype) for each in found]


# ---- products


@kernel("_grouped_mm")
def _grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Any:
    if offs is not None:
        _demand(offs.dtype == torch.int32, "Offsets have to be int32")
    for each in (left, right):
        aligned = each.stride(-1) == 1 or each.stride(-2) == 1
        _demand(aligned, "expected a matrix whose rows or columns are contiguous")

    def product(*arguments: Any) -> Tensor:
        return torch.ops.aten._grouped_mm(*arguments, out_dtype)  # type: ignore[no-any-return]

    return run("_grouped_mm", product, left, right, offs, bias)


@kernel("_scaled_mm")
def _scaled_mm(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    _demand(left.dtype == right.dtype == torch.float8_e4m3fn, "_scaled_mm wants float8_e4m3fn matrices")
    _demand(left.stride(1) == 1, "mat1 must be row_major")
    _demand(right.stride(0) == 1, "mat2 must be col_major")
    for each in (left.shape[1], right.shape[0], right.shape[1]):
        _demand(
            each % 16 == 0,
            f"dimensions of mat2 must be divisible by 16, got {tuple(right.shape)}",
        )
    _demand(scale_a.dtype == scale_b.dtype == torch.float32, "scales must be float32")
    rowwise = scale_a.shape == (left.shape[0], 1) and scale_b.shape == (1, right.shape[1])
    if rowwise:
        _demand(
            out_dtype == torch.bfloat16,
            "Only bf16 output is supported for row-wise scaling",
        )
        _demand(scale_a.is_contiguous() and scale_b.is_contiguous(), "scales must be contiguous")
    else:
        _demand(scale_a.numel() == scale_b.numel() == 1, "scales must be one number, or one for each row")

    def product(left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> Tensor:
        exact = (left.double() @ right.double()) * scale_a.double() * scale_b.double()
        return (exact if bias is None else exact + bias.double()).to(out_dtype or torch.bfloat16)

    return run("_scaled_mm", product, left, right, scale_a, scale_b, bias)


# ---- what the CPU has otherwise


@kernel("convolution_overrideable")
def _convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Any:
    return run("convolution", torch.ops.aten.convolution, inputs, weight, bias, *how)


@kernel("convolution_backward_overrideable")
def _convolution_backward(grad: Tensor, inputs: Tensor, weight: Tensor, *how: Any) -> Any:
    *how_forward, mask = how
    bias_sizes = [weight.shape[0]] if mask[2] else None

    def back(grad: Tensor, inputs: Tensor, weight: Tensor) -> Any:
        return torch.ops.aten.convolution_backward(grad, inputs, weight, bias_sizes, *how_forward, mask)

    return run("convolution_backward", back, grad, inputs, weight)


@kernel("histc")
def _histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    return run("histc", lambda own: torch.histc(own.float(), bins, min, max).to(own.dtype), values)
