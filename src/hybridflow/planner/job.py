"""What a run asks of devices: its models, rows and optimizer steps, from its configuration.

resolved PPOConfig, config.json of its models ──job_of──► Job
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridflow.config import PPOConfig
from hybridflow.config.explain import generation_batch
from hybridflow.config.needs import longest_rows, needs_reference, responses_per_prompt, rows_per_prompt
from hybridflow.config.roles import ROLE_KEYS, engine_keys
from hybridflow.config.tree import get_value
from hybridflow.planner.costs import Rows
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.model_shape import ModelShape

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
    load: Callable[[str], ModelShape],
    prompt: float,
    response: float,
    reward_seconds: float = 0.0,
) -> Job:
    """Return the job of a resolved configuration whose prompts and responses have so many tokens on the mean,
    and whose reward takes so many seconds for a response.

    `load` reads the shape of a model by its path. Raises ModelError.
    """
    wanted = {
        "actor": True,
        "reference": needs_reference(config),
        "critic": bool(config.critic.enable),
        "reward_model": config.reward.reward_model.enable,
    }
    shapes = {role: load(str(engine_keys(config, role)[2].path)) for role, there in wanted.items() if there}
    rows = config.data.train_batch_size * rows_per_prompt(config)
    longest = longest_rows(config)[0]
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
