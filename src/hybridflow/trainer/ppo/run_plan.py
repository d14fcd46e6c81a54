"""The plan of a run as its keys place it, and its predictions next to what each step takes.

    config ──plan_of──► RunPlan ─► `config --explain`
    RunPlan ──make_predictor──► Predictor ──(batch, timings of a step)──► perf/predicted/…, perf/peak_memory

The prediction is that of `hybridflow plan`, for the rows that the step has trained. On a CPU the machine is
measured when the run begins. The first step is predicted by the devices' figures alone, and corrects each
phase of the later ones, so that from the second step on a prediction says what these rows should take here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridflow.config import PPOConfig
from hybridflow.config.explain import generation_batch
from hybridflow.config.layout import JUDGE, VALIDATION
from hybridflow.config.needs import longest_row, responses_per_prompt
from hybridflow.controller import Placement
from hybridflow.controller.worker import Worker
from hybridflow.distributed.device import measured_cpu, resolve_device
from hybridflow.distributed.facilities import facilities
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.cache.kv_cache import slot_capacity
from hybridflow.models.files.build import shape_of
from hybridflow.planner.costs import FITTED, Costs, Lengths, StepRows, cpu_costs
from hybridflow.planner.hardware import CPU, HARDWARE, Cluster
from hybridflow.planner.memory import PlannedReplica, RoleEngine, native_quantization, planned_judge
from hybridflow.planner.model_shape import ModelShape, read_shape
from hybridflow.planner.pools import shapes_of
from hybridflow.planner.run_plan import OVERLAPPING, PoolPlan, RunPlan
from hybridflow.protocol import DataProto
from hybridflow.trainer.roles.parallel_layout import is_actors_module, rollout_axes, sizes
from hybridflow.trainer.roles.roles import Roles, needed_roles

logger = logging.getLogger(__name__)


def plan_of(config: PPOConfig) -> RunPlan:
    """Return the roles that each process will hold. Raises ConfigError for an impossible placement."""
    placement = Placement.from_config(config.trainer, needed_roles(config))
    rollout = config.actor_rollout_ref.rollout
    (_, groups), (_, ranks) = rollout_axes(config, len(placement.ranks("rollout")))
    at_once = math.ceil(generation_batch(config) * responses_per_prompt(config) / groups)
    replica = PlannedReplica(
        rollout.tensor_model_parallel_size,
        min(at_once, rollout.max_num_seqs),
        slot_capacity(longest_row(config)[0]),
        native_quantization(rollout),
        ranks,
    )
    pools = []
    for pool in placement.pools:
        roles = placement.roles(pool.name)
        engines = {
            role: RoleEngine.of(config, role, sizes(config, role, pool.world_size))
            for role in roles
            if role not in ("rollout", VALIDATION)
            and not (role == "reference" and is_actors_module(config, placement))
        }
        replica_here = replica if "rollout" in roles else None
        if VALIDATION in roles:
            replica_here = replica._replace(rows=_validated_at_once(config), ranks=replica.tensor)
        judge = planned_judge(config) if JUDGE in roles else None
        pools.append(PoolPlan(pool.name, tuple(roles), pool.devices_per_node, engines, replica_here, judge))
    return RunPlan(config, tuple(pools), config.trainer.schedule)


def _validated_at_once(config: PPOConfig) -> int:
    """Return how many responses a replica that validates may generate at once."""
    rollout = config.actor_rollout_ref.rollout
    batch = config.data.val_batch_size or rollout.max_num_seqs
    return min(batch * rollout.val_kwargs.n, rollout.max_num_seqs)


@dataclass
class Predictor:
    """Gives the predicted time of each phase of a step, and predicted and measured peak memory."""

    plan: RunPlan
    shapes: Mapping[str, ModelShape]
    """The model of each role whose phases are predicted."""
    costs: Costs
    roles: Roles
    factors: dict[str, float] = field(default_factory=dict)
    """Measured over predicted seconds of each phase, in the first step that had it."""
    first_peak: int | None = None
    """Peak bytes of the first step. The estimate that `config --explain` prints is the same for every step,
    so that this is what it becomes once the first step has corrected it by what the libraries take.
    """

    def __call__(self, batch: DataProto, measured: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step that has trained `batch` and logs `measured`."""
        if not len(batch):
            return {}
        rows = rows_of(batch)
        found: dict[str, float] = {}
        total = 0.0
        for name, seconds in self.plan.predict(rows, self.shapes, self.costs).items():
            took = measured.get(f"timing_s/{name}")
            if took is None:
                continue
            corrected = seconds * self.factors.get(name, 1.0)
            if seconds > 0:
                self.factors.setdefault(name, took / seconds)
            found[f"perf/predicted/{name}"] = corrected
            total += corrected
        if self.plan.apart and self.plan.schedule in OVERLAPPING:
            generating = found.get("perf/predicted/gen", 0.0)
            total = max(generating, total - generating)
        found["perf/predicted/step"] = total
        if self.costs.cluster.hardware.name != CPU:  # the utilisation of a CPU is not reported
            found |= self._mfu(rows, measured)
        peak = max(self.roles.actor.call_list(Worker.peak_memory))
        if peak:
            if self.first_peak is None:
                self.first_peak = peak
            found["perf/peak_memory"] = peak / 2**30
            found["perf/predicted/peak_memory"] = self.first_peak / 2**30
        return found

    def _mfu(self, rows: StepRows, measured: Mapping[str, float]) -> dict[str, float]:
        """Return the utilisation of the accelerators by updates."""
        found = {}
        for role, engine in self.plan.engines.items():
            seconds = measured.get(f"timing_s/update_{role}")
            if seconds and role in self.shapes:
                devices = engine.layout.world_size
                lora = engine.trains_adapters
                once = self.costs.mfu(self.shapes[role], rows, seconds, devices, lora=lora)
                found[f"perf/mfu/{role}"] = engine.epochs * once
        return found


def rows_of(batch: DataProto) -> StepRows:
    """Return the lengths of a batch's rows."""
    width = batch.batch["response_mask"].shape[1]
    prompts = batch.batch["attention_mask"][:, :-width].sum(-1)
    responses = batch.batch["response_mask"].sum(-1)
    groups = len(set(batch.non_tensor_batch["uid"]))
    return StepRows(
        len(batch),
        float(prompts.float().mean()),
        Lengths.of(responses.clamp(min=1).double().tolist()),
        max(1, len(batch) // groups),
    )


def make_predictor(config: PPOConfig, roles: Roles) -> Predictor | None:
    """Return the predictor of a run; None for devices whose figures are not known, or a model whose sizes
    the planner cannot read.
    """
    plan = plan_of(config)
    costs = costs_of(config, plan.devices)
    shapes = shapes_if_known(config)
    if costs is None or shapes is None:
        return None
    return Predictor(plan, shapes, costs, roles)


class PhaseSeconds(NamedTuple):
    """The predicted seconds of a phase."""

    of_tokens: float
    """What its tokens and the model's weights take."""
    of_passes: float = 0.0
    """What its passes take besides, however few tokens they have."""


Forecaster = Callable[[PPOConfig, StepRows], Mapping[str, PhaseSeconds]]


def forecaster(config: PPOConfig, card: str = "") -> Forecaster | None:
    """Return a function that predicts the seconds of each phase of a step with such rows, for `config` with
    other keys and the same models and devices; None where `make_predictor` gives none, and where the devices
    or the models are not on this machine. `card` names the devices of a run that was made elsewhere.
    """
    try:
        costs = costs_of(config, plan_of(config).devices, card)
        shapes = shapes_if_known(config)
    except ConfigError as error:
        logger.info("no forecasts by the planner's model: %s", error)
        return None
    if costs is None or shapes is None:
        return None

    def forecast(changed: PPOConfig, rows: StepRows) -> dict[str, PhaseSeconds]:
        plan = plan_of(changed)
        of_tokens = plan.predict(rows, shapes, costs.of_tokens_alone)
        whole = plan.predict(rows, shapes, costs)
        return {name: PhaseSeconds(of_tokens[name], whole[name] - of_tokens[name]) for name in whole}

    return forecast


def costs_of(config: PPOConfig, devices: int, card: str = "") -> Costs | None:
    """Return the costs on `devices` cards of this name, or devices like those here; None for unknown ones."""
    if not card:
        device = resolve_device(config.trainer.device)
        if device.type == "cpu":
            return cpu_costs(devices, *measured_cpu())
        card = facilities(device.type).card_name() or ""
    card = card.replace(" ", "")
    # the longest name first: GB200 before B200
    names = [name for name in sorted(HARDWARE, key=len, reverse=True) if name in card]
    return Costs(Cluster(HARDWARE[names[0]], devices), FITTED) if names else None


def shapes_if_known(config: PPOConfig) -> dict[str, ModelShape] | None:
    """Return the model of each role; None where the planner cannot read the sizes of one."""
    try:
        return shapes_of(config, lambda model: read_shape(shape_of(model).to_dict(), str(model.path)))
    except ModelError as error:
        logger.info("no predictions of time: %s", error)
        return None
