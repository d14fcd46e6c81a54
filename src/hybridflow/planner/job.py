"""The work of a run: its models, rows and optimizer steps, from its configuration; and what its steps take.

    resolved PPOConfig, config.json of its models ──job_of──► Job
    job, layouts ──StepModel.phases(rows)──► seconds of each phase, named as its `timing_s/` metric
    first measured step ──Calibration──► the same, corrected for this machine

The first step of a run is predicted by the devices' figures alone. What it took then corrects each phase,
so that from the second step on a prediction says what these rows should take here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hybridflow.config import PPOConfig
from hybridflow.config.explain import generation_batch
from hybridflow.config.model import ModelConfig
from hybridflow.config.needs import longest_row, needs_reference, responses_per_prompt, rows_per_prompt
from hybridflow.config.roles import ROLE_KEYS, engine_keys
from hybridflow.config.tree import get_value
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.planner.costs import Costs, Rows, Training
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.memory import Engine
from hybridflow.planner.model_shape import ModelShape

CALLS = {"reference": "ref", "critic": "values", "reward_model": "reward_model"}
"""The metric of a role's forward pass."""
READERS = ("reference", "critic", "reward_model")
"""Roles beside the actor and the rollout whose models a plan places."""


@dataclass(frozen=True)
class Learner:
    """How a role learns in a step."""

    optimizer_steps: int
    epochs: int
    rows: int
    """Rows of a mini-batch."""


@dataclass(frozen=True)
class Job:
    """A step of a run, whatever devices compute it."""

    config: PPOConfig
    shapes: dict[str, ModelShape]
    """The model of each role: actor, and those of reference, critic and reward_model that the run has."""
    learners: dict[str, Learner]
    generated: Rows
    trained: Rows
    longest: int
    """Tokens that a row may have."""
    old_log_probs: bool
    """The log-probs of generation are computed again before the update."""
    rewarding: float = 0.0
    """Seconds in which the reward processes score all responses; they begin with the first one."""

    @property
    def roles(self) -> list[str]:
        """All roles that have a place, the rollout among them."""
        return ["actor", "rollout", *(role for role in READERS if role in self.shapes)]


def job_of(
    config: PPOConfig,
    load: Callable[[ModelConfig], ModelShape],
    prompt: float,
    response: float,
    reward_seconds: float = 0.0,
) -> Job:
    """Return the job of a resolved configuration whose prompts and responses have so many tokens on the mean,
    and whose reward takes so many seconds for a response.

    `load` reads the shape of a model by its keys. Raises ModelError.
    """
    wanted = {
        "actor": True,
        "reference": needs_reference(config),
        "critic": bool(config.critic.enable),
        "reward_model": config.reward.reward_model.enable,
    }
    shapes = {role: load(engine_keys(config, role)[2]) for role, there in wanted.items() if there}
    rows = config.data.train_batch_size * rows_per_prompt(config)
    longest = longest_row(config)[0]
    lengths = Lengths(response, config.data.max_response_length)
    each = responses_per_prompt(config)
    return Job(
        config,
        shapes,
        {role: _learner(config, role, rows) for role in ("actor", "critic") if role in shapes},
        generated=Rows(generation_batch(config) * each, prompt, lengths, each),
        trained=Rows(rows, prompt, lengths),
        longest=longest,
        old_log_probs=not config.algorithm.rollout_correction.bypass_mode,
        rewarding=rows * reward_seconds / max(config.reward.num_workers, 1),
    )


def _learner(config: PPOConfig, role: str, rows: int) -> Learner:
    block = get_value(config, ROLE_KEYS[role].updates)
    mini = block.ppo_mini_batch_size or config.data.train_batch_size
    batches = -(-config.data.train_batch_size // mini)
    return Learner(batches * block.ppo_epochs, block.ppo_epochs, mini * rows_per_prompt(config))


def engine_of(config: PPOConfig, role: str, layout: ParallelLayout) -> Engine:
    """Return a role's engine with this layout, as the run will build it."""
    fsdp, _, model = engine_keys(config, role)
    path = ROLE_KEYS[role].updates
    if not path:
        return Engine(role, layout, fsdp, model, trained=False)
    block = get_value(config, path)
    return Engine(
        role.replace("_reward", " reward model"),
        layout,
        fsdp,
        model,
        rows=block.ppo_mini_batch_size * rows_per_prompt(config),
        longest=longest_row(config)[0],
        max_tokens=block.ppo_max_token_len_per_gpu,
        max_rows=getattr(block, "ppo_micro_batch_size_per_gpu", None),
        optimizer=block.optim.optimizer,
        keys=f"{path.rpartition('.')[2]}.ppo_",
    )


def training_of(engine: Engine, config: PPOConfig) -> Training:
    """Return how an engine passes over rows."""
    fsdp = engine.fsdp
    max_tokens = engine.max_tokens or config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    return Training(
        engine.layout,
        max_tokens,
        recomputes=engine.model.enable_gradient_checkpointing,
        offloads=fsdp.param_offload or fsdp.offload_policy,
        lora=engine.trained and bool(engine.model.lora_rank),
        reshards=fsdp.reshard_after_forward,
    )


def calls_of(job: Job, costs: Costs, role: str, training: Training, rows: Rows) -> dict[str, float]:
    """Return the seconds of a role's calls in a step, named as their `timing_s/` metrics."""
    shape = job.shapes[role]
    seconds = {}
    if role != "actor":
        seconds[CALLS[role]] = costs.forward(shape, rows, training)
    elif job.old_log_probs:
        seconds["old_log_prob"] = costs.forward(shape, rows, training)
    learner = job.learners.get(role)
    if learner is not None:
        seconds[f"update_{role}"] = costs.update(
            shape, rows, training, learner.optimizer_steps, learner.epochs
        )
    return seconds


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
