"""The engine of one model in training: packed micro-batches, one optimizer step for each mini-batch, and a
guard against a loss or gradient that is not finite.

On one rank the module is as it was built. On several, each holds a shard of it (`sharding`), and the ranks
agree on everything that they must do alike: the number of micro-batches, and the loss with the gradient norm
(one message for both), which decide whether a step is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from hybridflow.engines.base import BatchLimits, LossFn
from hybridflow.engines.fsdp.micro_batches import Agree, MicroBatch, nothing, plan
from hybridflow.engines.fsdp.nonfinite import NonfiniteGuard
from hybridflow.engines.fsdp.offload import ActivationOffload, Offloader
from hybridflow.engines.fsdp.optimizer import MasterAdamW
from hybridflow.engines.fsdp.schedule import learning_rate
from hybridflow.engines.fsdp.sharding import before_micro_batch, reshard
from hybridflow.errors import CheckpointError, TrainingError
from hybridflow.models.ask import Answers, Ask, answer
from hybridflow.models.lora import saved_names
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.protocol import DataProto


class FSDPEngine:
    """A `TrainEngine` over a whole or an FSDP2-sharded module.

    `name` prefixes the metrics (`actor`, `critic`). An optimizer step whose loss or gradient norm is not
    finite changes nothing: it is reported, its rows are written to `dump_dir`, and after
    `max_nonfinite_steps` of them in a row a TrainingError ends the run. With a `mesh`, `module` is sharded
    over it and computes on `device`; `compute_dtypes` has the dtypes in which parameters are gathered that
    are narrower than their shards, by name. All ranks then make every call together.
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
        compute_dtypes: Mapping[str, torch.dtype] | None = None,
        activations: ActivationOffload | None = None,
    ) -> None:
        self.module = module
        self.name = name
        self.optim = optim
        self.fsdp = fsdp
        self.mesh = mesh
        self.device = device or next(module.parameters()).device
        self.compute_dtypes = compute_dtypes or {}
        self.optimizer: MasterAdamW | None = None
        self.total_steps = total_steps
        if optim is not None:
            self.optimizer = MasterAdamW(module.named_parameters(), optim, compute_dtypes=self.compute_dtypes)
            if optim.total_training_steps >= 0:
                self.total_steps = optim.total_training_steps
        self.grad_clip = grad_clip
        self.guard = NonfiniteGuard(name, max_nonfinite_steps, dump_dir, _dump_suffix(mesh))
        self.offloader = Offloader(module, self.optimizer, self.device, fsdp)
        self.activations = activations
        self.num_steps = 0  # optimizer steps applied

    @torch.no_grad()
    def forward(self, rows: DataProto, ask: Ask, limits: BatchLimits) -> Answers:
        """Return the answers for all rows without gradients, each [B, R] float on the CPU.

        A batch without rows gives [0, R] under the same names.
        """
        self.module.eval()
        results: Answers = {}
        width = rows.batch["responses"].shape[1]
        with self.offloader.parameters():
            with _memory_named(self.name, limits):
                micros = self._plan(rows, limits, at_least=1)
                for micro in progress.each(micros, "micro-batch", len(micros)):
                    packed = micro.packed
                    for key, value in answer(self.module, packed, ask).items():
                        part = packed.unpack(value).cpu()
                        whole = results.setdefault(key, part.new_zeros(len(rows), width))
                        if micro.indices is not None:
                            whole[micro.indices] = part
            self._reshard()
        return results

    def train_mini_batch(self, rows: DataProto, ask: Ask, loss: LossFn, limits: BatchLimits) -> Metrics:
        """Take one optimizer step on `rows`, which are this rank's part of the mini-batch."""
        assert self.optimizer is not None and self.optim is not None, (
            f"{self.name} was built without an optimizer"
        )
        self.module.train()
        self.optimizer.zero_grad()
        metrics = Metrics()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        odd: dict[str, Tensor] = {}  # numbers that are not finite, by name of the output
        with self.offloader.parameters(), self.offloader.masters():
            with _memory_named(self.name, limits):
                micros = self._plan(rows, limits)
                for number, micro in enumerate(progress.each(micros, "micro-batch", len(micros)), start=1):
                    self._before(last=number == len(micros))
                    packed = micro.packed
                    with self._activations_kept():
                        named = answer(self.module, packed, ask)
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
            return self._step(rows, total, metrics, odd)

    @property
    def is_offloaded(self) -> bool:
        """Whether the parameters are offloaded to CPU memory between phases (`fsdp_config.param_offload`)."""
        return self.offloader.moves_parameters

    def onload(self) -> None:
        """Bring the parameters to the device, for a reader outside of this engine's own calls."""
        self.offloader.onload()

    def offload(self) -> None:
        """Undo one `onload`; the last one sends the parameters back to CPU memory, if they are offloaded."""
        self.offloader.offload()

    def _plan(self, batch: DataProto, limits: BatchLimits, *, at_least: int = 0) -> list[MicroBatch]:
        agree: Agree | None = None
        if self.mesh is not None:
            agree = max_over
        return plan(batch, limits, self.device, agree, at_least=at_least)

    def _activations_kept(self) -> AbstractContextManager[None]:
        if self.activations is None:
            return nullcontext()
        return self.activations.kept()

    def _before(self, *, last: bool) -> None:
        if self.mesh is not None:
            before_micro_batch(self.module, last=last, keep_gathered=not self.fsdp.reshard_after_forward)

    def _reshard(self) -> None:
        """Free gathered parameters, so that every parameter is this rank's shard again."""
        if self.mesh is not None:
            reshard(self.module)

    def _measure(self, total: Tensor) -> tuple[float, Tensor]:
        """Return the mini-batch's loss and its gradient norm (0-d), which are the same on every rank."""
        assert self.optimizer is not None
        if self.mesh is None:
            return float(total), self.optimizer.gradient_norm()
        self.optimizer.collect_shards()
        mine = total
        if not self.mesh.is_leader:  # ranks that share rows have the same loss: one of them counts it
            mine = torch.zeros_like(total)
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
        # metrics of the step, not of a rank's rows, come from one rank
        counts = self.mesh is None or self.mesh.rank == 0
        if counts:
            metrics.add_sum(f"{self.name}/num_updates", float(finite))
            metrics.add_sum(f"{self.name}/num_skipped_steps", float(not finite))
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
        with self.offloader.moments():
            self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self.num_steps += 1
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state of module, optimizer and counters; of a model with adapters only what is trained.

        Sharded tensors are DTensors, and everything else is equal on all ranks.
        """
        model = self._model()
        rounded: dict[int, Tensor] = {}  # tied parameters stay one tensor
        for key, dtype in self.compute_dtypes.items():
            shard = local(model[key])
            if shard.data_ptr() not in rounded or shard.numel() == 0:
                rounded[shard.data_ptr()] = placed_like(shard.to(dtype), model[key])
            model[key] = rounded[shard.data_ptr()]
        optimizer: dict[str, Any] = {}
        if self.optimizer is not None:
            optimizer = self.optimizer.state_dict()
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": {"num_steps": self.num_steps, "nonfinite_in_a_row": self.guard.in_a_row},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the parts of `state_dict()` that are there, in place: every user of the module sees the new
        weights.
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
        """Return the module's state without the base of adapters, which stays as it is in its own folder."""
        state = self.module.state_dict()
        names = saved_names(self.module)
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


def _dump_suffix(mesh: EngineMesh | None) -> str | None:
    """Return the suffix of this rank's folder of dumped rows; None where another rank has the same rows."""
    if mesh is None:
        return ""
    if mesh.is_leader:
        return f"_rank{mesh.rank}"
    return None


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
