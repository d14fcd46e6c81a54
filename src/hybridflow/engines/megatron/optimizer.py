"""megatron-core's distributed optimizer: AdamW, its moments and masters divided among data-parallel ranks.

Its state is read and written by the names of the stage's parameters, each whole as this rank's stage has it,
so that checkpoints know nothing of its buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from hybridflow.config.model import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class DistributedAdamW:
    """The optimizer of the stage whose parts `ddps` wrap; all ranks make it and every call together."""

    def __init__(self, ddps: list[DistributedDataParallel], config: OptimConfig, dtype: torch.dtype) -> None:
        self.ddps = ddps
        self.inner = get_megatron_optimizer(
            OptimizerConfig(
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                clip_grad=0.0,
            ),
            ddps,
            use_gloo_process_groups=False,
        )
        for group in self.inner.param_groups:  # megatron-core leaves this to its scheduler
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        self.parameters: dict[str, nn.Parameter] = dict(
            nn.ModuleList([ddp.module for ddp in ddps]).named_parameters()
        )
        # experts, whose gradients other ranks reduce, have an optimizer of their own, the second one
        self._part_of = {
            parameter: self.inner.chained_optimizers[0 if getattr(parameter, "allreduce", True) else 1]
            for parameter in self.parameters.values()
        }
        # megatron-core's own index of them counts otherwise where a group has parameters of two dtypes
        self._masters: dict[nn.Parameter, Tensor] = {
            parameter: master
            for part in set(self._part_of.values())
            for models, masters in (
                (part.model_fp32_groups, part.shard_fp32_groups),
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            )
            for group, of_group in zip(models, masters, strict=True)
            for parameter, master in zip(group, of_group, strict=True)
        }

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        self.inner.zero_grad()

    def gradient_norm(self) -> Tensor:
        """Complete the gradients, and return the 2-norm of those of all ranks, 0-d float64 on the host."""
        self.inner.prepare_grads()
        return torch.tensor(float(self.inner.get_grad_norm()), dtype=torch.float64)

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a number."""
        for group in self.inner.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    master.grad.mul_(factor.to(master.grad.dtype))

    def step(self, lr: float) -> None:
        """Take one step at learning rate `lr`, and gather the weights that other ranks have stepped."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step_with_ready_grads()

    @property
    def num_steps(self) -> int:
        """Number of steps that the moments have taken, the same on all ranks."""
        steps = [
            int(entry["step"]) for part in self._inners for entry in part.state.values() if "step" in entry
        ]
        return max(steps, default=0)

    @property
    def _inners(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in self.inner.chained_optimizers]

    @torch.no_grad()
    def whole_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the master and the moments of each parameter of the stage, float32, in main memory.

        They are gathered from the ranks that divide them, one parameter at a time.
        """
        found: dict[str, dict[str, Tensor]] = {"master": {}, **{moment: {} for moment in MOMENTS}}
        for name, parameter in self.parameters.items():
            part = self._part_of[parameter]
            whole = torch.zeros(3, parameter.numel(), dtype=torch.float32, device=parameter.device)
            if parameter in self._masters:
                own = part._get_model_param_range_map(parameter)["param"]
                master, entry = self._own(parameter)
                for row, value in enumerate([master, *(entry.get(moment) for moment in MOMENTS)]):
                    if value is not None:
                        whole[row, own.start : own.end] = value
            dist.all_reduce(whole, group=part.data_parallel_group)
            for row, kind in zip(whole.cpu(), found, strict=True):
                found[kind][name] = row.view(parameter.shape)
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], num_steps: int) -> None:
        """Take this rank's parts of masters and moments, whole tensors by kind and name."""
        for name, parameter in self.parameters.items():
            part = self._part_of[parameter]
            if parameter not in self._masters:
                continue
            own = part._get_model_param_range_map(parameter)["param"]
            master, entry = self._own(parameter)
            pieces = {kind: tensors[name].reshape(-1)[own.start : own.end] for kind, tensors in state.items()}
            master.copy_(pieces["master"])
            entry["step"] = torch.tensor(float(num_steps))
            for moment in MOMENTS:
                entry[moment] = pieces[moment].to(master, copy=True)

    def refresh(self) -> None:
        """Copy the weights of the stage into the masters, after they were written from outside."""
        self.inner.reload_model_params()

    def _own(self, parameter: nn.Parameter) -> tuple[Tensor, dict[str, Any]]:
        """Return this rank's part of the master of a parameter, and the state of it, empty before a step."""
        master = self._masters[parameter]
        return master, self._part_of[parameter].optimizer.state[master]
