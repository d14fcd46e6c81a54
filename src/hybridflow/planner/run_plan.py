"""The plan of a run: the roles that share devices, how each is spread over them, its memory and its seconds.

keys, placement ──trainer/ppo/run_plan.py──► RunPlan ─► `config --explain`, predictions beside a live run
keys, devices ──search.py──► the RunPlans that fit ─► `hybridflow plan`, as a table and as overrides
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.layout import JUDGE, ROLE_KEYS, VALIDATION
from hybridflow.config.model import FSDPConfig
from hybridflow.planner.costs import Costs, StepRows
from hybridflow.planner.hardware import Cluster
from hybridflow.planner.memory import (
    Needs,
    PlannedReplica,
    RoleEngine,
    engine_needs,
    generation_needs,
    judge_needs,
)
from hybridflow.planner.model_shape import ModelShape
from hybridflow.planner.model_size import ModelSize

CALLS = {"reference": "ref", "critic": "values", "reward_model": "reward_model"}
"""The metric of a role's forward pass."""
OVERLAPPING = ("one_step_off", "exact_async", "fully_async")
"""Schedules under which generation runs beside training where it has its own devices."""
REFILLING = ("fully_async", "colocated_async")
"""Schedules under which rows of the next batch take the places of those that end."""
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class PoolPlan:
    """Devices, and how the roles that share them use them."""

    name: str
    roles: tuple[str, ...]
    nodes: tuple[int, ...]
    """Devices of each node."""
    engines: Mapping[str, RoleEngine]
    """By role; the rollout has none, and a reference that is the actor without adapters needs none."""
    replica: PlannedReplica | None = None
    """How the rollout generates, or the replica that validates, if it is here."""
    judge: PlannedReplica | None = None
    """How a generative reward model does, if it is here."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes of one device in each phase, as a search has found them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each call, as a search has found them."""
    refilled: float = 0.0
    """Seconds of generation where the next batch's rows take the places of those that end."""

    @property
    def devices(self) -> int:
        """Devices of all nodes; each has one process."""
        return sum(self.nodes)

    def needs(self, sizes: Mapping[str, ModelSize], device: str) -> dict[str, Needs]:
        """Return what each role needs in a process; the rollout is `generation`. `sizes` are by role."""
        found = {
            role: engine_needs(engine, sizes[role], device=device)
            for role, engine in self.engines.items()
            if role != JUDGE
        }
        if self.judge is not None:
            found[JUDGE] = judge_needs(sizes[JUDGE], self.judge)
        if self.replica is not None:
            alone = "actor" not in self.roles
            found["generation"] = generation_needs(
                sizes["actor"], self.replica, alone=alone, devices=self.devices
            )
        return found


@dataclass(frozen=True)
class RunPlan:
    """One way to run a configuration."""

    config: PPOConfig | SFTConfig
    pools: tuple[PoolPlan, ...]
    schedule: str = "sync"
    phases: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds of each phase, named as its `timing_s/` metric; those of different pools may overlap."""
    seconds: float = 0.0
    """Seconds of a step, as a search has found them."""

    @property
    def devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.devices for pool in self.pools)

    @cached_property
    def engines(self) -> dict[str, RoleEngine]:
        """The engine of each role that has one."""
        found = {role: engine for pool in self.pools for role, engine in pool.engines.items()}
        return {role: found[role] for role in (*ROLE_KEYS, *found) if role in found}

    @property
    def placement(self) -> str:
        """What the paper calls the placement; a rollout with its own devices is named beside it."""
        models = [{*pool.roles} - {"rollout", VALIDATION} for pool in self.pools]
        models = [roles for roles in models if roles]
        name = "split"
        if len(models) == 1:
            name = "colocated"
        elif all(len(roles) == 1 for roles in models):
            name = "standalone"
        if ("rollout",) in [pool.roles for pool in self.pools]:
            return f"{name}, rollout alone"
        return name

    def pools_of(self, role: str) -> list[PoolPlan]:
        """Return the pools of a role; only the rollout may have several."""
        return [pool for pool in self.pools if role in pool.roles]

    @cached_property
    def generating(self) -> int:
        """Devices that generate."""
        return sum(pool.devices for pool in self.pools_of("rollout"))

    def predict(self, rows: StepRows, shapes: Mapping[str, ModelShape], costs: Costs) -> dict[str, float]:
        """Return the seconds of each phase of a step with these rows. `shapes` are by role."""
        config = self.config
        assert isinstance(config, PPOConfig), "phases are those of a step that generates"
        actor = self.engines["actor"]
        seconds: dict[str, float] = {}
        for role, shape in shapes.items():  # a reference that is the actor without adapters is spread like it
            seconds |= calls_of(config, role, self.engines.get(role, actor), shape, rows, costs)
        shape = shapes["actor"]
        refilled = self.schedule in REFILLING
        most = config.actor_rollout_ref.rollout.max_num_seqs
        ranks = self.ranks_of_replica
        seconds["gen"] = costs.generation(shape, rows, self.generating, ranks, most, refilled=refilled)
        seconds["update_weights"] = costs.sync(shape, actor.layout.world_size, ranks, apart=self.apart)
        return seconds

    @cached_property
    def apart(self) -> bool:
        """Whether the rollout has its own devices."""
        return all("actor" not in pool.roles for pool in self.pools_of("rollout"))

    @cached_property
    def ranks_of_replica(self) -> int:
        """Ranks of the rollout that serve requests together."""
        (replica, *_) = [pool.replica for pool in self.pools if pool.replica is not None]
        return replica.ranks

    def overrides(self, cluster: Cluster) -> list[str]:
        """Return `key=value` for each key that makes a run what the plan is; quoted where a shell would read
        more into it.
        """
        words = [f"trainer.device={cluster.hardware.device}", *self._places(cluster)]
        if self.schedule != "sync":
            assert isinstance(self.config, PPOConfig), "supervised runs have one schedule"
            words.append(f"trainer.schedule={self.schedule}")
            correction = self.config.algorithm.rollout_correction
            if not (correction.corrects or correction.bypass_mode):  # its tokens are some steps old
                words.append("algorithm.rollout_correction.rollout_is=token")
        for pool in self.pools:
            for role, engine in pool.engines.items():
                words += _layout(role, engine.fsdp)
            if pool.replica is not None and VALIDATION not in pool.roles:
                words.append(f"{ROLLOUT}.tensor_model_parallel_size={pool.replica.tensor}")
                words.append(f"{ROLLOUT}.max_num_seqs={pool.replica.rows}")
        return words

    def _places(self, cluster: Cluster) -> Iterator[str]:
        nodes = cluster.nodes
        if len(self.pools) == 1 and len(set(nodes)) == 1:
            yield f"trainer.nnodes={len(nodes)}"
            yield f"trainer.n_gpus_per_node={nodes[0]}"
            return
        shown = ", ".join(f"{pool.name}: {list(pool.nodes)}" for pool in self.pools)
        yield f"'trainer.resource_pools={{{shown}}}'"
        shown = ", ".join(f"{role}: {pool.name}" for pool in self.pools[1:] for role in pool.roles)
        if shown:
            yield f"'trainer.placement={{{shown}}}'"


def _layout(role: str, fsdp: FSDPConfig) -> Iterator[str]:
    """Yield the overrides that spread the engine of a role so; replicas of a judge are as the keys say."""
    if role == JUDGE:
        return
    keys = ROLE_KEYS[role]
    here = f"{keys.layout}.fsdp_config"
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if getattr(fsdp, name) > 1:
            yield f"{here}.{name}={getattr(fsdp, name)}"
    if fsdp.fsdp_size != -1:
        yield f"{here}.fsdp_size={fsdp.fsdp_size}"
    if fsdp.param_offload:
        yield f"{here}.param_offload=true"
        if keys.updates:
            yield f"{here}.optimizer_offload=true"


def calls_of(
    config: PPOConfig, role: str, engine: RoleEngine, shape: ModelShape, rows: StepRows, costs: Costs
) -> dict[str, float]:
    """Return the seconds of a role's calls in a step, named as their `timing_s/` metrics."""
    seconds: dict[str, float] = {}
    if role == JUDGE:  # its verdicts are part of what the reward takes
        return seconds
    if role != "actor":
        seconds[CALLS[role]] = costs.passes(shape, rows, engine, learns=False)
    elif not config.algorithm.rollout_correction.bypass_mode:
        limits = config.actor_rollout_ref.rollout
        scoring = replace(
            engine,
            max_tokens=limits.log_prob_max_token_len_per_gpu or engine.max_tokens,
            max_rows=limits.log_prob_micro_batch_size_per_gpu,
        )
        seconds["old_log_prob"] = costs.passes(shape, rows, scoring, learns=False)
    if role in ("actor", "critic"):
        seconds[f"update_{role}"] = costs.passes(shape, rows, engine, learns=True)
    return seconds
