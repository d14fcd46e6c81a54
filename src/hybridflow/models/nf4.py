"""Frozen linear layers in 4 bits: the NormalFloat (NF4) of QLoRA, arXiv 2305.14314.

    weight ──quantize──► codes, two a byte, and a scale for each block of 64 ──dequantize──► weight

A block of 64 numbers has its largest magnitude as scale, and of each number the nearest of 16 levels is kept:
quantiles of a normal distribution, with a level for 0. That is done once, when the model is read. Every
product, in training, in generation and in what is exported, is one with the same dequantized weight.
Of the paper, the scales' own quantization (0.37 of 4.5 bits) and the paged optimizer are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear, pad

from hybridflow.config.model import NF4_BLOCK
from hybridflow.errors import ModelError
from hybridflow.models.heads.log_probs import Product

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of a code, of the paper's appendix E; float32 holds them exactly."""


def quantize(weight: Tensor, name: str = "a weight") -> tuple[Tensor, Tensor]:
    """Return the codes [32·B] uint8, two in a byte, the first in its upper half, and the scales [B] float32
    of the B blocks of a weight of any shape; zeros fill the last block.

    Raises ModelError, which names the weight, where a number of it is not finite in float32.
    """
    numbers = weight.detach().float().flatten()
    if not bool(numbers.isfinite().all()):
        raise ModelError(f"{name} holds NaN or infinity, for which NF4 has no level")
    blocks = pad(numbers, (0, -len(numbers) % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1)
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=weight.device)
    middles = ((levels[1:] + levels[:-1]) / 2).float()
    codes = torch.bucketize(blocks / scales.where(scales > 0, 1)[:, None], middles, out_int32=True)
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the weight of `shape` that codes and scales mean: level · scale in float32, then in `dtype`."""
    values = _pairs(codes.device).index_select(0, codes.int()).view(torch.float32)
    values.view(-1, NF4_BLOCK).mul_(scales[:, None])
    return values[: math.prod(shape)].view(*shape).to(dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two float32 levels of each byte as 8 bytes, [256] int64: one gather finds both."""
    byte = torch.arange(256, device=device)
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels[byte // 16], levels[byte % 16]], 1).view(torch.int64)[:, 0]


class NF4Linear(nn.Linear):
    """A linear layer whose frozen weight is held as codes and scales, which no state dict has: like every
    frozen weight beside adapters they come from the base's own files.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    """The dtype of the weight, in which the layer computes."""
    product: Product = staticmethod(linear)
    """The function of inputs, weight and bias that the layer computes; exact mode has its own."""

    @classmethod
    def replace(cls, layer: nn.Linear, name: str) -> None:
        """Turn a linear layer into one of this class, in place; `name` is its weight's in errors, which are
        those of `quantize`. On the meta device codes and scales get their sizes and no memory.
        """
        weight = layer.weight
        blocks = -(-weight.numel() // NF4_BLOCK)
        codes = torch.empty(blocks * NF4_BLOCK // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(blocks, device=weight.device)
        if not weight.is_meta:
            codes, scales = quantize(weight, name)
        del layer.weight
        layer.__class__ = cls
        layer.dtype = weight.dtype  # type: ignore[assignment]
        layer.register_buffer("codes", codes, persistent=False)
        layer.register_buffer("scales", scales, persistent=False)

    def fill(self, weight: Tensor, name: str) -> None:
        """Hold another weight [N, K], rounded to the layer's dtype first. Errors are those of `quantize`."""
        codes, scales = quantize(weight.to(self.codes.device, self.dtype), name)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def share(self, other: NF4Linear) -> None:
        """Hold the very codes and scales of another layer, without a copy."""
        self.codes = other.codes
        self.scales = other.scales

    def restore(self, weight: Tensor) -> None:
        """Turn the layer into a plain one with this weight, in place."""
        del self.codes, self.scales
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [N, K], computed anew at each access."""
        return dequantize(self.codes, self.scales, (self.out_features, self.in_features), self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., K] -> [..., N]. The backward pass dequantizes again: in between no weight is kept."""
        weight = self.weight
        if not torch.is_grad_enabled():
            return self.product(input, weight, self.bias)
        memory = weight.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != memory:
                return tensor
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            return self.weight.as_strided(*kept)

        with saved_tensors_hooks(pack, unpack):
            return self.product(input, weight, self.bias)
