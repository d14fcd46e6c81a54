"""`reward.*`: how a response gets its score, and `reward.sandbox.*`: what programs of the model may use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.model import FSDPConfig, LearnerConfig, ModelConfig
from hybridflow.config.schema import at_most, divides, excludes, group, key, needs, read_by

ONE_BY_ONE = (
    excludes(
        ".manager", "it holds for responses that are scored one by one, and a manager scores all in one call"
    ),
    excludes(".num_workers=0", "it holds where processes score, and not in the trainer's own"),
)
"""Of limits on the scoring of single responses."""


@dataclass(frozen=True)
class SandboxConfig:
    """The local sandbox for code from the model, see docs/sandbox.md."""

    timeout: float = key(10.0, "Seconds a program may take.", above=0)
    cpu_time: float = key(10.0, "Seconds of CPU time that a program and its processes may take.", above=0)
    memory_limit_mb: int = key(
        1024, "MiB of memory that a program and its processes may have in use.", minimum=32
    )
    address_space_mb: int = key(
        4096, "MiB of addresses that one process may reserve, used or not (RLIMIT_AS).", minimum=64
    )
    max_processes: int = key(64, "Processes and threads of a program at the same time.", minimum=1)
    max_output_kb: int = key(
        1024, "KiB that a program may print, and as many of errors; more stops it.", minimum=1
    )
    scratch_mb: int = key(64, "MiB of files in a program's scratch folder.", minimum=1)
    give_up: list[Literal["private_root", "namespaces", "other_uid", "seccomp"]] = key(
        [],
        "Layers of protection without which programs may run where this machine does not have them; "
        "`hybridflow doctor` lists what each is for.",
    )


@dataclass(frozen=True)
class CustomRewardConfig:
    """A reward function of your own."""

    path: str | None = key(
        None,
        "File or module with your own reward function; path.py:name works too. null: reward.function "
        "decides.",
    )
    name: str = key(
        "compute_score",
        "Name of the function in that file; compute_reward is tried too.",
        read_by(".path", "no file of yours is read"),
    )
    reward_kwargs: dict[str, Any] = key(
        {},
        "Extra keyword arguments of the function.",
        excludes("reward.terms", "write the options into the term"),
    )


@dataclass(frozen=True)
class OverlongBufferConfig:
    """A penalty for responses that come close to the longest length."""

    enable: bool = key(
        False,
        "Overlong shaping (DAPO): subtract a penalty that grows over the last `len` tokens before the "
        "longest response.",
    )
    len: int | None = key(
        None,
        "Tokens before max_resp_len over which the penalty grows; null: a fifth of max_resp_len.",
        at_most("reward.reward_kwargs.max_resp_len"),
        minimum=1,
    )
    penalty_factor: float = key(
        1.0, "Penalty of a response of max_resp_len tokens, in units of the reward.", minimum=0
    )


@dataclass(frozen=True)
class RewardKwargsConfig:
    """Changes to every reward."""

    overlong_buffer_cfg: OverlongBufferConfig = group(OverlongBufferConfig)
    max_resp_len: int | None = key(
        None,
        "Length, in tokens, at which the overlong penalty is whole; null: data.max_response_length.",
        minimum=1,
    )


@dataclass(frozen=True)
class ProcessRewardModelConfig(LearnerConfig):
    """An implicit process reward model that trains beside the actor (PRIME)."""

    enable: bool | None = key(
        None,
        "Train an implicit process reward model beside the actor (PRIME); null: when the advantage "
        "estimator needs one.",
    )
    model: ModelConfig = group(ModelConfig)
    beta: float = key(
        0.05,
        "Scale of the process reward of a token, beta · (log-prob of the reward model − log-prob of the "
        "reference).",
        above=0,
    )
    granularity: Literal["token", "whole"] = key(
        "token",
        "Where process rewards go: token puts one on each token, whole puts their sum on the last token.",
    )
    update: Literal["before", "after"] = key(
        "before", "Train the reward model before or after it scores a batch."
    )
    process_coef: float = key(5.0, "Weight of the process rewards in the advantage.", minimum=0, symbol="c_p")
    outcome_coef: float = key(
        5.0,
        "Weight of the outcome, that is of the reward function's score, in the advantage.",
        minimum=0,
        symbol="c_o",
    )
    ppo_mini_batch_size: int | None = key(
        None,
        "Prompts in one optimizer step of the reward model, each with all of its responses; null: "
        "data.train_batch_size.",
        divides("data.train_batch_size"),
        minimum=1,
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None, "Largest number of tokens in one forward and backward pass; null: the actor's limit.", minimum=1
    )
    grad_clip: float | None = key(
        10.0, "Largest norm of the gradient; a larger one is scaled down to it. null: no clipping.", above=0
    )


CUSTOM = "reward.custom_reward_function"
CLASSIFIES = (".kind!=generative", "a classifier is computed as the reference is")
MODEL_TERM = "reward_model"
"""Name of the term of `reward.terms` that is the score of `reward.reward_model`."""
JUDGE_TERM = "judge"
"""Name of the built-in reward function that asks a generative model."""
JUDGE_APART = (
    "serve it (hybridflow serve), set reward.reward_model.enable=false and give the term judge its base_url"
)
"""What to do where a run's own judge cannot be asked."""
JUDGE_OFFERS = ("reward_router_address", "reward_model_name", "reward_model_tokenizer")
"""Arguments that a reward function gets, where it names them, from the run's own generative reward model."""


@dataclass(frozen=True)
class JudgeEngineConfig:
    """The engines of a generative reward model: a replica on each tensor_model_parallel_size devices."""

    name: Literal["native", "hf", "vllm", "sglang"] = key(
        "native",
        "Engine that generates the verdicts: native, or hf (transformers' generate, slow and plain). For "
        "vllm and sglang, native stands in, and a line says so: a judge in these is a server that you start, "
        "whose address the term judge takes.",
    )
    tensor_model_parallel_size: int = key(
        1,
        "Devices that hold one replica together; more than 1 needs a pool of its own "
        "(trainer.placement.judge).",
        excludes(".name=hf", "it generates on one device", at=">1"),
        minimum=1,
    )
    gpu_memory_utilization: float = key(
        0.5,
        "The KV cache may grow until this share of the device's memory is in use, as it is when the run "
        "starts; beside the actor a small share leaves room for training.",
        above=0,
        maximum=1,
    )
    max_num_seqs: int = key(64, "Largest number of verdicts that a replica decodes at once.", minimum=1)
    max_num_batched_tokens: int = key(
        8192, "Largest number of prompt tokens that are prefilled at once.", minimum=1
    )
    max_model_len: int | None = key(
        None, "Most tokens of a prompt and its verdict; null: the positions of the model.", minimum=2
    )
    max_restarts: int = key(
        3,
        "How often a replica is started again after it was lost; its requests go to the others, or wait. A "
        "start that fails is tried again 5, 10, 20, … seconds later, trainer.startup_timeout at most.",
        minimum=0,
    )


@dataclass(frozen=True)
class RewardModelRoleConfig:
    """A learned reward model: a classifier that reads the whole conversation, by its own chat template, or a
    model that generates verdicts.
    """

    enable: bool = key(
        False,
        "Score responses by a reward model. Without reward.terms its score is the reward; a term "
        "{name: reward_model, weight: 1} joins it with others.",
    )
    model: ModelConfig = group(ModelConfig)
    kind: Literal["score", "token_score", "generative"] = key(
        "score",
        "score: a sequence classifier, whose score of the last token is that of the response. token_score: a "
        "process reward model, a token classifier that scores each step of the last answer where it ends. "
        "generative: a causal LM, which the run serves to the reward functions that ask it: the built-in "
        "judge, and those that name reward_router_address.",
    )
    rollout: JudgeEngineConfig = group(JudgeEngineConfig, read_by(".kind=generative"))
    read_to: Literal["answer", "end"] = key(
        "answer",
        "Where a conversation ends for kind=score: answer ends it with the answer's turn, as hybridflow "
        "reward-model does; end reads all that the chat template writes.",
        read_by(".kind=score", "steps are scored where they end"),
    )
    step_separator: str = key(
        "\n",
        "token_score: text between two steps; a step is scored at the last token of its separator.",
        read_by(".kind=token_score"),
    )
    step_reduce: Literal["mean", "sum", "min", "last", "product"] = key(
        "mean",
        "token_score: how the scores of the steps become the response's. With mean and sum each step's part "
        "is on the policy's token that ends it.",
        read_by(".kind=token_score"),
    )
    activation: Literal["none", "sigmoid"] = key(
        "none",
        "Function of each score of the model: sigmoid makes log-odds probabilities.",
        read_by(*CLASSIFIES),
    )
    max_length: int | None = key(
        None,
        "Most tokens of a conversation that the reward model reads; a longer one is an error of that row. "
        "null: forward_max_token_len_per_gpu.",
        at_most(".forward_max_token_len_per_gpu", "which holds a whole conversation"),
        read_by(*CLASSIFIES),
        minimum=2,
    )
    micro_batch_size_per_gpu: int | None = key(
        None,
        "Largest number of rows in one forward pass; null: only the token limit counts.",
        read_by(*CLASSIFIES),
        minimum=1,
    )
    forward_max_token_len_per_gpu: int | None = key(
        None,
        "Largest number of tokens in one forward pass; null: the actor's limit.",
        read_by(*CLASSIFIES),
        minimum=1,
    )
    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that share the tokens of each row.", read_by(*CLASSIFIES), minimum=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig, read_by(*CLASSIFIES))


@dataclass(frozen=True)
class SandboxFusionConfig:
    """A SandboxFusion service that runs programs in place of the local sandbox."""

    url: str | None = key(
        None, "Address of the service, which ends in /run_code; null: programs run in the local sandbox."
    )
    max_concurrent: int = key(
        64, "Programs of all reward.num_workers together that run there at once.", minimum=1
    )
    memory_limit_mb: int = key(1024, "MiB of memory of a program there.", minimum=1)


@dataclass(frozen=True)
class RewardConfig:
    """How a response gets its score."""

    function: str = key(
        "auto",
        "Built-in reward: auto (chosen by each row's data_source), or one of docs/rewards.md, such as gsm8k, "
        "math or exact_match. reward.terms joins several.",
    )
    terms: list[dict[str, Any]] = key(
        [],
        "Weighted sum of rewards in place of one, for example [{name: gsm8k, weight: 1}, {name: length, "
        "weight: -0.1, max_chars: 400, when: acc}]. A term with `when` counts where that column is above 0.",
    )
    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig)
    reward_kwargs: RewardKwargsConfig = group(
        RewardKwargsConfig, read_by(".reward_kwargs.overlong_buffer_cfg.enable")
    )
    reward_model: RewardModelRoleConfig = group(RewardModelRoleConfig, read_by(".reward_model.enable"))
    manager: str | None = key(
        None,
        "What scores all responses of a step in one call, which reward.timeout bounds: batch calls your "
        "function with lists, path/to/file.py:name is a manager of your own. null: one call a response.",
        excludes(".num_workers=0", "it scores where processes score, and not in the trainer's own"),
        needs(".custom_reward_function.path", "it calls a function of yours with lists", at="=batch"),
    )
    process_reward_model: ProcessRewardModelConfig = group(ProcessRewardModelConfig)
    sandbox: SandboxConfig = group(SandboxConfig)
    sandbox_fusion: SandboxFusionConfig = group(SandboxFusionConfig)
    num_workers: int = key(
        2,
        "Processes that score responses; 0: score in the trainer's process, for debugging and for cheap "
        "rewards.",
        minimum=0,
    )
    timeout: float = key(
        30.0,
        "Seconds that one response may take to score; then its worker is killed and on_error decides.",
        above=0,
    )
    memory_limit_mb: int | None = key(
        8192,
        "MiB that a worker may reserve above what it has when the reward function is loaded, and that the "
        "processes of the function may use; more fails the row. null: no limit, and none on processes and "
        "output either, as a function that uses a GPU needs it.",
        minimum=64,
    )
    max_retries: int = key(
        0,
        "Further tries of a response whose reward fails, after 1, 2, 4, … seconds, more or less; then "
        "on_error decides.",
        *ONE_BY_ONE,
        minimum=0,
    )
    max_concurrent: int | None = key(
        None,
        "Responses that are scored at once, of all workers; null: as many as they take.",
        *ONE_BY_ONE,
        minimum=1,
    )
    max_rpm: float | None = key(
        None, "Requests a minute that the reward may be called with; null: no limit.", *ONE_BY_ONE, above=0
    )
    max_tpm: float | None = key(
        None, "Tokens a minute that the reward may be called with; null: no limit.", *ONE_BY_ONE, above=0
    )
    estimated_tokens_per_request: int = key(2000, "Tokens that a request counts as for max_tpm.", minimum=1)
    watch: bool = key(
        True,
        "Measure repetition, form without a right answer, growth of length, and training scores that leave "
        "the held-out ones; warn and show samples where one is out of bounds.",
    )
    cache_size: int = key(
        0,
        "Outcomes that are kept, so that an equal response to the same prompt is not scored again; 0: none.",
        minimum=0,
    )
    on_error: Literal["raise", "zero", "drop"] = key(
        "raise",
        "What happens where a reward fails: raise stops the run, zero scores 0, drop leaves the row out of "
        "the loss.",
    )


def has_classifier(reward: RewardConfig) -> bool:
    """Return whether a reward model scores, as a classifier."""
    return reward.reward_model.enable and reward.reward_model.kind != "generative"


def has_judge(reward: RewardConfig) -> bool:
    """Return whether the run serves a generative reward model."""
    return reward.reward_model.enable and reward.reward_model.kind == "generative"


def reward_problems(reward: RewardConfig) -> Iterator[str]:
    """Yield one line for more than one choice of the reward, and for a choice that is none."""
    choices = {
        "reward.terms": repr(reward.terms) if reward.terms else "",
        f"{CUSTOM}.path": reward.custom_reward_function.path or "",
        "reward.function": reward.function if reward.function != "auto" else "",
    }
    chosen = [f"{key}={value}" for key, value in choices.items() if value]
    if len(chosen) > 1:
        yield (
            f"{' and '.join(chosen)} each choose the reward: keep one (reward.function=auto takes back "
            "that of a recipe; a path.py:name may also be the name of a term)"
        )
    named = [term.get("name") for term in reward.terms if isinstance(term, dict)].count(MODEL_TERM)
    learned = reward.reward_model
    if named > 1:
        yield f"reward.terms names {MODEL_TERM} {named} times, and a run has one reward model: keep one"
    if named and not learned.enable:
        yield (
            f"reward.terms names {MODEL_TERM}, which is off: set reward.reward_model.enable=true and "
            "reward.reward_model.model.path"
        )
    if named and has_judge(reward):
        yield (
            f"reward.terms names {MODEL_TERM}, and reward.reward_model.kind=generative has no score of its "
            f"own: name {JUDGE_TERM}, or a function of yours that asks it"
        )
    if has_classifier(reward) and chosen and not named:
        yield (
            f"reward.reward_model.enable=true beside {chosen[0]}, which does not use its score: join them by "
            f"reward.terms=[{{name: {MODEL_TERM}}}, {{name: FUNCTION or path.py:name}}], with "
            "reward.function=auto, or, where the function asks the model itself, set "
            "reward.reward_model.kind=generative"
        )
    if has_judge(reward) and not _may_ask(reward):
        yield (
            f"reward.reward_model.kind=generative beside {chosen[0]}, which never asks the model: set "
            f"reward.function=auto and reward.terms=[{{name: {JUDGE_TERM}}}, …], or a function of yours that "
            f"names {JUDGE_OFFERS[0]}"
        )
    if reward.manager not in (None, "batch") and ":" not in reward.manager:
        yield f"reward.manager={reward.manager}: wanted batch, or path/to/file.py:name"


def _may_ask(reward: RewardConfig) -> bool:
    """Return whether a function of the run is the judge that is built in, or a user's own."""
    if reward.custom_reward_function.path or reward.manager not in (None, "batch"):
        return True
    names = [str(term.get("name")) for term in reward.terms if isinstance(term, dict)] or [reward.function]
    return any(name == JUDGE_TERM or name.endswith(".py") or ":" in name for name in names)
