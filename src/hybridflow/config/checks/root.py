"""Refuse a run that cannot work before anything is allocated: all problems at once, each with a way out.

    resolved config ──check──► notes on what may surprise, or one ConfigError

It looks at the file system (whether files exist, whether the run folder can be written) and creates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import get_args
from urllib.parse import urlsplit

from hybridflow.config.checks.agent import agent_problems
from hybridflow.config.checks.algorithm import PROCESS, algorithm_problems
from hybridflow.config.checks.cluster import (
    cluster_notes,
    ppo_cluster_problems,
    sft_cluster_problems,
)
from hybridflow.config.checks.model import expert_problems, kernel_problems, model_problems, picture_problems
from hybridflow.config.checks.notes import ppo_notes
from hybridflow.config.checks.paths import data_problems, folder_problems, plugin_problem, resume_problems
from hybridflow.config.checks.reward import reward_problems
from hybridflow.config.checks.rollout import (
    engine_problems,
    precision_problems,
    rollout_notes,
    rollout_problems,
)
from hybridflow.config.checks.schedule import schedule_notes, schedule_problems
from hybridflow.config.convert import raise_all
from hybridflow.config.layout import pool_sizes
from hybridflow.config.model import OptimConfig
from hybridflow.config.needs import has_validation, longest_row, needs_reference, needs_teacher
from hybridflow.config.own_code import own_algorithm_problems, own_code_problems
from hybridflow.config.preference import learns_from_pairs
from hybridflow.config.profiler import DEVICE_TOOLS, SECOND, ProfilerConfig
from hybridflow.config.roles import ROLE_KEYS
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.trainer import SFTTrainerConfig, Tracker, TrainerConfig
from hybridflow.config.tree import get_value
from hybridflow.distributed.accelerators import features

TRACKERS = get_args(Tracker)
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


def check(
    config: PPOConfig | SFTConfig,
    given: Set[str] = frozenset(),
    *,
    runs: bool = True,
    needs_model: bool = True,
    needs_files: bool = True,
    trains: bool = True,
    known_problems: Sequence[str] = (),
) -> list[str]:
    """Cross-check a resolved configuration and return notes on what may surprise.

    `given` are the paths that the user set. `runs=False` looks at no weights and no tokenizer, for commands
    that only show what a run would be; `needs_model=False` at no model at all, and `needs_files=False` at no
    data, no code for it, and no folder; without `trains` no training data are wanted. Raises ConfigError
    that lists every problem, and `known_problems` behind them.
    """
    if isinstance(config, PPOConfig):
        problems = list(_ppo_problems(config, trains))
        notes = [
            *ppo_notes(config, given),
            *rollout_notes(config, given),
            *schedule_notes(config, given),
            *cluster_notes(config, given),
        ]
    else:
        problems = list(_sft_problems(config))
        notes = list(cluster_notes(config, given))
    if needs_files:
        problems += _file_problems(config, trains)
    if needs_model:
        problems += model_problems(config, runs=runs)
    raise_all([*problems, *known_problems])
    return notes


def _ppo_problems(config: PPOConfig, trains: bool) -> Iterator[str]:
    yield from _sizes(config)
    yield from _token_limits(config)
    yield from algorithm_problems(config)
    yield from _rollout(config)
    yield from rollout_problems(config)
    yield from agent_problems(config)
    yield from schedule_problems(config)
    yield from engine_problems(config)
    yield from precision_problems(config, trains=trains)
    yield from expert_problems(config)
    yield from kernel_problems(config)
    yield from _validation(config)
    yield from _algorithm_plugins(config)
    yield from reward_problems(config.reward)
    for keys in ROLE_KEYS.values():
        if keys.updates:
            yield from _optim(get_value(config, keys.updates).optim, f"{keys.updates}.optim")
    yield from _trainer(config.trainer)
    yield from _profiler(config.global_profiler, config.trainer)
    yield from ppo_cluster_problems(config)


def _sft_problems(config: SFTConfig) -> Iterator[str]:
    yield from _sft_sizes(config)
    if learns_from_pairs(config):
        yield from _pair_sizes(config)
    yield from kernel_problems(config)
    yield from _optim(config.optim, "optim")
    yield from _trainer(config.trainer)
    yield from _profiler(config.global_profiler, config.trainer)
    yield from sft_cluster_problems(config)


def _sizes(config: PPOConfig) -> Iterator[str]:
    batch = config.data.train_batch_size
    n = config.actor_rollout_ref.rollout.n
    roles = {ACTOR: config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if config.critic.enable and config.critic.ppo_mini_batch_size not in (None, roles[ACTOR]):
        roles["critic"] = config.critic.ppo_mini_batch_size or 0
    if config.reward.process_reward_model.enable:
        roles[PROCESS] = config.reward.process_reward_model.ppo_mini_batch_size or batch
    for role, mini in roles.items():
        if mini > batch:
            yield (
                f"{role}.ppo_mini_batch_size={mini} prompts is more than data.train_batch_size={batch}: set "
                f"it to {batch} or a divisor, or leave it out"
            )
        elif batch % mini:
            nearest = max(size for size in range(1, mini + 1) if batch % size == 0)
            yield (
                f"data.train_batch_size={batch} × {ROLLOUT}.n={n} = {batch * n} sequences cannot be split "
                f"into {role}.ppo_mini_batch_size={mini} prompts: use a divisor of {batch}, for example "
                f"{nearest}"
            )


def _token_limits(config: PPOConfig) -> Iterator[str]:
    data = config.data
    roles = config.actor_rollout_ref
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
    for path, is_read in limits.items():
        limit = get_value(config, path)
        if is_read and limit is not None and limit < longest:
            yield (
                f"{path}={limit} tokens cannot hold one row of {keys} tokens: set it to {longest} or "
                "more, or shorten the rows"
            )
    if roles.rollout.max_num_batched_tokens < data.max_prompt_length:
        yield (
            f"{ROLLOUT}.max_num_batched_tokens={roles.rollout.max_num_batched_tokens} cannot hold one "
            f"prompt of data.max_prompt_length={data.max_prompt_length} tokens: set it to "
            f"{data.max_prompt_length} or more"
        )


def _rollout(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.do_sample and rollout.temperature != 1.0:
        yield (
            f"{ROLLOUT}.do_sample=false with {ROLLOUT}.temperature={rollout.temperature}: greedy tokens "
            "keep their log-probs at temperature 1, and training would compare them with those at "
            f"{rollout.temperature}: leave {ROLLOUT}.temperature out, or set {ROLLOUT}.do_sample=true"
        )
    others = {
        f"{ACTOR}.use_prefix_grouper": config.actor_rollout_ref.actor.use_prefix_grouper,
        "algorithm.rollout_correction.bypass_mode": config.algorithm.rollout_correction.bypass_mode,
    }
    if rollout.exact is True and (processes := sum(pool_sizes(config.trainer, "actor"))) > 1:
        yield (
            f"{ROLLOUT}.exact=true with an actor on {processes} processes, which compute with parts of the "
            f"model: give it one (trainer.placement.actor), or leave {ROLLOUT}.exact out"
        )
    for key in (key for key, asked in others.items() if asked and rollout.exact is True):
        yield (
            f"{ROLLOUT}.exact=true with {key}=true: log-probs would not be equal to the bit, or would not "
            "be compared: leave one of them out"
        )
    if "" in rollout.stop:
        yield (
            f"{ROLLOUT}.stop={rollout.stop} holds an empty text, which would end every response: leave it out"
        )
    if rollout.stop_token_ids and min(rollout.stop_token_ids) < 0:
        yield f"{ROLLOUT}.stop_token_ids={rollout.stop_token_ids}: token ids are 0 or more"


def _validation(config: PPOConfig) -> Iterator[str]:
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    if sampling.do_sample and sampling.temperature == 0:
        path = f"{ROLLOUT}.val_kwargs"
        yield (
            f"{path}.do_sample=true with {path}.temperature=0: set a temperature above 0, for example 1.0, "
            "or do_sample=false for greedy"
        )


def _algorithm_plugins(config: PPOConfig) -> Iterator[str]:
    yield from plugin_problem("algorithm.adv_estimator", config.algorithm.adv_estimator)
    yield from plugin_problem(
        f"{ACTOR}.policy_loss.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode
    )
    yield from own_algorithm_problems(config)
    for index, term in enumerate(config.reward.terms):
        if not isinstance(term, dict) or "name" not in term:
            yield f"reward.terms[{index}]={term!r}: wanted {{name: …, weight: …}}"


def _file_problems(config: PPOConfig | SFTConfig, trains: bool) -> Iterator[str]:
    """Problems with data, with a user's code that makes or scores it, and with the folders of the run."""
    own_class = isinstance(config, PPOConfig) and bool(config.data.custom_cls.path)
    if isinstance(config, PPOConfig):
        yield from _data_plugins(config)
        yield from picture_problems(config)
    yield from own_code_problems(config)
    yield from data_problems(config.data, own_class=own_class, trains=trains)
    yield from resume_problems(config.trainer)
    yield from folder_problems(config.trainer)


def _data_plugins(config: PPOConfig) -> Iterator[str]:
    data = config.data
    reward = config.reward.custom_reward_function
    if config.trainer.val_only and not has_validation(config):
        yield (
            "trainer.val_only=true without validation data: set data.val_files, or data.task.val_size with "
            "data.task.name"
        )
    yield from plugin_problem("trainer.step_class", config.trainer.step_class)
    yield from plugin_problem("reward.custom_reward_function.path", reward.path, reward.name)
    yield from plugin_problem(
        "data.custom_cls.path", data.custom_cls.path, data.custom_cls.name, needs_name="data.custom_cls.name"
    )
    yield from plugin_problem(
        "data.sampler.class_path",
        data.sampler.class_path,
        data.sampler.class_name,
        needs_name="data.sampler.class_name",
    )


def _optim(optim: OptimConfig, path: str) -> Iterator[str]:
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield (
            f"{path}.betas={optim.betas}: wanted two numbers, each at least 0 and below 1, for example "
            "[0.9,0.999]"
        )
    if 0 < optim.total_training_steps < optim.lr_warmup_steps:
        yield (
            f"{path}.lr_warmup_steps={optim.lr_warmup_steps} is more than "
            f"{path}.total_training_steps={optim.total_training_steps}, so the warm-up would never end: set "
            "it lower"
        )
    if optim.momentum >= 1:
        yield f"{path}.momentum={optim.momentum}: wanted a number from 0 to below 1"
    falls = max(0, optim.lr_wsd_decay_steps) + max(0, optim.lr_warmup_steps)
    if optim.lr_scheduler_type == "wsd" and 0 < optim.total_training_steps < falls:
        yield (
            f"{path}.lr_warmup_steps={optim.lr_warmup_steps} and {path}.lr_wsd_decay_steps="
            f"{optim.lr_wsd_decay_steps} are together more than {path}.total_training_steps="
            f"{optim.total_training_steps}: set one of them lower"
        )
    if optim.lr_scheduler_type != "wsd" and optim.lr_wsd_decay_steps >= 0:
        yield (
            f"{path}.lr_wsd_decay_steps={optim.lr_wsd_decay_steps} is for "
            f"{path}.lr_scheduler_type=wsd, and it is {optim.lr_scheduler_type}: leave it out"
        )


def _trainer(trainer: TrainerConfig | SFTTrainerConfig) -> Iterator[str]:
    names = [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger
    for name in names:
        if name not in TRACKERS:
            yield f"trainer.logger={name}: there is no such tracker; there are {', '.join(TRACKERS)}"
    if trainer.wandb_proxy is not None and not urlsplit(trainer.wandb_proxy).netloc:
        yield (
            f"trainer.wandb_proxy={trainer.wandb_proxy} is no address: wanted one with its scheme, for "
            "example http://proxy.example:3128"
        )
    if trainer.alert_webhook is not None and not _is_web_address(trainer.alert_webhook):
        yield f"trainer.alert_webhook={trainer.alert_webhook} is no address: wanted http://… or https://…"
    if (
        isinstance(trainer, TrainerConfig)
        and trainer.total_training_steps
        and trainer.critic_warmup >= trainer.total_training_steps
    ):
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} leaves no step of "
            f"trainer.total_training_steps={trainer.total_training_steps} in which the actor trains: set it "
            "lower"
        )


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  raises for one that is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _profiler(profiler: ProfilerConfig, trainer: TrainerConfig | SFTTrainerConfig) -> Iterator[str]:
    """Yield what cannot be recorded: by its device, or because the run ends before."""
    needs_device = profiler.tool in DEVICE_TOOLS and trainer.device != "auto"
    if needs_device and profiler.tool not in features(trainer.device).profilers:
        yield (
            f"global_profiler.tool={profiler.tool} records CUDA, and trainer.device={trainer.device}: take "
            "torch or phases"
        )
    steps = profiler.steps or SECOND
    if profiler.tool is not None and 0 < (trainer.total_training_steps or 0) < min(steps):
        yield (
            f"global_profiler.tool={profiler.tool} would record step {min(steps)}, and "
            f"trainer.total_training_steps={trainer.total_training_steps}: set global_profiler.steps to one "
            "of them"
        )


def _pair_sizes(config: SFTConfig) -> Iterator[str]:
    """Both answers of a pair are in one forward pass, which the loss compares."""
    data = config.data
    if data.max_length <= data.max_token_len_per_gpu < 2 * data.max_length:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} tokens cannot hold a pair of "
            f"data.max_length={data.max_length} tokens each: set it to {2 * data.max_length} or more"
        )
    if data.micro_batch_size_per_gpu == 1:
        yield "data.micro_batch_size_per_gpu=1 cannot hold both answers of a pair: set it to 2 or more"


def _sft_sizes(config: SFTConfig) -> Iterator[str]:
    data = config.data
    if data.max_token_len_per_gpu < data.max_length:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} tokens cannot hold one conversation "
            f"of data.max_length={data.max_length} tokens: set it to {data.max_length} or more"
        )
    if data.messages_key == data.prompt_key == data.response_key:
        yield (
            f"data.messages_key, data.prompt_key and data.response_key are all {data.messages_key}: they "
            "name different columns"
        )
