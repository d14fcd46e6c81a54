"""Dispatch rules, worker groups, resource pools and the backends that host workers."""

from hybridflow.controller.backend import Backend
from hybridflow.controller.dispatch import Call, Dealt, Dispatch, register
from hybridflow.controller.future import Future, Part
from hybridflow.controller.local import LocalBackend
from hybridflow.controller.mesh import MeshInfo
from hybridflow.controller.resource_pool import Placement, ResourcePool
from hybridflow.controller.worker import Factories, Place, RankInfo, Worker, WorkerFactory
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.controller.worker_host import Make, WorkerHost

__all__ = [
    "Backend",
    "Call",
    "Dealt",
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
    "Worker",
    "WorkerFactory",
    "WorkerGroup",
    "WorkerHost",
    "register",
]
