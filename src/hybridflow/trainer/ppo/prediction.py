"""Predicted beside measured: what each step of a run should have taken, in its metrics.

    config, placement ──► Predictor ──(batch, timings of a step)──► perf/predicted/…, perf/peak_memory

The prediction is that of `hybridflow plan`, for the rows that the step has trained. On a CPU the machine
is measured when the run begins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hybridflow.config import PPOConfig
from hybridflow.config.model import ModelConfig
from hybridflow.controller import Placement
from hybridflow.controller.worker import Worker
from hybridflow.distributed.device import measured_cpu, resolve_device
from hybridflow.distributed.facilities import facilities
from hybridflow.errors import ModelError
from hybridflow.models.build import shape_of
from hybridflow.models.kv_cache import slot_capacity
from hybridflow.planner.costs import CPU_EFFICIENCY, FITTED, Costs, Efficiency, Rows, Training
from hybridflow.planner.hardware import CPU, HARDWARE, Cluster, Hardware, cpu_hardware
from hybridflow.planner.job import Calibration, StepModel, engine_of, job_of, training_of
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.memory import engine_needs, generation_needs, phases_of_pool, rounded_to
from hybridflow.planner.model_shape import ModelShape, read_shape
from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.parallel_layout import is_actors_module, rollout_axes, sizes
from hybridflow.trainer.ppo.roles import Roles

logger = logging.getLogger(__name__)


class Predictor:
    """Gives the predicted time of each phase of a step, and predicted and measured peak memory."""

    def __init__(self, model: StepModel, memory: float, roles: Roles) -> None:
        """Predict by `model`; `memory` are the bytes that the heaviest process of the actor should take."""
        self.model = model
        self.memory = memory
        self.roles = roles
        self.calibration = Calibration()

    def __call__(self, batch: DataProto, measured: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step that has trained `batch` and logs `measured`."""
        if not len(batch):
            return {}
        timings = {
            name.removeprefix("timing_s/"): seconds
            for name, seconds in measured.items()
            if name.startswith("timing_s/")
        }
        rows = rows_of(batch)
        raw = {name: seconds for name, seconds in self.model.phases(rows).items() if name in timings}
        phases = self.calibration.corrected(raw)
        self.calibration.learn(raw, timings)
        found = {f"perf/predicted/{name}": seconds for name, seconds in phases.items()}
        found["perf/predicted/step"] = self.model.step(phases)
        found |= self._mfu(rows, timings)
        peak = max(self.roles.actor.call_list(Worker.peak_memory))
        if peak:
            if self.calibration.memory is None:
                self.calibration.memory = peak - self.memory
            found["perf/peak_memory"] = peak / 2**30
            found["perf/predicted/peak_memory"] = (self.memory + self.calibration.memory) / 2**30
        return found

    def _mfu(self, rows: Rows, timings: Mapping[str, float]) -> dict[str, float]:
        """Return what updates use of the accelerators; on a CPU nobody looks for it."""
        model = self.model
        if model.costs.cluster.hardware.name == CPU:
            return {}
        config = model.job.config
        actors = config.actor_rollout_ref.actor.ppo_epochs
        epochs = {"actor": actors, "critic": config.critic.ppo_epochs or actors}
        found = {}
        for role, passes in epochs.items():
            seconds = timings.get(f"update_{role}")
            if seconds and role in model.trainings:
                training = model.trainings[role]
                devices = training.layout.world_size
                once = model.costs.mfu(model.job.shapes[role], rows, seconds, devices, lora=training.lora)
                found[f"perf/mfu/{role}"] = passes * once
        return found


def rows_of(batch: DataProto) -> Rows:
    """Return the lengths of a batch's rows."""
    width = batch.batch["response_mask"].shape[1]
    prompts = batch.batch["attention_mask"][:, :-width].sum(-1)
    responses = batch.batch["response_mask"].sum(-1)
    groups = len(set(batch.non_tensor_batch["uid"]))
    return Rows(
        len(batch),
        float(prompts.float().mean()),
        Lengths.of([float(length) for length in responses.clamp(min=1).tolist()]),
        max(1, len(batch) // groups),
    )


def _device(config: PPOConfig) -> tuple[Hardware, Efficiency] | None:
    """Return the figures of the run's devices; None for an accelerator that has no row."""
    device = resolve_device(config.trainer.device)
    if device.type == "cpu":
        cpu = measured_cpu()
        return cpu_hardware(cpu.peak, cpu.bandwidth, cpu.memory), CPU_EFFICIENCY
    card = facilities(device.type).card_name()
    if card is None:
        return None
    name = card.replace(" ", "")
    # the longest name first: GB200 before B200
    row = next((HARDWARE[key] for key in sorted(HARDWARE, key=len, reverse=True) if key in name), None)
    return None if row is None else (row, FITTED)


def _shape(model: ModelConfig) -> ModelShape:
    return read_shape(shape_of(model).to_dict(), str(model.path))


def make_predictor(config: PPOConfig, roles: Roles, placement: Placement) -> Predictor | None:
    """Return the predictor of a run; None for devices whose figures are not known, or a model whose sizes
    the planner cannot read.
    """
    known = _device(config)
    if known is None:
        return None
    hardware, efficiency = known
    on_cpu = hardware.name == CPU
    try:
        job = job_of(config, _shape, 1.0, 1.0)
    except ModelError as error:
        logger.info("no predictions of time: %s", error)
        return None
    costs = Costs(Cluster(hardware, placement.num_devices), efficiency, itemsize=4 if on_cpu else 2)
    trainings: dict[str, Training] = {}
    needs = {}
    actors = placement.pools_of("actor")
    for role, shape in job.shapes.items():
        if role == "reference" and is_actors_module(config, placement):
            trainings[role] = trainings["actor"]
            continue
        world = sum(pool.world_size for pool in placement.pools_of(role))
        engine = engine_of(config, role, sizes(config, role, world))
        trainings[role] = training_of(engine, config)
        if placement.pools_of(role) == actors:
            lora = engine.model.lora_rank if engine.trained else 0
            size = shape.size(trained=engine.trained, lora_rank=lora, itemsize=costs.itemsize)
            needs[role] = engine_needs(engine, size, device=hardware.device)
    generating = len(placement.ranks("rollout"))
    (_, replicas), (_, tensor) = rollout_axes(config, generating)
    apart = placement.pools_of("rollout") != actors
    trainers = sum(pool.world_size for pool in actors)
    if not apart:
        rows = min(round(job.generated.count / replicas), config.actor_rollout_ref.rollout.max_num_seqs)
        needs["generation"] = generation_needs(
            job.shapes["actor"].size(trained=False, itemsize=costs.itemsize),
            tensor=tensor,
            rows=rows,
            slot=slot_capacity(job.longest),
            own_weights="" if trainers == 1 else "gathered",
            standing=False,
            rounded=rounded_to(config.actor_rollout_ref.rollout),
        )
    model = StepModel(job, costs, trainings, trainers, generating, tensor, apart)
    return Predictor(model, max(phases_of_pool(needs, trainers).values()), roles)
