"""Memory that is not needed all the time: parameters and optimizer between phases, activations between
forward and backward.

Whatever moves, moves in whole phases and at the places named here. On a CPU nothing moves, and all of it
runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.engines.fsdp.optimizer import MasterAdamW

CPU = torch.device("cpu")


class Residence:
    """Where a model and its optimizer rest, and how they come to the device."""

    def __init__(
        self, module: nn.Module, optimizer: MasterAdamW | None, device: torch.device, config: FSDPConfig
    ) -> None:
        self.module, self.optimizer, self.device = module, optimizer, device
        # under offload_policy all of it lives on the CPU as it is
        self.moves_parameters = config.param_offload and not config.offload_policy
        self.moves_optimizer = config.optimizer_offload and not config.offload_policy
        self._users = 1
        self.offload()
        if self.moves_optimizer and optimizer is not None:
            optimizer.moments_rest = CPU
            optimizer.move_masters(CPU)

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """Inside, the parameters are on the device."""
        self.onload()
        yield  # an exception ends the run: gathered parameters must not be moved
        self.offload()

    def onload(self) -> None:
        """Bring the parameters to the device; they stay until `offload` was called as often."""
        if self._users == 0 and self.moves_parameters:
            self.module.to(self.device)
        self._users += 1

    def offload(self) -> None:
        """Send the parameters to rest, if nobody else asked for them."""
        self._users -= 1
        if self._users == 0 and self.moves_parameters:
            self.module.to(CPU)

    @contextmanager
    def masters(self) -> Iterator[None]:
        """Inside, float32 masters apart from the parameters are on the device: gradients of a bfloat16 model
        add up beside them.
        """
        if not self.moves_optimizer or self.optimizer is None:
            yield
            return
        self.optimizer.move_masters(self.device)
        yield
        self.optimizer.move_masters(CPU)

    @contextmanager
    def moments(self) -> Iterator[None]:
        """Inside, the moments are where their masters are; a state that was loaded while the parameters
        rested left them behind.
        """
        if self.optimizer is None or not (self.moves_optimizer or self.moves_parameters):
            yield
            return
        self.optimizer.move_moments(None)
        yield
        if self.moves_optimizer:
            self.optimizer.move_moments(CPU)


class ActivationOffload:
    """What autograd keeps for the backward pass waits in CPU memory; parameters, which would only be copied
    in vain, stay.

    With gradient checkpointing these are the inputs of the blocks. Copies are queued on the stream that
    computes, so they come back in order without a wait.
    """

    smallest = 1024
    """Elements below which a tensor stays where it is."""

    def __init__(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        self._parameters: set[int] = set()
        for part in [module, *blocks]:
            part.register_forward_pre_hook(self._note_parameters)
        self._blocks = set(blocks)

    def _note_parameters(self, part: nn.Module, args: object) -> None:
        """Gathered parameters get their memory when their block begins: hooks of the sharding ran before this
        one.
        """
        own = part.parameters() if part in self._blocks else _outside(part, self._blocks)
        self._parameters |= {_memory(parameter) for parameter in own}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a forward whose backward follows."""
        self._parameters.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        if tensor.numel() < self.smallest or _memory(tensor) in self._parameters:
            return tensor.device, tensor
        waiting = torch.empty(
            tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=tensor.is_cuda
        )
        waiting.copy_(tensor, non_blocking=tensor.is_cuda)
        return tensor.device, waiting

    def _unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=tensor.is_pinned() if device.type == "cuda" else False)


def _outside(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters of `module` that are not in a block."""
    if module in blocks:
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _outside(child, blocks)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
