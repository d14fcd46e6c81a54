"""The interface of training engines: a forward over rows, an optimizer step on a mini-batch, and the state of
both model and optimizer.

    rows [B, T] ──split──► micro-batches ──pack──► module ──unpack──► answers [b, R] ──loss──► gradients
    ──step──► parameters

The engine never sees an algorithm, and nobody above it calls the module. It is handed an `Ask`, which names
the numbers wanted of each token, and a `LossFn`, whose result is minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridflow.models.ask import Answers, Ask
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

LossFn = Callable[[Answers, DataProto], tuple[Tensor, Metrics]]
"""(answers by name, each [b, R]; the micro-batch) -> (its share of the mini-batch's loss, 0-d; metrics)."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits on the size of one forward pass, all of which hold."""

    max_tokens: int
    """Largest number of tokens."""
    max_rows: int | None = None
    """Largest number of rows; None means no limit."""
    keep_groups: bool = False
    """Whether rows of equal `group_ids` (a column [B] int64 of the batch) must be in one forward, for a loss
    that compares them.
    """
    share_prompts: bool = False
    """Whether rows of one prompt go into one forward where they fit, which computes the prompt once for all.
    """


class TrainEngine(Protocol):
    """One model in training. `engines/fsdp` implements it."""

    module: nn.Module
    device: torch.device
    compute_dtypes: Mapping[str, torch.dtype]
    """Compute dtypes of the parameters that are kept in a wider dtype, by name."""

    @property
    def is_offloaded(self) -> bool:
        """Whether the parameters are offloaded to CPU memory between phases."""
        ...

    def onload(self) -> None:
        """Bring the parameters to the device; they stay until `offload` was called as often."""
        ...

    def offload(self) -> None:
        """Undo one `onload`; the last one sends the parameters back to CPU memory, if they are offloaded."""
        ...

    def forward(self, rows: DataProto, ask: Ask, limits: BatchLimits) -> Answers:
        """Return the answers for all rows without gradients, each [B, R] on the CPU, 0 where no token is
        predicted.
        """
        ...

    def train_mini_batch(self, rows: DataProto, ask: Ask, loss: LossFn, limits: BatchLimits) -> Metrics:
        """Take one optimizer step on `rows`, whose `loss` shares sum to the mini-batch's loss.

        The metric `num_updates` is 1 where the step was applied, `num_skipped_steps` where its loss or
        gradient was not finite.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of module, optimizer and schedule, from which an engine resumes to the bit."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, or some of its parts, in place; CheckpointError names what does
        not fit.
        """
        ...
