"""Refuse what cannot run, before anything is allocated: every problem at once, each with both values and the way out.

    resolved config ──check──► notes (things that may surprise), or one ConfigError

Reads the file system (do files exist, can the run folder be written); creates nothing but the run folder, and with `make_folders=False`
nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from hybridflow.config.check_paths import data_problems, folder_problems, model_problem, plugin_problem, resume_problems
from hybridflow.config.convert import raise_all
from hybridflow.config.model import OptimConfig
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig

ESTIMATORS = ("gae", "grpo")
POLICY_LOSSES = ("vanilla",)
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
TRACKERS = ("console", "tensorboard", "jsonl", "wandb", "mlflow", "swanlab")
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def check(config: PPOConfig | SFTConfig, given: Set[str] = frozenset(), *, make_folders: bool = True) -> list[str]:
    """Cross-check a resolved configuration; notes on what may surprise. `given`: paths that the user set.

    Raises ConfigError that lists every problem.
    """
    if isinstance(config, PPOConfig):
        problems = [
            *_sizes(config),
            *_token_limits(config),
            *_algorithm(config),
            *_rollout(config),
            *_validation(config),
            *_plugins(config),
            *data_problems(config.data.train_files, config.data.val_files, config.data.task, own_class=bool(config.data.custom_cls.path)),
            *model_problem(config.actor_rollout_ref.model, "actor_rollout_ref.model"),
            *(model_problem(config.critic.model, "critic.model") if config.critic.enable and config.critic.model.path else []),
            *_optim(config.actor_rollout_ref.actor.optim, f"{ACTOR}.optim"),
            *_optim(config.critic.optim, "critic.optim"),
            *_trainer(config.trainer, make_folders),
        ]
        notes = list(_ppo_notes(config, given))
    else:
        problems = [
            *_sft_sizes(config),
            *data_problems(config.data.train_files, config.data.val_files, config.data.task),
            *model_problem(config.model, "model"),
            *_optim(config.optim, "optim"),
            *_trainer(config.trainer, make_folders),
        ]
        notes = []
    raise_all(problems)
    return notes


def _sizes(config: PPOConfig) -> Iterator[str]:
    batch, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    roles = {ACTOR: config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if config.critic.enable and config.critic.ppo_mini_batch_size not in (None, roles[ACTOR]):
        roles["critic"] = config.critic.ppo_mini_batch_size or 0
    for role, mini in roles.items():
        if mini > batch:
            yield (
                f"{role}.ppo_mini_batch_size={mini} prompts is more than data.train_batch_size={batch}: "
                f"set it to {batch} or a divisor, or leave it out"
            )
        elif batch % mini:
            yield (
                f"data.train_batch_size={batch} × {ROLLOUT}.n={n} = {batch * n} sequences cannot be split into "
                f"{role}.ppo_mini_batch_size={mini} prompts: use a divisor of {batch}, for example {_near_divisor(batch, mini)}"
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
    if config.algorithm.use_kl_in_reward or roles.actor.use_kl_loss:
        limits[f"{REF}.log_prob_max_token_len_per_gpu"] = roles.ref.log_prob_max_token_len_per_gpu
    if config.critic.enable:
        limits["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
        limits["critic.forward_max_token_len_per_gpu"] = config.critic.forward_max_token_len_per_gpu
    for path, limit in limits.items():
        if limit is not None and limit < longest:
            yield (
                f"{path}={limit} tokens cannot hold one row of data.max_prompt_length={data.max_prompt_length} + "
                f"data.max_response_length={data.max_response_length} = {longest} tokens: set it to {longest} or more, or shorten the rows"
            )
    if roles.rollout.max_num_batched_tokens < data.max_prompt_length:
        yield (
            f"{ROLLOUT}.max_num_batched_tokens={roles.rollout.max_num_batched_tokens} cannot hold one prompt of "
            f"data.max_prompt_length={data.max_prompt_length} tokens: set it to {data.max_prompt_length} or more"
        )


def _algorithm(config: PPOConfig) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    if algorithm.adv_estimator not in ESTIMATORS and ":" not in algorithm.adv_estimator:
        yield f"algorithm.adv_estimator={algorithm.adv_estimator}: there are {', '.join(ESTIMATORS)}; your own goes as path/to/file.py:name"
    if algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n < 2:
        yield (
            f"algorithm.adv_estimator=grpo compares the responses of a prompt, and {ROLLOUT}.n="
            f"{config.actor_rollout_ref.rollout.n} gives one: set {ROLLOUT}.n to 2 or more, for example 8"
        )
    if algorithm.adv_estimator == "gae" and config.critic.enable is False:
        yield "algorithm.adv_estimator=gae needs the critic, and critic.enable=false: leave critic.enable out, or set adv_estimator=grpo"
    if actor.policy_loss.loss_mode not in POLICY_LOSSES and ":" not in actor.policy_loss.loss_mode:
        yield f"{ACTOR}.policy_loss.loss_mode={actor.policy_loss.loss_mode}: there is vanilla; your own goes as path/to/file.py:name"
    yield from _kl_estimator("algorithm.kl_penalty", algorithm.kl_penalty, gradient=False)
    yield from _kl_estimator(f"{ACTOR}.kl_loss_type", actor.kl_loss_type, gradient=True)
    for side, epsilon in (("clip_ratio_low", actor.clip_low), ("clip_ratio", actor.clip_ratio)):
        if epsilon > 1 and actor.policy_loss.loss_mode == "vanilla":
            yield f"{ACTOR}.{side}={epsilon} lets the ratio fall below 0: set it to 1 or less, for example 0.2"


def _kl_estimator(path: str, name: str, *, gradient: bool) -> Iterator[str]:
    base = name.removesuffix("+")
    if base == "full":
        yield f"{path}=full needs the reference's whole distribution, which this version does not keep: use low_var_kl"
    elif base not in KL_ESTIMATORS:
        yield f"{path}={name}: there are {', '.join(KL_ESTIMATORS)}"
    elif name.endswith("+") and not gradient:
        yield f"{path}={name}: a KL in the reward has no gradient, so + means nothing there: use {base}"


def _rollout(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.do_sample and rollout.temperature != 1.0:
        yield (
            f"{ROLLOUT}.do_sample=false with {ROLLOUT}.temperature={rollout.temperature}: greedy tokens keep their log-probs at "
            f"temperature 1, and training would compare them with those at {rollout.temperature}: leave {ROLLOUT}.temperature out, "
            f"or set {ROLLOUT}.do_sample=true"
        )


def _validation(config: PPOConfig) -> Iterator[str]:
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    if sampling.do_sample and sampling.temperature == 0:
        path = f"{ROLLOUT}.val_kwargs"
        yield f"{path}.do_sample=true with {path}.temperature=0: set a temperature above 0, for example 1.0, or do_sample=false for greedy"
    if config.trainer.val_only and not _has_validation(config):
        yield "trainer.val_only=true without validation data: set data.val_files, or data.task.val_size with data.task.name"


def _has_validation(config: PPOConfig) -> bool:
    return bool(config.data.val_files) or bool(config.data.task.name and config.data.task.val_size)


def _plugins(config: PPOConfig) -> Iterator[str]:
    data, reward = config.data, config.reward.custom_reward_function
    yield from plugin_problem("algorithm.adv_estimator", config.algorithm.adv_estimator)
    yield from plugin_problem(f"{ACTOR}.policy_loss.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode)
    yield from plugin_problem("reward.custom_reward_function.path", reward.path, reward.name)
    yield from plugin_problem("data.custom_cls.path", data.custom_cls.path, data.custom_cls.name, needs_name="data.custom_cls.name")
    yield from plugin_problem(
        "data.sampler.class_path", data.sampler.class_path, data.sampler.class_name, needs_name="data.sampler.class_name"
    )
    for index, term in enumerate(config.reward.terms):
        if not isinstance(term, dict) or "name" not in term:
            yield f"reward.terms[{index}]={term!r}: a term is {{name: …, weight: …}}"


def _optim(optim: OptimConfig, path: str) -> Iterator[str]:
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"{path}.betas={optim.betas}: wanted two numbers, each at least 0 and below 1, for example [0.9,0.999]"
    if 0 < optim.total_training_steps < optim.lr_warmup_steps:
        yield f"{path}.lr_warmup_steps={optim.lr_warmup_steps} is more than {path}.total_training_steps={optim.total_training_steps}"


def _trainer(trainer: TrainerConfig | SFTTrainerConfig, make_folders: bool) -> Iterator[str]:
    if trainer.nnodes > 1 or trainer.n_gpus_per_node > 1:
        yield (
            f"trainer.nnodes={trainer.nnodes} × trainer.n_gpus_per_node={trainer.n_gpus_per_node} = "
            f"{trainer.nnodes * trainer.n_gpus_per_node} processes, but this version runs one process (the cluster backend is the next "
            "milestone): set trainer.nnodes=1 trainer.n_gpus_per_node=1"
        )
    names = [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger
    for name in names:
        if name not in TRACKERS:
            yield f"trainer.logger={name}: there are {', '.join(TRACKERS)}"
    yield from resume_problems(trainer)
    yield from folder_problems(trainer, make=make_folders)
    if isinstance(trainer, TrainerConfig) and trainer.total_training_steps and trainer.critic_warmup >= trainer.total_training_steps:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} leaves no step of trainer.total_training_steps="
            f"{trainer.total_training_steps} in which the actor trains: set it lower"
        )


def _sft_sizes(config: SFTConfig) -> Iterator[str]:
    data = config.data
    if data.max_token_len_per_gpu < data.max_length:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} tokens cannot hold one conversation of "
            f"data.max_length={data.max_length} tokens: set it to {data.max_length} or more"
        )
    if data.messages_key == data.prompt_key == data.response_key:
        yield f"data.messages_key, data.prompt_key and data.response_key are all {data.messages_key}: they name different columns"


def _ppo_notes(config: PPOConfig, given: Set[str]) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    reference = algorithm.use_kl_in_reward or actor.use_kl_loss
    rollout = config.actor_rollout_ref.rollout
    if rollout.do_sample and (rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            f"{ROLLOUT}.top_p={rollout.top_p}, top_k={rollout.top_k} leave tokens out of sampling; the log-probs kept and trained on "
            "are of the whole distribution at the temperature alone"
        )
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield f"algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss are both on: the KL is charged twice"
    if not reference and any(path.startswith("algorithm.kl_ctrl.") for path in given):
        yield "algorithm.kl_ctrl is read only with algorithm.use_kl_in_reward=true: there is no KL penalty in this run"
    if not reference and f"{ACTOR}.kl_loss_coef" in given:
        yield f"{ACTOR}.kl_loss_coef is read only with {ACTOR}.use_kl_loss=true: there is no KL term in this run"
    if not _has_validation(config) and config.trainer.test_freq > 0:
        yield f"trainer.test_freq={config.trainer.test_freq} without validation data: nothing is validated"
    if not config.critic.enable and any(path.startswith("critic.") for path in given):
        yield f"critic.* is not read: algorithm.adv_estimator={algorithm.adv_estimator} runs without a critic"
    if config.critic.enable and "critic.model.tokenizer_path" in given and config.critic.model.tokenizer_path != config.data.tokenizer:
        yield f"critic.model.tokenizer_path is not used: the critic reads the token ids of data.tokenizer={config.data.tokenizer}"
    if algorithm.adv_estimator == "grpo" and "algorithm.lam" in given:
        yield "algorithm.lam is read by gae only"
    if actor.loss_scale_factor is not None and f"{ACTOR}.loss_scale_factor" in given and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield f"{ACTOR}.loss_scale_factor is read only with {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
