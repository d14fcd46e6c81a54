"""RMS norms as one fused operation on devices, in training and in generation alike.

The classes of transformers compute them by eight operations, each with a launch and a pass over all states.
On a CPU they keep their bits, and less for the backward pass (`lean_backward`).
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from hybridflow.models.lean_backward import Grafted, graft, is_lean, lean_norm, norm_has_lean_bits


def join_norms(module: nn.Module) -> None:
    """Fuse the norms in a module whose formula is weight · x / sqrt(mean(x²) + eps) into one operation."""
    for child in module.modules():
        kind: Any = type(child)
        joined = _joined(kind)
        if joined is not None:
            child.__class__ = joined


@functools.cache
def _joined(kind: Any) -> type[nn.Module] | None:
    """Return a class like that of a norm, but with one operation on devices; None for any other formula."""
    if not kind.__name__.endswith("RMSNorm") or issubclass(kind, JoinedNorm) or not _is_plain(kind):
        return None
    joined: type[nn.Module] = graft(JoinedNorm, kind)
    return joined


class JoinedNorm(Grafted):
    """The forward pass of a joined norm."""

    lean: bool
    """Whether the class of transformers has the bits of `LeanNorm`."""
    weight: Tensor
    variance_epsilon: float

    @classmethod
    def facts(cls, kind: Any) -> dict[str, Any]:
        # tried here: what a trial keeps for its backward pass must not be among what a layer keeps
        return {"lean": norm_has_lean_bits(kind)}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """States [..., H] to normed states of the same shape and dtype."""
        weight = self.weight
        on_cpu = hidden_states.device.type == "cpu"
        if self.lean and is_lean(hidden_states, weight):
            return lean_norm(hidden_states, weight, self.variance_epsilon)
        if on_cpu or type(weight) is not nn.Parameter or weight.dtype != hidden_states.dtype:
            normed: Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return normed
        return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def _is_plain(kind: Any) -> bool:
    """Return whether a class's norm has the formula of `rms_norm`, on random numbers small and large."""
    if list(inspect.signature(kind.forward).parameters) != ["self", "hidden_states"]:
        return False
    random = torch.Generator().manual_seed(0)
    for size in (1.0, 1e-3, 1e4):
        with torch.device("cpu"), torch.no_grad():  # a model may be made on the meta device
            weight, states = torch.randn(2, 16, generator=random)
            states = states * size
            stub = SimpleNamespace(weight=weight, variance_epsilon=0.5)
            try:
                found = kind.forward(stub, states[None])
            except Exception:  # code of any model: it has other names, or wants another shape
                return False
            wanted = rms_norm(states, (16,), weight, 0.5)
            if not isinstance(found, Tensor) or not torch.allclose(found[0], wanted):
                return False
    return True
