"""Dispatch rules, worker groups, resource pools and the backends that host workers.

Each name below is imported when it is first used, so that placements can be checked before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.controller.backend import Backend, Future, Part
    from hybridflow.controller.dispatch import Call, Dispatch, ShardedCall, register
    from hybridflow.controller.local import LocalBackend, Make, WorkerHost
    from hybridflow.controller.mesh import MeshInfo
    from hybridflow.controller.resource_pool import Placement, ResourcePool
    from hybridflow.controller.worker import Factories, Place, RankInfo, Worker, WorkerFactory
    from hybridflow.controller.worker_group import WorkerGroup

_HOMES = {
    "backend": ("Backend", "Future", "Part"),
    "dispatch": ("Call", "ShardedCall", "Dispatch", "register"),
    "local": ("LocalBackend", "Make", "WorkerHost"),
    "mesh": ("MeshInfo",),
    "resource_pool": ("Placement", "ResourcePool"),
    "worker": ("Factories", "Place", "RankInfo", "Worker", "WorkerFactory"),
    "worker_group": ("WorkerGroup",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Backend",
    "Call",
    "Dispatch",
    "Factories",
    "Future",
    "LocalBackend",
    "Make",
    "MeshInfo",
    "Part",
    "Place",
    "Placement",
    "RankInfo",
    "ResourcePool",
    "ShardedCall",
    "Worker",
    "WorkerFactory",
    "WorkerGroup",
    "WorkerHost",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"hybridflow.controller.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'hybridflow.controller' has no attribute {name!r}")
