"""Builds the backend that the configuration asks for: the only place that maps its name to a class.

hosting(trainer, ray_kwargs, roles) ──devices are there──► start(make, meshes) ──► Backend; all processes
end with the context
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeAlias

from hybridflow.config.cluster import RayConfig
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig
from hybridflow.controller.backend import Backend
from hybridflow.controller.local import LocalBackend, Make
from hybridflow.controller.mesh import MeshInfo
from hybridflow.controller.resource_pool import Placement
from hybridflow.errors import ConfigError
from hybridflow.observability.progress import progress

logger = logging.getLogger(__name__)

Meshes: TypeAlias = Callable[[Placement], Mapping[str, MeshInfo]]
"""A function that arranges the ranks of each role on a placement."""


class Start(Protocol):
    """A function that starts the worker processes, given the factories of their workers and the meshes."""

    def __call__(
        self, make: Make, meshes: Meshes, part: Callable[[Placement], Placement] | None = None
    ) -> Backend:
        """Start the processes of the whole placement, or of the part that `part` makes of it: those of a
        backend of its own, whose loss is not that of the others.
        """
        ...


@contextmanager
def hosting(
    trainer: TrainerConfig | SFTTrainerConfig, ray: RayConfig, roles: Sequence[str], *, patience: float = 0.0
) -> Iterator[Start]:
    """Make sure that there are devices for `roles` before anything is loaded, and give the function that
    starts the workers; everything that was started ends with the context.

    `patience` is the number of seconds to wait for missing devices, after a node was lost. Raises ConfigError
    for an impossible placement, for a cluster that cannot be joined, and for devices that it does not have.
    """
    if trainer.controller == "local":
        yield lambda make, meshes, part=None: _local(make, roles)
        return
    placement = Placement.from_config(trainer, roles)
    from hybridflow.controller.ray.backend import RayBackend
    from hybridflow.controller.ray.cluster import RayCluster

    start_queue: Callable[[float], TransferQueue] | None = None
    further_cpus = 0
    if isinstance(trainer, TrainerConfig) and trainer.row_store == "transferqueue":
        from hybridflow.controller.ray.transfer_queue import TransferQueue, cpus_of

        start_queue = partial(TransferQueue.start, trainer.transfer_queue)
        further_cpus = cpus_of(trainer.transfer_queue)
    cluster = RayCluster.connect(
        ray,
        device=trainer.device,
        wanted=placement.num_devices,
        num_nodes=max(len(pool.devices_per_node) for pool in placement.device_pools),
        further_cpus=further_cpus,
    )
    backends: list[RayBackend] = []

    def start(make: Make, meshes: Meshes, part: Callable[[Placement], Placement] | None = None) -> Backend:
        chosen = placement
        if part is not None:
            chosen = part(placement)
            if backends:  # what a replica held that was lost is free a moment later
                cluster.check(chosen, cluster.device)
        backend = RayBackend(
            cluster,
            chosen,
            meshes(chosen),
            make,
            device=cluster.device,
            num_threads=trainer.num_threads,
            call_timeout=trainer.worker_timeout,
            heartbeat_timeout=trainer.heartbeat_timeout,
            startup_timeout=trainer.startup_timeout,
            start_queue=start_queue,
        )
        backends.append(backend)
        return backend

    try:
        _wait_for_devices(lambda: cluster.check(placement, cluster.device), patience)
        yield start
    finally:
        with progress.phase("stopping the workers"):
            for backend in backends:
                backend.shutdown()
            cluster.shutdown()


def data_parallel(placement: Placement) -> dict[str, MeshInfo]:
    """Return the simplest mesh for each role: all its ranks are data-parallel, and get equally many rows."""
    return {role: MeshInfo(len(placement.ranks(role))) for role in placement.pools_of_role}


def _local(make: Make, roles: Sequence[str]) -> LocalBackend:
    backend = LocalBackend(make)
    for role in roles:  # build them now and not in the first step
        backend.worker(role)
    return backend


def _wait_for_devices(check: Callable[[], None], patience: float) -> None:
    """Repeat `check` until it passes; after `patience` seconds raise its ConfigError."""
    deadline = time.monotonic() + patience
    said = -math.inf
    while True:
        try:
            return check()
        except ConfigError as error:
            now = time.monotonic()
            if now >= deadline:
                raise
            if now - said >= 60:
                said = now
                logger.warning("waiting up to %.0f s for devices: %s", deadline - now, error)
            time.sleep(min(1.0, patience))
