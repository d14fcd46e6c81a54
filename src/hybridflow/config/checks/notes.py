"""Notes on a run that may surprise: keys that are set and not read, and settings with little effect.

resolved config, the paths that the user set ──ppo_notes──► one line for each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES, EstimatorFacts, LossFacts
from hybridflow.config.by_source import algorithms_of
from hybridflow.config.checks.rollout import agent_notes
from hybridflow.config.layout import pushes_weights
from hybridflow.config.needs import (
    estimator_facts,
    has_validation,
    is_given,
    loss_facts,
    needs_reference,
    needs_teacher,
)
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import arguments_of_keys

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
PROCESS = "reward.process_reward_model"


def ppo_notes(config: PPOConfig, given: Set[str]) -> Iterator[str]:
    """Yield one line for each setting that may surprise. `given` are the paths that the user set."""
    yield from _rollout(config)
    yield from agent_notes(config)
    yield from _names(config, given)
    yield from _kl_and_reference(config)
    yield from _features(config)
    yield from _roles(config, given)
    trainer = config.trainer
    if config.data.datagen.path and trainer.total_epochs == 1 and trainer.total_training_steps is None:
        yield "data.datagen: rows that it makes join the next epoch, and trainer.total_epochs=1 has none"
    if not has_validation(config):
        frequency = config.trainer.test_freq
        if frequency > 0:
            yield f"trainer.test_freq={frequency} without validation data: nothing is validated"
        if is_given(f"{ROLLOUT}.val_kwargs", given):
            yield f"{ROLLOUT}.val_kwargs.* is not read: without validation data nothing is validated"


def _rollout(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    name = config.algorithm.adv_estimator
    facts = estimator_facts(config)
    if rollout.do_sample and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0):
        min_p = ""
        if rollout.min_p > 0:
            min_p = f", min_p={rollout.min_p}"
        yield (
            f"{ROLLOUT}.top_p={rollout.top_p}, top_k={rollout.top_k}{min_p} leave tokens out of sampling; "
            "the log-probs kept and trained on are of the whole distribution at the temperature alone"
        )
    if rollout.repetition_penalty != 1:
        yield (
            f"{ROLLOUT}.repetition_penalty={rollout.repetition_penalty} changes which tokens are chosen; "
            "the log-probs kept and trained on are those without it, so the policy that samples is not "
            "quite the one that learns"
        )
    if rollout.delta_push and not pushes_weights(config):
        yield (
            f"{ROLLOUT}.delta_push is not read: the rollout shares the actor's processes, where no weights "
            "travel between them"
        )
    if not rollout.do_sample and facts is not None and (facts.group or facts.greedy_rows):
        yield (
            f"{ROLLOUT}.do_sample=false: greedy responses to a prompt are all alike, so {name} finds "
            "nothing to learn from"
        )


def _names(config: PPOConfig, given: Set[str]) -> Iterator[str]:
    """Keys of other estimators and losses, and clip bounds that are not those of the loss's paper."""
    actor = config.actor_rollout_ref.actor
    estimator = config.algorithm.adv_estimator
    estimators = [each.adv_estimator for each in algorithms_of(config.algorithm).values()]
    loss = actor.policy_loss.loss_mode
    facts = loss_facts(config)
    if config.distillation.lmbda < 1:  # which takes the data's answers too
        given = given - {"data.demonstration_key"}
    yield from _read_by_others("algorithm.adv_estimator", estimators, ESTIMATORS, given)
    yield from _read_by_others(f"{ACTOR}.policy_loss.loss_mode", [loss], POLICY_LOSSES, given)
    if estimator in ESTIMATORS and config.algorithm.options:
        yield f"algorithm.options is read by estimators of your own only: algorithm.adv_estimator={estimator}"
    if facts is not None and facts.clip is not None and (actor.clip_low, actor.clip_high) != facts.clip:
        yield (
            f"{ACTOR}.clip_ratio_low={actor.clip_low}, clip_ratio_high={actor.clip_high} as given; the "
            f"paper of {loss} has {facts.clip[0]} and {facts.clip[1]}"
        )


def _read_by_others(
    choice: str, names: Sequence[str], table: Mapping[str, EstimatorFacts | LossFacts], given: Set[str]
) -> Iterator[str]:
    """Keys that set an argument of others in a table, and none of those that the run has, the first by
    `choice`.
    """
    if not table.keys() >= set(names):
        return
    for path, arguments in arguments_of_keys(PPOConfig).items():
        if not is_given(path, given):
            continue
        readers = [other for other, facts in table.items() if arguments & set(facts.reads)]
        if readers and not set(names) & set(readers):
            named = " and ".join(filter(None, (", ".join(readers[:-1]), readers[-1])))
            yield f"{path} is read by {named} only: {choice}={names[0]}"


def _kl_and_reference(config: PPOConfig) -> Iterator[str]:
    algorithm = config.algorithm
    facts = estimator_facts(config)
    if algorithm.use_kl_in_reward and facts is not None and not facts.token_rewards:
        yield (
            "algorithm.use_kl_in_reward=true changes no advantage: "
            f"algorithm.adv_estimator={algorithm.adv_estimator} does not read the token rewards; "
            f"{ACTOR}.use_kl_loss=true puts the KL into the loss"
        )
    if algorithm.ref_update_freq and _all_known(config) and not needs_reference(config):
        yield (
            f"algorithm.ref_update_freq={algorithm.ref_update_freq} is not used: nothing in this run reads "
            "a reference"
        )


def _all_known(config: PPOConfig) -> bool:
    """Whether estimator and loss are both built in: a user's own may need any column and any role."""
    return estimator_facts(config) is not None and loss_facts(config) is not None


def _features(config: PPOConfig) -> Iterator[str]:
    """Features that change each other."""
    algorithm = config.algorithm
    facts = estimator_facts(config)
    kwargs = config.reward.reward_kwargs
    if algorithm.use_pf_ppo and facts is not None and facts.group:
        yield (
            f"algorithm.use_pf_ppo=true with algorithm.adv_estimator={algorithm.adv_estimator}: advantages "
            "are computed over whole groups first, then rows are resampled by their scores"
        )
    if kwargs.overlong_buffer_cfg.enable and (kwargs.max_resp_len or 0) > config.data.max_response_length:
        yield (
            f"reward.reward_kwargs.max_resp_len={kwargs.max_resp_len} is more than "
            f"data.max_response_length={config.data.max_response_length}: no response is long enough for "
            "the whole overlong penalty"
        )


def _roles(config: PPOConfig, given: Set[str]) -> Iterator[str]:
    """Roles that are built for nothing, or set up and not built."""
    name = config.algorithm.adv_estimator
    facts = estimator_facts(config)
    others = given - {"critic.enable"}
    if "actor_rollout_ref.actor.strategy" in given:
        others -= {"critic.strategy"}  # the name of verl's Megatron file sets both
    if not config.critic.enable and is_given("critic", others):
        yield f"critic.* is not read: algorithm.adv_estimator={name} runs without a critic"
    if (
        config.critic.enable
        and "critic.model.tokenizer_path" in given
        and config.critic.model.tokenizer_path != config.data.tokenizer
    ):
        yield (
            "critic.model.tokenizer_path is not used: the critic reads the token ids of "
            f"data.tokenizer={config.data.tokenizer}"
        )
    process = config.reward.process_reward_model
    given_process = is_given(PROCESS, given - {f"{PROCESS}.enable"})
    if not process.enable and given_process and _all_known(config):
        yield f"{PROCESS}.* is not read: algorithm.adv_estimator={name} runs without a process reward model"
    if process.enable and facts is not None and _all_known(config) and not facts.process_rewards:
        yield (
            f"{PROCESS}.enable=true trains a model whose rewards algorithm.adv_estimator={name} does not "
            "read: prime does"
        )
    taught = {each for each in given if each != "distillation.enabled"}
    if _all_known(config) and not needs_teacher(config) and is_given("distillation", taught):
        yield (
            f"distillation.* is not read: algorithm.adv_estimator={name} has no teacher; "
            "on_policy_distillation does, or a distillation_loss.loss_mode other than k1"
        )
