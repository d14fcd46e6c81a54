"""Predictions of a step of a run with a fixed layout, phase by phase, by the model of `hybridflow plan`.

    job, layouts ──StepModel.phases(rows)──► seconds of each phase, named as its `timing_s/` metric
    first measured step ──Calibration──► the same, corrected for this machine

The first step of a run is predicted by the devices' figures alone. What it took then corrects each phase,
so that from the second step on a prediction says what these rows should take here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridflow.planner.costs import Costs, Rows, Training
from hybridflow.planner.job import Job, calls_of

OVERLAPPING = ("one_step_off", "exact_async", "fully_async")
"""Schedules under which generation runs beside training where it has devices of its own."""


@dataclass(frozen=True)
class StepModel:
    """The layout of a run, as far as times depend on it."""

    job: Job
    costs: Costs
    trainings: Mapping[str, Training]
    """How each role that has an engine passes over rows."""
    trainers: int
    """Devices of the actor."""
    generating: int
    """Devices of the rollout."""
    tensor: int = 1
    """Devices of a replica of the rollout."""
    apart: bool = False
    """The rollout has devices of its own."""

    def phases(self, rows: Rows) -> dict[str, float]:
        """Return the seconds of each phase for a batch of these rows."""
        seconds: dict[str, float] = {}
        for role, training in self.trainings.items():
            seconds |= calls_of(self.job, self.costs, role, training, rows)
        shape = self.job.shapes["actor"]
        most = self.job.config.actor_rollout_ref.rollout.max_num_seqs
        refilled = self.job.config.trainer.schedule in ("fully_async", "colocated_async")
        seconds["gen"] = self.costs.generation(
            shape, rows, self.generating, self.tensor, most, refilled=refilled
        )
        seconds["update_weights"] = self.costs.sync(shape, self.trainers, self.tensor, apart=self.apart)
        return seconds

    def step(self, phases: Mapping[str, float]) -> float:
        """Return the seconds of a step with these phases."""
        total = sum(phases.values())
        if self.apart and self.job.config.trainer.schedule in OVERLAPPING:
            generating = phases.get("gen", 0.0)
            return max(generating, total - generating)
        return total


@dataclass
class Calibration:
    """Corrections of predictions by the first step that was measured."""

    factors: dict[str, float] = field(default_factory=dict)
    """Measured over predicted seconds of each phase."""
    memory: float | None = None
    """Measured less predicted peak bytes: the libraries, and what else the estimate leaves out."""

    def corrected(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of phases as this machine takes them."""
        return {name: seconds * self.factors.get(name, 1.0) for name, seconds in phases.items()}

    def learn(self, predicted: Mapping[str, float], measured: Mapping[str, float]) -> None:
        """Take the factors of phases that have none yet."""
        for name, seconds in predicted.items():
            if name in measured and name not in self.factors and seconds > 0:
                self.factors[name] = measured[name] / seconds
