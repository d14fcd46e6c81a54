"""The mapping of roles to devices that takes the least time: algorithm 1 of HybridFlow (arXiv 2409.19256).

    partitions of the roles ─► devices of each set ─► layouts that fit ─► RunPlan, by seconds of a step

As in the paper, every way to put roles on common devices is tried, each set gets at least the fewest devices
in whose memory its roles fit, each role has its best layout by simulation, and a step takes, in each of its
three stages, as long as the set that needs most. Two things are not the paper's: the rollout may be a
separate set, to compare schedules that generate ahead, and layouts are those that the keys can say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hybridflow.planner.costs import Costs
from hybridflow.planner.hardware import MOST_DEVICES, Cluster, sizes_of_pools
from hybridflow.planner.pools import PARTS, PoolPlanner, StepWork
from hybridflow.planner.run_plan import REFILLING, PoolPlan, RunPlan

GENERATING = "gen"
PREPARING = ("old_log_prob", "ref", "values", "reward_model")
UPDATING = ("update_critic", "update_actor")
SYNCING = "update_weights"
STANDALONE_SCHEDULES = ("sync", "one_step_off", "fully_async")
SHARED_SCHEDULES = ("sync", "colocated_async")


class Found(NamedTuple):
    """The outcome of a search."""

    plans: list[RunPlan]
    """All that fit, the fastest first."""
    placements: int
    """Ways of sharing devices that were tried."""
    tried: int
    """Divisions of the devices that were simulated."""


@dataclass
class PlacementSearch:
    """A search over placements, devices and layouts for one job."""

    job: StepWork
    costs: Costs
    schedules: Sequence[str] = ("sync", "one_step_off", "fully_async", "colocated_async")

    @cached_property
    def pools(self) -> PoolPlanner:
        """Plans a set of roles on a number of devices, and caches the plan."""
        return PoolPlanner(self.job, self.costs)

    def run(self) -> Found:
        """Return all plans that fit into memory, the fastest first.

        A replica that validates beside training (`trainer.val_in_background`) has as many devices as one of
        the rollout, and all else has the others.
        """
        if not self.job.config.trainer.val_in_background:
            return self._found()
        cluster = self.costs.cluster
        plans: list[RunPlan] = []
        placements = 0
        tried = 0
        for width in PARTS:
            validation = self.pools.validation(width)
            if validation is None or width >= cluster.devices:
                continue
            left = Cluster(cluster.hardware, cluster.devices - width)
            found = replace(self, costs=replace(self.costs, cluster=left))._found()
            placements += found.placements
            tried += found.tried
            plans += [
                replace(plan, pools=(*plan.pools, validation))
                for plan in found.plans
                if plan.ranks_of_replica == width
            ]
        return Found(sorted(plans, key=lambda plan: plan.seconds), placements, tried)

    def _found(self) -> Found:
        """Return all plans of the roles of a step on all devices."""
        plans: list[RunPlan] = []
        placements = 0
        tried = 0
        for sets in partitions(self.job.roles):
            placements += 1
            fewest = [self.pools.fewest(tuple(roles)) for roles in sets]
            if any(number is None for number in fewest):
                continue
            for sizes in allocations(self.costs.cluster, [number or 1 for number in fewest]):
                tried += 1
                plans.extend(self._plans(sets, sizes))
        return Found(sorted(plans, key=lambda plan: plan.seconds), placements, tried)

    def _plans(self, sets: Sequence[Sequence[str]], sizes: Sequence[int]) -> Iterator[RunPlan]:
        pools = []
        for roles, devices in zip(sets, sizes, strict=True):
            pool = self.pools.plan(tuple(roles), devices)
            if pool is None:
                return
            pools.append(pool)
        alone = any(tuple(roles) == ("rollout",) for roles in sets)
        shared = any({"actor", "rollout"} <= {*roles} for roles in sets)
        if not (alone or shared):
            return  # the rollout among others than the actor trains and waits like them, and gains nothing
        possible = STANDALONE_SCHEDULES if alone else SHARED_SCHEDULES
        for schedule in possible:
            if schedule in self.schedules:
                phases, seconds = self._step(tuple(pools), schedule, apart=alone)
                yield RunPlan(self.job.config, tuple(pools), schedule, phases, seconds)

    def _step(
        self, pools: tuple[PoolPlan, ...], schedule: str, *, apart: bool
    ) -> tuple[dict[str, float], float]:
        """Return the seconds of each phase and those of the step, along its critical path."""
        phases = {name: seconds for pool in pools for name, seconds in pool.seconds.items()}
        if schedule in REFILLING:
            phases[GENERATING] = max(pool.refilled for pool in pools)
        if self.job.rewarding:
            phases["reward"] = self.job.rewarding
        generating = max(phases[GENERATING], self.job.rewarding)  # responses are scored as they end
        actor = next(pool for pool in pools if "actor" in pool.roles)
        rollout = next(pool for pool in pools if "rollout" in pool.roles)
        assert rollout.replica is not None, "a pool with the rollout has a replica of it"
        phases[SYNCING] = self.costs.sync(
            self.job.shapes["actor"], actor.devices, rollout.replica.tensor, apart=apart
        )
        preparing = max(sum(pool.seconds.get(name, 0.0) for name in PREPARING) for pool in pools)
        updating = max(sum(pool.seconds.get(name, 0.0) for name in UPDATING) for pool in pools)
        training = preparing + updating
        if schedule in ("one_step_off", "fully_async"):
            return phases, max(generating, training) + phases[SYNCING]
        return phases, generating + training + phases[SYNCING]


def enough_devices(job: StepWork, costs: Costs) -> int | None:
    """Return a number of devices, found by doubling, that all roles fit on together; None if none is."""
    devices = 2 * costs.cluster.devices
    while devices <= MOST_DEVICES:
        cluster = Cluster(costs.cluster.hardware, devices)
        if PoolPlanner(job, replace(costs, cluster=cluster)).plan(tuple(job.roles), devices) is not None:
            return devices
        devices *= 2
    return None


def partitions(roles: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield every way to put roles into sets that share their devices."""
    if not roles:
        yield []
        return
    first = roles[0]
    for rest in partitions(roles[1:]):
        yield [[first], *rest]
        for index, one in enumerate(rest):
            yield [*rest[:index], [first, *one], *rest[index + 1 :]]


def allocations(cluster: Cluster, fewest: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to divide all devices into sets that need at least `fewest` each, so that a pool has
    whole nodes and at most one part of a node.
    """
    sizes = sizes_of_pools(cluster)
    after = [sum(fewest[index + 1 :]) for index in range(len(fewest))]

    def deal(index: int, left: int) -> Iterator[tuple[int, ...]]:
        if index == len(fewest) - 1:
            if left in sizes and left >= fewest[index]:
                yield (left,)
            return
        for size in sizes:
            if fewest[index] <= size <= left - after[index]:
                for rest in deal(index + 1, left - size):
                    yield (size, *rest)

    return (sizes for sizes in deal(0, cluster.devices) if cluster.holds(sizes))


def first_different(plans: Sequence[RunPlan]) -> list[RunPlan]:
    """Return the plans without those that share roles out as a faster one does under the same schedule."""
    found: dict[tuple[str, frozenset[tuple[str, ...]]], RunPlan] = {}
    for plan in plans:
        found.setdefault((plan.schedule, frozenset(pool.roles for pool in plan.pools)), plan)
    return list(found.values())
