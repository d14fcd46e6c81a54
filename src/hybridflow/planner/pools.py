"""One set of roles on common devices: the layout of each that fits into memory and takes the least time.

resolved PPOConfig, config.json of its models ──job_of──► StepWork
roles, devices ──PoolPlanner.plan──► PoolPlan: engine of each role, bytes of each phase, seconds of each call
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from hybridflow.config import PPOConfig
from hybridflow.config.checks.rollout import WITH_WEIGHTS
from hybridflow.config.explain import generation_batch
from hybridflow.config.layout import JUDGE, VALIDATION, engine_keys
from hybridflow.config.megatron import STRATEGIES
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.config.needs import (
    has_own_reference,
    longest_row,
    needs_reference,
    responses_per_prompt,
    rows_per_prompt,
)
from hybridflow.config.reward import has_classifier, has_judge
from hybridflow.config.tree import get_value
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.planner.costs import Costs, Lengths, StepRows
from hybridflow.planner.hardware import CPU, sizes_of_pools
from hybridflow.planner.memory import (
    Needs,
    PlannedReplica,
    RoleEngine,
    engine_needs,
    generation_needs,
    judge_needs,
    native_quantization,
    phases_of_pool,
    planned_judge,
)
from hybridflow.planner.model_shape import ModelShape, adapter_rank
from hybridflow.planner.run_plan import PoolPlan, calls_of

RESERVED = 1.5 * 2**30
"""Bytes of a device that the estimate leaves out: context, libraries, buffers of communication."""
USABLE = 0.9
"""Part of a device that a plan fills."""
PARTS = (1, 2, 3, 4, 6, 8)
"""Numbers of stages and of ranks of tensor parallelism that are tried where they divide."""
MOST_PARTS = 64
"""Most ranks that share experts in a plan."""
FEWEST_ROWS = 8
"""Rows that a replica must have room for at once."""


class Option(NamedTuple):
    """A layout of a role with its bytes and seconds."""

    engine: RoleEngine
    needs: Needs
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all its calls."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class StepWork:
    """A step of a run, whatever devices compute it."""

    config: PPOConfig
    shapes: dict[str, ModelShape]
    """The model of each role: actor, and those of reference, critic and reward_model that the run has."""
    generated: StepRows
    trained: StepRows
    rewarding: float = 0.0
    """Seconds in which the reward processes score all responses; they begin with the first one."""

    @property
    def roles(self) -> list[str]:
        """All roles that have a place, the rollout among them."""
        return ["actor", "rollout", *(role for role in self.shapes if role != "actor")]


def shapes_of(config: PPOConfig, load: Callable[[ModelConfig], ModelShape]) -> dict[str, ModelShape]:
    """Return the model of each role that has a place in plans, without the rollout. Raises ModelError.

    `load` reads the shape of a model by its keys.
    """
    there = {
        "actor": True,
        "reference": needs_reference(config),
        "critic": bool(config.critic.enable),
        "reward_model": has_classifier(config.reward),
        JUDGE: has_judge(config.reward),
    }
    return {role: load(engine_keys(config, role)[2]) for role in there if there[role]}


def job_of(
    config: PPOConfig,
    load: Callable[[ModelConfig], ModelShape],
    prompt: float,
    response: float,
    reward_seconds: float = 0.0,
) -> StepWork:
    """Return the job of a resolved configuration with these mean numbers of tokens in prompts and responses,
    and these seconds of the reward for a response. `load` is that of `shapes_of`.
    """
    rows = config.data.train_batch_size * rows_per_prompt(config)
    lengths = Lengths(response, config.data.max_response_length)
    each = responses_per_prompt(config)
    return StepWork(
        config,
        shapes_of(config, load),
        generated=StepRows(generation_batch(config) * each, prompt, lengths, each),
        trained=StepRows(rows, prompt, lengths),
        rewarding=rows * reward_seconds / max(config.reward.num_workers, 1),
    )


class PoolPlanner:
    """Plans sets of roles of one job; each set and number of devices is planned once."""

    def __init__(self, job: StepWork, costs: Costs) -> None:
        self.job = job
        self.costs = costs
        self.plan = cache(self._plan)
        self.options = cache(self._options)

    @property
    def node(self) -> int:
        """Devices of a node."""
        return min(self.costs.cluster.hardware.node, self.costs.cluster.devices)

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may use."""
        return self.costs.cluster.hardware.memory * USABLE - RESERVED

    def generates_by(self, tensor: int) -> bool:
        """Return whether `tensor` devices can be one replica of the rollout.

        The native engine cuts dense models; vLLM and SGLang cut experts too, and hold a head of keys and
        values on several devices where there are more devices than heads.
        """
        shape = self.job.shapes["actor"]
        if tensor == 1:
            return True
        if self.job.config.actor_rollout_ref.rollout.name in WITH_WEIGHTS:
            shared = shape.kv_heads % tensor == 0 or tensor % shape.kv_heads == 0
            return shape.heads % tensor == 0 and shared
        return not shape.experts and shape.cuts(tensor)

    def validation(self, width: int) -> PoolPlan | None:
        """Return the pool of a replica on `width` devices that validates; None where it does not fit."""
        found = self._rollout(PoolPlan(VALIDATION, (VALIDATION,), (width,), {}), width, {})
        return found and replace(found, seconds={}, refilled=0.0)

    def fewest(self, roles: tuple[str, ...]) -> int | None:
        """Return the fewest devices in whose memory the roles fit; None where none are enough."""
        for size in sizes_of_pools(self.costs.cluster):
            if self.plan(roles, size) is not None:
                return size
        return None

    def _plan(self, roles: tuple[str, ...], devices: int) -> PoolPlan | None:
        models = [role for role in roles if role != "rollout"]
        options = {role: self.options(role, devices) for role in models}
        if any(not found for found in options.values()):
            return None
        together = [role for role in models if self._is_megatrons(role, devices)]
        if len(together) < 2:
            return self._fitting(roles, devices, options)
        alike = [{each.engine.layout: each for each in self._every(role, devices)} for role in together]
        found = []
        for layout in alike[0]:  # megatron-core has one layout in a process
            if all(layout in each for each in alike):
                same = {role: [each[layout]] for role, each in zip(together, alike, strict=True)}
                found.append(self._fitting(roles, devices, options | same))
        fitting = (pool for pool in found if pool is not None)
        return min(fitting, key=lambda pool: sum(pool.seconds.values()), default=None)

    def _fitting(
        self, roles: tuple[str, ...], devices: int, options: Mapping[str, Sequence[Option]]
    ) -> PoolPlan | None:
        """Return the pool with the fastest of the options of each role that fit together."""
        chosen = dict.fromkeys(options, 0)
        while True:
            taken = {role: options[role][index] for role, index in chosen.items()}
            pool = self._with_rollout(roles, devices, taken)
            if pool is not None:
                return pool
            role = self._next_to_shrink(options, chosen)
            if role is None:
                return None
            chosen[role] += 1

    @staticmethod
    def _next_to_shrink(options: Mapping[str, Sequence[Option]], chosen: Mapping[str, int]) -> str | None:
        """Return the role whose next setting frees most memory for a second; None where all are smallest."""
        best = None
        most = -1.0
        for role, index in chosen.items():
            if index + 1 < len(options[role]):
                here = options[role][index]
                after = options[role][index + 1]
                freed = _bytes(here) - _bytes(after)
                price = max(after.total - here.total, 1e-3)
                if freed / price > most:
                    best = role
                    most = freed / price
        return best

    def _options(self, role: str, devices: int) -> list[Option]:
        """Return a role's layouts on `devices` devices, each smaller and slower than the one before."""
        if role == JUDGE:
            return self._judge(devices)
        kept: list[Option] = []
        for option in sorted(self._every(role, devices), key=lambda option: option.total):
            if not kept or _bytes(option) < _bytes(kept[-1]):
                kept.append(option)
        return kept

    def _every(self, role: str, devices: int) -> list[Option]:
        return [self._option(role, devices, fsdp) for fsdp in self.layouts(role, devices)]

    def _is_megatrons(self, role: str, devices: int) -> bool:
        """Return whether megatron-core computes a role on `devices` devices, by the key alone."""
        key = STRATEGIES.get(role)
        return key is not None and devices > 1 and bool(get_value(self.job.config, key) == "megatron")

    def _judge(self, devices: int) -> list[Option]:
        """Return the one way in which a generative reward model uses devices, if it can use as many."""
        config = self.job.config
        width = config.reward.reward_model.rollout.tensor_model_parallel_size
        shape = self.job.shapes[JUDGE]
        if devices % width or self.node % width:
            return []
        engine = RoleEngine.of(config, JUDGE, ParallelLayout.from_keys(width, -1, 1, width, 1, 1))
        size = shape.size(trained=False, itemsize=self.costs.itemsize)
        return [Option(engine, judge_needs(size, planned_judge(config)), {})]

    def layouts(self, role: str, devices: int) -> Iterator[FSDPConfig]:
        """Yield the layouts of a role that its keys can say and that its model allows."""
        fsdp, _, model = engine_keys(self.job.config, role)
        adapters = model.lora_rank or model.lora_adapter_path
        shape = self.job.shapes[role]
        megatron = self._is_megatrons(role, devices)  # which has fewer layouts, without copies or offloading
        for stages, tensor in itertools.product(PARTS, PARTS):
            sharers = devices // (stages * tensor)
            if devices % (stages * tensor) or self.node % tensor or not shape.cuts(tensor):
                continue
            if (tensor > 1 and adapters) or stages > max(1, len(shape.layers) // 4):
                continue
            if stages > 1 and model.quantization:
                continue
            parts = stages * fsdp.virtual_pipeline_parallel_size
            if megatron and (len(shape.layers) % parts or (tensor > 1 and shape.experts)):
                continue
            shards = [-1]
            if sharers * tensor > self.node and not megatron:  # copies, none of which is on two nodes
                shards.append(math.gcd(sharers, self.node // tensor))
            on_cpu = self.costs.cluster.hardware.name == CPU  # in whose memory all is at hand
            ways = (False,) if on_cpu or megatron else (False, True)
            for each, offloads in itertools.product(shards, ways):
                ranks = tensor * (sharers if each == -1 else each)
                for experts in _parts_of_experts(shape, ranks, tensor, fsdp):
                    yield replace(
                        fsdp,
                        fsdp_size=each,
                        tensor_parallel_size=tensor,
                        pipeline_parallel_size=stages,
                        expert_parallel_size=experts,
                        param_offload=offloads,
                        optimizer_offload=offloads,
                    )

    def _option(self, role: str, devices: int, fsdp: FSDPConfig) -> Option:
        job = self.job
        layout = ParallelLayout.from_keys(
            devices,
            fsdp.fsdp_size,
            1,
            fsdp.tensor_parallel_size,
            fsdp.pipeline_parallel_size,
            fsdp.expert_parallel_size,
        )
        engine = replace(RoleEngine.of(job.config, role, layout), fsdp=fsdp)
        shape = job.shapes[role]
        seconds = calls_of(job.config, role, engine, shape, job.trained, self.costs)
        lora = adapter_rank(engine.model) if engine.trained else 0
        size = shape.size(
            trained=engine.trained,
            lora_rank=lora,
            itemsize=self.costs.itemsize,
            quantized=engine.trained and engine.model.quantization is not None,
        )
        return Option(engine, engine_needs(engine, size, device=self.costs.cluster.hardware.device), seconds)

    def _with_rollout(
        self, roles: tuple[str, ...], devices: int, taken: Mapping[str, Option]
    ) -> PoolPlan | None:
        """Return the pool with these layouts and the rollout's best, or None if they do not fit."""
        needs = {role: option.needs for role, option in taken.items()}
        # whether the reference is the actor without its adapters, and has no separate weights
        config = self.job.config
        model = config.actor_rollout_ref.model
        adapters = bool(model.lora_rank or model.lora_adapter_path)
        if adapters and "reference" in roles and not has_own_reference(config):
            if "actor" in roles:
                needs.pop("reference")
            elif model.quantization is not None:
                return None  # the base in 4 bits is in the actor's processes alone
        memory = phases_of_pool(needs, devices) if needs else {}
        if needs and max(memory.values()) > self.room:
            return None
        seconds = {name: value for option in taken.values() for name, value in option.seconds.items()}
        name = roles[0]
        if "actor" in roles:
            name = "train"
        elif roles == ("rollout",):
            name = "gen"
        pool = PoolPlan(
            name,
            roles,
            tuple(self.costs.cluster.split(devices)),
            {role: option.engine for role, option in taken.items()},
            memory=memory,
            seconds=seconds,
        )
        if "rollout" not in roles:
            return pool
        found = [self._rollout(pool, tensor, needs) for tensor in PARTS]
        return min(
            (each for each in found if each is not None), key=lambda each: each.seconds["gen"], default=None
        )

    def _rollout(self, pool: PoolPlan, tensor: int, needs: Mapping[str, Needs]) -> PoolPlan | None:
        """Return the pool with replicas of `tensor` devices, or None if they do not fit beside `needs`."""
        job = self.job
        devices = pool.devices
        shape = job.shapes["actor"]
        held = job.config.actor_rollout_ref.model.quantization
        if devices % tensor or self.node % tensor or not self.generates_by(tensor) or (held and tensor > 1):
            return None
        rollout = job.config.actor_rollout_ref.rollout
        here = max(1, round(job.generated.count / (devices // tensor)))
        mean = job.generated.prompt + job.generated.lengths.mean
        size = shape.size(trained=False, itemsize=self.costs.itemsize, quantized=held is not None)
        alone = "actor" not in pool.roles
        if alone and held is not None:
            return None  # the actor's processes generate

        def replica(rows: int) -> PlannedReplica:
            return PlannedReplica(tensor, rows, round(mean), native_quantization(rollout), tensor)

        def generation(rows: int) -> Needs:
            return generation_needs(size, replica(rows), alone=alone, devices=devices)

        none = phases_of_pool({**needs, "generation": generation(0)}, devices)["generating"]
        each = generation(1).update - generation(0).update
        rows = min(here, rollout.max_num_seqs, int((self.room - none) // each))
        longest = longest_row(job.config)[0]
        if rows < min(FEWEST_ROWS, here) or (self.room - none) < each * longest / mean:
            return None
        generate = self.costs.generation
        return replace(
            pool,
            replica=replica(rows),
            memory=phases_of_pool({**needs, "generation": generation(rows)}, devices),
            seconds={**pool.seconds, "gen": generate(shape, job.generated, devices, tensor, rows)},
            refilled=generate(shape, job.generated, devices, tensor, rows, refilled=True),
        )


def _parts_of_experts(shape: ModelShape, ranks: int, tensor: int, fsdp: FSDPConfig) -> Iterator[int]:
    """Yield the numbers of ranks that may share experts, of the `ranks` that hold one copy of a stage."""
    if tensor == 1 or not shape.experts:
        yield 1
    if shape.experts and not fsdp.use_torch_compile:
        for parts in range(2, min(ranks, MOST_PARTS) + 1):
            if ranks % parts == 0 and shape.deals(parts, ranks // parts):
                yield parts


def _bytes(option: Option) -> float:
    """Return the bytes of a role at its peak, with what rests twice: other roles wait for it."""
    return 2.0 * option.needs.between + option.needs.update
