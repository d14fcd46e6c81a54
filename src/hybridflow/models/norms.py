"""Root mean square norms by one operation on devices, in training and in generation alike.

The classes of transformers compute them by eight operations, each with a launch and a pass over all states.
On a CPU they stay as they are, to the bit.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


def join_norms(module: nn.Module) -> None:
    """Let the norms in a module whose formula is weight · x / sqrt(mean(x²) + eps) be one operation."""
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
    return type(kind.__name__, (JoinedNorm, kind), {"__module__": kind.__module__})


class JoinedNorm:
    """The forward pass of a joined norm; the class of transformers comes behind this one."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, states: Tensor) -> Tensor:
        """States [..., H] to normed states of the same shape and dtype."""
        weight = self.weight
        if states.device.type == "cpu" or type(weight) is not nn.Parameter or weight.dtype != states.dtype:
            plain: Tensor = super().forward(states)  # type: ignore[misc]
            return plain
        return rms_norm(states, weight.shape, weight, self.variance_epsilon)


def _is_plain(kind: Any) -> bool:
    """Return whether a class's norm has the formula of `rms_norm`, on random numbers."""
    random = torch.Generator().manual_seed(0)
    weight, states = torch.randn(2, 16, generator=random)
    stub = SimpleNamespace(weight=weight, variance_epsilon=0.5)
    try:
        found = kind.forward(stub, states[None])
    except (AttributeError, TypeError, RuntimeError):  # other names, or other arguments
        return False
    return isinstance(found, Tensor) and torch.allclose(found[0], rms_norm(states, (16,), weight, 0.5))
