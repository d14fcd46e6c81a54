"""Storages that sharded training gives back between uses: torch resizes them, which Python cannot do here.

Their memory is counted as free, filled with 255, and its use is a fault until it is taken again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

from simulated_accelerator.memory import block_of


def _instead(real: Callable[[Tensor], None], method: str) -> Callable[[Tensor], None]:
    def call(tensor: Tensor) -> None:
        block = block_of(tensor)
        if block is None:
            real(tensor)
        else:
            getattr(block, method)()

    return call


_places: tuple[Any, ...] = (_fsdp_param, _fsdp_param_group, _fsdp_collectives)
for _name, _method in (("free_storage", "free"), ("alloc_storage", "take_again")):
    _call = _instead(getattr(_fsdp_param, _name), _method)
    for _module in _places:
        if hasattr(_module, _name):
            setattr(_module, _name, _call)
