"""An optimizer that owns float32 masters: the module keeps its compute dtype, a step rounds into it in place.

In a float32 or wider module the masters are the parameters themselves and cost nothing. In a bfloat16 module
the gradients of micro-batches add up in float32, because bfloat16 sums lose small terms. Where parameters are
sharded, the masters are this rank's pieces, in the same memory. `update_rules` has the rules by name.

The learning rate is a pure function of the optimizer step, so that a resume needs no scheduler object.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridflow.config.model import OptimConfig
from hybridflow.distributed.shards import is_absent, local, piece_for, placed_like, replicas
from hybridflow.distributed.transfers import HostBuffers, to_device
from hybridflow.engines.update_rules import make_rules, read_state, state_names, write_state
from hybridflow.errors import CheckpointError, TrainingError


class MasterAdamW:
    """AdamW, or another rule by name, over named parameters.

    Weight decay is on matrices only: biases, norms and scalars are not decayed. `apart` names the embeddings
    and output heads, which Muon leaves to AdamW.

    `compute_dtypes` names sharded parameters that are gathered in a narrower dtype than their shards have:
    those shards are masters, and are saved as such. With `in_stages` some parameters may be absent here.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        *,
        compute_dtypes: Collection[str] = (),
        apart: Collection[str] = (),
        in_stages: bool = False,
    ) -> None:
        self.compute_dtypes = compute_dtypes
        self.moments_rest: torch.device | None = None
        """Device of the moments between steps; None means that of their masters."""
        trained = {name: p for name, p in named_parameters if p.requires_grad}
        elsewhere = {name: p for name, p in trained.items() if in_stages and is_absent(p)}
        self.absent = {
            name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in elsewhere.items()
        }
        """Stand-ins, without memory, for the masters of parameters that other stages of a pipeline train."""
        self.parameters = {name: p for name, p in trained.items() if name not in self.absent}
        if not self.parameters:
            raise TrainingError(
                "no parameter of the model can be trained here: all are frozen (requires_grad is false). "
                "Look for code of your own that freezes them, and for target_modules that name no layer"
            )
        self.masters: dict[str, Tensor] = {name: self._master(p) for name, p in self.parameters.items()}
        self.rules = make_rules(self.masters, self.parameters, config, apart)
        known = list(self.rules)
        if self.absent:
            known += make_rules(self.absent, elsewhere, config, apart)
        self.rule_of = {
            master: rule for rule in known for group in rule.param_groups for master in group["params"]
        }

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if isinstance(parameter, DTensor):
            assert parameter.dtype.itemsize >= 4, "trained shards are float32 or wider"
            piece = torch.empty(0, dtype=parameter.dtype, device=local(parameter).device)
            piece.data = local(parameter)  # itself a view, which would keep the memory that the shard leaves
            return piece
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = parameter.detach().to(torch.float32, copy=True)
        master.grad = None

        def accumulate(p: Tensor) -> None:
            assert p.grad is not None
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    @torch.no_grad()
    def collect_shards(self) -> None:
        """Give the masters the gradients of their sharded parameters, none of which may be gathered."""
        for master in self.masters.values():
            master.grad = None
        self.refresh_shards()
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                self.masters[name].grad = local(parameter.grad)

    @torch.no_grad()
    def gradient_square(
        self, world_size: int, device: torch.device, elsewhere: Collection[str] = ()
    ) -> Tensor:
        """Return this rank's share of the squared gradient norm, 0-d float64 on `device`.

        The shares of all ranks sum to the whole; parameters named in `elsewhere` are in another rank's. A
        piece that several ranks hold (copies of the model, parameters that tensor parallelism leaves whole)
        counts in equal parts on each.
        """
        grads = {
            name: master.grad
            for name, master in self.masters.items()
            if master.grad is not None and name not in elsewhere
        }
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=device)
        squares = torch.stack(torch._foreach_norm(list(grads.values()))).double().square()
        copies = [replicas(self.parameters[name], world_size) for name in grads]
        squares = squares / to_device(torch.tensor(copies, dtype=torch.float64), squares.device)
        if squares.device.type == "cpu":  # in the order of the parameters: the bits of adding one by one
            return to_device(squares.cumsum(0)[-1], device)
        return squares.sum()

    @property
    def num_gradients(self) -> int:
        """Number of masters that have a gradient."""
        return sum(master.grad is not None for master in self.masters.values())

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all gradients together, 0-d float; for parameters that are not sharded."""
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if not grads:
            return torch.zeros(())
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return norm

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a 0-d tensor of main memory, which torch takes as a number anywhere."""
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Take one step at learning rate `lr`, rounded into the module's parameters in place."""
        for rule in self.rules:
            for param_group in rule.param_groups:
                param_group["lr"] = lr
            rule.step()
        for name, parameter in self._apart():
            parameter.copy_(self.masters[name])

    def _apart(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters whose masters have separate memory, with their names."""
        return (
            (name, p)
            for name, p in self.parameters.items()
            if p is not self.masters[name] and not isinstance(p, DTensor)
        )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad = None

    def move_masters(self, device: torch.device, buffers: HostBuffers) -> None:
        """Move masters that have separate memory to `device`, and drop their gradients.

        On a CPU they are complete after `buffers.wait`.
        """
        for name, _ in self._apart():
            master = self.masters[name]
            master.grad = None
            master.data = buffers.move(f"master {name}", master.data, device)

    def move_moments(self, device: torch.device | None, buffers: HostBuffers) -> None:
        """Move the moments to `device`, as `move_masters` does; None means to their masters.

        Step counts stay on the device: the fused AdamW reads them there, and they are one number each.
        """
        for name, master in self.masters.items():
            entry = self.rule_of[master].state.get(master, {})
            to = device or master.device
            for key, value in entry.items():
                if key != "step" or to.type != "cpu":
                    entry[key] = buffers.move(f"{key} {name}", value, to)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return moments, step counts and masters by parameter name; DTensors where sharded.

        The names are the same on any number of ranks.
        """
        self.refresh_shards()
        state: dict[str, Any] = {}
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            rest = self.moments_rest or master.device
            entry = dict(read_state(self.rule_of[master], master, rest))
            for key in entry.keys() - {"step"}:
                entry[key] = placed_like(entry[key], parameter)
            if isinstance(parameter, DTensor):
                if name in self.compute_dtypes:
                    entry["master"] = parameter.detach()
            elif master is not parameter:
                entry["master"] = master
            state[name] = entry
        return state | {name: self._absent_entry(name) for name in self.absent}

    def _absent_entry(self, name: str) -> dict[str, Tensor]:
        """Return the state of a parameter that another stage holds: names, shapes and dtypes alone."""
        master = self.absent[name]
        entry = dict(read_state(self.rule_of[master], master, master.device))
        if name in self.compute_dtypes:
            entry["master"] = master
        return entry

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict()` of any number of ranks; CheckpointError where the names differ."""
        if set(state) != self.masters.keys() | self.absent.keys():
            odd = sorted(set(state) ^ (self.masters.keys() | self.absent.keys()))[:3]
            raise CheckpointError(
                f"The checkpoint's optimizer is for other parameters than this model's, for example {odd}."
            )
        self.copy_from_parameters()
        for name, master in self.masters.items():
            entry = state[name]
            parameter = self.parameters[name]
            rule = self.rule_of[master]
            saved = set(entry) - {"master", "step"}
            if saved and saved != set(state_names(rule)):
                kept = ", ".join(state_names(rule)) or "nothing"
                raise CheckpointError(
                    f"The checkpoint's optimizer has {', '.join(sorted(saved))} of {name}, and "
                    f"{type(rule).__name__} keeps {kept}: set optim.optimizer to the checkpoint's, or leave "
                    "optimizer out of checkpoint.load_contents"
                )
            if "master" in entry:  # else the checkpoint is of a run whose parameters were their own masters
                master.copy_(piece_for(parameter, entry["master"]))
                if master is not parameter and not isinstance(parameter, DTensor):
                    parameter.copy_(master)
            moments: dict[str, Tensor] = {}
            for key, value in entry.items():
                if key in state_names(rule):
                    value = piece_for(parameter, value)
                if key != "master":
                    moments[key] = value.clone().to(self.moments_rest or master.device)
            write_state(rule, master, moments)

    def refresh_shards(self) -> None:
        """Point the masters of sharded parameters to the memory where these are now."""
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor):
                self.masters[name].data = local(parameter)

    @torch.no_grad()
    def copy_from_parameters(self) -> None:
        """Copy the module's parameters into the masters, after they were written from outside."""
        self.refresh_shards()
        for name, parameter in self._apart():
            self.masters[name].copy_(parameter)


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Return the number of warm-up steps: the absolute number where given, else the share of all steps."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps)


def learning_rate(step: int, config: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (the first is 0).

    Warm-up is linear and reaches `lr` at its last step. After it the rate is constant, or falls along a line
    or half-cosines to `min_lr_ratio * lr` at `total_steps`; `wsd` falls in the last steps only.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    if config.lr_scheduler_type == "wsd":
        return _falling(config, _wsd_factor(step, config, total_steps))
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "linear":
        factor = 1.0 - progress
    else:
        factor = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return _falling(config, factor)


def _falling(config: OptimConfig, factor: float) -> float:
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)


def wsd_decay_steps(config: OptimConfig, total_steps: int) -> int:
    """Return the number of steps in which `wsd` falls at the end: the number given, else a tenth of all."""
    if config.lr_wsd_decay_steps >= 0:
        return config.lr_wsd_decay_steps
    return max(1, total_steps // 10)


def _wsd_factor(step: int, config: OptimConfig, total_steps: int) -> float:
    """Return 1 until the fall begins, then a curve to 0 at `total_steps`, by Megatron's formulas."""
    decay = wsd_decay_steps(config, total_steps)
    past = step - (total_steps - decay)
    if past <= 0:
        return 1.0
    share = min(1.0, past / max(1, decay))
    if config.lr_wsd_decay_style == "linear":
        return 1.0 - share
    if config.lr_wsd_decay_style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * share))
    if config.lr_wsd_decay_style == "minus_sqrt":
        return 1.0 - math.sqrt(share)
    return 2.0 * math.pow(0.5, share) - 1.0
