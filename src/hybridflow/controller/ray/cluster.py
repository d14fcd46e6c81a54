"""The Ray cluster of a run: it is joined or started, asked for its devices, and left or ended.

    connect ──► RayCluster ──check(placement)──► all pools fit ──place(pool)──► PlacedPool ──► shutdown

The address comes from the key, from RAY_ADDRESS, or from the submitted job that this process belongs to.
Without an address the run starts its own Ray on this machine, in a temporary folder, and always ends it.
A cluster that others started is only left.
"""

from __future__ import annotations

import atexit
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private.accelerators import get_all_accelerator_resource_names
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hybridflow.config.cluster import RayConfig, choose_address, num_cpus
from hybridflow.controller.ray import session
from hybridflow.controller.ray.assignment import assign, describe, shortage
from hybridflow.controller.ray.preflight import (
    NodeInfo,
    answers,
    check_own,
    check_port_free,
    device_of,
    living,
    reach,
    source_of,
)
from hybridflow.controller.resource_pool import Placement, ResourcePool
from hybridflow.distributed.accelerators import GPU, features
from hybridflow.distributed.device import num_devices, resolve_device
from hybridflow.errors import ConfigError, WorkerError, WorkerLost

logger = logging.getLogger(__name__)

OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Resources for which Ray has its own options."""
SETTLE_SECONDS = 3.0  # devices of a run that has just ended become free within this time


@dataclass(frozen=True)
class PlacedPool:
    """Devices reserved for a pool; the lists but the last have an entry for each rank, in rank order."""

    pool: ResourcePool
    bundles: list[dict[str, Any]]
    """Options for the rank's actor: `RankProcess.options(**placed.bundles[rank])`."""
    nodes: list[str]
    """Name of each rank's node; the ranks of one node are consecutive."""
    node_ids: list[str]
    """Ray's id for each rank's node."""
    local_ranks: list[int]
    groups: list[PlacementGroup] = field(repr=False)

    def free(self) -> None:
        """Give the devices back, which ends the processes that still run on them."""
        groups = list(self.groups)
        self.groups.clear()
        if ray.is_initialized() and answers(ray.get_runtime_context().gcs_address):
            for group in groups:
                remove_placement_group(group)


def _takes(device: str) -> dict[str, Any]:
    """Return the resources of Ray that a process takes: a CPU, or an accelerator and no CPU."""
    takes: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
    unit = features(device).resource
    if unit in OWN_OPTIONS:
        takes[OWN_OPTIONS[unit]] = 1
    else:
        takes["resources"] = {unit: 1}
    return takes


@dataclass(eq=False)
class RayCluster:
    """A Ray cluster that this run has started or joined."""

    device: str
    """The kind of device that each rank computes on, as the table of accelerators names it."""
    address: str
    """host:port of the cluster's control service."""
    timeline: str | None
    """File that Ray's timeline is written to at the end; None for none."""
    leaves: bool = True
    """False where this process was connected to Ray before, and stays so."""
    temp_dir: str | None = None
    """Folder of a Ray that this run has started; None for one that it has joined."""
    _placed: list[PlacedPool] = field(default_factory=list)
    _plan: dict[str, list[NodeInfo]] = field(default_factory=dict)
    _open: bool = True

    def __post_init__(self) -> None:
        atexit.register(self.shutdown)

    @property
    def owns(self) -> bool:
        """Whether this run has started the cluster."""
        return self.temp_dir is not None

    @classmethod
    def connect(
        cls, config: RayConfig, *, device: str, wanted: int, num_nodes: int = 1, further_cpus: int = 0
    ) -> RayCluster:
        """Join the cluster whose address is set, or start one for `wanted` processes.

        `device` is auto or a device of the table of accelerators; auto asks the cluster. A process that is
        connected to Ray already stays connected to it. A Ray of the run's own offers `further_cpus` beside
        those of the machine, for processes that have little to do. Raises ConfigError, within seconds, where
        there is no such cluster, where it refuses this process or has another version, where a port is in
        use, or where a Ray on this machine would be too small.
        """
        if ray.is_initialized():
            return cls._joined(config, device, leaves=False)
        address = choose_address(config.ray_init.address)
        if address is None:
            return cls._own(config, resolve_device(device).type, wanted, num_nodes, further_cpus)
        source = source_of(config)
        if address == "auto":
            try:
                reach(str(canonicalize_bootstrap_address("auto")), source=source, greet=False)
            except ConnectionError as error:
                raise ConfigError(
                    f"{source}=auto, but no Ray runs on this machine: `ray start --head` starts one"
                ) from error
        else:
            reach(address, source=source)
        session.connect(config, address=address)
        return cls._joined(config, device, leaves=True)

    @classmethod
    def _joined(cls, config: RayConfig, device: str, *, leaves: bool) -> RayCluster:
        if device == "auto":
            device = device_of(ray.nodes(), num_devices)
        address = ray.get_runtime_context().gcs_address
        ours = ("num_cpus", "num_gpus", "object_store_memory", "dashboard_port")
        given = [f"ray_kwargs.ray_init.{name}" for name in ours if getattr(config.ray_init, name) is not None]
        if given:
            logger.warning("%s: this has no effect on a Ray that runs already", ", ".join(given))
        cluster = cls(device, address, config.timeline_json_file, leaves=leaves)
        logger.info(
            "joined the Ray cluster at %s: %s",
            address,
            "; ".join(f"{node} {features(device).resource}s" for node in cluster.nodes()),
        )
        return cluster

    @classmethod
    def _own(
        cls, config: RayConfig, device: str, wanted: int, num_nodes: int, further_cpus: int
    ) -> RayCluster:
        given = config.ray_init
        unit = features(device).resource
        cpus = given.num_cpus or num_cpus()
        num_gpus = given.num_gpus
        if num_gpus is None:
            num_gpus = num_devices(device if unit == "GPU" else GPU)
        offered = {"CPU": cpus, "GPU": num_gpus}
        further: dict[str, Any] = {}
        if unit not in offered:
            offered[unit] = num_devices(device)
            if unit not in get_all_accelerator_resource_names():  # Ray counts those itself
                further["resources"] = {unit: offered[unit]}
        check_own(wanted, num_nodes, offered[unit], device)
        if given.include_dashboard and given.dashboard_port is not None:
            check_port_free(given.dashboard_port, "ray_kwargs.ray_init.dashboard_port")
        temp_dir, dashboard = session.start(
            config,
            num_cpus=cpus + further_cpus,
            num_gpus=num_gpus,
            **further,
            object_store_memory=given.object_store_memory,
            include_dashboard=given.include_dashboard,
            dashboard_port=given.dashboard_port,
        )
        address = ray.get_runtime_context().gcs_address
        logger.info("started a Ray of this run's own at %s: %d CPUs, %d GPUs", address, cpus, num_gpus)
        if dashboard:
            logger.info("the dashboard of this Ray is at http://%s", dashboard)
        return cls(device, address, config.timeline_json_file, temp_dir=temp_dir)

    def nodes(self) -> list[NodeInfo]:
        """Return the living nodes with their free and total devices: GPUs for cuda, CPUs for cpu.

        Raises WorkerLost where the cluster's head does not answer; Ray itself would wait for a minute and
        then end the process.
        """
        if not answers(self.address):
            raise WorkerLost(
                f"the head node of the Ray cluster at {self.address} is gone: start the cluster again, then "
                "the run"
            )
        return living(ray.nodes(), available_resources_per_node(), self.device)

    def check(self, placement: Placement, device: str, *, wait: float = SETTLE_SECONDS) -> None:
        """Make sure that there are devices for all pools, and choose a node for each part of each pool.

        Devices that others hold are waited for, at most `wait` seconds. Raises ConfigError, which names the
        pools, what was wanted, each node's free and total devices, and what to set.
        """
        assert device == self.device, f"this run computes on {self.device}, not {device}"
        until = time.monotonic() + wait
        while True:
            nodes = self.nodes()
            plan = assign(placement.device_pools, nodes)
            if plan is not None:
                self._plan = plan
                return
            if assign(placement.device_pools, nodes, by_total=True) is None or time.monotonic() >= until:
                raise ConfigError(shortage(placement.device_pools, nodes, device, self._name, self.owns))
            time.sleep(0.2)

    @property
    def _name(self) -> str:
        if self.owns:
            return "the Ray of this run's own"
        return f"the Ray cluster at {self.address}"

    def place(self, pool: ResourcePool, device: str, *, deadline: float) -> PlacedPool:
        """Reserve a device for each rank of `pool`, on as many different nodes as the pool has.

        Waits at most `deadline` seconds, then raises WorkerError, which says what is missing. Each process
        takes one CPU, or one accelerator and no CPU.
        """
        assert device == self.device, f"this run computes on {self.device}, not {device}"
        alive = {node.id: node for node in self.nodes()}
        plan = self._plan.get(pool.name, [])
        if not plan or any(node.id not in alive for node in plan):
            plan = (assign([pool], list(alive.values())) or {}).get(pool.name, [])
            if not plan:
                raise WorkerError(shortage([pool], list(alive.values()), device, self._name, self.owns))
        bundle = {features(device).resource: 1.0}
        groups = [
            # a group for each node, because only a whole group can be kept together on one node
            placement_group(
                [bundle] * count,
                strategy="STRICT_PACK",
                name=f"hybridflow-{pool.name}-{place}",
                _soft_target_node_id=node.id,
            )
            for place, (count, node) in enumerate(zip(pool.devices_per_node, plan))
        ]
        try:
            self._await(pool, groups, plan, deadline)
            placed = self._placed_pool(pool, groups)
        except BaseException:
            for group in groups:
                remove_placement_group(group)
            raise
        self._placed.append(placed)
        return placed

    def place_without_devices(self, pool: ResourcePool) -> PlacedPool:
        """Spread the processes of a pool that has no devices over the nodes; Ray counts nothing for them."""
        nodes = self.nodes()
        placed = PlacedPool(pool, [], [], [], [], [])
        for rank in range(pool.world_size):
            node = nodes[rank % len(nodes)]
            strategy = NodeAffinitySchedulingStrategy(node.id, soft=True)
            placed.bundles.append({"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy})
            placed.nodes.append(node.name)
            placed.node_ids.append(node.id)
            placed.local_ranks.append(rank // len(nodes))
        return placed

    def _await(
        self, pool: ResourcePool, groups: list[PlacementGroup], plan: list[NodeInfo], seconds: float
    ) -> None:
        told = time.monotonic()
        until = told + seconds
        unit = features(self.device).resource
        waiting = list(zip(groups, pool.devices_per_node, plan))
        while waiting := [each for each in waiting if not each[0].wait(0.2)]:
            now = time.monotonic()
            missing = ", ".join(f"{count} on {node.name}" for _, count, node in waiting)
            if now >= until:
                there = "; ".join(f"{node} {unit}s" for node in self.nodes()) or "no node"
                raise WorkerError(
                    f"pool {pool.name!r} ({describe(pool)}) did not get its {unit}s within {seconds:.0f} s: "
                    f"{missing} are missing. There are now {there}. Others may have taken them: see "
                    "`ray status`, or raise trainer.startup_timeout"
                )
            if now - told >= 60:
                told = now
                logger.warning("pool %r is still waiting for %ss: %s", pool.name, unit, missing)

    def _placed_pool(self, pool: ResourcePool, groups: list[PlacementGroup]) -> PlacedPool:
        placed = PlacedPool(pool, [], [], [], [], groups)
        names = {node.id: node.name for node in self.nodes()}
        used: set[str] = set()
        for count, group in zip(pool.devices_per_node, groups):
            on = set(placement_group_table(group)["bundles_to_node_id"].values())
            if len(on) != 1 or on & used:
                raise WorkerError(
                    f"other runs took devices while pool {pool.name!r} was placed, and two of its nodes "
                    "became one: start the run again"
                )
            used |= on
            (node_id,) = on
            for local_rank in range(count):
                strategy = PlacementGroupSchedulingStrategy(
                    group, local_rank, placement_group_capture_child_tasks=False
                )
                placed.bundles.append({**_takes(self.device), "scheduling_strategy": strategy})
                placed.nodes.append(names.get(node_id, node_id[:6]))
                placed.node_ids.append(node_id)
                placed.local_ranks.append(local_rank)
        return placed

    def shutdown(self) -> None:
        """Free the devices and leave the cluster, or end the run's own; it may be called twice."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.shutdown)
        try:
            if ray.is_initialized():
                if answers(self.address):
                    self._write_timeline()
                if not self.owns:
                    for placed in self._placed:
                        placed.free()
                if self.leaves:
                    ray.shutdown()
        finally:
            if self.temp_dir is not None:
                session.end(self.temp_dir)

    def _write_timeline(self) -> None:
        if self.timeline is None:
            return
        try:
            Path(self.timeline).parent.mkdir(parents=True, exist_ok=True)
            ray.timeline(self.timeline)
            logger.info("Ray's timeline is in %s (open it in https://ui.perfetto.dev)", self.timeline)
        except Exception as error:  # whatever Ray raises, the run itself went well
            logger.warning("ray_kwargs.timeline_json_file=%s could not be written: %s", self.timeline, error)
