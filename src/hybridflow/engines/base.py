"""What a training engine promises: a forward over rows, an optimizer step over a mini-batch, and its whole
state.

    rows [B, T] ──split──► micro-batches ──pack──► module ──unpack──► outputs [b, R] ──loss──► gradients
    ──step──► parameters

The engine never sees an algorithm: what the module is asked for is a `ForwardFn`, what is minimised a
`LossFn`, both handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import PackedBatch

ForwardFn = Callable[[nn.Module, PackedBatch], dict[str, Tensor]]
"""(module, packed rows) -> named outputs, each [M], one entry for each predicted token."""

LossFn = Callable[[dict[str, Tensor], DataProto], tuple[Tensor, Metrics]]
"""(outputs by name, each [b, R]; the micro-batch) -> (its share of the mini-batch's loss, 0-d; metrics)."""


@dataclass(frozen=True)
class BatchLimits:
    """How much one forward may hold; whichever limit binds first."""

    max_tokens: int
    """Tokens, a hard cap."""
    max_rows: int | None = None
    """Rows; None: no limit."""
    keep_groups: bool = False
    """True: rows of equal `group_ids` (a column [B] int64 of the batch) are in one forward, for a loss that
    compares them.
    """
    share_prompts: bool = False
    """True: rows of one prompt go into one forward where they fit, which computes the prompt once for all of
    them.
    """


class TrainEngine(Protocol):
    """One model in training. Implementations: `engines/fsdp`."""

    module: nn.Module
    device: torch.device
    narrow: Mapping[str, torch.dtype]
    """The dtypes in which it computes with parameters that it keeps in a wider one, by name."""

    @property
    def rests(self) -> bool:
        """Whether the parameters leave the device between phases."""
        ...

    def onload(self) -> None:
        """Bring the parameters to the device; they stay until `offload` was called as often."""
        ...

    def offload(self) -> None:
        """Send the parameters back to where they rest, if nobody else asked for them."""
        ...

    def forward(self, batch: DataProto, forward: ForwardFn, limits: BatchLimits) -> dict[str, Tensor]:
        """Outputs of all rows without gradients, each [B, R] on the CPU, 0 where no token is predicted."""
        ...

    def train_mini_batch(
        self, batch: DataProto, forward: ForwardFn, loss: LossFn, limits: BatchLimits
    ) -> Metrics:
        """One optimizer step on the rows of `batch`, whose `loss` shares sum to the mini-batch's loss.

        `num_updates` counts it where it was applied, `num_skipped_steps` where its loss or gradient was not
        finite.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Module, optimizer and schedule: all that a resumed engine needs to go on to the bit."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, or some of its parts, in place; CheckpointError names what does
        not fit.
        """
        ...
