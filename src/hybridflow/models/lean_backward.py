"""Norms and gated layers that keep less for the backward pass, with the bits of transformers' own classes.

    norm     kept: states, their 1/root             computed again: states / root
    gated    kept: gate, up                         computed again: silu(gate), silu(gate) · up

Autograd keeps every factor of every product. Half of what a dense model keeps are the four wide tensors of
its gated layers, of which two follow from the others by one pass over memory; what is computed again has the
bits that it had. A class is computed so only where its own outputs and gradients are equal to the bit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu


class LeanNorm(torch.autograd.Function):
    """weight · states / sqrt(mean(states²) + eps), in the order of operations of transformers' RMS norms.

    It takes the states twice, and has a gradient for each of their two uses: autograd adds the three of a
    residual stream one after the other, and another order would round otherwise.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, same_states: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(states, inverse, weight)
        return weight * (states * inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, inverse, weight = ctx.saved_tensors
        grad_weight: Tensor | None = None
        if ctx.needs_input_grad[2]:
            product = (states * inverse).mul_(grads[0])
            grad_weight = product.sum(dim=list(range(product.dim() - 1)))
            del product
        if not ctx.needs_input_grad[0]:
            return None, None, grad_weight, None
        scaled = grads[0] * weight
        of_inverse = (scaled * states).sum(-1, keepdim=True)
        of_mean = -0.5 * of_inverse * inverse.pow(3)
        through_mean = (of_mean / states.shape[-1]).expand_as(states) * (2.0 * states)
        return scaled.mul_(inverse), through_mean, grad_weight, None


class LeanGated(torch.autograd.Function):
    """(silu(gate) · up) · downᵀ of gate and up [..., I] and down [H, I]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, down)
        return linear(silu(gate).mul_(up), down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, down = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        active = silu(gate)
        grad_down: Tensor | None = None
        if ctx.needs_input_grad[2]:
            grad_down = grad.T @ (active * up).flatten(0, -2)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            return None, None, grad_down
        product = (grad @ down).view_as(gate)
        grad_up = active.mul_(product)
        grad_gate = torch.ops.aten.silu_backward(product.mul_(up), gate)
        return grad_gate, grad_up, grad_down


def is_lean(states: Tensor, weight: Tensor) -> bool:
    """Return whether a backward pass may come, and these may be computed here: a whole weight, and both in
    float32 in main memory. A compiler chooses by itself what is kept.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or type(weight) is not nn.Parameter:
        return False
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (states, weight))


def lean_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of states [..., H] float32."""
    normed: Tensor = LeanNorm.apply(states, states, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class Grafted:
    """A forward pass that replaces the one of a class of transformers, which stands behind it."""

    plain: type[nn.Module]
    """That class."""
    ours: type[Grafted]
    """The class in front of it."""

    @classmethod
    def facts(cls, kind: Any) -> dict[str, Any]:
        """Return the further attributes of a class that is made of this one and `kind`."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class has no name in a module: a copy is made of its two parts."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_empty, (self.ours, self.plain), *reduced[2:])


@functools.cache
def graft(ours: Any, kind: Any) -> Any:
    """Return a class like `kind` of transformers, with the forward pass of `ours`."""
    own = {"__module__": kind.__module__, "plain": kind, "ours": ours, **ours.facts(kind)}
    return type(kind.__name__, (ours, kind), own)


def _empty(ours: Any, kind: Any) -> Any:
    made = graft(ours, kind)
    return made.__new__(made)


def keep_gates_lean(module: nn.Module) -> None:
    """Let the gated layers in a module compute by `LeanGated` where it has their bits."""
    for child in module.modules():
        kind: Any = type(child)
        if issubclass(kind, LeanGatedLayer) or "forward" in vars(child):
            continue
        if _is_gated(kind) and _is_silu(child.act_fn):
            child.__class__ = graft(LeanGatedLayer, kind)


class LeanGatedLayer(Grafted):
    """The forward pass of a gated layer by `LeanGated`."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """States [..., H] to states of the same shape."""
        down = self.down_proj
        is_plain = not torch.compiler.is_compiling() and (
            type(down) is nn.Linear
            and down.bias is None
            and "forward" not in vars(down)
            and not (down._forward_hooks or down._forward_pre_hooks or down._backward_hooks)
        )
        if not is_plain or not is_lean(x, down.weight):
            found: Tensor = super().forward(x)  # type: ignore[misc]
            return found
        gate = self.gate_proj(x)
        product: Tensor = LeanGated.apply(gate, self.up_proj(x), down.weight)  # type: ignore[no-untyped-call]
        return product


def norm_has_lean_bits(kind: Any) -> bool:
    """Return whether a class's norm has the outputs and gradients of `LeanNorm`, to the bit."""
    weight, states = _random(48), _random(1, 7, 48)
    stub = SimpleNamespace(weight=weight, variance_epsilon=1e-5)
    return _same_bits(
        lambda: states + kind.forward(stub, states),
        lambda: states + lean_norm(states, weight, 1e-5),
        (states, weight),
    )


@functools.cache
def _is_gated(kind: Any) -> bool:
    """Return whether a class is a gated layer with the outputs and gradients of `LeanGated`, to the bit."""
    if not kind.__name__.endswith("MLP") or len(inspect.signature(kind.forward).parameters) != 2:
        return False
    gate, up, down, states = _random(80, 48), _random(80, 48), _random(48, 80), _random(1, 7, 48)
    stub = SimpleNamespace(gate_proj=lambda x: linear(x, gate), up_proj=lambda x: linear(x, up), act_fn=silu)
    stub.down_proj = lambda x: linear(x, down)
    return _same_bits(
        lambda: kind.forward(stub, states),
        lambda: LeanGated.apply(linear(states, gate), linear(states, up), down),  # type: ignore[no-untyped-call]
        (states, gate, up, down),
    )


def _is_silu(activation: Any) -> bool:
    """Return whether a layer's activation, which its configuration chooses, is the one of `LeanGated`."""
    numbers = _random(80).detach()
    return torch.equal(activation(numbers), silu(numbers))


def _random(*shape: int) -> Tensor:
    """Return random numbers in main memory, always the same ones, also where a model is made elsewhere."""
    generator = torch.Generator("cpu").manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, device="cpu").requires_grad_()


def _same_bits(usual: Callable[[], Tensor], lean: Callable[[], Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return whether two computations have the same outputs and the same gradients of their inputs."""
    found = []
    for compute in (usual, lean):
        try:
            with torch.enable_grad():
                out = compute()
                found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        except Exception:  # code of any model: it has other names, or wants another shape
            return False
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))
