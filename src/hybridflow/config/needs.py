"""The roles and models that a run needs, by the names of its estimator and its loss.

There are no facts about a user's own function (`path.py:name`), so nothing is assumed of it and nothing
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from typing import Any

from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES, EstimatorFacts, LossFacts
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.by_source import algorithms_of
from hybridflow.config.convert import WrongKeyRead
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.config.reward import has_classifier
from hybridflow.config.root import PPOConfig, SFTConfig


def estimator_facts(config: PPOConfig) -> EstimatorFacts | None:
    """Return the facts about the advantage estimator; None for a user's own."""
    return ESTIMATORS.get(config.algorithm.adv_estimator)


def loss_facts(config: PPOConfig) -> LossFacts | None:
    """Return the facts about the policy loss; None for a user's own."""
    return POLICY_LOSSES.get(config.actor_rollout_ref.actor.policy_loss.loss_mode)


def needs_reference(config: PPOConfig) -> bool:
    """Return whether something in the run reads the log-probs of a reference policy."""
    estimator = estimator_facts(config)
    loss = loss_facts(config)
    return bool(
        config.algorithm.use_kl_in_reward
        or config.actor_rollout_ref.actor.use_kl_loss
        or config.reward.process_reward_model.enable
        or (estimator is not None and estimator.process_rewards)
        or (loss is not None and loss.reference)
    )


def wants_full_kl(actor: ActorConfig) -> bool:
    """Return whether the loss has the exact KL from the reference, which updates compute themselves."""
    return actor.use_kl_loss and actor.kl_loss_type == "full"


def has_own_reference(config: PPOConfig) -> bool:
    """Return whether the reference is another model than the one that the actor starts from."""
    reference = config.actor_rollout_ref.ref.model
    actor = config.actor_rollout_ref.model
    if reference.path is None:  # not filled in yet: the actor's
        return False
    return (reference.path, reference.override_config, reference.dtype) != (
        actor.path,
        actor.override_config,
        actor.dtype,
    )


def needs_teacher(config: PPOConfig) -> bool:
    """Return whether the estimator or the loss reads a teacher."""
    names = [each.adv_estimator for each in algorithms_of(config.algorithm).values()]
    taught = any(ESTIMATORS[name].teacher for name in names if name in ESTIMATORS)
    return taught or has_divergence(config)


def has_divergence(config: PPOConfig) -> bool:
    """Return whether the loss has a divergence from a teacher."""
    return config.distillation.distillation_loss.loss_mode != "k1"


def teacher_reader(config: PPOConfig) -> str:
    """Return the key, with its value, by which the run reads a teacher."""
    if has_divergence(config):
        return f"distillation.distillation_loss.loss_mode={config.distillation.distillation_loss.loss_mode}"
    for source, each in algorithms_of(config.algorithm).items():
        facts = ESTIMATORS.get(each.adv_estimator)
        if source is not None and facts is not None and facts.teacher:
            return f"algorithm.by_source, {source}: adv_estimator={each.adv_estimator}"
    return f"algorithm.adv_estimator={config.algorithm.adv_estimator}"


def tells_top_outcomes(config: PPOConfig) -> bool:
    """Return whether the teacher tells its most likely tokens; of another divergence it computes beside the
    actor.
    """
    return config.distillation.distillation_loss.loss_mode.endswith("_topk")


def built_models(config: PPOConfig | SFTConfig) -> Iterator[tuple[str, ModelConfig, FSDPConfig | None]]:
    """Yield (path of the block, the block, its sharding) of each model that the run builds."""
    if isinstance(config, SFTConfig):
        yield "model", config.model, config.engine
        return
    roles = config.actor_rollout_ref
    critic = config.critic
    process = config.reward.process_reward_model
    yield "actor_rollout_ref.model", roles.model, roles.actor.fsdp_config
    if critic.enable:
        yield "critic.model", critic.model, critic.fsdp_config
    if process.enable:
        yield "reward.process_reward_model.model", process.model, roles.actor.fsdp_config
    learned = config.reward.reward_model
    if learned.enable:
        sharding = learned.fsdp_config if has_classifier(config.reward) else None
        yield "reward.reward_model.model", learned.model, sharding
    if needs_reference(config) and has_own_reference(config):
        yield "actor_rollout_ref.ref.model", roles.ref.model, roles.ref.fsdp_config
    if needs_teacher(config):
        yield "distillation.teacher_model", config.distillation.teacher_model, None


def unbuilt_blocks(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield the block of each role that the run does not have, as far as its keys have usable values."""
    if isinstance(config, SFTConfig):
        return
    roles: dict[str, Callable[[], Any]] = {
        "critic": lambda: config.critic.enable,
        "reward.process_reward_model": lambda: config.reward.process_reward_model.enable,
        "reward.reward_model": lambda: config.reward.reward_model.enable,
        "actor_rollout_ref.ref": lambda: needs_reference(config),
        "distillation": lambda: needs_teacher(config),
    }
    for block, is_built in roles.items():
        built = False
        with suppress(WrongKeyRead):
            built = bool(is_built())
        if not built:
            yield block


def replayed_steps(config: PPOConfig) -> int:
    """Return for how many steps the rows of a step may be drawn again; 0: there is no replay buffer."""
    return config.algorithm.pf_ppo.max_age if config.algorithm.use_pf_ppo else 0


def rows_per_prompt(config: PPOConfig) -> int:
    """Return the rows of a prompt that are trained on: its responses, and the data's own answer if read."""
    facts = estimator_facts(config)
    shown = facts.demonstration_rows if facts is not None else 0
    return config.actor_rollout_ref.rollout.n + shown


def responses_per_prompt(config: PPOConfig) -> int:
    """Return the responses to a prompt that are generated: those trained on, and a greedy one if needed."""
    facts = estimator_facts(config)
    greedy = facts.greedy_rows if facts is not None else 0
    return config.actor_rollout_ref.rollout.n + greedy


def has_validation(config: PPOConfig) -> bool:
    """Return whether there is data to validate on."""
    return bool(config.data.val_files) or bool(config.data.task.name and config.data.task.val_size)


def is_given(path: str, given: Set[str]) -> bool:
    """Return whether the user set the key at `path`, or a key of the block at `path`."""
    return any(key == path or key.startswith(path + ".") for key in given)


def longest_row(config: PPOConfig) -> tuple[int, str]:
    """Return the tokens that a row of the run has at most, and the keys that say so with their values.

    A response to a prompt of the data ends at data.max_response_length, however long the context of the
    engine is. Only agents go on after it, up to the whole context.
    """
    data = config.data
    longest = data.max_prompt_length + data.max_response_length
    most = config.actor_rollout_ref.rollout.max_model_len
    if may_use_agents(config) and most is not None and most > longest:
        return most, f"actor_rollout_ref.rollout.max_model_len={most}"
    return longest, (
        f"data.max_prompt_length={data.max_prompt_length} + "
        f"data.max_response_length={data.max_response_length} = {longest}"
    )


def uses_agents(config: PPOConfig) -> bool:
    """Return whether the keys ask for more than one response to each prompt of the data: tools, an
    environment, or a user's agent.
    """
    rollout = config.actor_rollout_ref.rollout
    return bool(
        rollout.multi_turn.enable
        or config.data.environment
        or rollout.agent.default_agent_loop != "single_turn_agent"
        or rollout.agent.command
    )


def reads_text_alone(config: PPOConfig) -> str | None:
    """Return the reason the run cannot generate from pictures, with what to set; None where it can, but for
    agents that are known once they are loaded.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "native":
        return f"actor_rollout_ref.rollout.name={rollout.name} is given token ids alone: set it to native"
    for block, role in (
        ("actor_rollout_ref.actor", config.actor_rollout_ref.actor),
        ("critic", config.critic),
    ):
        if role.ulysses_sequence_parallel_size > 1:
            return f"ranks that share rows read none: set {block}.ulysses_sequence_parallel_size=1"
    return None


def may_use_agents(config: PPOConfig) -> bool:
    """Return whether agents may run: the keys ask for them, or have what rows with an agent_name need."""
    rollout = config.actor_rollout_ref.rollout
    turns = rollout.multi_turn
    return uses_agents(config) or bool(
        turns.tool_config_path
        or turns.function_tool_path
        or turns.interaction_config_path
        or rollout.agent.agent_loop_config_path
    )


def may_score_itself(config: PPOConfig) -> bool:
    """Return whether rewards may come from an environment, or from a user's agent."""
    agent = config.actor_rollout_ref.rollout.agent
    built_in = ("single_turn_agent", "tool_agent")
    return bool(config.data.environment or agent.command or agent.default_agent_loop not in built_in)
