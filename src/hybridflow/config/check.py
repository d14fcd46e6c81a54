"""Refuse what cannot run, before anything is allocated: every problem at once, each with both values and the
way out.

    resolved config ──check──► notes (things that may surprise), or one ConfigError

Reads the file system (do files exist, can the run folder be written) and creates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from hybridflow.config.check_algorithm import PROCESS, algorithm_problems
from hybridflow.config.check_cluster import (
    cluster_notes,
    pool_sizes,
    ppo_cluster_problems,
    sft_cluster_problems,
)
from hybridflow.config.check_engine import engine_problems
from hybridflow.config.check_kernels import kernel_problems
from hybridflow.config.check_model import model_problem, tokenizer_problems
from hybridflow.config.check_notes import has_validation, ppo_notes
from hybridflow.config.check_paths import (
    data_problems,
    folder_problems,
    plugin_problem,
    resume_problems,
)
from hybridflow.config.check_reward import reward_problems
from hybridflow.config.check_rollout import rollout_notes, rollout_problems
from hybridflow.config.convert import raise_all
from hybridflow.config.model import OptimConfig
from hybridflow.config.needs import needs_reference, needs_teacher
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig

TRACKERS = ("console", "tensorboard", "jsonl", "wandb", "mlflow", "swanlab")
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def check(config: PPOConfig | SFTConfig, given: Set[str] = frozenset()) -> list[str]:
    """Cross-check a resolved configuration; notes on what may surprise. `given`: paths that the user set.

    Raises ConfigError that lists every problem.
    """
    if isinstance(config, PPOConfig):
        problems = [
            *_sizes(config),
            *_token_limits(config),
            *algorithm_problems(config),
            *_rollout(config),
            *rollout_problems(config),
            *engine_problems(config),
            *kernel_problems(config),
            *_validation(config),
            *_plugins(config),
            *reward_problems(config.reward),
            *data_problems(
                config.data.train_files,
                config.data.val_files,
                config.data.task,
                own_class=bool(config.data.custom_cls.path),
            ),
            *model_problem(config.actor_rollout_ref.model, "actor_rollout_ref.model"),
            *_other_models(config),
            *tokenizer_problems(config),
            *_optim(config.actor_rollout_ref.actor.optim, f"{ACTOR}.optim"),
            *_optim(config.critic.optim, "critic.optim"),
            *_optim(config.reward.process_reward_model.optim, f"{PROCESS}.optim"),
            *_trainer(config.trainer),
            *ppo_cluster_problems(config),
        ]
        notes = [*ppo_notes(config, given), *rollout_notes(config, given), *cluster_notes(config, given)]
    else:
        problems = [
            *_sft_sizes(config),
            *kernel_problems(config),
            *data_problems(config.data.train_files, config.data.val_files, config.data.task),
            *model_problem(config.model, "model"),
            *tokenizer_problems(config),
            *_optim(config.optim, "optim"),
            *_trainer(config.trainer),
            *sft_cluster_problems(config),
        ]
        notes = list(cluster_notes(config, given))
    raise_all(problems)
    return notes


def _other_models(config: PPOConfig) -> Iterator[str]:
    """Models of the roles that the run builds; one that follows the actor's is not looked at twice."""
    actor = config.actor_rollout_ref.model.path
    critic = config.critic
    process = config.reward.process_reward_model
    if critic.enable and critic.model.path and critic.model.path != actor:
        yield from model_problem(critic.model, "critic.model")
    if process.enable and process.model.path and process.model.path != actor:
        yield from model_problem(process.model, f"{PROCESS}.model")


def _sizes(config: PPOConfig) -> Iterator[str]:
    batch, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
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
            yield (
                f"data.train_batch_size={batch} × {ROLLOUT}.n={n} = {batch * n} sequences cannot be split "
                f"into {role}.ppo_mini_batch_size={mini} prompts: use a divisor of {batch}, for example "
                f"{_near_divisor(batch, mini)}"
            )


def _near_divisor(number: int, wanted: int) -> int:
    return max(d for d in range(1, wanted + 1) if number % d == 0)


def _token_limits(config: PPOConfig) -> Iterator[str]:
    data, roles = config.data, config.actor_rollout_ref
    longest = data.max_prompt_length + data.max_response_length
    limits: dict[str, int | None] = {
        f"{ACTOR}.ppo_max_token_len_per_gpu": roles.actor.ppo_max_token_len_per_gpu,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": roles.rollout.log_prob_max_token_len_per_gpu,
    }
    if needs_reference(config):
        limits[f"{REF}.log_prob_max_token_len_per_gpu"] = roles.ref.log_prob_max_token_len_per_gpu
    if config.critic.enable:
        limits["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
        limits["critic.forward_max_token_len_per_gpu"] = config.critic.forward_max_token_len_per_gpu
    if config.reward.process_reward_model.enable:
        limits[f"{PROCESS}.ppo_max_token_len_per_gpu"] = (
            config.reward.process_reward_model.ppo_max_token_len_per_gpu
        )
    if needs_teacher(config):
        limits["distillation.log_prob_max_token_len_per_gpu"] = (
            config.distillation.log_prob_max_token_len_per_gpu
        )
    for path, limit in limits.items():
        if limit is not None and limit < longest:
            yield (
                f"{path}={limit} tokens cannot hold one row of "
                f"data.max_prompt_length={data.max_prompt_length} + "
                f"data.max_response_length={data.max_response_length} = {longest} tokens: set it to "
                f"{longest} or more, or shorten the rows"
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
            f"{ROLLOUT}.exact=true with {key}=true: log-probs would not be equal to the bit, or not be "
            "compared: leave one of them out"
        )
    if "" in rollout.stop:
        yield f"{ROLLOUT}.stop={rollout.stop} has an empty text, which every response ends with: leave it out"
    if rollout.stop_token_ids and min(rollout.stop_token_ids) < 0:
        yield f"{ROLLOUT}.stop_token_ids={rollout.stop_token_ids}: token ids are numbers from 0"


def _validation(config: PPOConfig) -> Iterator[str]:
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    if sampling.do_sample and sampling.temperature == 0:
        path = f"{ROLLOUT}.val_kwargs"
        yield (
            f"{path}.do_sample=true with {path}.temperature=0: set a temperature above 0, for example 1.0, "
            "or do_sample=false for greedy"
        )
    if config.trainer.val_only and not has_validation(config):
        yield (
            "trainer.val_only=true without validation data: set data.val_files, or data.task.val_size with "
            "data.task.name"
        )


def _plugins(config: PPOConfig) -> Iterator[str]:
    data, reward = config.data, config.reward.custom_reward_function
    yield from plugin_problem("algorithm.adv_estimator", config.algorithm.adv_estimator)
    yield from plugin_problem(
        f"{ACTOR}.policy_loss.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode
    )
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
    for index, term in enumerate(config.reward.terms):
        if not isinstance(term, dict) or "name" not in term:
            yield f"reward.terms[{index}]={term!r}: a term is {{name: …, weight: …}}"


def _optim(optim: OptimConfig, path: str) -> Iterator[str]:
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield (
            f"{path}.betas={optim.betas}: wanted two numbers, each at least 0 and below 1, for example "
            "[0.9,0.999]"
        )
    if 0 < optim.total_training_steps < optim.lr_warmup_steps:
        yield (
            f"{path}.lr_warmup_steps={optim.lr_warmup_steps} is more than "
            f"{path}.total_training_steps={optim.total_training_steps}"
        )


def _trainer(trainer: TrainerConfig | SFTTrainerConfig) -> Iterator[str]:
    names = [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger
    for name in names:
        if name not in TRACKERS:
            yield f"trainer.logger={name}: there are {', '.join(TRACKERS)}"
    yield from resume_problems(trainer)
    yield from folder_problems(trainer)
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
