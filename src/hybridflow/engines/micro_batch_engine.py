"""The part of a training engine that every layout of the model shares: rows become micro-batches, and the
gradients of a mini-batch become one optimizer step, unless its loss or gradient is not finite.

    rows ──plan──► micro-batches ──answer_all──► answers ──► rows [B, R]
    rows ──plan──► micro-batches ──accumulate──► gradients, loss ──agreed over ranks──► step or report

How micro-batches pass through the model is the engine's own: it is given all of them at once, because a
pipeline keeps several on the way. `NonfiniteGuard` keeps the rows of a loss or gradient that is not finite,
says why, and ends the run where that goes on.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config.model import OptimConfig
from hybridflow.distributed.mesh import EngineMesh
from hybridflow.distributed.process_group import max_over
from hybridflow.distributed.transfers import HostCopy, to_device
from hybridflow.engines.base import BatchLimits, LossFn
from hybridflow.engines.micro_batches import MicroBatch, plan
from hybridflow.engines.optimizer import MasterAdamW, learning_rate
from hybridflow.errors import TrainingError
from hybridflow.models.experts.routing import LIVE
from hybridflow.models.output_spec import Outputs, OutputSpec
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

logger = logging.getLogger(__name__)

WITHOUT_GRADIENT = (
    "it does not depend on the model. Look for detach(), .item(), .data or no_grad in a loss of your own "
    "(policy_loss.loss_mode), and for code of your own that freezes parameters (external_lib)"
)


class Stepper(Protocol):
    """The optimizer of an engine, `MasterAdamW` or a library's own."""

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a 0-d tensor of main memory."""

    def step(self, lr: float) -> None:
        """Take one step at learning rate `lr`, and leave the model with the weights that come of it."""


@dataclass
class Accumulated:
    """The sums over a mini-batch's micro-batches on one rank; the gradients are in the optimizer."""

    name: str
    """The engine's name, for messages."""
    loss: Tensor
    """The sum of the loss shares, 0-d float64."""
    metrics: Metrics = field(default_factory=Metrics)
    non_finite: dict[str, Tensor] = field(default_factory=dict)
    """Numbers of answers that are not finite, 0-d each, by name."""
    num_lost: int = 0
    """Number of losses that were found not to depend on the states that other ranks have sent."""

    def share(self, micro: MicroBatch, answers: Outputs, loss: LossFn) -> Tensor:
        """Return a micro-batch's share of the loss, 0-d, and add what is known of it to the sums.

        The share of a dummy is 0 and reaches all of the model in the backward pass. `answers` are [M] each.
        """
        if micro.rows is None:
            total: Tensor = sum((value * 0.0).sum() for value in answers.values() if value.requires_grad)  # type: ignore[assignment]
            return total
        for name, value in answers.items():
            self.non_finite[name] = self.non_finite.get(name, 0) + (~value.detach().isfinite()).sum()
        unpacked = {name: micro.packed.unpack(value) for name, value in answers.items()}
        share, metrics = loss(unpacked, micro.rows)
        if not share.requires_grad:
            which = f"a micro-batch of {len(micro.rows)} rows"
            raise TrainingError(
                f"{self.name}: the loss of {which} is {float(share):g} and has no gradient, so nothing could "
                f"be learned from it: {WITHOUT_GRADIENT}"
            )
        self.loss += share.detach()
        self.metrics.update(metrics)
        return share


class MicroBatchEngine(ABC):
    """A training engine without its model, which a subclass adds with `_forward_all` and `_accumulate`.

    `name` prefixes the metrics (`actor`, `critic`). An optimizer step whose loss or gradient norm is not
    finite changes nothing: it is reported, its rows are written to `dump_dir`, and after
    `max_nonfinite_steps` of them in a row a TrainingError ends the run. All ranks of `mesh` make every call
    together; None means a single rank. Without an `optimizer` nothing is trained.
    """

    multiple_of = 1
    """What the number of micro-batches on each rank is a multiple of, where there are several ranks."""

    def __init__(
        self,
        *,
        name: str,
        device: torch.device,
        optim: OptimConfig | None,
        optimizer: Stepper | None,
        total_steps: int = 0,
        grad_clip: float | None = None,
        max_nonfinite_steps: int = 3,
        dump_dir: Path | None = None,
        mesh: EngineMesh | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.optim = optim
        self.optimizer: Stepper | None = optimizer
        self.total_steps = total_steps
        if optim is not None and optim.total_training_steps >= 0:
            self.total_steps = optim.total_training_steps
        self.grad_clip = grad_clip
        self.mesh = mesh
        suffix: str | None = ""  # of this rank's folder of dumped rows; None where another rank has the same
        if mesh is not None:
            suffix = f"_rank{mesh.rank}" if mesh.returns else None
        self.guard = NonfiniteGuard(name, max_nonfinite_steps, dump_dir, suffix)
        self.num_steps = 0  # optimizer steps applied
        self.counted_elsewhere: frozenset[str] = frozenset()
        """Parameters that this rank trains and whose gradients another rank counts in the norm."""

    def _ready(self, *, training: bool) -> AbstractContextManager[None]:
        """Return a context in which the model computes; with `training` it may be given gradients."""
        return nullcontext()

    @abstractmethod
    def _forward_all(
        self, micros: Sequence[MicroBatch], spec: OutputSpec
    ) -> Iterator[tuple[MicroBatch, Outputs]]:
        """Yield each micro-batch as it was given, on the host, with its answers on the device, [M] each.

        It is called without gradients.
        """

    @abstractmethod
    def _accumulate(
        self, micros: Sequence[MicroBatch], spec: OutputSpec, loss: LossFn, sums: Accumulated
    ) -> None:
        """Add the gradients of all micro-batches to the parameters, and their loss shares to `sums`."""

    def _apply(self, lr: float) -> None:
        """Take the optimizer's step with the gradients that it has."""
        assert self.optimizer is not None
        self.optimizer.step(lr)

    @torch.no_grad()
    def forward(self, rows: DataProto, spec: OutputSpec, limits: BatchLimits) -> Outputs:
        """Return the answers for all rows without gradients, each [B, R, …] float on the CPU, but routes.

        Routes are [B, T, W] int16, and `LIVE` on padding. A batch without rows gives none of each.
        """
        answered: list[tuple[MicroBatch, str]] = []
        copy = HostCopy()
        with self._ready(training=False), _memory_named(self.name, limits):
            micros = self._plan(rows, limits, at_least=1)
            for micro, answers in self._forward_all(micros, spec):
                answered += [(micro, name) for name in answers]
                copy.add(list(answers.values()))
        results: Outputs = {}
        for (micro, name), value in zip(answered, copy.tensors(), strict=True):
            if name not in results and name == "routes":
                size = (*rows.batch["attention_mask"].shape, value.shape[1])
                results[name] = torch.full(size, LIVE, dtype=value.dtype)
            elif name not in results:
                size = (*rows.batch["response_mask"].shape, *value.shape[1:])
                results[name] = torch.zeros(size, dtype=value.dtype)
            if micro.rows is not None and name == "routes":
                mask = micro.rows.batch["attention_mask"]
                results[name][micro.indices] = micro.packed.unpack_tokens(value, mask, LIVE)
            elif micro.rows is not None:
                results[name][micro.indices] = micro.packed.unpack(value)
        return results

    def train_mini_batch(
        self, rows: DataProto, spec: OutputSpec, loss: LossFn, limits: BatchLimits
    ) -> Metrics:
        """Take one optimizer step on `rows`, which are this rank's part of the mini-batch."""
        assert self.optimizer is not None, f"{self.name} was built without an optimizer"
        self.optimizer.zero_grad()
        sums = Accumulated(self.name, torch.zeros((), dtype=torch.float64, device=self.device))
        with self._ready(training=True):
            with _memory_named(self.name, limits):
                self._accumulate(self._plan(rows, limits), spec, loss, sums)
            return self._step(rows, sums)

    def _plan(self, rows: DataProto, limits: BatchLimits, *, at_least: int = 0) -> list[MicroBatch]:
        agree = None
        if self.mesh is not None:
            agree = max_over
        return plan(rows, limits, agree, at_least=at_least, multiple_of=self.multiple_of)

    def _measure(self, sums: Accumulated) -> tuple[float, Tensor]:
        """Return the mini-batch's loss and its gradient norm (0-d, on the host), the same on every rank.

        The host waits once, for all of the numbers. Raises TrainingError on all ranks where no parameter has
        a gradient. One of zeros is a gradient.
        """
        assert isinstance(self.optimizer, MasterAdamW), "another optimizer is measured by its own engine"
        if self.mesh is None:
            norm = self.optimizer.gradient_norm()
            loss, length = torch.stack([sums.loss, norm.to(sums.loss)]).tolist()
            self._refuse_without_gradient(self.optimizer.num_gradients, loss)
            return loss, torch.tensor(length, dtype=norm.dtype)
        self.optimizer.collect_shards()
        mine = sums.loss
        if not self.mesh.returns:  # ranks that share rows have the same loss: one counts it
            mine = torch.zeros_like(mine)
        size = self.mesh.layout.stage_size
        square = self.optimizer.gradient_square(size, self.device, self.counted_elsewhere)
        counts = to_device(torch.tensor([self.optimizer.num_gradients, sums.num_lost]).double(), self.device)
        numbers = torch.cat([torch.stack([mine, square]), counts])
        dist.all_reduce(numbers)
        norm = numbers[1].sqrt()
        loss, _, gradients, lost, length = torch.cat([numbers, norm[None]]).tolist()
        # a stage that nothing depends on is given zeros to pass on, which are gradients to the stages before
        self._refuse_without_gradient(0 if lost else int(gradients), loss)
        return loss, torch.tensor(length, dtype=norm.dtype)

    def _refuse_without_gradient(self, number: int, loss: float) -> None:
        """Raise TrainingError where the parameters have no gradient at all, `number` of them."""
        assert isinstance(self.optimizer, MasterAdamW)
        if not number:
            raise TrainingError(
                f"{self.name}: optimizer step {self.num_steps + 1} has a loss of {loss:g}, and none of the "
                f"{len(self.optimizer.masters)} parameters that are trained got a gradient from it: "
                f"{WITHOUT_GRADIENT}"
            )

    def _step(self, rows: DataProto, sums: Accumulated) -> Metrics:
        """Apply the gradients of a mini-batch, or report why that cannot be done."""
        assert self.optimizer is not None and self.optim is not None
        metrics = sums.metrics
        loss, norm = self._measure(sums)
        grad_norm = norm.item()
        lr = learning_rate(self.num_steps, self.optim, self.total_steps)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        # metrics of the step, not of a rank's rows, come from one rank
        counts = self.mesh is None or self.mesh.reports
        if counts:
            metrics.add_sum(f"{self.name}/num_updates", float(finite))
            metrics.add_sum(f"{self.name}/num_skipped_steps", float(not finite))
        if not finite:
            self.optimizer.zero_grad()
            non_finite = {name: int(count) for name, count in sums.non_finite.items()}
            self.guard.report(rows, loss, grad_norm, self.num_steps, non_finite)
            return metrics
        self.guard.in_a_row = 0
        if counts:
            metrics.add_mean(f"{self.name}/grad_norm", grad_norm)
            metrics.add_last(f"{self.name}/lr", lr)
        if self.grad_clip is not None and grad_norm > self.grad_clip:
            self.optimizer.scale_gradients(self.grad_clip / (norm + 1e-6))
        self._apply(lr)
        self.optimizer.zero_grad()
        self.num_steps += 1
        return metrics


@contextmanager
def _memory_named(name: str, limits: BatchLimits) -> Iterator[None]:
    """Turn an out-of-memory error of the device into a TrainingError that names the keys to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{name}: out of device memory in a forward of at most {limits.max_tokens} tokens: lower its "
            "*_max_token_len_per_gpu or *_micro_batch_size_per_gpu, or set "
            "enable_gradient_checkpointing=true. "
            f"({str(error).splitlines()[0]})"
        ) from error


_ODD_LOG_PROB = (
    "Either the weights have diverged (then lower the learning rate), or a sampled token has probability 0, "
    "log-prob -inf, which makes importance ratios and KL terms NaN or infinite (then look for tokens that "
    "generation allows and training does not)"
)
_BROKEN_INPUT = "Look at what it was computed from, first of all the scores of the reward function"
_OVERFLOW = (
    "The model's outputs and the columns of its rows are finite, so the loss or its gradient overflows. Look "
    "for a learning rate that is too high, and for a reward or an advantage of great size"
)


class NonfiniteGuard:
    """A count of optimizer steps in a row whose loss or gradient norm is not finite.

    After `limit` of them a TrainingError ends the run. Rows are written below `folder`; `part` is what this
    rank adds to the name of its file, or None where another rank has the same rows and writes them.
    """

    def __init__(self, name: str, limit: int, folder: Path | None, part: str | None = "") -> None:
        self.name = name
        self.limit = limit
        self.folder = folder
        self.part = part
        self.in_a_row = 0

    def report(
        self,
        batch: DataProto,
        loss: float,
        grad_norm: float,
        num_steps: int,
        outputs: Mapping[str, int] | None = None,
    ) -> None:
        """Count a skipped step, write down its rows, and warn; TrainingError after too many in a row.

        `num_steps` optimizer steps were applied before. `outputs`: how many of the module's outputs for these
        rows are not finite, by name.
        """
        self.in_a_row += 1
        text = (
            f"{self.name}: this optimizer step is skipped, because its loss or its gradient is not finite "
            f"(loss {loss}, gradient norm {grad_norm}; {self.in_a_row} in a row of at most {self.limit}). "
            f"{_cause(batch, outputs or {})}. {self._keep(batch, num_steps)}"
        )
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"{text}. The run stops; trainer.max_nonfinite_steps sets how many such steps in a row are "
                "allowed."
            )
        logger.warning(text)

    def _keep(self, batch: DataProto, num_steps: int) -> str:
        """Write down the rows of a skipped step, and return a sentence that says where they are."""
        if self.folder is None:
            return "Its rows are not kept, as no folder was given for them"
        if self.part is None:
            return "Its rows are written down by another rank, which has the same"
        folder = self.folder / f"{self.name}_after_update_{num_steps}_{self.in_a_row}{self.part}"
        batch.save_to_disk(folder)
        return f"Its rows are in {folder}"


def _cause(batch: DataProto, outputs: Mapping[str, int]) -> str:
    """Return the known causes of a non-finite step, as sentences that say where to look."""
    for name, where, value in _odd_entries(batch):
        if _is_log_prob(name):
            return f"{name} is {value} at {where}. {_ODD_LOG_PROB}"
        return f"{name} is {value} at {where}. {_BROKEN_INPUT}"
    for name, count in outputs.items():
        if count:
            found = f"{count} of the model's {name} for these rows are not finite"
            if _is_log_prob(name):
                return f"{found}. {_ODD_LOG_PROB}"
            return f"{found}. {_OVERFLOW}"
    return _OVERFLOW


def _is_log_prob(name: str) -> bool:
    return name.endswith(("log_probs", "log_prob"))


def _odd_entries(batch: DataProto) -> Iterator[tuple[str, str, float]]:
    """Yield the first entry that is not finite of each per-token column, where its token is learned from."""
    mask = batch.batch["loss_mask" if "loss_mask" in batch else "response_mask"].bool()
    for name, column in sorted(batch.batch.items()):
        if not isinstance(column, Tensor) or not column.is_floating_point() or column.shape != mask.shape:
            continue
        non_finite = (~column.isfinite() & mask.to(column.device)).nonzero()
        if len(non_finite):
            row, token = non_finite[0].tolist()
            yield name, f"row {row}, response token {token}", float(column[row, token])
