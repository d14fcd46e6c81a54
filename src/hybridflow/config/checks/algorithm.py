"""The checks of the algorithm: which estimator goes with which loss, roles and sizes.

Each check yields one line per problem, with both values and the way out. Nothing is known about a user's own
estimator or loss (`path.py:name`), so nothing is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hybridflow.algorithms.catalog import ESTIMATORS, KL_ESTIMATORS, OF_A_WHOLE_RUN, POLICY_LOSSES
from hybridflow.config.by_source import algorithms_of, sources_of
from hybridflow.config.needs import (
    estimator_facts,
    has_divergence,
    loss_facts,
    needs_teacher,
    tells_top_outcomes,
    wants_full_kl,
)
from hybridflow.config.own_code import own_algorithm_problems
from hybridflow.config.root import PPOConfig
from hybridflow.config.thresholds import parse_is_threshold, read_rejection
from hybridflow.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
PROCESS = "reward.process_reward_model"
LOSS = f"{ACTOR}.policy_loss.loss_mode"


def name_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each unknown name of an estimator or a loss."""
    for path, name, names in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ESTIMATORS),
        (LOSS, config.actor_rollout_ref.actor.policy_loss.loss_mode, POLICY_LOSSES),
    ):
        if name not in names and ":" not in name:
            yield f"{path}={name}: there are {', '.join(names)}; give your own as path/to/file.py:name"


def estimator_problems(config: PPOConfig) -> Iterator[str]:
    facts = estimator_facts(config)
    name = config.algorithm.adv_estimator
    n = config.actor_rollout_ref.rollout.n
    if facts is None:
        return
    if facts.group and n < 2:
        yield (
            f"algorithm.adv_estimator={name} compares the responses of a prompt, and {ROLLOUT}.n={n} gives "
            f"one: set {ROLLOUT}.n to 2 or more, for example 8"
        )
    if facts.critic and config.critic.enable is False:
        yield (
            f"algorithm.adv_estimator={name} needs the critic, and critic.enable=false: leave critic.enable "
            "out, or set an estimator without one, for example adv_estimator=grpo"
        )
    if facts.process_rewards and config.reward.process_reward_model.enable is False:
        yield (
            f"algorithm.adv_estimator={name} reads process rewards, and {PROCESS}.enable=false: leave "
            f"{PROCESS}.enable out, or set adv_estimator=rloo, which reads the outcome alone"
        )


def partner_problems(config: PPOConfig) -> Iterator[str]:
    """Losses over pairs or rows read what their own estimators give, and no other loss can read it."""
    estimator = config.algorithm.adv_estimator
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if estimator not in ESTIMATORS or loss not in POLICY_LOSSES:
        return
    for special, facts in POLICY_LOSSES.items():
        partners = facts.estimators
        if partners and (loss == special) != (estimator in partners):
            yield (
                f"algorithm.adv_estimator={estimator} with {LOSS}={loss}: loss {special} goes with "
                f"algorithm.adv_estimator={' or '.join(partners)} only, and they go with no other loss: set "
                "both, or neither"
            )


def source_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of a data source's algorithm, and where sources cannot be mixed."""
    entries = sources_of(config.algorithm)
    run = dict.fromkeys(line for rule in OF_A_SOURCE for line in rule(config))
    partners = [name for facts in POLICY_LOSSES.values() for name in facts.estimators]
    for source, algorithm in algorithms_of(config.algorithm).items() if entries else ():
        where = (
            f"algorithm.by_source, {source}" if source is not None else "algorithm.by_source, all other rows"
        )
        name = algorithm.adv_estimator
        facts = ESTIMATORS.get(name)
        if name in partners or (facts and not {*facts.reads}.isdisjoint(OF_A_WHOLE_RUN)):
            yield (
                f"{where}: adv_estimator={name} needs a model, a loss or rows of its own, which only a whole "
                "run has: set another one, for example grpo, rloo or reinforce_plus_plus"
            )
            continue
        own = replace(config, algorithm=algorithm)
        lines = dict.fromkeys(line for rule in OF_A_SOURCE for line in rule(own))
        yield from (f"{where}: {line}" for line in lines if line not in run)
    for source, entry in entries.items():
        if entry.kl_loss_coef is not None and not config.actor_rollout_ref.actor.use_kl_loss:
            yield (
                f"algorithm.by_source, {source}: kl_loss_coef={entry.kl_loss_coef} is a coefficient of the "
                f"KL in the loss, and {ACTOR}.use_kl_loss=false: set it to true"
            )


def pair_problems(config: PPOConfig) -> Iterator[str]:
    """Settings that cannot be joined with the loss of pairs."""
    loss = config.actor_rollout_ref.actor.policy_loss
    facts = loss_facts(config)
    if facts is None or not facts.pairs:
        return
    path = f"{ACTOR}.policy_loss"
    if loss.dpo_loss == "ipo" and loss.dpo_label_smoothing:
        yield (
            f"{path}.dpo_label_smoothing={loss.dpo_label_smoothing} has no meaning with "
            f"{path}.dpo_loss=ipo: set it to 0, or {path}.dpo_loss=sigmoid"
        )
    if config.algorithm.use_pf_ppo:
        yield (
            f"algorithm.use_pf_ppo=true draws single rows, and {LOSS}={loss.loss_mode} needs the two rows of "
            "a pair: set algorithm.use_pf_ppo=false, or another loss"
        )


def gdpo_problems(config: PPOConfig) -> Iterator[str]:
    algorithm = config.algorithm
    keys = algorithm.gdpo_reward_keys
    weights = algorithm.gdpo_reward_weights
    facts = estimator_facts(config)
    if facts is not None and "reward_components" in facts.reads and not keys:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} normalises several rewards one by one, and "
            "algorithm.gdpo_reward_keys is empty: set it to keys that the reward function returns, for "
            "example [acc,format]"
        )
    if weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights={weights} has {len(weights)} weights, and "
            f"algorithm.gdpo_reward_keys={keys} has {len(keys)} keys: give one weight for each key, or "
            "leave the weights out"
        )
    if len(set(keys)) != len(keys):
        yield (
            f"algorithm.gdpo_reward_keys={keys} names a key twice: name each once and set its weight in "
            "algorithm.gdpo_reward_weights"
        )


def score_problems(config: PPOConfig) -> Iterator[str]:
    """Settings that lower scores below 0, for an estimator that takes none there."""
    facts = estimator_facts(config)
    if facts is None or not facts.scores_from_zero:
        return
    name = config.algorithm.adv_estimator
    if config.algorithm.use_kl_in_reward:
        yield (
            f"algorithm.adv_estimator={name} takes scores of 0 or more, and algorithm.use_kl_in_reward=true "
            f"lowers them below 0: set {ACTOR}.use_kl_loss=true in its place"
        )
    if config.reward.reward_kwargs.overlong_buffer_cfg.enable:
        yield (
            f"algorithm.adv_estimator={name} takes scores of 0 or more, and "
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true lowers them below 0: set "
            "algorithm.overlong_filtering=true in its place"
        )


def clip_problems(config: PPOConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    facts = loss_facts(config)
    if facts is not None and facts.lowest_ratio and actor.clip_low > 1:
        name = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
        yield (
            f"{ACTOR}.{name}={actor.clip_low} lets the ratio fall below 0: set it to 1 or less, for example "
            "0.2"
        )
    loss = actor.policy_loss
    if facts is not None and "clip_cov_lb" in facts.reads and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield (
            f"{ACTOR}.policy_loss.clip_cov_lb={loss.clip_cov_lb} is not below "
            f"clip_cov_ub={loss.clip_cov_ub}: no token lies between them; set for example 1.0 and 5.0"
        )


def kl_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each estimator of the KL that there is not, or not there."""
    yield from _kl_estimator("algorithm.kl_penalty", config.algorithm.kl_penalty, gradient=False)
    yield from _kl_estimator(
        f"{ACTOR}.kl_loss_type", config.actor_rollout_ref.actor.kl_loss_type, gradient=True
    )


def _kl_estimator(path: str, name: str, *, gradient: bool) -> Iterator[str]:
    base = name.removesuffix("+")
    if base == "full" and not (gradient and name == base):
        yield (
            f"{path}={name}: the KL over the whole vocabulary is a term of the loss alone, and has its own "
            f"gradient: set {ACTOR}.use_kl_loss=true and {ACTOR}.kl_loss_type=full, or low_var_kl here"
        )
    elif base == "full":
        return
    elif base not in KL_ESTIMATORS:
        yield f"{path}={name}: there is no such estimator; there are {', '.join(KL_ESTIMATORS)}"
    elif name.endswith("+") and not gradient:
        yield f"{path}={name}: a KL in the reward has no gradient, so + means nothing there: use {base}"


def full_kl_problems(config: PPOConfig) -> Iterator[str]:
    """The actor's update computes the reference's distributions, so both are spread over ranks alike."""
    path = f"{ACTOR}.kl_loss_type=full"
    if not wants_full_kl(config.actor_rollout_ref.actor):
        return
    placed = config.trainer.placement
    if placed.get("reference", "") != placed.get("actor", ""):
        yield (
            f"{path} computes the reference in the actor's processes, and trainer.placement puts it on "
            f"{placed.get('reference', 'another pool')}: leave it out of trainer.placement, or set "
            "low_var_kl"
        )
    roles = config.actor_rollout_ref
    theirs = roles.ref.ulysses_sequence_parallel_size
    if theirs not in (None, roles.actor.ulysses_sequence_parallel_size):
        yield (
            f"{path} with actor_rollout_ref.ref.ulysses_sequence_parallel_size={theirs}: the reference has "
            f"to cut rows as the actor does; set {roles.actor.ulysses_sequence_parallel_size}"
        )


def distillation_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line where a teacher is asked for that nothing reads or the other way round, and where the
    teacher of a divergence over the whole vocabulary is not beside the actor.
    """
    block = "distillation"
    enabled = config.distillation.enabled
    if enabled and not needs_teacher(config):
        yield (
            f"{block}.enabled=true, and nothing reads a teacher: set algorithm.adv_estimator="
            f"on_policy_distillation (k1 as a policy gradient), or {block}.distillation_loss.loss_mode to "
            "forward_kl_topk or another divergence"
        )
    if enabled is False and needs_teacher(config):
        yield (
            f"{block}.enabled=false, and algorithm.adv_estimator={config.algorithm.adv_estimator} with "
            f"{block}.distillation_loss.loss_mode={config.distillation.distillation_loss.loss_mode} reads a "
            "teacher: leave enabled out, or set another estimator and loss_mode=k1"
        )
    placed = config.trainer.placement
    if has_divergence(config) and not tells_top_outcomes(config):
        mode = config.distillation.distillation_loss.loss_mode
        if config.distillation.teachers:
            yield (
                f"{block}.distillation_loss.loss_mode={mode} computes one teacher beside the actor, and "
                f"{block}.teachers has others: set loss_mode={mode}_topk, or leave them out"
            )
        if placed.get("teacher", "") != placed.get("actor", ""):
            yield (
                f"{block}.distillation_loss.loss_mode={mode} computes the teacher in the actor's processes, "
                f"and trainer.placement puts it on {placed.get('teacher', 'another pool')}: leave it out of "
                f"trainer.placement, or set loss_mode={mode}_topk, for which it tells its most likely tokens"
            )


def sampling_problems(config: PPOConfig) -> Iterator[str]:
    groups = config.algorithm.filter_groups
    path = "algorithm.filter_groups"
    if not groups.enable:
        return
    if not groups.metric:
        yield f"{path}.metric is empty: set it to acc, score, or a key that the reward function returns"
    prompts = config.data.gen_batch_size or 0
    batches = groups.max_num_gen_batches
    wanted = config.data.train_batch_size
    if batches and batches * prompts < wanted:
        yield (
            f"{path}.max_num_gen_batches={batches} × data.gen_batch_size={prompts} = {batches * prompts} "
            f"prompts can never fill data.train_batch_size={wanted}: raise one of the first two"
        )


CORRECTION = "algorithm.rollout_correction"


def correction_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each part of a run that bypass mode excludes."""
    correction = config.algorithm.rollout_correction
    estimator = estimator_facts(config)
    if correction.bypass_mode and estimator is not None and estimator.actor_pass:
        yield (
            f"{CORRECTION}.bypass_mode=true leaves out the actor's pass over the batch, and "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs Σπ² from it: set "
            f"{CORRECTION}.bypass_mode=false, or another estimator, for example rloo"
        )
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    facts = loss_facts(config)
    unweighted = correction.bypass_mode and correction.rollout_is and correction.loss_type == "ppo_clip"
    if unweighted and facts is not None and not facts.has_ratio:
        yield (
            f"{CORRECTION}.rollout_is={correction.rollout_is} with bypass_mode=true and loss_type=ppo_clip "
            f"leaves the weights to the ratio of the loss, and {LOSS}={loss} has none: "
            f"set {CORRECTION}.loss_type=reinforce, or bypass_mode=false"
        )


def uncorrected(config: PPOConfig, why: str) -> Iterator[str]:
    """Yield a line if nothing corrects for the policy that sampled; `why` says that it is another one."""
    correction = config.algorithm.rollout_correction
    if not (correction.corrects or correction.bypass_mode):
        yield (
            f"{why}, and nothing corrects for the policy that sampled them. Set one of "
            f"{CORRECTION}.rollout_is=token (or sequence: the loss is weighted by the ratio of the policy at "
            "the start of the step to the one that sampled: decoupled PPO), "
            f"{CORRECTION}.rollout_rs=token_k1 with rollout_rs_threshold (tokens or rows whose ratio is off "
            f"are left out), or {CORRECTION}.bypass_mode=true (the policy that sampled is the old policy of "
            "the loss, which saves a pass over the batch)"
        )
        return
    facts = loss_facts(config)
    weighted = correction.rollout_is and correction.loss_type == "reinforce"
    if correction.bypass_mode and facts and not (facts.has_ratio or weighted or correction.rollout_rs):
        loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield (
            f"{why}, and {CORRECTION}.bypass_mode=true leaves the correction to the ratio of the loss, "
            f"which actor_rollout_ref.actor.policy_loss.loss_mode={loss} does not have: set "
            f"{CORRECTION}.bypass_mode=false with rollout_is=token, or a loss with a ratio"
        )


def thresholds(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each threshold or option that does not parse, or does not fit the others."""
    correction = config.algorithm.rollout_correction
    try:
        parse_is_threshold(correction.rollout_is_threshold)
    except ConfigError as error:
        yield str(error)
    if correction.rollout_rs is not None:
        yield from read_rejection(correction.rollout_rs, correction.rollout_rs_threshold)[1]


OF_A_SOURCE: tuple[Callable[[PPOConfig], Iterator[str]], ...] = (
    name_problems,
    estimator_problems,
    gdpo_problems,
    score_problems,
    correction_problems,
    own_algorithm_problems,
)
"""The rules that look at an estimator and its keys, which each data source has to follow."""
