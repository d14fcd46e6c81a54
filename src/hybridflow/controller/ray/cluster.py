"""The Ray of a run: found or started, asked for what it has, and let go.

connect ──► Cluster ──check(placement)──► there are devices for all pools ──place(pool)──► PlacedPool
──shutdown──► all as it was

An address is the key's, RAY_ADDRESS, or that of the submitted job we run in; without one this run starts a
Ray of its own on this machine, under a folder of its own, and ends it, whatever else happens. A cluster that
others started is only left.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private import ray_constants
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.config.cluster import RayConfig
from hybridflow.controller.ray.preflight import (
    UNIT,
    NodeInfo,
    answers,
    assign,
    check_own,
    check_port_free,
    choose_address,
    describe,
    device_of,
    living,
    num_cpus,
    processes,
    reach,
    shortage,
    source_of,
)
from hybridflow.controller.resource_pool import Placement, ResourcePool
from hybridflow.distributed.device import resolve_device
from hybridflow.errors import ConfigError, WorkerError, WorkerLost

logger = logging.getLogger(__name__)

# A node whose process is gone is dead after 4 s, one that does not answer after 12 s (Ray's own: 15 s and 65
# s).
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}
NICENESS = {"worker_niceness": 0}  # Ray's own 15 would let anything else on the machine come first
START_ATTEMPTS = 3
STARTUP_TIMEOUT = "timed out during startup"  # in the message of Ray's plain Exception
SETTLE_SECONDS = 3.0  # what a run that just ended held comes free within this time
LOOPBACK = "127.0.0.1"
MAX_TEMP_LENGTH = 40  # sockets live some 60 characters below, and a socket's path has at most 107


@dataclass(frozen=True)
class PlacedPool:
    """Devices that are held for a pool. Each field but the last has one entry a rank, in rank order."""

    pool: ResourcePool
    bundles: list[dict[str, Any]]
    """Options of the actor: `RankProcess.options(**placed.bundles[rank])`."""
    nodes: list[str]
    """Name of the node of each rank; ranks of one node follow each other."""
    node_ids: list[str]
    """Ray's id of the node of each rank."""
    local_ranks: list[int]
    groups: list[PlacementGroup] = field(repr=False)

    def free(self) -> None:
        """Give the devices back; this ends processes that still run on them."""
        groups, self.groups[:] = list(self.groups), []
        if ray.is_initialized() and answers(ray.get_runtime_context().gcs_address):
            for group in groups:
                remove_placement_group(group)


class Cluster:
    """A Ray that this run started, or one that it joined."""

    def __init__(
        self,
        *,
        device: str,
        address: str,
        owns: bool,
        leaves: bool,
        temp_dir: str | None,
        timeline: str | None,
    ) -> None:
        self.device = device
        """`cpu` or `cuda`: what a rank of this run computes on."""
        self.address = address
        """host:port of the cluster's control service."""
        self.owns = owns
        self._leaves, self._temp_dir, self._timeline = leaves, temp_dir, timeline
        self._placed: list[PlacedPool] = []
        self._plan: dict[str, list[NodeInfo]] = {}
        self._open = True
        atexit.register(self.shutdown)

    @classmethod
    def connect(cls, config: RayConfig, *, device: str, wanted: int, num_nodes: int = 1) -> Cluster:
        """Join the cluster that was named, or start one of this run's own for `wanted` processes.

        `device`: auto, cpu or cuda; auto asks the cluster. Where this process is in a Ray already, that is
        the one, and it stays. Raises ConfigError, within seconds, where there is no such cluster, it does not
        let us in or has another version, a port is in use, or a Ray of this run's own would be too small.
        """
        if ray.is_initialized():
            return cls._joined(config, device, leaves=False)
        address = choose_address(config.ray_init.address)
        if address is None:
            return cls._own(config, resolve_device(device).type, wanted, num_nodes)
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
        _init(config, address=address)
        return cls._joined(config, device, leaves=True)

    @classmethod
    def _joined(cls, config: RayConfig, device: str, *, leaves: bool) -> Cluster:
        if device == "auto":
            device = device_of(ray.nodes())
        address = ray.get_runtime_context().gcs_address
        ours = ("num_cpus", "num_gpus", "object_store_memory", "dashboard_port")
        if given := [
            f"ray_kwargs.ray_init.{name}" for name in ours if getattr(config.ray_init, name) is not None
        ]:
            logger.warning("%s: without effect on a Ray that runs already", ", ".join(given))
        cluster = cls(
            device=device,
            address=address,
            owns=False,
            leaves=leaves,
            temp_dir=None,
            timeline=config.timeline_json_file,
        )
        logger.info(
            "joined the Ray cluster at %s: %s",
            address,
            "; ".join(f"{node} {UNIT[device]}s" for node in cluster.nodes()),
        )
        return cluster

    @classmethod
    def _own(cls, config: RayConfig, device: str, wanted: int, num_nodes: int) -> Cluster:
        given = config.ray_init
        cpus = given.num_cpus or num_cpus()
        num_gpus = torch.cuda.device_count() if given.num_gpus is None else given.num_gpus
        check_own(wanted, num_nodes, num_gpus if device == "cuda" else cpus, device)
        if given.include_dashboard and given.dashboard_port is not None:
            check_port_free(given.dashboard_port, "ray_kwargs.ray_init.dashboard_port")
        temp_dir, dashboard = _start(
            config,
            num_cpus=cpus,
            num_gpus=num_gpus,
            object_store_memory=given.object_store_memory,
            include_dashboard=given.include_dashboard,
            dashboard_port=given.dashboard_port,
        )
        address = ray.get_runtime_context().gcs_address
        shown = f"; its dashboard: http://{dashboard}" if dashboard else ""
        logger.info(
            "started a Ray of this run's own at %s: %d CPUs, %d GPUs%s", address, cpus, num_gpus, shown
        )
        return cls(
            device=device,
            address=address,
            owns=True,
            leaves=True,
            temp_dir=temp_dir,
            timeline=config.timeline_json_file,
        )

    def nodes(self) -> list[NodeInfo]:
        """The living nodes, with what is free and there in all of GPUs for cuda, of CPUs for cpu.

        Raises WorkerLost where the cluster's head does not answer: Ray itself would wait for it for a minute
        and then end the process.
        """
        if not answers(self.address):
            raise WorkerLost(
                f"the head node of the Ray cluster at {self.address} is gone: start the cluster again, then "
                "the run"
            )
        return living(ray.nodes(), available_resources_per_node(), self.device)

    def check(self, placement: Placement, device: str, *, wait: float = SETTLE_SECONDS) -> None:
        """Before any placement group: are there devices for all pools? Remembers which node each pool will be
        on.

        Devices that others hold are waited for, `wait` seconds. Raises ConfigError that names the pools, what
        was wanted, what each node has free and in all, and the way out.
        """
        assert device == self.device, f"this run computes on {self.device}, not {device}"
        until = time.monotonic() + wait
        while True:
            nodes = self.nodes()
            plan = assign(placement.pools, nodes)
            if plan is not None:
                self._plan = plan
                return
            if assign(placement.pools, nodes, by_total=True) is None or time.monotonic() >= until:
                where = "the Ray of this run's own" if self.owns else f"the Ray cluster at {self.address}"
                raise ConfigError(shortage(placement.pools, nodes, device, where, self.owns))
            time.sleep(0.2)

    def place(self, pool: ResourcePool, device: str, *, deadline: float) -> PlacedPool:
        """Hold a bundle for each rank of `pool`: all of a node's ranks on one node, different nodes for
        different ones.

        Waits `deadline` seconds. Raises WorkerError that says what is missing. A process takes one CPU, on
        cuda one GPU and no CPU.
        """
        assert device == self.device, f"this run computes on {self.device}, not {device}"
        alive = {node.id: node for node in self.nodes()}
        plan = self._plan.get(pool.name, [])
        if not plan or any(node.id not in alive for node in plan):
            plan = (assign([pool], list(alive.values())) or {}).get(pool.name, [])
            if not plan:
                raise WorkerError(
                    shortage(
                        [pool], list(alive.values()), device, f"the Ray cluster at {self.address}", self.owns
                    )
                )
        bundle = {"GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
        groups = [
            # one group a node: only a group of its own can be held together on one node
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

    def _await(
        self, pool: ResourcePool, groups: list[PlacementGroup], plan: list[NodeInfo], seconds: float
    ) -> None:
        until, told = time.monotonic() + seconds, time.monotonic()
        waiting = list(zip(groups, pool.devices_per_node, plan))
        while waiting := [each for each in waiting if not each[0].wait(0.2)]:
            unit, now = UNIT[self.device], time.monotonic()
            missing = ", ".join(f"{count} on {node.name}" for _, count, node in waiting)
            if now >= until:
                there = "; ".join(f"{node} {unit}s" for node in self.nodes()) or "no node"
                raise WorkerError(
                    f"pool {pool.name!r} ({describe(pool)}) did not get its {unit}s within {seconds:.0f} s: "
                    f"{missing} are missing. "
                    f"There are now {there}. Others may have taken them: see `ray status`, or raise "
                    "trainer.startup_timeout"
                )
            if now - told >= 60:
                told = now
                logger.warning("pool %r still waits for %ss: %s", pool.name, unit, missing)

    def _placed_pool(self, pool: ResourcePool, groups: list[PlacementGroup]) -> PlacedPool:
        placed = PlacedPool(pool, [], [], [], [], groups)
        names = {node.id: node.name for node in self.nodes()}
        used: set[str] = set()
        for count, group in zip(pool.devices_per_node, groups):
            on = set(placement_group_table(group)["bundles_to_node_id"].values())
            if len(on) != 1 or on & used:
                raise WorkerError(
                    f"pool {pool.name!r}: others took devices meanwhile, and two of its nodes became one; "
                    "start again"
                )
            used |= on
            (node_id,) = on
            for local_rank in range(count):
                strategy = PlacementGroupSchedulingStrategy(
                    group, local_rank, placement_group_capture_child_tasks=False
                )
                on_gpu = self.device == "cuda"
                placed.bundles.append(
                    {"num_cpus": 0 if on_gpu else 1, "num_gpus": int(on_gpu), "scheduling_strategy": strategy}
                )
                placed.nodes.append(names.get(node_id, node_id[:6]))
                placed.node_ids.append(node_id)
                placed.local_ranks.append(local_rank)
        return placed

    def shutdown(self) -> None:
        """Free what was placed and leave; a Ray of this run's own ends, with all its processes and files. May
        be called twice.
        """
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.shutdown)
        try:
            if ray.is_initialized():
                if answers(self.address):
                    self._write_timeline()
                for placed in self._placed if not self.owns else []:
                    placed.free()
                if self._leaves:
                    ray.shutdown()
        finally:
            if self._temp_dir is not None:
                _end(self._temp_dir)

    def _write_timeline(self) -> None:
        if self._timeline is None:
            return
        try:
            Path(self._timeline).parent.mkdir(parents=True, exist_ok=True)
            ray.timeline(self._timeline)
            logger.info("Ray's timeline is in %s (open it in https://ui.perfetto.dev)", self._timeline)
        except Exception as error:  # whatever Ray raises: the run itself went well
            logger.warning("ray_kwargs.timeline_json_file=%s could not be written: %s", self._timeline, error)


def _start(config: RayConfig, **offered: Any) -> tuple[str, str]:
    """Start a Ray in a temporary folder of its own; gives the folder, and where its dashboard is (empty:
    nowhere).

    Ray gives a node 30 s to start, whatever the machine has to do at the time: then it is tried again, and
    refused after the third time.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        temp_dir = tempfile.mkdtemp(
            prefix="hf-ray-", dir=None if len(tempfile.gettempdir()) <= MAX_TEMP_LENGTH else "/tmp"
        )
        try:
            with _on_loopback():
                dashboard = _init(
                    config,
                    address="local",
                    _temp_dir=temp_dir,
                    _node_ip_address=LOOPBACK,
                    _system_config={**HEALTH_CHECKS, **NICENESS},
                    **offered,
                )
            return temp_dir, dashboard
        except BaseException as error:
            _end(temp_dir)
            if STARTUP_TIMEOUT not in str(error):
                raise
            load = os.getloadavg()[0]
            if attempt == START_ATTEMPTS:
                raise ConfigError(
                    f"Ray did not start within 30 s, {START_ATTEMPTS} times: this machine is too busy (load "
                    f"{load:.0f} on {num_cpus()} "
                    "CPUs). Try again when it has less to do, or join a Ray that runs already "
                    "(ray_kwargs.ray_init.address)"
                ) from error
            logger.warning("Ray did not start within 30 s (the machine's load is %.0f): trying again", load)
    raise AssertionError("the loop returns or raises")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray start a node that listens on 127.0.0.1 only.

    Given that address, Ray replaces it by one that other machines can reach, unless it is told that this
    platform has no clusters.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Keep the driver's own handlers of SIGINT and SIGTERM: Ray replaces the one of SIGTERM when it connects.

    Where the driver has set none for SIGTERM, Ray's stays, which ends the process in an orderly way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler not in (signal.SIG_DFL, None):
                signal.signal(number, handler)


def _init(config: RayConfig, *, address: str, **own: Any) -> str:
    """`ray.init`, with its errors in our words; gives where the dashboard is (empty: nowhere)."""
    namespace = config.ray_init.namespace or f"hybridflow-{uuid.uuid4().hex[:8]}"
    runtime_env = config.ray_init.runtime_env or None
    try:
        with warnings.catch_warnings(), _signal_handlers_kept():
            # about environment variables of accelerators in later versions of Ray
            warnings.simplefilter("ignore", FutureWarning)
            given = {
                "namespace": namespace,
                "runtime_env": runtime_env,
                "log_to_driver": True,
                "logging_level": logging.ERROR,
                **own,
            }
            return ray.init(address=address, **given).dashboard_url or ""
    except (RuntimeError, ConnectionError, ValueError) as error:
        text = " ".join(str(error).split())
        if "Version mismatch" in text:
            raise ConfigError(
                f"the Ray cluster at {address} and this process differ, install the same versions on all "
                f"nodes: {text}"
            ) from error
        if "merge the Job's runtime env" in text:
            raise ConfigError(
                "ray_kwargs.ray_init.runtime_env sets what the runtime environment of the submitted job "
                "sets too: leave one of them out"
                f" ({config.ray_init.runtime_env})"
            ) from error
        what = (
            "Ray did not start on this machine"
            if own
            else f"the Ray cluster at {address} could not be joined"
        )
        raise ConfigError(f"{what}: {text}") from error


def _end(temp_dir: str) -> None:
    """Stop the Ray that lives under `temp_dir` and remove it; what `ray.shutdown` left alive is killed."""
    try:
        if ray.is_initialized():
            ray.shutdown()
    finally:
        for pid, words in processes():
            if pid != os.getpid() and any(temp_dir in word for word in words):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                logger.debug("killed process %d (%s) that Ray left behind", pid, words[0])
        shutil.rmtree(temp_dir, ignore_errors=True)
