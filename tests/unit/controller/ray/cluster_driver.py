"""Drivers of a Ray cluster, each a process of its own: what `test_cluster.py` starts, interrupts and reads.

A process can be in one Ray only, and a signal must meet a whole driver. What a driver finds it prints as one
line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

import ray

from hybridflow.config.cluster import RayConfig, RayInitConfig
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.controller.resource_pool import Placement, ResourcePool
from hybridflow.errors import HybridFlowError


@ray.remote
class Process:
    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def hang(self) -> None:
        # holds the interpreter's lock as little as a collective that waits does
        ctypes.CDLL(None).sleep(1000)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def refused(call: Any) -> str:
    """The message of the error that `call` raises."""
    try:
        call()
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def placement(*pools: ResourcePool) -> Placement:
    return Placement(pools, {f"on {pool.name}": (pool.name,) for pool in pools})


def own(timeline: str) -> None:
    """A Ray of its own with three busy processes; waits for a signal."""
    asks_too_much = lambda: RayCluster.connect(RayConfig(), device="cpu", wanted=1000)  # noqa: E731
    too_many = refused(asks_too_much)
    in_ray_before = ray.is_initialized()
    offered = RayInitConfig(num_cpus=4, include_dashboard=True)
    cluster = RayCluster.connect(RayConfig(offered, timeline), device="auto", wanted=3)
    try:
        pool = ResourcePool("global", (3,))
        no_room = refused(lambda: cluster.check(placement(pool, ResourcePool("rollout", (2,))), "cpu"))
        cluster.check(placement(pool), "cpu")
        placed = cluster.place(pool, "cpu", deadline=300)
        taken = refused(lambda: cluster.check(placement(ResourcePool("late", (2,))), "cpu", wait=0.1))
        late = refused(lambda: cluster.place(ResourcePool("late", (2,)), "cpu", deadline=0.5))
        actors = [Process.options(**options).remote() for options in placed.bundles]
        where = ray.get([actor.where.remote() for actor in actors])
        actors[0].hang.remote()
        # this process is in a Ray: that is the one
        there = RayCluster.connect(RayConfig(), device="cpu", wanted=1)
        there.shutdown()
        say(
            device=cluster.device,
            pids=[pid for _, pid in where],
            local_ranks=placed.local_ranks,
            temp_dir=cluster.temp_dir,
            too_many=too_many,
            in_ray_before=in_ray_before,
            no_room=no_room,
            taken=taken,
            late=late,
            still_there=ray.is_initialized(),
        )
        time.sleep(1000)
    finally:
        cluster.shutdown()
        cluster.shutdown()  # twice is once


def handles(_: str) -> None:
    """A Ray of its own under a driver with signal handlers; two processes work before and after signals."""
    caught: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: caught.append(number))
    cluster = RayCluster.connect(RayConfig(RayInitConfig(num_cpus=2)), device="cpu", wanted=2)
    pool = ResourcePool("global", (2,))
    cluster.check(placement(pool), "cpu")
    actors = [
        Process.options(**options).remote() for options in cluster.place(pool, "cpu", deadline=300).bundles
    ]
    before = ray.get([actor.where.remote() for actor in actors])
    say(pids=[pid for _, pid in before], temp_dir=cluster.temp_dir)
    sys.stdin.readline()  # the test sends its signals
    say(caught=caught, same=ray.get([actor.where.remote() for actor in actors]) == before)
    cluster.shutdown()


def version(address: str) -> None:
    """Joins as a process with another version of Ray would."""
    ray.__version__ = "2.0.0"
    message = refused(
        lambda: RayCluster.connect(RayConfig(RayInitConfig(address=address)), device="cpu", wanted=1)
    )
    say(message=message)


def spread(address: str) -> None:
    """Spans two nodes; sees one of them killed, by the test, and places the pool anew when another
    has come.
    """
    cluster = RayCluster.connect(RayConfig(RayInitConfig(address=address)), device="auto", wanted=4)
    pool = ResourcePool("global", (2, 2))
    too_many = refused(lambda: cluster.check(placement(ResourcePool("global", (2, 2, 2))), "cpu"))
    cluster.check(placement(pool), "cpu")
    placed = cluster.place(pool, "cpu", deadline=300)
    where = ray.get([Process.options(**options).remote().where.remote() for options in placed.bundles])
    say(
        nodes=placed.nodes,
        local_ranks=placed.local_ranks,
        as_planned=[node for node, _ in where] == placed.node_ids,
        num_processes=len({pid for _, pid in where}),
        too_many=too_many,
    )
    sys.stdin.readline()  # the test kills a node
    until = time.monotonic() + 60  # less than the 65 s of Ray's own settings
    while len(cluster.nodes()) > 2 and time.monotonic() < until:
        time.sleep(0.05)
    noticed = len(cluster.nodes()) == 2
    placed.free()
    missing = refused(lambda: cluster.check(placement(pool), "cpu"))
    say(noticed=noticed, missing=missing)
    sys.stdin.readline()  # the test adds a node
    cluster.check(placement(pool), "cpu")
    say(nodes=cluster.place(pool, "cpu", deadline=300).nodes)
    cluster.shutdown()
    say(in_ray=ray.is_initialized())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
