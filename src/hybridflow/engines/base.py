"""The interface of training engines: a forward over rows, a step on a mini-batch, and their state.

    rows [B, T] ──split──► micro-batches ──pack──► module ──unpack──► answers [b, R] ──loss──► gradients
    ──step──► parameters

The engine never sees an algorithm, and no code above it calls the module. It is handed an `OutputSpec`, which
names the numbers wanted of each token, and a `LossFn`, whose result is minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.shards import Box
from hybridflow.models.output_spec import Outputs, OutputSpec
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

if TYPE_CHECKING:  # losses need this module, and no model library
    from hybridflow.models.policy import PolicyModel

LossFn = Callable[[Outputs, DataProto], tuple[Tensor, Metrics]]
"""(answers by name, each [b, R]; the micro-batch) -> (its share of the mini-batch's loss, 0-d; metrics)."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits on the size of one forward pass, all of which hold."""

    max_tokens: int
    """Largest number of tokens."""
    max_rows: int | None = None
    """Largest number of rows; None means no limit."""
    keep_groups: bool = False
    """Whether rows of equal `group_ids` [B] int64, which a loss compares, must be in one forward."""
    share_prompts: bool = False
    """Whether rows of one prompt go into one forward where they fit, which computes the prompt once for all.
    """


@dataclass(frozen=True)
class Held:
    """The part of one parameter that a rank holds."""

    name: str
    """The name in the unsharded model, as in checkpoints; in a policy `hf.` and the Hugging Face name."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    box: Box
    """The place of `tensor` in the whole; it may be empty."""
    tensor: Tensor
    """The part itself, detached, in the engine's memory and in the dtype in which it is kept."""
    compute_dtype: torch.dtype
    """The dtype in which the model computes with it, in which it is generated with and exported."""
    trained: bool
    """Whether training changes it."""


class TrainEngine(Protocol):
    """One model in training, by PyTorch (`engines/fsdp`, `engines/pipeline.py`) or by `engines/megatron`."""

    device: torch.device

    @property
    def policy(self) -> PolicyModel:
        """The module that trains, for generation in the same process; its parameters may be shards."""

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the model over the ranks that hold it together."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens that a policy has log-probs for, padding of its head included."""

    def held_weights(self) -> Iterator[Held]:
        """Yield this rank's part of each parameter, in the same order on all ranks, without communication.

        Tied parameters come once. What is offloaded comes from where it is.
        """

    def readable_policy(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters of `policy` are this rank's parts, for a reader of all."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which a model with adapters answers as its base does; for `forward` alone."""

    def export_hf(self, folder: str | Path, *, with_weights: bool = True) -> None:
        """Write the Hugging Face folder of a policy or a reward model, all ranks their shares.

        It has no tokenizer. Without `with_weights` only the configuration is written.
        """

    @property
    def is_offloaded(self) -> bool:
        """Whether the parameters are offloaded to CPU memory between phases."""

    def onload(self) -> None:
        """Bring the parameters to the device; they stay until `offload` was called as often."""

    def offload(self) -> None:
        """Undo one `onload`; the last one sends the parameters back to CPU memory, if they are offloaded."""

    def forward(self, rows: DataProto, spec: OutputSpec, limits: BatchLimits) -> Outputs:
        """Return the answers for all rows without gradients, [B, R] each, CPU, 0 where not predicted."""

    def train_mini_batch(
        self, rows: DataProto, spec: OutputSpec, loss: LossFn, limits: BatchLimits
    ) -> Metrics:
        """Take one optimizer step on `rows`, whose `loss` shares sum to the mini-batch's loss.

        The metric `num_updates` is 1 where the step was applied, `num_skipped_steps` where it was not finite.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of module, optimizer and schedule, from which an engine resumes to the bit."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load parts of a `state_dict` in place; CheckpointError names what does not fit."""
