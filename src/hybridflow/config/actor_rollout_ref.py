"""`actor_rollout_ref.*`: the policy that trains, the engine that generates with it, and the reference it is
held to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import CheckpointContentsConfig, ModelConfig, OptimConfig
from hybridflow.config.schema import group, key

LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = key("vanilla", "policy loss by name, or path.py:name")
    options: dict[str, Any] = key({}, "further parameters of the loss")
    tau_pos: float = key(1.0, "sapo: temperature of the gate where the advantage is positive", above=0)
    tau_neg: float = key(1.05, "sapo: temperature of the gate where it is not", above=0)
    clip_cov_ratio: float = key(
        2e-4, "clip_cov: share of the tokens that get no gradient", minimum=0, maximum=1
    )
    clip_cov_lb: float = key(1.0, "clip_cov: only tokens whose covariance is above this")
    clip_cov_ub: float = key(5.0, "clip_cov: and below this")
    kl_cov_ratio: float = key(
        2e-4,
        "kl_cov: share of the tokens, of the highest covariance, that get a KL penalty",
        minimum=0,
        maximum=1,
    )
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of that penalty", minimum=0)
    dro_beta: float = key(0.1, "dro: weight of the squared log-ratio", above=0)
    dpo_loss: Literal["sigmoid", "ipo"] = key("sigmoid", "dpo: which loss of the pairs")
    dpo_beta: float = key(0.1, "dpo: how strongly the policy is held to the reference", above=0)
    dpo_label_smoothing: float = key(
        0.0, "dpo: probability that a pair is the wrong way round (cDPO)", minimum=0, below=0.5
    )


@dataclass(frozen=True)
class ActorConfig:
    strategy: Literal["fsdp", "fsdp2"] = key("fsdp2", "training engine; fsdp is an alias of fsdp2")
    ppo_mini_batch_size: int = key(256, "prompts (whole groups) per optimizer step", minimum=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "at most this many rows in one forward/backward; null: only the token limit", minimum=1
    )
    ppo_max_token_len_per_gpu: int = key(
        16_384, "at most this many tokens in one forward/backward (hard)", minimum=1
    )
    ppo_epochs: int = key(1, "passes over each batch", minimum=1)
    use_prefix_grouper: bool = key(
        False, "compute a prompt once for its responses in a forward/backward: fewer tokens, no exact mode"
    )
    shuffle: bool = key(True, "deal the groups into mini-batches in a seeded random order; false: in order")
    grad_clip: float | None = key(1.0, "largest gradient norm; null: no clipping", above=0)
    clip_ratio: float = key(
        0.2,
        "PPO's epsilon on both sides; left out, a loss whose paper has other bounds uses those",
        minimum=0,
    )
    clip_ratio_low: float | None = key(None, "epsilon below 1; null: clip_ratio", minimum=0)
    clip_ratio_high: float | None = key(
        None, "epsilon above 1 (clip-higher: 0.28); null: clip_ratio", minimum=0
    )
    clip_ratio_c: float = key(
        3.0, "dual clip: bound of the loss where the advantage is negative; dppo: largest ratio", above=1
    )
    loss_agg_mode: LossAggMode | None = key(
        None, "how token losses become one number; null: the policy loss's own (vanilla: token-mean)"
    )
    loss_scale_factor: float | None = key(
        None, "divisor of seq-mean-token-sum-norm; null: data.max_response_length", above=0
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    positive_lm_loss_coef: float = key(
        0.0, "weight of the log-likelihood of right responses (VAPO: 0.1)", minimum=0
    )
    use_kl_loss: bool = key(False, "add a KL term against the reference to the loss")
    kl_loss_coef: float = key(0.001, "weight of the KL term", minimum=0)
    kl_loss_type: str = key(
        "low_var_kl", "KL estimator: kl|k1, abs, mse|k2, low_var_kl|k3; with + the gradient is k2's"
    )
    ulysses_sequence_parallel_size: int = key(
        1, "ranks that share the tokens of each row (Ulysses)", minimum=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig)
    policy_loss: PolicyLossConfig = group(PolicyLossConfig)
    optim: OptimConfig = group(OptimConfig)
    checkpoint: CheckpointContentsConfig = group(CheckpointContentsConfig)

    @property
    def clip_low(self) -> float:
        """Epsilon below 1 that is in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Epsilon above 1 that is in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "at most this many rows in one forward; null: only the token limit", minimum=1
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "at most this many tokens in one forward; null: the actor's limit", minimum=1
    )
    ulysses_sequence_parallel_size: int | None = key(
        None, "ranks that share the tokens of each row; null: the actor's", minimum=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig)


@dataclass(frozen=True)
class ValKwargsConfig:
    do_sample: bool = key(False, "sample in validation; false: greedy")
    temperature: float = key(0.0, "temperature in validation when do_sample is true", minimum=0)
    top_k: int = key(-1, "keep the k most probable tokens; -1: all", minimum=-1)
    top_p: float = key(1.0, "keep the smallest set of tokens with this probability", above=0, maximum=1)
    min_p: float = key(
        0.0, "drop tokens less probable than this share of the most probable one", minimum=0, maximum=1
    )
    repetition_penalty: float = key(
        1.0, "above 1, tokens that the prompt or the response has become less probable", above=0
    )
    n: int = key(1, "responses per validation prompt", minimum=1)


@dataclass(frozen=True)
class EngineKwargsConfig:
    vllm: dict[str, Any] = key({}, "further arguments of vllm's engine, by its own names")
    sglang: dict[str, Any] = key({}, "further arguments of sglang's server, by its own names")


@dataclass(frozen=True)
class RolloutServerConfig:
    enable: bool | None = key(
        None,
        "vllm: a server of its own beside each process that generates; null: where several are or `python` "
        "is set; sglang: always",
    )
    address: str | list[str] | None = key(
        None, "server that runs already, http://HOST:PORT, one for each process; null: start them"
    )
    python: str | None = key(
        None, "python that has the engine and hybridflow, for the server that is started; null: this one"
    )
    start_timeout: float = key(900.0, "seconds that a server may take to answer", above=0)
    push_timeout: float = key(
        600.0, "seconds that one bucket of weights, or one call of a worker, may take", above=0
    )
    transport: Literal["auto", "shared_memory", "cuda_ipc", "process_group"] = key(
        "auto",
        "how weights travel to a server; auto: shared_memory on this machine, process_group to another",
    )


@dataclass(frozen=True)
class RolloutConfig:
    name: Literal["native", "vllm", "sglang", "hf"] = key(
        "native", "generation engine; hf: transformers' own, slow, to compare with"
    )
    n: int = key(1, "responses per prompt (the size of a group)", minimum=1)
    temperature: float = key(1.0, "sampling temperature", above=0)
    top_k: int = key(-1, "keep the k most probable tokens; -1: all", minimum=-1)
    top_p: float = key(1.0, "keep the smallest set of tokens with this probability", above=0, maximum=1)
    min_p: float = key(
        0.0, "drop tokens less probable than this share of the most probable one", minimum=0, maximum=1
    )
    repetition_penalty: float = key(
        1.0, "above 1, tokens that the prompt or the response has become less probable", above=0
    )
    do_sample: bool = key(True, "sample; false: greedy")
    ignore_eos: bool = key(False, "go on after the end token, up to max_response_length")
    stop: list[str] = key(
        [],
        "texts that end a response, in validation too; the token that completes one is its last, and is kept",
    )
    stop_token_ids: list[int] = key(
        [], "tokens that end a response besides the model's end tokens, in validation too"
    )
    tensor_model_parallel_size: int = key(
        1, "ranks that generate together, each with a slice of every dense layer", minimum=1
    )
    max_num_seqs: int = key(256, "rows decoded together", minimum=1)
    max_num_batched_tokens: int = key(8192, "prompt tokens prefilled together", minimum=1)
    gpu_memory_utilization: float = key(
        0.5, "share of the device's memory that the KV cache may fill up to", above=0, maximum=1
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "vllm, sglang: dtype in which it computes; auto: the actor's"
    )
    max_model_len: int | None = key(
        None,
        "vllm, sglang: longest prompt + response; null: max_prompt_length + max_response_length",
        minimum=1,
    )
    enforce_eager: bool | None = key(None, "true: no CUDA graphs (vllm: nor compilation); null: only on CPU")
    cudagraph_capture_sizes: list[int] | None = key(
        None, "native, on CUDA: numbers of rows that decode by CUDA graphs; null: few, up to max_num_seqs"
    )
    enable_chunked_prefill: bool = key(True, "vllm, sglang: long prompts in parts, beside decoding rows")
    enable_prefix_caching: bool = key(True, "prompts that begin alike share their keys and values")
    kv_cache: Literal["auto", "slots", "paged"] = key(
        "auto",
        "native: keys and values in a slot for each row, or in blocks of 256 tokens; auto: blocks on CUDA "
        "where a kernel reads them",
    )
    free_cache_engine: bool = key(True, "vllm, sglang: give its memory back while the actor trains")
    load_format: str = key(
        "dummy", "vllm, sglang: weights before the first push; dummy: none, auto: those of the model's folder"
    )
    quantization: str | None = key(None, "vllm, sglang: generate with quantised weights, for example fp8")
    lora_as_adapters: bool = key(
        False,
        "vllm: LoRA adapters are sent by themselves, over weights that are sent once; false: folded into "
        "the weights",
    )
    update_weights_bucket_megabytes: int = key(
        256, "vllm, sglang: weights that travel together; by shared memory at most 16", minimum=1
    )
    engine_kwargs: EngineKwargsConfig = group(EngineKwargsConfig)
    server: RolloutServerConfig = group(RolloutServerConfig)
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "at most this many rows in one forward of old log-probs; null: only the token limit", minimum=1
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "at most this many tokens in that forward; null: the actor's limit", minimum=1
    )
    exact: bool | Literal["auto"] = key(
        "auto",
        "log-probs of rollout and training equal to the bit (CPU, float32), so no old-log-prob pass; auto: "
        "where it holds and pays",
    )
    exact_check_rows: int = key(
        16, "rows that are checked each step beside those of the first mini-batch", minimum=1
    )
    reuse_log_probs_within: float | None = key(
        None,
        "fast mode: no old-log-prob pass where exact_check_rows rows differ by at most so much (nats); "
        "null: a pass",
        minimum=0,
    )
    val_kwargs: ValKwargsConfig = group(ValKwargsConfig)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    model: ModelConfig = group(ModelConfig)
    actor: ActorConfig = group(ActorConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    ref: RefConfig = group(RefConfig)
