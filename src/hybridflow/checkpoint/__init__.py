"""Atomic checkpoints, verified by digest, without pickle.

The names below are loaded when they are first used: who only wants a file lock or a manifest needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("hybridflow.checkpoint.store"), name)
    raise AttributeError(f"module 'hybridflow.checkpoint' has no attribute {name!r}")
