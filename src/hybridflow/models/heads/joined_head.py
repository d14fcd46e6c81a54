"""The output head for a chunk of tokens, fused by compiled functions where Triton runs.

Between the head's product and its log-probs, logits [m, V] in float32 are written and read some six times by
separate operations, and as often in the backward pass. `torch.compile` makes one pass or two of them, which
read the product as it is, in bfloat16. The formulas are those of `log_probs.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hybridflow.distributed.accelerators import features

logger = logging.getLogger(__name__)

LOWEST = -1e4
"""Least log-prob in nats that is computed with: exp of it is 0 in every dtype, and no product overflows."""


def head_outputs(
    raw: Tensor,
    targets: Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    with_entropy: bool,
    with_squares: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return log-probs, log-normalizers and, if wanted, entropy and Σπ² [m], of the head's product [m, V].

    In nats and float32; the normalizer is that of logits which are divided by the temperature.
    """
    logits = _scaled(raw, temperature, scale, softcap)
    highest = logits.amax(-1, keepdim=True)
    total = (logits - highest).exp().sum(-1).log() + highest[:, 0]
    log_probs = logits.gather(-1, targets[:, None])[:, 0] - total
    entropy: Tensor | None = None
    squares: Tensor | None = None
    log_p = logits - total[:, None]
    if with_entropy:
        entropy = -(log_p.exp() * log_p.clamp(min=LOWEST)).sum(-1)
    if with_squares:
        squares = log_p.exp().square().sum(-1)
    return log_probs, total, entropy, squares


def head_gradient(
    raw: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient [m, V] of the head's product, in its dtype, from those of `head_outputs`."""
    logits = _scaled(raw, temperature, scale, softcap)
    log_p = logits - total[:, None]
    p = log_p.exp()
    hit = torch.arange(raw.shape[1], device=raw.device) == targets[:, None]
    grad = (hit.to(p.dtype) - p) * grad_log_probs[:, None]
    if entropy is not None and grad_entropy is not None:
        grad = grad - p * (log_p.clamp(min=LOWEST) + entropy[:, None]) * grad_entropy[:, None]
    slope = scale / temperature
    if softcap is not None:
        grad = grad * (1 - (logits * (temperature / softcap)).square())
    return (grad * slope).to(raw.dtype)


def _scaled(raw: Tensor, temperature: float, scale: float, softcap: float | None) -> Tensor:
    logits = raw.to(torch.promote_types(raw.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits / temperature


class JoinedHead:
    """Both functions, compiled; None in place of results where compiling has failed, with a warning."""

    def __init__(self) -> None:
        self._works = True
        self._outputs = torch.compile(head_outputs, dynamic=True)
        self._gradient = torch.compile(head_gradient, dynamic=True)

    def outputs(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
        """Return what `head_outputs` returns for its arguments."""
        return self._try(self._outputs, *arguments)  # type: ignore[no-any-return]

    def gradient(self, *arguments: Any) -> Tensor | None:
        """Return what `head_gradient` returns for its arguments."""
        return self._try(self._gradient, *arguments)  # type: ignore[no-any-return]

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not self._works:
            return None
        try:
            return function(*arguments)
        except torch.OutOfMemoryError:  # no fault of the compiler: the run says which key to lower
            raise
        except Exception as error:  # a compiler may raise anything, and the plain way raises what is ours
            self._works = False
            first = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            logger.warning("log-probs go on without torch.compile, a few times as slow: %s", first)
            return None


@functools.cache
def _compiled() -> JoinedHead:
    return JoinedHead()


def joined_head(device: torch.device, dtype: torch.dtype) -> JoinedHead | None:
    """Return the compiled functions for a head in half precision where Triton runs, else None."""
    half = dtype in (torch.bfloat16, torch.float16)
    if not half or not features(device.type).triton:
        return None
    if is_in_torch_dispatch_mode(include_infra_modes=False):  # torch compiles nothing that is watched
        return None
    return _compiled()
