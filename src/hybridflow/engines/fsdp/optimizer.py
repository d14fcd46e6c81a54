"""AdamW that owns float32 masters: the module keeps its compute dtype, a step rounds into it in place.

Where the module is float32 or wider already, masters are the parameters themselves and cost nothing. Where it is bfloat16, gradients of
the micro-batches add up in float32, because bfloat16 sums lose the small ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.config.model import OptimConfig
from hybridflow.errors import CheckpointError


class MasterAdamW:
    """AdamW over named parameters; weight decay on matrices only (biases, norms and scalars are not decayed)."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> None:
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        assert self.parameters, "an optimizer needs at least one parameter that requires a gradient"
        self.masters: dict[str, Tensor] = {name: self._master(p) for name, p in self.parameters.items()}
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        others = [m for m in self.masters.values() if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        beta1, beta2 = config.betas
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)

    def _master(self, parameter: nn.Parameter) -> Tensor:
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
    def gradient_norm(self) -> Tensor:
        """2-norm of all gradients together, 0-d float; 0 where there are none."""
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
                master.grad.mul_(factor)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One AdamW step at learning rate `lr`, rounded into the module's parameters in place."""
        for param_group in self.adamw.param_groups:
            param_group["lr"] = lr
        self.adamw.step()
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for master in self.masters.values():
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and masters by parameter name."""
        state: dict[str, Any] = {}
        for name, master in self.masters.items():
            entry = dict(self.adamw.state.get(master, {}))
            if master is not self.parameters[name]:
                entry["master"] = master
            state[name] = entry
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict()`; CheckpointError where the names differ."""
        if set(state) != set(self.masters):
            odd = sorted(set(state) ^ set(self.masters))[:3]
            raise CheckpointError(f"The checkpoint's optimizer is for other parameters than this model's, for example {odd}.")
        self.copy_from_parameters()
        for name, entry in state.items():
            master = self.masters[name]
            if "master" in entry:  # else the checkpoint is of a run whose parameters were their own masters
                master.copy_(entry["master"])
                self.parameters[name].copy_(master)
            moments = {key: value.to(master.device).clone() for key, value in entry.items() if key != "master"}
            if moments:
                self.adamw.state[master] = moments
            else:
                self.adamw.state.pop(master, None)

    @torch.no_grad()
    def copy_from_parameters(self) -> None:
        """Masters become what the module's parameters are, after those were written from outside."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                self.masters[name].copy_(parameter)
