"""One model in training: packed micro-batches, one optimizer step for each mini-batch, a guard against
numbers that are not finite.

On one rank the module is as it was built. On several, each holds a shard of it (`sharding`), and what every
rank must do alike is agreed upon: the number of micro-batches, the gradient norm with the loss (one message
for both), and so whether a step is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import OptimConfig
from hybridflow.distributed.mesh import EngineMesh
from hybridflow.distributed.process_group import max_over
from hybridflow.distributed.shards import local, piece_for, placed_like
from hybridflow.engines.base import BatchLimits, ForwardFn, LossFn
from hybridflow.engines.fsdp.micro_batches import MicroBatch, nothing, plan
from hybridflow.engines.fsdp.nonfinite import NonfiniteGuard
from hybridflow.engines.fsdp.offload import ActivationOffload, Residence
from hybridflow.engines.fsdp.optimizer import MasterAdamW
from hybridflow.engines.fsdp.schedule import learning_rate
from hybridflow.engines.fsdp.sharding import before_micro_batch, reshard
from hybridflow.errors import CheckpointError, TrainingError
from hybridflow.models.lora import saved_names
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto


class FSDPEngine:
    """Implements `TrainEngine`.

    `name` prefixes the metrics (`actor`, `critic`). An optimizer step whose loss or gradient norm is not
    finite changes nothing: it is reported, its rows are written to `dump_dir`, and after
    `max_nonfinite_steps` of them in a row a TrainingError ends the run. With a `mesh`, `module` is sharded
    over it and `device` is where it computes; `narrow` names the parameters that are gathered in a narrower
    dtype than their shards have. All ranks then call `forward`, `train_mini_batch` and the rest together.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        optim: OptimConfig | None,
        total_steps: int = 0,
        grad_clip: float | None = None,
        max_nonfinite_steps: int = 3,
        dump_dir: Path | None = None,
        fsdp: FSDPConfig = FSDPConfig(),  # noqa: B008  (frozen)
        mesh: EngineMesh | None = None,
        device: torch.device | None = None,
        narrow: Mapping[str, torch.dtype] | None = None,
        activations: ActivationOffload | None = None,
    ) -> None:
        self.module, self.name, self.optim, self.fsdp, self.mesh = module, name, optim, fsdp, mesh
        self.device = next(module.parameters()).device if device is None else device
        self.narrow = narrow or {}
        self.optimizer = (
            None if optim is None else MasterAdamW(module.named_parameters(), optim, narrow=self.narrow)
        )
        self.total_steps = (
            total_steps if optim is None or optim.total_training_steps < 0 else optim.total_training_steps
        )
        self.grad_clip = grad_clip
        part = "" if mesh is None else f"_rank{mesh.rank}" if mesh.is_leader else None
        self.guard = NonfiniteGuard(name, max_nonfinite_steps, dump_dir, part)
        self.residence = Residence(module, self.optimizer, self.device, fsdp)
        self.activations = activations
        self.num_steps = 0  # optimizer steps applied

    @torch.no_grad()
    def forward(self, batch: DataProto, forward: ForwardFn, limits: BatchLimits) -> dict[str, Tensor]:
        """Outputs of all rows without gradients, each [B, R] float on the CPU; no rows give [0, R] under the
        same names.
        """
        self.module.eval()
        results: dict[str, Tensor] = {}
        width = batch.batch["responses"].shape[1]
        with self.residence.parameters():
            with _memory_named(self.name, limits):
                for micro in self._plan(batch, limits, at_least=1):
                    packed = micro.packed
                    for key, value in forward(self.module, packed).items():
                        rows = packed.unpack(value).cpu()
                        whole = results.setdefault(key, rows.new_zeros(len(batch), width))
                        if micro.indices is not None:
                            whole[micro.indices] = rows
            self._reshard()
        return results

    def train_mini_batch(
        self, batch: DataProto, forward: ForwardFn, loss: LossFn, limits: BatchLimits
    ) -> Metrics:
        """One optimizer step on the rows of `batch`, which are this rank's part of the mini-batch."""
        assert self.optimizer is not None and self.optim is not None, (
            f"{self.name} was built without an optimizer"
        )
        self.module.train()
        self.optimizer.zero_grad()
        metrics = Metrics()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        odd: dict[str, Tensor] = {}  # numbers that are not finite, by name of the output
        with self.residence.parameters(), self.residence.masters():
            with _memory_named(self.name, limits):
                micros = self._plan(batch, limits)
                for number, micro in enumerate(micros, start=1):
                    self._before(last=number == len(micros))
                    packed = micro.packed
                    with nullcontext() if self.activations is None else self.activations.kept():
                        named = forward(self.module, packed)
                    if micro.rows is None:
                        nothing(named).backward()
                        continue
                    for key, value in named.items():
                        odd[key] = odd.get(key, 0) + (~value.detach().isfinite()).sum()
                    outputs = {key: packed.unpack(value) for key, value in named.items()}
                    share, micro_metrics = loss(outputs, micro.rows)
                    share.backward()
                    total += share.detach()
                    metrics.update(micro_metrics)
                self._reshard()
            return self._step(batch, total, metrics, odd)

    @property
    def rests(self) -> bool:
        """Whether the parameters leave the device between phases (`fsdp_config.param_offload`)."""
        return self.residence.moves_parameters

    def onload(self) -> None:
        """Bring the parameters to the device, for whoever reads them outside of this engine's own calls."""
        self.residence.onload()

    def offload(self) -> None:
        """Send the parameters back to where they rest (`fsdp_config.param_offload`)."""
        self.residence.offload()

    def _plan(self, batch: DataProto, limits: BatchLimits, *, at_least: int = 0) -> list[MicroBatch]:
        return plan(batch, limits, self.device, None if self.mesh is None else max_over, at_least=at_least)

    def _before(self, *, last: bool) -> None:
        if self.mesh is not None:
            before_micro_batch(self.module, last=last, keep_gathered=not self.fsdp.reshard_after_forward)

    def _reshard(self) -> None:
        """Every parameter is this rank's shard again."""
        if self.mesh is not None:
            reshard(self.module)

    def _measure(self, total: Tensor) -> tuple[float, Tensor]:
        """The mini-batch's loss and its gradient norm (0-d): the same numbers on every rank."""
        assert self.optimizer is not None
        if self.mesh is None:
            return float(total), self.optimizer.gradient_norm()
        self.optimizer.collect_shards()
        # ranks that share rows have the same loss
        mine = total if self.mesh.is_leader else torch.zeros_like(total)
        numbers = torch.stack([mine, self.optimizer.gradient_square(self.mesh.sizes.world_size, self.device)])
        dist.all_reduce(numbers)
        return float(numbers[0]), numbers[1].sqrt()

    def _step(self, batch: DataProto, total: Tensor, metrics: Metrics, odd: Mapping[str, Tensor]) -> Metrics:
        """Apply the gradients of a mini-batch whose loss is `total`, or report why that cannot be done.

        `odd`: how many of the module's outputs are not finite, 0-d each, by name.
        """
        assert self.optimizer is not None and self.optim is not None
        loss, norm = self._measure(total)
        grad_norm = float(norm)
        lr = learning_rate(self.num_steps, self.optim, self.total_steps)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        # what is true of the step, not of a rank's rows, is said once
        counts = self.mesh is None or self.mesh.rank == 0
        if counts:
            metrics.add_sum(f"{self.name}/num_updates", 1.0 if finite else 0.0)
            metrics.add_sum(f"{self.name}/num_skipped_steps", 0.0 if finite else 1.0)
        if not finite:
            self.optimizer.zero_grad()
            outputs = {name: int(count) for name, count in odd.items()}
            self.guard.report(batch, loss, grad_norm, self.num_steps, outputs)
            return metrics
        self.guard.in_a_row = 0
        if counts:
            metrics.add_mean(f"{self.name}/grad_norm", grad_norm)
            metrics.add_last(f"{self.name}/lr", lr)
        if self.grad_clip is not None and grad_norm > self.grad_clip:
            self.optimizer.scale_gradients(self.grad_clip / (norm + 1e-6))
        with self.residence.moments():
            self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self.num_steps += 1
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Module (with adapters: what is trained), optimizer, counters; sharded tensors are DTensors, all
        else is equal on all ranks.
        """
        model = self._model()
        rounded: dict[int, Tensor] = {}  # tied parameters stay one tensor
        for key, dtype in self.narrow.items():
            shard = local(model[key])
            if shard.data_ptr() not in rounded or shard.numel() == 0:
                rounded[shard.data_ptr()] = placed_like(shard.to(dtype), model[key])
            model[key] = rounded[shard.data_ptr()]
        return {
            "model": model,
            "optimizer": {} if self.optimizer is None else self.optimizer.state_dict(),
            "scheduler": {"num_steps": self.num_steps, "nonfinite_in_a_row": self.guard.in_a_row},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the parts of `state_dict()` that are there, in place: whoever shares the module sees the
        new weights.
        """
        if "model" in state:
            self._load_module(state["model"])
        if self.optimizer is not None:
            if "optimizer" in state:
                self.optimizer.load_state_dict(state["optimizer"])
            else:
                self.optimizer.copy_from_parameters()
        if "scheduler" in state:
            self.num_steps = int(state["scheduler"]["num_steps"])
            self.guard.in_a_row = int(state["scheduler"]["nonfinite_in_a_row"])

    def _model(self) -> dict[str, Tensor]:
        """The module's state, without the base of adapters: that is in its own folder and stays as it is."""
        state, names = self.module.state_dict(), saved_names(self.module)
        return {name: tensor for name, tensor in state.items() if names is None or name in names}

    def _load_module(self, saved: dict[str, Tensor]) -> None:
        own = self._model()
        if set(own) != set(saved):
            odd = sorted(set(own) ^ set(saved))[:3]
            raise CheckpointError(
                f"The checkpoint's model has other parameters than this {self.name}, for example {odd}."
            )
        for key, value in saved.items():
            if own[key].shape != value.shape:
                raise CheckpointError(
                    f"{self.name}: {key} is {tuple(value.shape)} in the checkpoint and "
                    f"{tuple(own[key].shape)} here."
                )
        for key, value in saved.items():
            local(own[key]).copy_(piece_for(own[key], value))


@contextmanager
def _memory_named(name: str, limits: BatchLimits) -> Iterator[None]:
    """Say which keys to lower where a forward or backward does not fit the device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{name}: out of device memory in a forward of at most {limits.max_tokens} tokens: lower its "
            "*_max_token_len_per_gpu or "
            "*_micro_batch_size_per_gpu, or set enable_gradient_checkpointing=true. "
            f"({str(error).splitlines()[0]})"
        ) from error
