"""`actor_rollout_ref.*`: the policy that trains, its generation engine, and the reference it is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.algorithms.catalog import LossAggMode
from hybridflow.config.agent import AgentConfig, MultiTurnConfig
from hybridflow.config.model import (
    SAMPLES,
    FSDPConfig,
    LogProbLimits,
    ModelConfig,
    SamplingKeys,
    ShardedLearnerConfig,
)
from hybridflow.config.schema import at_least, divides, excludes, group, key, needs, read_by, surprises

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
WHOLE_HEAD = "the whole KL is computed where the head is whole on each rank"

TraceBackend = Literal["otel", "mlflow", "weave", "trackio"]


@dataclass(frozen=True)
class RolloutTraceConfig:
    """One trace for each trajectory: generation, turns, tools, environment and reward, with their times."""

    backend: TraceBackend | None = key(
        None,
        "Where traces go: otel (a collector of OpenTelemetry, by OTLP over HTTP), mlflow, weave or trackio, "
        "each by the extra of its name; null: there are none.",
    )
    token2text: bool = key(False, "Traces have the texts of prompts, responses, tool calls and answers.")
    max_samples_per_step_per_worker: int | None = key(
        None,
        "Prompts of a step, and of a validation, whose trajectories each process traces: the first ones in "
        "the order of the data; null: all.",
        minimum=1,
    )
    endpoint: str | None = key(
        None,
        "otel: address that takes traces, such as http://HOST:4318/v1/traces; null: as "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says, else this machine's port "
        "4318.",
        needs(".backend=otel|null", "the others have their address in variables of their own"),
        schemes=("http", "https"),
    )


@dataclass(frozen=True)
class RouterReplayConfig:
    """Replay of the experts that tokens went to, in updates of a mixture of experts."""

    mode: Literal["disabled", "R2", "R3"] = key(
        "disabled",
        "Experts that tokens go to in the update: those of its own router (disabled), of the pass for old "
        "log-probs (R2), or of generation (R3, with rollout.enable_rollout_routing_replay).",
        needs(
            f"{ROLLOUT}.enable_rollout_routing_replay",
            "R3 replays the routes that generation records",
            at="=R3",
        ),
        excludes(
            "algorithm.rollout_correction.bypass_mode",
            "R2 records in the pass for old log-probs, which is left out",
            at="=R2",
        ),
        excludes(
            f"{ROLLOUT}.reuse_log_probs_within!=null",
            "R2 records in the pass for old log-probs, which may be left out",
            at="=R2",
        ),
        excludes(
            f"{ACTOR}.fsdp_config.use_torch_compile",
            "a compiled layer does not tell its routes",
            at="!=disabled",
        ),
    )


@dataclass(frozen=True)
class RolloutSkipConfig:
    """Scored rollouts on disk, for looking at training without waiting for generation."""

    enable: bool = key(
        False,
        "Dump the scored rollouts of each step, and read them back where they are there already for the same "
        "model, data, sampling and reward. They were sampled under the weights of the run that dumped them.",
        needs("trainer.schedule=sync", "only the synchronous schedule reads dumped rollouts"),
    )
    dump_dir: str = key("~/.cache/hybridflow/rollouts", "Folder of the dumps, which runs may share.")
    action: Literal["cache", "repeat"] = key(
        "cache",
        "cache: a step reads its own dump, and is generated and dumped where there is none. repeat: steps "
        "train on the dumps that are there, over and over; nothing is generated for training.",
        read_by(".enable"),
    )


@dataclass(frozen=True)
class EngineKwargsConfig:
    """Arguments that go to a generation engine unchanged."""

    vllm: dict[str, Any] = key(
        {},
        "Further arguments of vLLM's engine, by vLLM's own names.",
        read_by("actor_rollout_ref.rollout.name=vllm"),
    )
    sglang: dict[str, Any] = key(
        {},
        "Further arguments of SGLang's server, by SGLang's own names.",
        read_by("actor_rollout_ref.rollout.name=sglang"),
    )


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculation: tokens are drafted from what a prompt and its responses have, and verified in one pass."""

    enable: bool = key(
        False,
        "native: draft what followed the newest tokens when they came before, and verify it in one pass with "
        "the draws of the run. Tokens are the same as without, in exact mode to the bit; it pays where few "
        "rows are left and texts repeat.",
    )
    num_draft_tokens: int = key(
        8, "Most tokens that are drafted for a row in one pass.", read_by(".enable"), minimum=1
    )
    max_tokens: int | None = key(
        None,
        "Drafts are added to passes of up to so many tokens, one of each row included; null: to passes of "
        "any size, as long as a drafted token is right more often than it costs.",
        read_by(".enable"),
        minimum=1,
    )


@dataclass(frozen=True)
class RolloutServerConfig:
    """Servers of vLLM and SGLang that generate in separate processes."""

    enable: bool | None = key(
        None,
        "vllm: start a server beside each process that generates; null: where there are several processes "
        "or `python` is set. sglang is always a server.",
        excludes(".address", "a server that is switched off has no address", at="=false"),
        excludes(".python", "that is the python of a server", at="=false"),
        excludes(f"{ROLLOUT}.name=sglang", "sglang is always a server", at="=false"),
    )
    address: str | list[str] | None = key(
        None,
        "Servers that run already, http://HOST:PORT, one for each replica that generates; null: the run "
        "starts them.",
        schemes=("http",),
    )
    python: str | None = key(
        None,
        "Path of a python that has the engine and hybridflow, with which servers are started; null: this "
        "python.",
    )
    start_timeout: float = key(
        900.0, "Seconds that a server may take until it answers; then the run ends with an error.", above=0
    )
    push_timeout: float = key(
        600.0, "Seconds that one bucket of weights, or one call of a server's worker, may take.", above=0
    )
    transport: Literal["auto", "shared_memory", "cuda_ipc", "process_group"] = key(
        "auto",
        "How weights travel to a server; auto: shared_memory on the same machine, process_group to another "
        "machine.",
    )


@dataclass(frozen=True)
class PolicyLossConfig:
    """The policy loss and the parameters of single losses."""

    loss_mode: str = key(
        "vanilla", "Policy loss: a name such as vanilla, gspo or cispo, or your own as path.py:name."
    )
    options: dict[str, Any] = key({}, "Further arguments of a policy loss of your own, by name.")
    tau_pos: float = key(
        1.0,
        "sapo: temperature of the soft gate on tokens with a positive advantage; a larger one closes the "
        "gate sooner.",
        above=0,
        symbol="τ_pos",
    )
    tau_neg: float = key(
        1.05, "sapo: temperature of the soft gate on all other tokens.", above=0, symbol="τ_neg"
    )
    clip_cov_ratio: float = key(
        2e-4,
        "clip_cov: share of the tokens, drawn among those of high covariance, that get no gradient.",
        minimum=0,
        maximum=1,
        symbol="ratio",
    )
    clip_cov_lb: float = key(
        1.0, "clip_cov: only tokens whose covariance is above this may be drawn.", symbol="lb"
    )
    clip_cov_ub: float = key(
        5.0, "clip_cov: only tokens whose covariance is below this may be drawn.", symbol="ub"
    )
    kl_cov_ratio: float = key(
        2e-4,
        "kl_cov: share of the tokens, those of the highest covariance, that get a KL penalty.",
        minimum=0,
        maximum=1,
        symbol="ratio",
    )
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of that KL penalty.", minimum=0, symbol="coef")
    dro_beta: float = key(
        0.1, "dro: weight of the squared log-ratio of the policy to the old one.", above=0, symbol="β"
    )
    dpo_loss: Literal["sigmoid", "ipo"] = key(
        "sigmoid", "dpo: loss of a pair of responses, sigmoid (DPO) or ipo (IPO).", argument="dpo_loss"
    )
    dpo_beta: float = key(
        0.1, "dpo: strength with which the policy is held to the reference.", above=0, symbol="β"
    )
    dpo_label_smoothing: float = key(
        0.0,
        "dpo: assumed probability that the two responses of a pair are the wrong way round (cDPO).",
        minimum=0,
        below=0.5,
        symbol="ε",
    )


@dataclass(frozen=True)
class ActorConfig(ShardedLearnerConfig):
    """The policy that trains: its batches, loss, optimizer and sharding."""

    strategy: Literal["fsdp", "fsdp2", "megatron"] = key(
        "fsdp2",
        "Training engine of the actor and the reference: fsdp2 is PyTorch's, with all layouts; megatron is "
        "megatron-core where it is installed and there are several processes, and fsdp2 elsewhere; fsdp is "
        "another name of fsdp2.",
    )
    ppo_mini_batch_size: int = key(
        256,
        "Prompts in one optimizer step, each with all of its responses.",
        divides("data.train_batch_size"),
        minimum=1,
    )
    ppo_max_token_len_per_gpu: int = key(
        16_384,
        "Largest number of tokens in one forward and backward pass, never exceeded. Lower it when memory "
        "runs out.",
        minimum=1,
    )
    ppo_epochs: int = key(1, "Passes over the responses of each step.", minimum=1)
    use_prefix_grouper: bool | None = key(
        None,
        "Compute a prompt once for all of its responses in a pass: fewer tokens are computed. null: on a "
        "CPU, where exact mode is off; true: exact mode is off.",
        excludes(
            ".ulysses_sequence_parallel_size>1 or actor_rollout_ref.ref.ulysses_sequence_parallel_size>1",
            "ranks that share rows hold each prompt as often as it has responses",
            at="=true",
        ),
    )
    shuffle: bool = key(
        True, "Deal the groups into mini-batches in a seeded random order; false: in the order of the batch."
    )
    clip_ratio: float = key(
        0.2,
        "PPO's clip range epsilon on both sides of ratio 1. Left out, a loss whose paper has other bounds "
        "uses those.",
        minimum=0,
    )
    clip_ratio_low: float | None = key(
        None,
        "Clip range below ratio 1; null: clip_ratio.",
        minimum=0,
        argument="clip_low",
        symbol="ε_low",
        otherwise="clip_ratio",
    )
    clip_ratio_high: float | None = key(
        None,
        "Clip range above ratio 1, for example 0.28 for DAPO's clip-higher; null: clip_ratio.",
        minimum=0,
        argument="clip_high",
        symbol="ε_high",
        otherwise="clip_ratio",
    )
    clip_ratio_c: float = key(
        3.0,
        "Dual clip: bound of the loss, in units of the advantage, where the advantage is negative. For dppo "
        "it is the largest ratio.",
        above=1,
        argument="clip_c",
        symbol="c",
    )
    loss_agg_mode: LossAggMode | None = key(
        None,
        "How the losses of the tokens become one number; null: as the policy loss's paper does (vanilla: "
        "token-mean).",
        argument="loss_agg_mode",
    )
    loss_scale_factor: float | None = key(
        None,
        "Divisor of seq-mean-token-sum-norm, in tokens; null: data.max_response_length.",
        read_by(".loss_agg_mode=seq-mean-token-sum-norm or critic.loss_agg_mode=seq-mean-token-sum-norm"),
        above=0,
        argument="loss_scale_factor",
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus in the loss; 0: no bonus.")
    positive_lm_loss_coef: float = key(
        0.0,
        "Weight of an extra loss, the negative log-likelihood of right responses (VAPO: 0.1); 0: none.",
        surprises(
            "reward.custom_reward_function.path", "right are the responses whose reward returns acc = 1"
        ),
        minimum=0,
    )
    router_aux_loss_coef: float = key(
        0.0,
        "Weight of the auxiliary loss that spreads tokens evenly over the experts; 0: none, whatever the "
        "model's own configuration says.",
        excludes(".fsdp_config.use_torch_compile", "a compiled layer does not tell its routes"),
        minimum=0,
    )
    use_kl_loss: bool = key(False, "Add a KL term against the reference policy to the loss.")
    kl_loss_coef: float = key(
        0.001,
        "Weight of that KL term.",
        read_by(".use_kl_loss", "there is no KL term in this run's loss"),
        minimum=0,
    )
    kl_loss_type: str = key(
        "low_var_kl",
        "Estimator of that KL: kl (k1), abs, mse (k2) or low_var_kl (k3), or full, which is exact, over the "
        "whole vocabulary; with + at its end, for example "
        "k3+, it has the gradient of k2. k3 has none where it is clamped, more than 2.6 nats below the "
        "reference.",
        read_by(".use_kl_loss", "there is no KL term in this run's loss"),
        excludes("actor_rollout_ref.actor.fsdp_config.tensor_parallel_size>1", WHOLE_HEAD, at="=full"),
        excludes("actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size>1", WHOLE_HEAD, at="=full"),
        excludes("actor_rollout_ref.ref.fsdp_config.tensor_parallel_size>1", WHOLE_HEAD, at="=full"),
        excludes("actor_rollout_ref.ref.fsdp_config.pipeline_parallel_size>1", WHOLE_HEAD, at="=full"),
    )
    router_replay: RouterReplayConfig = group(RouterReplayConfig)
    policy_loss: PolicyLossConfig = group(PolicyLossConfig)

    @property
    def clip_low(self) -> float:
        """Epsilon below 1 that is in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Epsilon above 1 that is in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True)
class RefConfig(LogProbLimits):
    """The frozen policy to which the actor is held."""

    model: ModelConfig = group(ModelConfig)
    ulysses_sequence_parallel_size: int | None = key(
        None, "Ranks that share the tokens of each row; null: as many as the actor's.", minimum=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig)


@dataclass(frozen=True)
class ValKwargsConfig(SamplingKeys):
    """Sampling in validation."""

    do_sample: bool = key(
        False, "Sample responses in validation; false: take the most probable token each time (greedy)."
    )
    temperature: float = key(
        0.0,
        "Sampling temperature in validation, read when do_sample is true.",
        SAMPLES,
        excludes(
            ".do_sample",
            "tokens are sampled at a temperature above 0, for example 1.0; false is greedy",
            at="=0",
        ),
        minimum=0,
    )
    n: int = key(
        1, "Responses to each validation prompt; the metrics are their mean, best and majority.", minimum=1
    )


@dataclass(frozen=True)
class RolloutConfig(LogProbLimits, SamplingKeys):
    """Generation: the engine, sampling, memory, and how old log-probs are obtained."""

    name: Literal["native", "vllm", "sglang", "hf"] = key(
        "native",
        "Generation engine: native uses the module that trains, vllm and sglang hold a copy of the weights, "
        "hf is transformers' own, which is slow and there to compare with.",
    )
    n: int = key(
        1,
        "Responses to each prompt, which is the size of a group. Estimators that compare responses, such as "
        "grpo, need 2 or more.",
        minimum=1,
    )
    temperature: float = key(
        1.0,
        "Sampling temperature of the responses. Training computes log-probs at the same temperature.",
        excludes(
            ".do_sample=false",
            "greedy tokens keep their log-probs at temperature 1, and training would compare them with "
            "those at another",
            at="!=1",
        ),
        above=0,
    )
    do_sample: bool = key(
        True, "Sample the responses; false: take the most probable token each time (greedy)."
    )
    ignore_eos: bool = key(
        False, "Generate on after the end token, up to data.max_response_length. For speed measurements."
    )
    stop: list[str] = key(
        [],
        "Texts that end a response, in validation too. The token that completes such a text is kept as the "
        "last one.",
    )
    stop_token_ids: list[int] = key(
        [], "Token ids that end a response besides the model's own end tokens, in validation too.", minimum=0
    )
    tensor_model_parallel_size: int = key(
        1, "Ranks that generate together, each with a slice of every dense layer.", minimum=1
    )
    expert_parallel_size: int = key(
        1,
        "vllm and sglang: ranks of a replica that share the experts of a layer among them; 1, or "
        "tensor_model_parallel_size. With 1 each has a slice of every expert.",
        minimum=1,
    )
    max_num_seqs: int = key(256, "Largest number of responses that are decoded at once.", minimum=1)
    max_num_batched_tokens: int = key(
        8192,
        "Largest number of prompt tokens that are prefilled at once.",
        at_least("data.max_prompt_length", "and cannot hold one prompt"),
        minimum=1,
    )
    gpu_memory_utilization: float = key(
        0.5,
        "The KV cache may grow until this share of the device's memory is in use; a larger cache decodes "
        "more responses at once.",
        above=0,
        maximum=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "vllm, sglang: dtype in which the engine computes; auto: the actor's.",
        excludes(
            ".name=native|hf",
            "the module that trains generates, in its own dtype",
            at="=float32|float16",
            way="actor_rollout_ref.model.dtype",
        ),
        surprises(
            ".name=native|hf",
            "the module that trains generates, in the dtype of actor_rollout_ref.model.dtype",
            at="=bfloat16",
        ),
    )
    max_model_len: int | None = key(
        None,
        "Longest prompt and response of one call together, in tokens; read by vllm and sglang, and by all "
        "engines with agents. null: data.max_prompt_length + data.max_response_length.",
        minimum=1,
    )
    enforce_eager: bool | None = key(
        None,
        "true: use no CUDA graphs (in vllm no compilation either); null: none on a CPU only.",
        read_by(".name=native|vllm|sglang"),
    )
    cudagraph_capture_sizes: list[int] | None = key(
        None,
        "native, on CUDA: numbers of rows for which decoding is recorded as a CUDA graph; null: a few sizes "
        "up to max_num_seqs.",
        read_by(
            ".name=native", "vllm has engine_kwargs.vllm.compilation_config, sglang has cuda_graph_bs_decode"
        ),
        minimum=1,
        fewest=1,
    )
    enable_chunked_prefill: bool = key(
        True,
        "vllm, sglang: prefill long prompts in chunks, beside rows that decode.",
        read_by(".name=vllm|sglang"),
    )
    enable_prefix_caching: bool = key(
        True,
        "Prompts that begin alike share the keys and values of their common beginning.",
        read_by(".name=native|vllm|sglang"),
    )
    recompute_kv_after_update: bool = key(
        True,
        "Keys and values of responses that go on under new weights are computed again; false: they stay as "
        "the old weights made them, which saves that and makes later log-probs those of neither version. "
        "false wants the native engine on a pool of its own.",
        needs(".name=native", "the other engines take new weights while nothing runs", at="=false"),
    )
    kv_cache: Literal["auto", "slots", "paged"] = key(
        "auto",
        "native: hold keys and values in one slot for each row (slots) or in blocks of 256 tokens (paged); "
        "auto: paged on CUDA where a kernel reads blocks, else slots.",
        read_by(".name=native", "the other engines have blocks of their own"),
    )
    free_cache_engine: bool = key(
        True,
        "vllm, sglang: the engine gives its memory back while the actor trains.",
        read_by(".name=vllm|sglang"),
    )
    load_format: str = key(
        "dummy",
        "vllm, sglang: weights before the first push; dummy: random ones, auto: those of the model's folder.",
        read_by(".name=vllm|sglang"),
    )
    quantization: str | None = key(
        None,
        "Generate with weights rounded to fewer bits; native: int8, fp8 or, on a CPU, float16; vllm, sglang: "
        "a name that the engine knows, for example fp8; null: with the weights as they are.",
        excludes(".exact=true", "rounded weights give other log-probs than training's"),
        surprises(
            ".name=vllm|sglang", "tokens come from rounded weights; consider algorithm.rollout_correction"
        ),
    )
    lora_as_adapters: bool = key(
        False,
        "vllm: send LoRA adapters alone in each step, over base weights that are sent once; false: send "
        "them folded into the weights.",
        read_by(".name=vllm|sglang"),
        excludes(".name=sglang", "sglang takes adapters folded into the weights"),
        needs(
            "actor_rollout_ref.model.lora_rank or actor_rollout_ref.model.lora_adapter_path",
            "the actor has no adapters",
        ),
    )
    delta_push: bool = key(
        False,
        "Where generation has processes of its own, send them the elements of a tensor that an update has "
        "changed, if they are fewer bytes than all of it: few in bfloat16 at a small learning rate, most in "
        "float32. The actor's ranks keep what they sent, one copy of the weights together. Checksums of the "
        "whole weights are compared as always; a replica whose base is another one gets whole tensors, and "
        "so do schedules that generate whole steps ahead.",
    )
    update_weights_bucket_megabytes: int = key(
        256,
        "vllm, sglang: megabytes of weights that travel in one piece; shared memory uses at most 16.",
        read_by(".name=vllm|sglang"),
        minimum=1,
    )
    engine_kwargs: EngineKwargsConfig = group(EngineKwargsConfig)
    server: RolloutServerConfig = group(RolloutServerConfig, read_by(".name=vllm|sglang"))
    speculative: SpeculativeConfig = group(SpeculativeConfig)
    enable_rollout_routing_replay: bool = key(
        False,
        "native: record the experts that tokens go to in generation, for actor.router_replay.mode=R3.",
        needs(f"{ACTOR}.router_replay.mode=R3", "generation records routes for R3 and for nothing else"),
        excludes("trainer.num_collectors", "collectors do not keep routes"),
    )
    exact: bool | Literal["auto"] = key(
        "auto",
        "Exact mode (CPU, float32): generation and training give the same log-probs to the bit, so the pass "
        "for the old ones is left out. auto: where it holds and saves time.",
        excludes(f"{ACTOR}.use_prefix_grouper=true", "log-probs would not be equal to the bit", at="=true"),
        excludes("algorithm.rollout_correction.bypass_mode", "log-probs would not be compared", at="=true"),
        excludes(".skip.enable", "dumped log-probs are those of other weights than the actor's", at="=true"),
        excludes("actor_rollout_ref.model.lora_dropout", "updates have other log-probs than it", at="=true"),
    )
    exact_check_rows: int = key(
        16,
        "Rows whose log-probs are compared in each step, besides those of the first mini-batch.",
        minimum=1,
    )
    reuse_log_probs_within: float | None = key(
        None,
        "Leave the pass for the old log-probs out of a step in which exact_check_rows rows differ by at "
        "most this many nats; null: never.",
        read_by("algorithm.rollout_correction.bypass_mode=false", "it always takes the rollout's log-probs"),
        excludes(
            "actor_rollout_ref.model.lora_dropout",
            "the first pass of an update, which it compares with the rollout, has dropout",
            at="!=null",
        ),
        surprises(
            "algorithm.rollout_correction.rollout_is or algorithm.rollout_correction.rollout_rs",
            "it saves no pass, since the correction compares the rollout's log-probs with those of the pass",
            at="!=null",
        ),
        minimum=0,
    )
    val_kwargs: ValKwargsConfig = group(ValKwargsConfig)
    multi_turn: MultiTurnConfig = group(MultiTurnConfig)
    agent: AgentConfig = group(AgentConfig)
    skip: RolloutSkipConfig = group(RolloutSkipConfig)
    trace: RolloutTraceConfig = group(RolloutTraceConfig)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """The policy: its model, its training, its generation and its reference."""

    model: ModelConfig = group(ModelConfig)
    actor: ActorConfig = group(ActorConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    ref: RefConfig = group(RefConfig)
