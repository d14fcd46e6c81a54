"""Offloading to CPU memory: of model and optimizer between phases, of activations until the backward.

Tensors move for a whole phase, at the places named here. On a CPU the same code runs and nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from hybridflow.config.model import FSDPConfig
from hybridflow.distributed.accelerators import features
from hybridflow.distributed.shards import is_absent, local, placed_like
from hybridflow.distributed.transfers import HostBuffers, copy_to_host, empty_on_host, to_device
from hybridflow.engines.fsdp.sharding import reshard
from hybridflow.engines.optimizer import MasterAdamW

CPU = torch.device("cpu")


class Offloader:
    """Sends a model and its optimizer to CPU memory, and brings them back to the device.

    Their places in CPU memory are kept. The host waits once where all has been sent, for others to read it;
    it does not wait for what comes back.
    """

    def __init__(
        self, module: nn.Module, optimizer: MasterAdamW | None, device: torch.device, config: FSDPConfig
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.device = device
        # under offload_policy FSDP itself keeps all of it on the CPU
        self.moves_parameters = config.param_offload and not config.offload_policy
        self.moves_optimizer = config.optimizer_offload and not config.offload_policy
        self._buffers = HostBuffers()
        self._users = 1
        if self.moves_optimizer and optimizer is not None:
            optimizer.moments_rest = CPU
            optimizer.move_masters(CPU, self._buffers)
        self.offload()

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """Keep the parameters on the device inside the context."""
        self.onload()
        yield  # an exception ends the run: gathered parameters must not be moved
        self.offload()

    def onload(self) -> None:
        """Bring the parameters to the device; they stay until `offload` was called as often."""
        if self._users == 0 and self.moves_parameters:
            self._replace(lambda tensor: to_device(local(tensor), self.device))
        self._users += 1

    def offload(self) -> None:
        """Undo one `onload`; the last one sends the parameters to CPU memory.

        What `masters` and `moments` have sent is complete there, too.
        """
        self._users -= 1
        if self._users > 0 or not self.moves_parameters:
            self._buffers.wait()
            return
        reshard(self.module)
        held = dict(chain(self.module.named_parameters(), self.module.named_buffers()))
        copies = {
            id(tensor): self._buffers.copy(name, local(tensor))
            for name, tensor in held.items()
            if not is_absent(tensor)
        }
        self._buffers.wait()  # FSDP reads pieces of uneven size, which it pads
        self._replace(lambda tensor: copies[id(tensor)] if id(tensor) in copies else local(tensor).cpu())

    def _replace(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Give each parameter and buffer the memory of what `moved` returns for it."""
        before = list(map(id, self.module.parameters()))

        def replacement(tensor: Tensor) -> Tensor:
            if is_absent(tensor):
                return tensor
            return placed_like(moved(tensor), tensor)

        self.module._apply(replacement)  # as `Module.to` does; FSDP takes note of it
        assert before == list(map(id, self.module.parameters())), (
            "torch has made new parameters of those that moved, and the optimizer has the old ones: tensors "
            f"of {self.device.type} cannot become tensors of a CPU. Set fsdp_config.param_offload=false"
        )
        if self.optimizer is not None:
            self.optimizer.refresh_shards()  # the masters of shards would keep the memory that these were in

    @contextmanager
    def masters(self) -> Iterator[None]:
        """Keep float32 masters on the device inside the context, where gradients add up in them.

        It is inside of `parameters`, whose end waits for what is sent.
        """
        if not self.moves_optimizer or self.optimizer is None:
            yield
            return
        self.optimizer.move_masters(self.device, self._buffers)
        yield
        self.optimizer.move_masters(CPU, self._buffers)

    @contextmanager
    def moments(self) -> Iterator[None]:
        """Keep the moments on the device of their masters inside the context, which is inside `parameters`.

        They may be elsewhere: a state that is loaded while the parameters are offloaded stays in CPU memory.
        """
        if self.optimizer is None or not (self.moves_optimizer or self.moves_parameters):
            yield
            return
        self.optimizer.move_moments(None, self._buffers)
        yield
        if self.moves_optimizer:
            self.optimizer.move_moments(CPU, self._buffers)


class ActivationOffload:
    """Offloading of activations: tensors that autograd keeps for the backward pass wait in CPU memory.

    Parameters stay, since the device has them anyway. With gradient checkpointing the activations are the
    inputs of the blocks. Copies are queued on the stream that computes: they come back without a wait.
    """

    smallest = 1024
    """Number of elements below which a tensor stays where it is."""

    def __init__(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        self._parameters: set[int] = set()
        for part in [module, *blocks]:
            part.register_forward_pre_hook(self._note_parameters)
        self._blocks = set(blocks)

    def _note_parameters(self, part: nn.Module, args: object) -> None:
        """Remember the memory of a block's parameters, which FSDP has gathered when it begins."""
        own = _outside(part, self._blocks)
        if part in self._blocks:
            own = part.parameters()
        self._parameters |= {_memory(parameter) for parameter in own}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Offload activations of the forward pass inside the context, whose backward pass follows."""
        self._parameters.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        if tensor.numel() < self.smallest or _memory(tensor) in self._parameters:
            return tensor.device, tensor
        return tensor.device, copy_to_host(tensor, empty_on_host(tensor))

    def _unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=features(device.type).pins_memory)


def _outside(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Parameter]:
    if module in blocks:
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _outside(child, blocks)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
