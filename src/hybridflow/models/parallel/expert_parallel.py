"""Expert parallelism: each rank of the mesh ("ep",) holds some of the experts, and gets the tokens for them.

    hidden [N, H], routes [N, K] ──sorted──► all-to-all ──► own experts ──► all-to-all ──► weighted sum [N, H]

Expert tensors become DTensors with `Shard(0)`, so that files, checkpoints and weight sync see whole tensors
with a place for each part; FSDP then shards them over the other ranks. The products of a token's experts are
computed where the experts are, by the model's own kernel, and weighted and added up where the token is.

Ranks of tensor parallelism have the same tokens. Each sends its share of them to the experts, and what comes
back is gathered on all: the experts' gradients are then sums over ranks, as they are over ranks with other
rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hybridflow.errors import ModelError
from hybridflow.models.experts.layers import count_choices, expert_modules, num_experts
from hybridflow.models.parallel.sequence_parallel import AllToAll, exchange
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel

KEY = "fsdp_config.expert_parallel_size"
PLACED = "grouped_gemm"
"""What transformers' plan for expert parallelism calls the parameters of experts."""


def apply_expert_parallel(
    model: PolicyModel | ValueModel, mesh: DeviceMesh, same_tokens: dist.ProcessGroup | None = None
) -> list[nn.Module]:
    """Cut the experts of `model`, on the meta device, among the ranks of the one-dimensional `mesh`.

    `same_tokens` are ranks that have the same tokens, those of tensor parallelism. Returns the modules that
    hold experts. Raises ModelError for a model without experts or whose plan names none, and for a number of
    experts that does not divide.
    """
    assert mesh.ndim == 1, f"expert parallelism takes a mesh of one dimension, got {mesh}"
    check_experts(model, mesh.size())
    backbone: Any = model.hf.base_model if isinstance(model, PolicyModel) else model.backbone
    modules = list(expert_modules(backbone).values())
    for experts in modules:
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = parameter.detach().chunk(mesh.size())[0]
            cut = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        forward = functools.partial(_forward, experts, mesh)
        if same_tokens is not None:
            forward = functools.partial(_on_own_tokens, forward, same_tokens)
        experts.forward = forward
    return modules


def check_experts(model: PolicyModel | ValueModel, ranks: int) -> None:
    """Raise ModelError where the experts of a model cannot be sharded over `ranks` ranks."""
    backbone: Any = model.hf.base_model if isinstance(model, PolicyModel) else model.backbone
    kind = f"{type(backbone).__name__} (model_type {backbone.config.model_type!r})"
    count = num_experts(backbone.config)
    modules = expert_modules(backbone)
    plan = getattr(backbone.config.get_text_config(), "base_model_ep_plan", None) or {}
    planned = {name.rpartition(".")[2] for name, style in plan.items() if style == PLACED}
    own = {name for experts in modules.values() for name, _ in experts.named_parameters()}
    if not count or not modules or own != planned:
        raise ModelError(
            f"{kind} has no experts that can be cut among ranks: transformers' plan for it names "
            f"{', '.join(sorted(planned)) or 'no tensors'}, and its experts have "
            f"{', '.join(sorted(own)) or 'none'}. Set {KEY}=1"
        )
    if count % ranks:
        raise ModelError(f"{kind} has {count} experts, which {KEY}={ranks} does not divide: set a divisor")


class _OwnExperts:
    """The experts of this rank, as the kernels of a model see them: plain tensors of its part."""

    def __init__(self, experts: Any, ranks: int) -> None:
        self._experts = experts
        self.num_experts = experts.num_experts // ranks
        for name, parameter in experts.named_parameters(recurse=False):
            setattr(self, name, parameter.to_local(grad_placements=[Shard(0)]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def compute(self, states: Tensor, expert: Tensor) -> Tensor:
        """Return the outputs [S, H] of the expert [S] int64, numbered here, of each of the states [S, H]."""
        if not len(states):  # the parameters still take part in the backward pass, as on every other rank
            nothing = sum((each * 0.0).sum() for each in vars(self).values() if isinstance(each, Tensor))
            return states + nothing
        ones = states.new_ones(len(states), 1)
        outputs: Tensor = type(self._experts).forward(self, states, expert[:, None], ones)
        return outputs


def _on_own_tokens(
    forward: Callable[..., Tensor],
    group: dist.ProcessGroup,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Compute the experts of tokens that all ranks of `group` have, each rank those of its share."""
    count = len(hidden_states)
    states, weights = _OwnTokens.apply(group, hidden_states, top_k_weights)  # type: ignore[no-untyped-call]
    outputs = forward(states, top_k_index[_share(count, group)], weights)
    whole: Tensor = _AllTokens.apply(group, outputs, count)  # type: ignore[no-untyped-call]
    return whole


class _OwnTokens(torch.autograd.Function):
    """This rank's share of tokens [N, ...] that all ranks have; their gradient is gathered on all of them."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.count = len(tokens[0])
        own = _share(ctx.count, group)
        return tuple(each[own].clone() for each in tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_gathered(grad, ctx.group, ctx.count) for grad in grads)


class _AllTokens(torch.autograd.Function):
    """Tokens [N, H] gathered from each rank's share; all ranks have their gradient, and take their shares."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, own: Tensor, count: int) -> Tensor:
        ctx.own = _share(count, group)
        return _gathered(own, group, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return None, grads[0][ctx.own], None


def _share(count: int, group: dist.ProcessGroup) -> slice:
    """Return which of `count` tokens are this rank's; the last ranks may have fewer, or none."""
    part = -(-count // group.size())
    return slice(part * group.rank(), part * (group.rank() + 1))


def _gathered(own: Tensor, group: dist.ProcessGroup, count: int) -> Tensor:
    """Return all `count` tokens [N, ...] from each rank's share."""
    part = -(-count // group.size())
    padded = own.new_zeros(part, *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([each[: max(count - part * rank, 0)] for rank, each in enumerate(parts)])


def _forward(
    experts: Any, mesh: DeviceMesh, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of hidden states [N, H] where they are: indices and weights [N, K] -> [N, H]."""
    count, chosen = top_k_index.shape
    ranks = mesh.size()
    group = mesh.get_group()
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    sends = count_choices(flat, experts.num_experts).long().view(ranks, -1)
    receives = exchange(sends.view(-1), group, None, None).view(ranks, -1)
    given, taken = torch.stack([sends.sum(1), receives.sum(1)]).tolist()  # the one wait of the host
    states = AllToAll.apply(hidden_states[order // chosen], group, given, taken)  # type: ignore[no-untyped-call]
    numbers = torch.arange(receives.shape[1], device=flat.device).repeat(ranks)
    expert = numbers.repeat_interleave(receives.reshape(-1), output_size=sum(taken))
    outputs = _OwnExperts(experts, ranks).compute(states, expert)
    outputs = AllToAll.apply(outputs, group, taken, given)[order.argsort()]  # type: ignore[no-untyped-call]
    weighted: Tensor = outputs.view(count, chosen, -1) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)
