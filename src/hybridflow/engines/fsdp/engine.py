"""One model in training: packed micro-batches, one optimizer step for each mini-batch, a guard against numbers that are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.config.model import OptimConfig
from hybridflow.engines.base import BatchLimits, ForwardFn, LossFn
from hybridflow.engines.fsdp.optimizer import MasterAdamW
from hybridflow.engines.fsdp.schedule import learning_rate
from hybridflow.errors import CheckpointError, TrainingError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.balancing import split_micro_batches
from hybridflow.protocol.packing import pack

logger = logging.getLogger(__name__)


class FSDPEngine:
    """Implements `TrainEngine` for one process.

    `name` prefixes the metrics (`actor`, `critic`). An optimizer step whose loss or gradient norm is not finite changes nothing: it is
    reported, its rows are written to `dump_dir`, and after `max_nonfinite_steps` of them in a row a TrainingError ends the run.
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
    ) -> None:
        self.module, self.name, self.optim = module, name, optim
        self.device = next(module.parameters()).device
        self.optimizer = None if optim is None else MasterAdamW(module.named_parameters(), optim)
        self.total_steps = total_steps if optim is None or optim.total_training_steps < 0 else optim.total_training_steps
        self.grad_clip = grad_clip
        self.max_nonfinite_steps, self.dump_dir = max_nonfinite_steps, dump_dir
        self.num_steps = 0  # optimizer steps applied
        self.nonfinite_in_a_row = 0

    @torch.no_grad()
    def forward(self, batch: DataProto, forward: ForwardFn, limits: BatchLimits) -> dict[str, Tensor]:
        """Outputs of all rows without gradients, each [B, R] float on the CPU."""
        self.module.eval()
        results: dict[str, Tensor] = {}
        with _memory_named(self.name, limits):
            for indices, micro in self._micro_batches(batch, limits):
                packed = pack(micro)
                for key, value in forward(self.module, packed).items():
                    rows = packed.unpack(value).cpu()
                    whole = results.setdefault(key, rows.new_zeros(len(batch), rows.shape[1]))
                    whole[indices] = rows
        return results

    def train_mini_batch(self, batch: DataProto, forward: ForwardFn, loss: LossFn, limits: BatchLimits) -> Metrics:
        """One optimizer step on the rows of `batch`."""
        assert self.optimizer is not None and self.optim is not None, f"{self.name} was built without an optimizer"
        self.module.train()
        self.optimizer.zero_grad()
        metrics = Metrics()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with _memory_named(self.name, limits):
            for _, micro in self._micro_batches(batch, limits):
                packed = pack(micro)
                outputs = {key: packed.unpack(value) for key, value in forward(self.module, packed).items()}
                share, micro_metrics = loss(outputs, micro)
                share.backward()
                total += share.detach()
                metrics.update(micro_metrics)
        return self._step(batch, float(total), metrics)

    def _micro_batches(self, batch: DataProto, limits: BatchLimits) -> list[tuple[list[int], DataProto]]:
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        groups = batch.batch["group_ids"].tolist() if limits.keep_groups else None
        bins = split_micro_batches(lengths, max_tokens=limits.max_tokens, max_rows=limits.max_rows, groups=groups)
        return [(indices, batch.select_idxs(indices).to(self.device)) for indices in bins]

    def _step(self, batch: DataProto, loss: float, metrics: Metrics) -> Metrics:
        assert self.optimizer is not None and self.optim is not None
        norm = self.optimizer.gradient_norm()
        grad_norm = float(norm)
        lr = learning_rate(self.num_steps, self.optim, self.total_steps)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        metrics.add_sum(f"{self.name}/num_updates", 1.0 if finite else 0.0)
        metrics.add_sum(f"{self.name}/num_skipped_steps", 0.0 if finite else 1.0)
        if not finite:
            self.optimizer.zero_grad()
            self._report_not_finite(batch, loss, grad_norm)
            return metrics
        self.nonfinite_in_a_row = 0
        metrics.add_mean(f"{self.name}/grad_norm", grad_norm)
        metrics.add_last(f"{self.name}/lr", lr)
        if self.grad_clip is not None and grad_norm > self.grad_clip:
            self.optimizer.scale_gradients(self.grad_clip / (norm + 1e-6))
        self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self.num_steps += 1
        return metrics

    def _report_not_finite(self, batch: DataProto, loss: float, grad_norm: float) -> None:
        self.nonfinite_in_a_row += 1
        where = "not written (no folder given)"
        if self.dump_dir is not None:
            folder = self.dump_dir / f"{self.name}_after_update_{self.num_steps}_{self.nonfinite_in_a_row}"
            batch.save_to_disk(folder)
            where = str(folder)
        text = (
            f"{self.name}: optimizer step skipped, loss {loss}, gradient norm {grad_norm} "
            f"({self.nonfinite_in_a_row} in a row of at most {self.max_nonfinite_steps}); its rows: {where}"
        )
        if self.nonfinite_in_a_row >= self.max_nonfinite_steps:
            raise TrainingError(
                f"{text}. The run stops. Look for a broken reward or a learning rate that is too high; "
                "trainer.max_nonfinite_steps sets how many are allowed."
            )
        logger.warning(text)

    def state_dict(self) -> dict[str, Any]:
        """Module, optimizer and counters."""
        return {
            "model": dict(self.module.state_dict()),
            "optimizer": {} if self.optimizer is None else self.optimizer.state_dict(),
            "scheduler": {"num_steps": self.num_steps, "nonfinite_in_a_row": self.nonfinite_in_a_row},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the parts of `state_dict()` that are there, in place: whoever shares the module sees the new weights."""
        if "model" in state:
            self._load_module(state["model"])
        if self.optimizer is not None:
            if "optimizer" in state:
                self.optimizer.load_state_dict(state["optimizer"])
            else:
                self.optimizer.copy_from_parameters()
        if "scheduler" in state:
            self.num_steps = int(state["scheduler"]["num_steps"])
            self.nonfinite_in_a_row = int(state["scheduler"]["nonfinite_in_a_row"])

    def _load_module(self, saved: dict[str, Tensor]) -> None:
        own = self.module.state_dict()
        if set(own) != set(saved):
            odd = sorted(set(own) ^ set(saved))[:3]
            raise CheckpointError(f"The checkpoint's model has other parameters than this {self.name}, for example {odd}.")
        for key, value in saved.items():
            if own[key].shape != value.shape:
                raise CheckpointError(f"{self.name}: {key} is {tuple(value.shape)} in the checkpoint and {tuple(own[key].shape)} here.")
        for key, value in saved.items():
            own[key].copy_(value)


@contextmanager
def _memory_named(name: str, limits: BatchLimits) -> Iterator[None]:
    """Say which keys to lower where a forward or backward does not fit the device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{name}: out of device memory in a forward of at most {limits.max_tokens} tokens: lower its *_max_token_len_per_gpu or "
            f"*_micro_batch_size_per_gpu, or set enable_gradient_checkpointing=true. ({str(error).splitlines()[0]})"
        ) from error
