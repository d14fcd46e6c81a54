"""Pools of devices on the nodes of a cluster: which node each part of a pool gets, and what is missing.

assign(pools, nodes)     a node of the cluster for each node of each pool; None where they do not fit
shortage(pools, nodes)   in words: what is wanted, what there is, and what to set
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.controller.ray.preflight import NodeInfo
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.distributed.accelerators import features

MAX_TRIES = 10_000  # ways to put pools on nodes that are tried; a cluster with room needs far fewer


def assign(
    pools: Sequence[ResourcePool], nodes: Sequence[NodeInfo], *, by_total: bool = False
) -> dict[str, list[NodeInfo]] | None:
    """Choose a node of the cluster for each node of each pool; return None if they do not fit.

    The nodes of one pool differ from each other; two pools may share a node. The largest number of devices
    is placed first, on the node where it leaves the fewest free, so that whole machines stay free for those
    who need them. Among equal numbers the nodes of a pool are sorted by ip, so that a restarted run has its
    ranks in the same places.
    """
    wishes = [
        Wish(count, pool.name, place) for pool in pools for place, count in enumerate(pool.devices_per_node)
    ]
    hosts = [NodeSlots(node, node.total if by_total else node.free) for node in sorted(nodes, key=_ip_key)]
    chosen = _fit(sorted(wishes, key=lambda wish: -wish.count), hosts, [MAX_TRIES])
    if chosen is None:
        return None
    return {
        pool.name: _by_ip(
            pool.devices_per_node, [chosen[pool.name, place] for place in range(len(pool.devices_per_node))]
        )
        for pool in pools
    }


@dataclass(frozen=True)
class Wish:
    """A number of devices that a pool wants on one node."""

    count: int
    pool: str
    place: int


@dataclass
class NodeSlots:
    """A node of the cluster while pools are assigned to nodes."""

    node: NodeInfo
    left: int
    pools: frozenset[str] = frozenset()


def _fit(
    wishes: Sequence[Wish], hosts: Sequence[NodeSlots], tries: list[int]
) -> dict[tuple[str, int], NodeInfo] | None:
    """Place the wishes by depth-first search, best fit first, in at most `tries`; None where they do not fit.

    Of hosts in the same state only one is tried.
    """
    if not wishes:
        return {}
    wish, *rest = wishes
    tried: set[tuple[int, frozenset[str]]] = set()
    for host in sorted(hosts, key=lambda host: host.left):
        state = (host.left, host.pools)
        if host.left < wish.count or wish.pool in host.pools or state in tried or tries[0] <= 0:
            continue
        tried.add(state)
        tries[0] -= 1
        host.left -= wish.count
        host.pools |= {wish.pool}
        found = _fit(rest, hosts, tries)
        if found is not None:
            return {**found, (wish.pool, wish.place): host.node}
        host.left, host.pools = state
    return None


def _by_ip(counts: Sequence[int], nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return the same nodes, those with equal counts in the order of their ips."""
    waiting = {
        count: sorted((node for c, node in zip(counts, nodes) if c == count), key=_ip_key)
        for count in set(counts)
    }
    return [waiting[count].pop(0) for count in counts]


def _ip_key(node: NodeInfo) -> tuple[int, int, str]:
    address = ipaddress.ip_address(node.ip)
    return address.version, int(address), node.id


def shortage(
    pools: Sequence[ResourcePool], nodes: Sequence[NodeInfo], device: str, where: str, own: bool
) -> str:
    """Describe in words which devices are wanted, which there are, and what to set."""
    unit = features(device).resource
    wanted = sum(pool.world_size for pool in pools)
    total = sum(node.total for node in nodes)
    why = f"{where} has {total}"
    if total >= wanted:
        why = f"{where} does not have them free, or not on as many nodes"
    lines = [f"the run wants {wanted} {unit}s, but {why}."]
    lines += [f"  wanted: pool {pool.name!r}, {describe(pool)}" for pool in pools]
    lines += [f"  there:  {node} {unit}s" for node in nodes] or ["  there:  no node"]
    if assign(pools, nodes, by_total=True) is not None:
        lines.append(
            "Others hold what is missing: wait until they end, or see `ray status` and `ray list "
            "placement-groups`."
        )
    elif total >= wanted:
        lines.append(
            "There are enough in all, but not on as many nodes as wanted: a pool's nodes are different "
            "machines."
        )
    way_out = "Lower trainer.nnodes or trainer.n_gpus_per_node (or trainer.resource_pools)"
    if own and device == "cpu":
        way_out += ", or set ray_kwargs.ray_init.num_cpus to let processes share CPUs"
    elif not own:
        way_out += ", or start more nodes (`ray start --address=…`)"
    return "\n".join([*lines, way_out + "."])


def describe(pool: ResourcePool) -> str:
    """Describe a pool's devices, for example `2 nodes × 4` or `nodes of 4, 2`."""
    counts = pool.devices_per_node
    if len(set(counts)) == 1:
        return f"{len(counts)} node{'s' * (len(counts) > 1)} × {counts[0]}"
    return f"nodes of {', '.join(map(str, counts))}"
