"""FSDP2 on a model: the modules that are gathered together, their dtypes, and when gradients are reduced.

Gradients are summed over ranks, not averaged: a loss share is normalised by the whole mini-batch's counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from hybridflow.config.model import FSDPConfig
from hybridflow.distributed.accelerators import features
from hybridflow.distributed.mesh import EngineMesh
from hybridflow.distributed.shards import is_absent, local, own_box
from hybridflow.engines.base import Held
from hybridflow.errors import ModelError

REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: EngineMesh,
    config: FSDPConfig,
    compute: torch.dtype,
    *,
    experts: Sequence[nn.Module] = (),
    root: nn.Module | None = None,
    absent: Set[nn.Parameter] = frozenset(),
) -> None:
    """Shard parameters over the ranks of `mesh`: each block is a group, the rest one with the root.

    `experts` are modules whose parameters are cut among the ranks of `mesh.experts`; each is a group over the
    other ranks, cut along the second dimension. `root` is the module whose forward is called, `module` itself
    if it is None. `absent` are parameters that other stages of a pipeline hold, which stay as they are.

    The root's group (embeddings, last norm, head) stays gathered from its forward to its backward, since the
    head's weight is used between the two. A head in a wider dtype than `compute` (the value model's) is a
    separate group, which is not rounded.
    """
    reduce: torch.dtype | None = None
    if compute != torch.float64:
        reduce = REDUCE_DTYPES[config.mixed_precision.reduce_dtype]
    offload = OffloadPolicy()
    if config.offload_policy:
        offload = CPUOffloadPolicy(pin_memory=features(mesh.fsdp.device_type).pins_memory)

    def group(part: nn.Module, reshard: bool, dtype: torch.dtype, over: DeviceMesh = mesh.fsdp) -> None:
        # inputs and buffers keep their dtypes: positions, rotary frequencies and the value head's input are
        # float32 on one rank too
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)
        place = None
        if over is mesh.expert_fsdp:
            place = _second_dimension
        fully_shard(
            part,
            mesh=over,
            reshard_after_forward=reshard,
            shard_placement_fn=place,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=set(absent),
        )

    if mesh.expert_fsdp is not None:
        here = [each for each in experts if absent.isdisjoint(each.parameters())]
        _check_even(here, mesh.expert_fsdp.size(-1))
        for each in here:
            group(each, config.reshard_after_forward, compute, mesh.expert_fsdp)
    for block in blocks:
        group(block, config.reshard_after_forward, compute)
    head = getattr(module, "head", None)
    if isinstance(head, nn.Module) and head in set(module.children()) and head.weight not in absent:
        group(head, config.reshard_after_forward, torch.promote_types(compute, torch.float32))
    root = root or module
    group(root, False, compute)
    if hasattr(root, "head_inputs"):
        register_fsdp_forward_method(root, "head_inputs")
    for part in sharded_modules(root):
        part.set_gradient_divide_factor(1.0)
        # else the factor asks for an operation that only NCCL has
        part.set_force_sum_reduction_for_comms(True)
    if config.forward_prefetch:
        for this, following in pairwise(blocks):
            assert isinstance(this, FSDPModule) and isinstance(following, FSDPModule)
            this.set_modules_to_forward_prefetch([following])


def _second_dimension(parameter: nn.Parameter) -> Shard:
    """Return where FSDP cuts a parameter of experts, whose first dimension is cut already."""
    return Shard(1)


def _check_even(experts: Sequence[nn.Module], ranks: int) -> None:
    """Raise ModelError where FSDP cannot cut expert tensors along their second dimension evenly."""
    for part in experts:
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.shape[1] % ranks:
                raise ModelError(
                    f"{ranks} ranks share each part of the experts, and {name} {tuple(parameter.shape)} "
                    "cannot be cut evenly among them: raise fsdp_config.expert_parallel_size, or lower "
                    "fsdp_config.fsdp_size"
                )


def widen_trained(module: nn.Module) -> dict[str, torch.dtype]:
    """Make trainable parameters float32 that are narrower (on the meta device): their shards are the masters.

    Returns the dtypes that they had, by name; those of tied parameters are under all of their names.
    """
    known: dict[int, nn.Parameter] = {}
    compute_dtypes: dict[str, torch.dtype] = {}
    for path, owner in module.named_modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None or not parameter.requires_grad or parameter.dtype.itemsize >= 4:
                continue
            compute_dtypes[f"{path}.{name}"] = parameter.dtype
            if id(parameter) not in known:
                known[id(parameter)] = nn.Parameter(parameter.detach().to(torch.float32))
            owner._parameters[name] = known[id(parameter)]
    return compute_dtypes


def sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules whose parameters are gathered together, the root among them."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def held_weights(module: nn.Module, compute_dtypes: Mapping[str, torch.dtype]) -> Iterator[Held]:
    """Yield the parts of parameters that this rank holds, none of which may be gathered.

    `compute_dtypes` has the compute dtypes of parameters that are kept in a wider one, by name.
    """
    for name, parameter in module.named_parameters():
        yield Held(
            name=name,
            shape=tuple(parameter.shape),
            box=own_box(parameter),
            tensor=torch.empty(0) if is_absent(parameter) else local(parameter),
            compute_dtype=compute_dtypes.get(name, parameter.dtype),
            trained=parameter.requires_grad,
        )


def before_micro_batch(module: nn.Module, *, last: bool, keep_gathered: bool) -> None:
    """Choose which gradients the backward pass of the next micro-batch reduces over ranks.

    reshard_after_forward=true saves memory: a block's gradient is summed and scattered in every backward, so
    that no rank ever holds a whole gradient; only the sum over copies of the model (HSDP), which saves no
    memory, waits for the last micro-batch. reshard_after_forward=false (`keep_gathered`) saves messages:
    parameters stay gathered, and whole gradients, in the dtype of the reduction, add up on each rank until
    the last micro-batch reduces them.
    """
    assert isinstance(module, FSDPModule)
    choose_reduction([module], last=last, keep_gathered=keep_gathered, recurse=True)


def choose_reduction(
    modules: Iterable[FSDPModule], *, last: bool, keep_gathered: bool, recurse: bool
) -> None:
    """Do as `before_micro_batch` says for some sharded modules, with those below them if `recurse`."""
    for module in modules:
        if keep_gathered:
            module.set_requires_gradient_sync(last, recurse=recurse)
            module.set_reshard_after_backward(last, recurse=recurse)
        else:
            module.set_requires_all_reduce(last, recurse=recurse)


def reshard(module: nn.Module) -> None:
    """Free all gathered parameters, so that every parameter is this rank's shard."""
    for part in sharded_modules(module):
        part.reshard()
