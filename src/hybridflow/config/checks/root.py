"""Refuse a run that cannot work before anything is allocated: all problems at once, each with a way out.

    resolved config ──find_problems──► one line each; ──find_notes──► one line each for what may surprise

What concerns one or two keys is declared on them (`schema.py`). The tables below list the rules that cross
more keys, or look at files. None of them hides another: each is a separate function, and one that reads a
key without a usable value is left out. They look at the file system (whether files exist, whether the run
folder can be written) and create nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any, get_args

from hybridflow.config.checks import algorithm, cluster, model, paths, rollout
from hybridflow.config.checks.notes import ppo_notes
from hybridflow.config.checks.paths import plugin_problem
from hybridflow.config.convert import WrongKeyRead, raise_all
from hybridflow.config.data import SFTDataConfig
from hybridflow.config.layout import ROLE_KEYS
from hybridflow.config.megatron import megatron_notes, megatron_problems
from hybridflow.config.needs import (
    has_validation,
    longest_row,
    needs_reference,
    needs_teacher,
    unbuilt_blocks,
)
from hybridflow.config.own_code import own_algorithm_problems, own_code_problems
from hybridflow.config.preference import learns_from_pairs
from hybridflow.config.relations import Relations
from hybridflow.config.resolve import follows_of
from hybridflow.config.reward import reward_problems
from hybridflow.config.root import DEVICE_TOOLS, SECOND, PPOConfig, SFTConfig
from hybridflow.config.trainer import Tracker
from hybridflow.config.tree import get_value
from hybridflow.distributed.accelerators import features

Rule = Callable[[Any], Iterator[str]]
TRACKERS = get_args(Tracker)
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
PROCESS = "reward.process_reward_model"


def check(config: PPOConfig | SFTConfig, given: Set[str] = frozenset(), **scope: bool) -> list[str]:
    """Return notes on what may surprise in a resolved configuration; `scope` is that of `find_problems`.

    `given` are the paths that the user set. Raises ConfigError that lists every problem.
    """
    raise_all(find_problems(config, **scope))
    return find_notes(config, given)


def find_problems(
    config: PPOConfig | SFTConfig,
    *,
    runs: bool = True,
    needs_model: bool = True,
    needs_files: bool = True,
    trains: bool = True,
) -> list[str]:
    """Return one line for each problem of a resolved configuration.

    `runs=False` looks at no weights and no tokenizer, for commands that only show what a run would be;
    `needs_model=False` at no model at all, and `needs_files=False` at no data, no code for it, and no folder;
    without `trains` no training data are wanted.
    """
    kind = PPOConfig if isinstance(config, PPOConfig) else SFTConfig
    stages = {
        "keys": True,
        "training": trains,
        "files": needs_files,
        "training files": trains and needs_files,
        "models": needs_model,
        "weights": needs_model and runs,
    }
    problems = list(Relations(config, unbuilt_blocks(config)).problems(follows_of(config)))
    for stage, wanted in stages.items():
        for rule in RULES[kind].get(stage, ()) if wanted else ():
            with suppress(WrongKeyRead):
                problems.extend(rule(config))
    return problems


def find_notes(config: PPOConfig | SFTConfig, given: Set[str]) -> list[str]:
    """Return one line for each setting that may surprise; `given` are the paths that the user set."""
    notes = list(Relations(config).notes(given))
    if isinstance(config, PPOConfig):
        notes += [
            *ppo_notes(config, given),
            *rollout.context_notes(config, given),
            *rollout.schedule_notes(config),
        ]
    return [*notes, *megatron_notes(config, given), *cluster.cluster_notes(config, given)]


def token_limits(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each limit of tokens that cannot hold the longest row of the run."""
    longest, keys = longest_row(config)
    limits = {
        f"{ACTOR}.ppo_max_token_len_per_gpu": True,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": True,
        f"{REF}.log_prob_max_token_len_per_gpu": needs_reference(config),
        "critic.ppo_max_token_len_per_gpu": config.critic.enable,
        "critic.forward_max_token_len_per_gpu": config.critic.enable,
        f"{PROCESS}.ppo_max_token_len_per_gpu": config.reward.process_reward_model.enable,
        "distillation.log_prob_max_token_len_per_gpu": needs_teacher(config),
    }
    follows = follows_of(config)
    for path, is_read in limits.items():
        limit = get_value(config, path)
        told = path in follows and limit == get_value(config, follows[path])
        if is_read and not told and limit is not None and limit < longest:
            yield (
                f"{path}={limit} tokens cannot hold one row of {keys} tokens: set it to {longest} or "
                "more, or shorten the rows"
            )


def estimator_plugin(config: PPOConfig) -> Iterator[str]:
    """Yield one line where the file of a user's own estimator is not there."""
    yield from plugin_problem("algorithm.adv_estimator", config.algorithm.adv_estimator)


def loss_plugin(config: PPOConfig) -> Iterator[str]:
    """Yield one line where the file of a user's own policy loss is not there."""
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    yield from plugin_problem(f"{ACTOR}.policy_loss.loss_mode", loss)


def reward_choice(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of the choice of the reward, and for each term that is none."""
    yield from reward_problems(config.reward)
    for index, term in enumerate(config.reward.terms):
        if not isinstance(term, dict) or "name" not in term:
            yield f"reward.terms[{index}]={term!r}: wanted {{name: …, weight: …}}"


def nothing_to_validate(config: PPOConfig) -> Iterator[str]:
    """Yield one line where a run that only validates has nothing to validate on."""
    if config.trainer.val_only and not has_validation(config):
        yield (
            "trainer.val_only=true without validation data: set data.val_files, or data.task.val_size with "
            "data.task.name"
        )


def plugins_of_data(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each file of a user's own code that is not there, or whose class has no name."""
    reward = config.reward.custom_reward_function
    data = config.data.custom_cls
    sampler = config.data.sampler
    yield from plugin_problem("trainer.step_class", config.trainer.step_class)
    yield from plugin_problem("reward.custom_reward_function.path", reward.path, reward.name)
    yield from plugin_problem("data.custom_cls.path", data.path, data.name, needs_name="data.custom_cls.name")
    made = config.data.datagen
    yield from plugin_problem("data.datagen.path", made.path, made.name, needs_name="data.datagen.name")
    yield from plugin_problem(
        "data.sampler.class_path",
        sampler.class_path,
        sampler.class_name,
        needs_name="data.sampler.class_name",
    )


def optimizers(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each schedule of the learning rate that rises and falls for longer than it lasts."""
    blocks = ["optim"]
    if isinstance(config, PPOConfig):
        blocks = [f"{keys.updates}.optim" for keys in ROLE_KEYS.values() if keys.updates]
    for path in blocks:
        optim = get_value(config, path)
        falls = max(0, optim.lr_wsd_decay_steps) + max(0, optim.lr_warmup_steps)
        if optim.lr_scheduler_type == "wsd" and 0 < optim.total_training_steps < falls:
            yield (
                f"{path}.lr_warmup_steps={optim.lr_warmup_steps} and {path}.lr_wsd_decay_steps="
                f"{optim.lr_wsd_decay_steps} are together more than {path}.total_training_steps="
                f"{optim.total_training_steps}: set one of them lower"
            )


def trackers(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each tracker that there is not."""
    for name in config.trainer.logger:
        if name not in TRACKERS:
            yield f"trainer.logger={name}: there is no such tracker; there are {', '.join(TRACKERS)}"


def profiler(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield what cannot be recorded: by its device, or because the run ends before."""
    keys = config.global_profiler
    trainer = config.trainer
    needs_device = keys.tool in DEVICE_TOOLS and trainer.device != "auto"
    if needs_device and keys.tool not in features(trainer.device).profilers:
        yield (
            f"global_profiler.tool={keys.tool} records CUDA, and trainer.device={trainer.device}: take "
            "torch or phases"
        )
    steps = keys.steps or SECOND
    if keys.tool is not None and 0 < (trainer.total_training_steps or 0) < min(steps):
        yield (
            f"global_profiler.tool={keys.tool} would record step {min(steps)}, and "
            f"trainer.total_training_steps={trainer.total_training_steps}: set global_profiler.steps to one "
            "of them"
        )


def pair_sizes(config: SFTConfig) -> Iterator[str]:
    """Yield one line for each limit that does not hold both answers of a pair, which one pass compares."""
    data = config.data
    if not learns_from_pairs(config):
        return
    if data.max_length <= data.max_token_len_per_gpu < 2 * data.max_length:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} tokens cannot hold a pair of "
            f"data.max_length={data.max_length} tokens each: set it to {2 * data.max_length} or more"
        )
    if data.micro_batch_size_per_gpu == 1:
        yield "data.micro_batch_size_per_gpu=1 cannot hold both answers of a pair: set it to 2 or more"


def columns(config: SFTConfig) -> Iterator[str]:
    """Yield one line where three kinds of columns have one name."""
    data = config.data
    if data.messages_key == data.prompt_key == data.response_key:
        yield (
            f"data.messages_key, data.prompt_key and data.response_key are all {data.messages_key}: they "
            "name different columns"
        )
    if data.text_key is not None and type(data) is not SFTDataConfig:
        yield f"data.text_key={data.text_key}: a plain text has no answer to compare or score: leave it out"


SHARED_FILES: tuple[Rule, ...] = (
    own_code_problems,
    paths.task_problems,
    paths.train_file_problems,
    paths.val_file_problems,
    paths.resume_problems,
    paths.folder_problems,
)
SHARED_MODELS: Mapping[str, tuple[Rule, ...]] = {
    "training files": (paths.no_data,),
    "models": (model.model_problems,),
    "weights": (model.weight_problems, model.tokenizer_problems),
}
RULES: Mapping[type, Mapping[str, tuple[Rule, ...]]] = {
    PPOConfig: {
        "keys": (
            token_limits,
            algorithm.name_problems,
            algorithm.estimator_problems,
            algorithm.partner_problems,
            algorithm.source_problems,
            algorithm.pair_problems,
            algorithm.gdpo_problems,
            algorithm.score_problems,
            algorithm.clip_problems,
            algorithm.kl_problems,
            algorithm.full_kl_problems,
            algorithm.distillation_problems,
            algorithm.sampling_problems,
            algorithm.thresholds,
            algorithm.correction_problems,
            rollout.rollout_problems,
            rollout.server_problems,
            rollout.engine_problems,
            rollout.precision_problems,
            rollout.agent_problems,
            rollout.uncorrected_rows,
            rollout.schedule_problems,
            model.kernel_problems,
            estimator_plugin,
            loss_plugin,
            own_algorithm_problems,
            reward_choice,
            optimizers,
            trackers,
            profiler,
            megatron_problems,
            *cluster.RULES,
        ),
        "training": (rollout.uncorrected_precision,),
        "files": (nothing_to_validate, plugins_of_data, model.picture_problems, *SHARED_FILES),
        **SHARED_MODELS,
    },
    SFTConfig: {
        "keys": (
            pair_sizes,
            columns,
            model.kernel_problems,
            optimizers,
            trackers,
            profiler,
            cluster.controller_problems,
            megatron_problems,
            cluster.sft_layout_problems,
        ),
        "files": SHARED_FILES,
        **SHARED_MODELS,
    },
}
"""The rules that cross keys or look at files, by the kind of run and what a command needs of it."""
