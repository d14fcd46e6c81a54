"""One set of roles on common devices: the layout of each that fits into memory and takes the least time.

roles, devices ──PoolPlanner.plan──► Pool: settings of each role, bytes of each phase, seconds of each call
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.needs import has_own_reference
from hybridflow.config.roles import engine_keys
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.planner.costs import Costs
from hybridflow.planner.hardware import sizes_of_pools
from hybridflow.planner.job import Job, calls_of, engine_of, training_of
from hybridflow.planner.memory import Needs, engine_needs, generation_needs, phases_of_pool, rounded_to
from hybridflow.planner.model_shape import ModelShape

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


class Setting(NamedTuple):
    """How one role uses the devices of its pool."""

    tensor: int = 1
    shards: int = -1
    """fsdp_size; -1: all."""
    offloads: bool = False
    stages: int = 1
    experts: int = 1
    """expert_parallel_size."""
    rows: int = 0
    """Rows that a replica of the rollout runs at once."""


class Option(NamedTuple):
    """A setting of a role with its bytes and seconds."""

    setting: Setting
    needs: Needs
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all its calls."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Pool:
    """Devices, and the roles that share them."""

    roles: tuple[str, ...]
    devices: int
    settings: Mapping[str, Setting]
    memory: Mapping[str, float]
    """Bytes of one device in each phase."""
    seconds: Mapping[str, float]
    """Seconds of each call."""
    refilled: float = field(default=0.0)
    """Seconds of generation where the next batch's rows take the places of those that end."""


class PoolPlanner:
    """Plans sets of roles of one job; each set and number of devices is planned once."""

    def __init__(self, job: Job, costs: Costs) -> None:
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
        """Return whether so many devices can be one replica of the rollout.

        The native engine cuts dense models. Another one is started on each device, or by the user.
        """
        shape = self.job.shapes["actor"]
        native = self.job.config.actor_rollout_ref.rollout.name == "native"
        return tensor == 1 or (native and not shape.experts and shape.cuts(tensor))

    def fewest(self, roles: tuple[str, ...]) -> int | None:
        """Return the fewest devices in whose memory the roles fit; None where none are enough."""
        for size in sizes_of_pools(self.costs.cluster):
            if self.plan(roles, size) is not None:
                return size
        return None

    def _plan(self, roles: tuple[str, ...], devices: int) -> Pool | None:
        models = [role for role in roles if role != "rollout"]
        options = {role: self.options(role, devices) for role in models}
        if any(not found for found in options.values()):
            return None
        chosen = dict.fromkeys(models, 0)
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
        """Return a role's settings on so many devices, each smaller and slower than the one before."""
        found = [self._option(role, devices, setting) for setting in self.settings(role, devices)]
        found.sort(key=lambda option: option.total)
        kept: list[Option] = []
        for option in found:
            if not kept or _bytes(option) < _bytes(kept[-1]):
                kept.append(option)
        return kept

    def settings(self, role: str, devices: int) -> Iterator[Setting]:
        """Yield the layouts of a role that its keys can say and that its model allows."""
        fsdp, _, model = engine_keys(self.job.config, role)
        adapters = model.lora_rank or model.lora_adapter_path
        shape = self.job.shapes[role]
        for stages, tensor in itertools.product(PARTS, PARTS):
            sharers = devices // (stages * tensor)
            if devices % (stages * tensor) or self.node % tensor or not shape.cuts(tensor):
                continue
            if (tensor > 1 and adapters) or stages > max(1, len(shape.layers) // 4):
                continue
            shards = [-1]
            if sharers * tensor > self.node:  # copies of the model, none of which is on two nodes
                shards.append(math.gcd(sharers, self.node // tensor))
            ways = (False,) if self.costs.on_cpu else (False, True)
            for each, offloads in itertools.product(shards, ways):
                ranks = tensor * (sharers if each == -1 else each)
                for experts in _parts_of_experts(shape, ranks, tensor, fsdp):
                    yield Setting(tensor, each, offloads, stages, experts)

    def _option(self, role: str, devices: int, setting: Setting) -> Option:
        job = self.job
        layout = ParallelLayout.from_keys(
            devices, setting.shards, 1, setting.tensor, setting.stages, setting.experts
        )
        engine = engine_of(job.config, role, layout)
        keys = replace(
            engine.fsdp,
            fsdp_size=setting.shards,
            tensor_parallel_size=setting.tensor,
            pipeline_parallel_size=setting.stages,
            expert_parallel_size=setting.experts,
            param_offload=setting.offloads,
            optimizer_offload=setting.offloads,
        )
        engine = replace(engine, role=role, fsdp=keys)
        seconds = calls_of(job, self.costs, role, training_of(engine, job.config), job.trained)
        lora = engine.model.lora_rank if engine.trained else 0
        size = job.shapes[role].size(trained=engine.trained, lora_rank=lora, itemsize=self.costs.itemsize)
        return Option(setting, engine_needs(engine, size, device=self.costs.cluster.hardware.device), seconds)

    def _with_rollout(self, roles: tuple[str, ...], devices: int, taken: Mapping[str, Option]) -> Pool | None:
        """Return the pool with these settings and the rollout's best, or None if they do not fit."""
        needs = {role: option.needs for role, option in taken.items()}
        # whether the reference is the actor without its adapters, and has no weights of its own
        config = self.job.config
        model = config.actor_rollout_ref.model
        adapters = bool(model.lora_rank or model.lora_adapter_path)
        if adapters and {"actor", "reference"} <= {*roles} and not has_own_reference(config):
            needs.pop("reference")
        settings = {role: option.setting for role, option in taken.items()}
        seconds = {name: value for option in taken.values() for name, value in option.seconds.items()}
        if needs and max(phases_of_pool(needs, devices).values()) > self.room:
            return None
        if "rollout" not in roles:
            return Pool(roles, devices, settings, phases_of_pool(needs, devices), seconds)
        best: Pool | None = None
        for tensor in PARTS:
            found = self._rollout(roles, devices, tensor, needs)
            if found is None:
                continue
            setting, memory, generating, refilled = found
            if best is None or generating < best.seconds["gen"]:
                together = {**settings, "rollout": setting}
                best = Pool(roles, devices, together, memory, {**seconds, "gen": generating}, refilled)
        return best

    def _rollout(
        self, roles: tuple[str, ...], devices: int, tensor: int, needs: dict[str, Needs]
    ) -> tuple[Setting, Mapping[str, float], float, float] | None:
        job = self.job
        shape = job.shapes["actor"]
        if devices % tensor or self.node % tensor or not self.generates_by(tensor):
            return None
        here = max(1, round(job.generated.count / (devices // tensor)))
        most = job.config.actor_rollout_ref.rollout.max_num_seqs
        apart = "actor" not in roles
        why = ""
        if apart or devices > 1:
            why = "of the rollout"
        size = shape.size(trained=False, itemsize=self.costs.itemsize)

        def generation(rows: int) -> Needs:
            return generation_needs(
                size,
                tensor=tensor,
                rows=rows,
                slot=round(mean),
                own_weights=why,
                standing=apart,
                rounded=rounded_to(job.config.actor_rollout_ref.rollout),
            )

        mean = job.generated.prompt + job.generated.lengths.mean
        none = phases_of_pool({**needs, "generation": generation(0)}, devices)["generating"]
        each = generation(1).update - generation(0).update
        fits = int((self.room - none) // each)
        rows = min(here, most, fits)
        if rows < min(FEWEST_ROWS, here) or (self.room - none) < each * job.longest / mean:
            return None
        setting = Setting(tensor, rows=rows)
        memory = phases_of_pool({**needs, "generation": generation(rows)}, devices)
        generate = self.costs.generation
        seconds = generate(shape, job.generated, devices, tensor, rows)
        refilled = generate(shape, job.generated, devices, tensor, rows, refilled=True)
        return setting, memory, seconds, refilled


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
