"""Dispatch rules, worker groups, resource pools and the backends that host workers."""

from hybridflow.controller.backend import Backend
from hybridflow.controller.dispatch import Call, Dispatch, MeshInfo, register
from hybridflow.controller.future import Future
from hybridflow.controller.local import LocalBackend
from hybridflow.controller.resource_pool import Placement, ResourcePool
from hybridflow.controller.worker import RankInfo, Worker, WorkerFactory
from hybridflow.controller.worker_group import WorkerGroup

__all__ = [
    "Backend",
    "Call",
    "Dispatch",
    "Future",
    "LocalBackend",
    "MeshInfo",
    "Placement",
    "RankInfo",
    "ResourcePool",
    "Worker",
    "WorkerFactory",
    "WorkerGroup",
    "register",
]
