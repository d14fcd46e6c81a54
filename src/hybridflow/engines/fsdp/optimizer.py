"""AdamW that owns float32 masters: the module keeps its compute dtype, a step rounds into it in place.

Where the module is float32 or wider already, masters are the parameters themselves and cost nothing. Where it
is bfloat16, gradients of the micro-batches add up in float32, because bfloat16 sums lose the small ones.
Where parameters are sharded, the masters are this rank's pieces, in the same memory: a step is plain AdamW
over plain tensors, and no rank talks to another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridflow.config.model import OptimConfig
from hybridflow.distributed.shards import local, piece_for, placed_like, replicas
from hybridflow.errors import CheckpointError


class MasterAdamW:
    """AdamW over named parameters; weight decay on matrices only (biases, norms and scalars are not decayed).

    `narrow` names sharded parameters that are used in a narrower dtype than their shards have: those are
    masters, and saved as such.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        *,
        narrow: Collection[str] = (),
    ) -> None:
        self.narrow = narrow
        self.moments_rest: torch.device | None = None
        """Where the moments wait between steps; None: where their masters are."""
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        assert self.parameters, "an optimizer needs at least one parameter that requires a gradient"
        self.masters: dict[str, Tensor] = {name: self._master(p) for name, p in self.parameters.items()}
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        others = [m for m in self.masters.values() if m.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        beta1, beta2 = config.betas
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True
        )

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if isinstance(parameter, DTensor):
            assert parameter.dtype.itemsize >= 4, "trained shards are float32 or wider"
            return local(parameter)
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = parameter.detach().to(torch.float32, copy=True)
        master.grad = None

        def accumulate(p: Tensor) -> None:
            assert p.grad is not None
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    @torch.no_grad()
    def collect_shards(self) -> None:
        """Give the masters the gradients of their sharded parameters (no parameter may be gathered)."""
        for master in self.masters.values():
            master.grad = None
        self.refresh_shards()
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                self.masters[name].grad = local(parameter.grad)

    @torch.no_grad()
    def gradient_square(self, world_size: int, device: torch.device) -> Tensor:
        """This rank's share of the squared 2-norm, 0-d float64 on `device`: the shares of all ranks sum to
        the whole.

        A piece that several ranks hold (copies of the model, parameters that tensor parallelism leaves whole)
        is shared among them.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name, master in self.masters.items():
            if master.grad is not None:
                square = torch.linalg.vector_norm(master.grad).double().square()
                total += (square / replicas(self.parameters[name], world_size)).to(device)
        return total

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """2-norm of all gradients together, 0-d float; 0 where there are none. For parameters that are not
        sharded.
        """
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if not grads:
            return torch.zeros(())
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        return norm

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a 0-d tensor."""
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor.to(master.grad.device))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One AdamW step at learning rate `lr`, rounded into the module's parameters in place."""
        for param_group in self.adamw.param_groups:
            param_group["lr"] = lr
        self.adamw.step()
        for name, parameter in self._apart():
            parameter.copy_(self.masters[name])

    def _apart(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose masters are memory of their own."""
        return (
            (name, p)
            for name, p in self.parameters.items()
            if p is not self.masters[name] and not isinstance(p, DTensor)
        )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad = None

    def move_masters(self, device: torch.device) -> None:
        """Masters apart from their parameters go to `device`; a gradient beside one is dropped."""
        for name, _ in self._apart():
            self.masters[name].grad = None
            self.masters[name].data = self.masters[name].data.to(device)

    def move_moments(self, device: torch.device | None) -> None:
        """The moments and step counts go to `device`; None: to their masters."""
        for master, entry in self.adamw.state.items():
            for key, value in entry.items():
                entry[key] = value.to(master.device if device is None else device)

    def _rest(self, master: Tensor) -> torch.device:
        return master.device if self.moments_rest is None else self.moments_rest

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a master: before its first step, zeros, as AdamW itself would start."""
        if not self.adamw.state.get(master):
            rest = self._rest(master)
            zeros = {
                key: torch.zeros_like(master, memory_format=torch.preserve_format, device=rest)
                for key in ("exp_avg", "exp_avg_sq")
            }
            self.adamw.state[master] = {"step": torch.zeros((), dtype=torch.float32, device=rest), **zeros}
        entry: dict[str, Tensor] = self.adamw.state[master]
        return entry

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and masters by parameter name, the same names on any number of ranks; DTensors
        where sharded.
        """
        self.refresh_shards()
        state: dict[str, Any] = {}
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            entry = {
                key: value if key == "step" else placed_like(value, parameter)
                for key, value in self._moments(master).items()
            }
            if isinstance(parameter, DTensor):
                if name in self.narrow:
                    entry["master"] = parameter.detach()
            elif master is not parameter:
                entry["master"] = master
            state[name] = entry
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict()`, of as many ranks or of others; CheckpointError where the names differ."""
        if set(state) != set(self.masters):
            odd = sorted(set(state) ^ set(self.masters))[:3]
            raise CheckpointError(
                f"The checkpoint's optimizer is for other parameters than this model's, for example {odd}."
            )
        self.copy_from_parameters()
        for name, entry in state.items():
            master, parameter = self.masters[name], self.parameters[name]
            if "master" in entry:  # else the checkpoint is of a run whose parameters were their own masters
                master.copy_(piece_for(parameter, entry["master"]))
                if master is not parameter and not isinstance(parameter, DTensor):
                    parameter.copy_(master)
            moments = {
                key: self._taken(parameter, key, value).to(self._rest(master))
                for key, value in entry.items()
                if key != "master"
            }
            if moments:
                self.adamw.state[master] = moments
            else:
                self.adamw.state.pop(master, None)

    def _taken(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        return (value if key == "step" else piece_for(parameter, value)).clone()

    def refresh_shards(self) -> None:
        """Masters of sharded parameters see them where they are now."""
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor):
                self.masters[name].data = local(parameter)

    @torch.no_grad()
    def copy_from_parameters(self) -> None:
        """Masters become what the module's parameters are, after those were written from outside."""
        self.refresh_shards()
        for name, parameter in self._apart():
            self.masters[name].copy_(parameter)
