"""Quantized weights [N, K] and matrix products with them. For generation only: they have no gradients.

    int8      a scale for each output, symmetric; inputs as they are (on a CPU in bfloat16)
    fp8       float8 of four exponent bits, a scale for each output; inputs too, a scale for each token
    float16   on an x86 CPU, without a scale; inputs and sums in float32

A product is scales · (quantized weights · inputs), whatever computes it: the same numbers up to the order of
sums for one row and for many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridflow.errors import ConfigError, ModelError

KEY = "actor_rollout_ref.rollout.quantization"
FEW_ROWS = 16
"""Rows up to which torch's int8 kernel for CPUs is faster than a product with weights made float32."""
_LARGEST_INT8 = 127.0
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_LARGEST_FLOAT16 = torch.finfo(torch.float16).max
_TINY = 1e-30


class QuantizedWeight(ABC):
    """The quantized copy of one weight, empty before `fill`."""

    @abstractmethod
    def fill(self, weight: Tensor) -> None:
        """Round `weight` [N, K] of any float dtype; ModelError where the kind has no numbers for it."""

    @abstractmethod
    def times(self, inputs: Tensor) -> Tensor:
        """Return contiguous inputs [R, K] · weightᵀ as [R, N], in the dtype of the inputs."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory of the copy."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the copy takes."""

    def linear(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return inputs [..., K] · weightᵀ + bias [N] as [..., N], what a linear layer computes."""
        product = self.times(inputs.reshape(-1, inputs.shape[-1]).contiguous())  # kernels want it so
        product = product.view(*inputs.shape[:-1], product.shape[-1])
        return product if bias is None else product + bias


class _Scaled(QuantizedWeight):
    """Numbers [N, K] of a narrow dtype, and a float32 scale for each of the N outputs; both stay where they
    are when they are filled again.
    """

    dtype: torch.dtype
    largest: float

    def __init__(self) -> None:
        self.numbers = torch.empty(0, dtype=self.dtype)
        self.scales = torch.empty(0)

    def fill(self, weight: Tensor) -> None:
        if self.numbers.shape != weight.shape or self.numbers.device != weight.device:
            self.numbers = torch.empty(weight.shape, dtype=self.dtype, device=weight.device)
            self.scales = torch.empty(weight.shape[0], device=weight.device)
        weight = weight.float()
        self.scales.copy_(weight.abs().amax(1).clamp_(min=_TINY).div_(self.largest))
        scaled = weight / self.scales[:, None]
        if not self.dtype.is_floating_point:
            scaled.round_()
        self.numbers.copy_(scaled.clamp_(-self.largest, self.largest))

    def free(self) -> None:
        self.numbers = self.numbers.new_empty(0)
        self.scales = self.scales.new_empty(0)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


class Int8Weight(_Scaled):
    """int8 weights. On a CPU inputs and sums are rounded to bfloat16, as torch's fast kernel wants them."""

    dtype = torch.int8
    largest = _LARGEST_INT8

    def __init__(self) -> None:
        super().__init__()
        self._ones = torch.empty(0)

    def fill(self, weight: Tensor) -> None:
        super().fill(weight)
        self._ones = torch.ones(weight.shape[0], dtype=torch.bfloat16, device=weight.device)

    def times(self, inputs: Tensor) -> Tensor:
        if inputs.device.type != "cpu":
            wide = inputs
            if wide.dtype == torch.float16:  # sums without the scales may be beyond its largest number
                wide = inputs.bfloat16()
            sums = linear(wide, self.numbers.to(wide.dtype)).float()
        elif len(inputs) <= FEW_ROWS:  # scales of ones: the kernel would round others to bfloat16
            sums = torch._weight_int8pack_mm(inputs.bfloat16(), self.numbers, self._ones).float()
        else:
            sums = linear(inputs.bfloat16().float(), self.numbers.float()).bfloat16().float()
        return sums.mul_(self.scales).to(inputs.dtype)


class Float8Weight(_Scaled):
    """fp8 weights and inputs: fast on GPUs that multiply fp8 (compute capability 8.9 and later)."""

    dtype = torch.float8_e4m3fn
    largest = _LARGEST_FP8

    def times(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        scales = wide.abs().amax(1, keepdim=True).clamp_(min=_TINY).div_(self.largest)
        numbers = (wide / scales).clamp_(-self.largest, self.largest).to(self.dtype)
        product: Tensor = torch._scaled_mm(
            numbers, self.numbers.t(), scale_a=scales, scale_b=self.scales[None], out_dtype=torch.bfloat16
        )
        return product.to(inputs.dtype)


class Float16Weight(QuantizedWeight):
    """float16 weights for an x86 CPU: half the memory to read, and log-probs as good as unchanged."""

    def __init__(self) -> None:
        self._packed: Any = None
        self._count = 0

    def fill(self, weight: Tensor) -> None:
        if not weight.abs().amax() <= _LARGEST_FLOAT16:  # NaN too: packing would make it a number
            raise ModelError(
                f"a weight cannot be rounded to float16: it is beyond ±{_LARGEST_FLOAT16:g}, or no number; "
                "round to int8, or not at all"
            )
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), None)
        self._count = weight.numel()

    def times(self, inputs: Tensor) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(inputs.float(), self._packed)
        return product.to(inputs.dtype)

    def free(self) -> None:
        self._packed = None
        self._count = 0

    @property
    def nbytes(self) -> int:
        return 2 * self._count


KINDS: Mapping[str, type[QuantizedWeight]] = {
    "int8": Int8Weight,
    "fp8": Float8Weight,
    "float16": Float16Weight,
}
"""The values of `rollout.quantization` that the native engine knows."""
MULTIPLE = 16
"""Numbers of inputs and outputs that a quantized weight has are multiples of this, as fp8 kernels want it."""


def check_kind(name: str, device: torch.device, key: str = KEY) -> type[QuantizedWeight]:
    """Return the kind of this name; ConfigError where `device` or this torch cannot multiply by it."""
    kind = KINDS.get(name)
    if kind is None:
        raise ConfigError(f"{key}={name}: the native engine rounds to {', '.join(KINDS)}")
    if name == "float16" and device.type != "cpu":
        raise ConfigError(f"{key}=float16 is for CPUs, and this is {device}: set it to fp8 or int8")
    inputs = torch.ones(FEW_ROWS + 1, MULTIPLE, device=device, dtype=torch.bfloat16)
    try:  # small products, of few rows and of many, are the surest way to ask
        weight = kind()
        weight.fill(torch.ones(MULTIPLE, MULTIPLE, device=device))
        product = torch.cat([weight.times(inputs[:1]), weight.times(inputs)])
        right = bool(((product - MULTIPLE).abs() < 0.5).all())
        why = "it gives wrong products"
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        right = False
        why = " ".join(str(error).split())[:200]
    if not right:
        instead = "leave it out"
        if name != "int8":
            instead = "set it to int8, or leave it out"
        raise ConfigError(f"{key}={name} does not work on {device} with this torch: {why}; {instead}")
    return kind
