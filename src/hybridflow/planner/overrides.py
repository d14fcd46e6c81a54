"""The keys that make a run what a plan is, as overrides to paste behind `hybridflow train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridflow.config.roles import ROLE_KEYS, RoleKeys
from hybridflow.planner.hardware import Cluster
from hybridflow.planner.job import Job
from hybridflow.planner.pools import Pool, Setting
from hybridflow.planner.search import Plan

ROLLOUT = "actor_rollout_ref.rollout"


def overrides_of(plan: Plan, cluster: Cluster, job: Job) -> list[str]:
    """Return `key=value` for each key that the plan sets; quoted where a shell would read more into it."""
    return [
        f"trainer.device={cluster.hardware.device}",
        *_devices(plan.pools, cluster),
        *_schedule(plan, job),
        *_layouts(plan.pools),
    ]


def _devices(pools: Sequence[Pool], cluster: Cluster) -> Iterator[str]:
    node = min(cluster.hardware.node, cluster.devices)
    if len(pools) == 1:
        nodes = cluster.nodes
        if len(set(nodes)) == 1:
            yield f"trainer.nnodes={len(nodes)}"
            yield f"trainer.n_gpus_per_node={nodes[0]}"
            return
    named = {_name(pool): _nodes(pool.devices, node) for pool in pools}
    shown = ", ".join(f"{name}: {counts}" for name, counts in named.items())
    yield f"'trainer.resource_pools={{{shown}}}'"
    first = _name(pools[0])
    places = {role: _name(pool) for pool in pools for role in pool.roles if _name(pool) != first}
    if places:
        shown = ", ".join(f"{role}: {name}" for role, name in places.items())
        yield f"'trainer.placement={{{shown}}}'"


def _name(pool: Pool) -> str:
    """Return a name for a pool: that of its first role, or train where the actor is."""
    if "actor" in pool.roles:
        return "train"
    return "gen" if pool.roles == ("rollout",) else pool.roles[0]


def _nodes(devices: int, node: int) -> list[int]:
    whole = [node] * (devices // node)
    rest = devices % node
    return [*whole, rest] if rest else whole


def _schedule(plan: Plan, job: Job) -> Iterator[str]:
    if plan.schedule == "sync":
        return
    yield f"trainer.schedule={plan.schedule}"
    correction = job.config.algorithm.rollout_correction
    if not (correction.corrects or correction.bypass_mode):  # its tokens are some steps old
        yield "algorithm.rollout_correction.rollout_is=token"


def _layouts(pools: Sequence[Pool]) -> Iterator[str]:
    for pool in pools:
        for role, setting in pool.settings.items():
            if role == "rollout":
                yield f"{ROLLOUT}.tensor_model_parallel_size={setting.tensor}"
                yield f"{ROLLOUT}.max_num_seqs={setting.rows}"
            else:
                yield from _layout(ROLE_KEYS[role], setting)


def _layout(keys: RoleKeys, setting: Setting) -> Iterator[str]:
    here = f"{keys.layout}.fsdp_config"
    if setting.tensor > 1:
        yield f"{here}.tensor_parallel_size={setting.tensor}"
    if setting.stages > 1:
        yield f"{here}.pipeline_parallel_size={setting.stages}"
    if setting.experts > 1:
        yield f"{here}.expert_parallel_size={setting.experts}"
    if setting.shards != -1:
        yield f"{here}.fsdp_size={setting.shards}"
    if setting.offloads:
        yield f"{here}.param_offload=true"
        if keys.updates:
            yield f"{here}.optimizer_offload=true"
