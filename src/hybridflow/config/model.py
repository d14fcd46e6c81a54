"""Model, optimizer and engine keys that actor, critic and SFT share; among them `*.fsdp_config.*`: how a
model in training is sharded over the ranks of its pool, and where it is offloaded to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import at_most, excludes, group, key, needs, read_by

SCALE_BLOCK = 256
"""Numbers of a moment that share a scale in optimizer=AdamW8bit."""
NF4_BLOCK = 64
"""Numbers of a weight that share a scale in quantization=nf4."""
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "added_tokens.json",
)
"""Files that say a tokenizer's tokens."""
TOKENIZER_FILES = ("tokenizer_config.json", *VOCABULARY_FILES)
"""Files of which a tokenizer's folder has at least one."""
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts of a layer in a config.json."""
NEW_ADAPTERS = (
    read_by(".lora_adapter_path=null", "a trained adapter has its own"),
    read_by(".lora_rank>0", "without adapters all weights train"),
)
FALLS = read_by(".lr_scheduler_type=linear|cosine|wsd", "a constant learning rate has no end")
SAMPLES = read_by(".do_sample", "greedy takes the most probable token, whatever the others are")


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """Dtypes of computation and of summed gradients."""

    param_dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "Dtype in which the model computes, and in which sharded parameters are gathered; auto: the model's "
        "dtype. The optimizer keeps float32 weights.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "Dtype in which gradients are summed over ranks."
    )


@dataclass(frozen=True)
class FSDPConfig:
    """Sharding and offload of a model that trains."""

    fsdp_size: int = key(
        -1,
        "Ranks that share one copy of the parameters; -1: all ranks. Fewer keep several copies (HSDP).",
        minimum=-1,
    )
    tensor_parallel_size: int = key(
        1, "Ranks that split each dense layer among them (tensor parallelism).", minimum=1
    )
    expert_parallel_size: int = key(
        1,
        "Ranks that share the experts of each layer and exchange the tokens that go to them (expert "
        "parallelism); neighbours among those of fsdp_size × tensor_parallel_size.",
        excludes(
            ".use_torch_compile",
            "ranks exchange as many tokens as a pass wants, which cannot be compiled",
            at=">1",
        ),
        minimum=1,
    )
    pipeline_parallel_size: int = key(
        1, "Stages, each of which has some of the layers; micro-batches pass through them in turn.", minimum=1
    )
    virtual_pipeline_parallel_size: int = key(
        1,
        "Parts of each stage (interleaved schedule): stages wait less for each other and send more.",
        needs(".pipeline_parallel_size>1", "without stages there are no parts of them", at=">1"),
        minimum=1,
    )
    context_parallel: Literal["ulysses", "ring"] = key(
        "ulysses",
        "How ranks that share the tokens of rows (ulysses_sequence_parallel_size) attend: ulysses exchanges "
        "heads for tokens; ring passes keys and values round, for models with fewer heads than ranks.",
    )
    reshard_after_forward: bool = key(
        True,
        "Free a block's gathered parameters after its forward pass, which saves memory; false: keep them "
        "for the backward pass.",
    )
    forward_prefetch: bool = key(False, "Gather the next block's parameters while one block computes.")
    mixed_precision: MixedPrecisionConfig = group(MixedPrecisionConfig)
    param_offload: bool = key(False, "Keep the parameters in CPU memory while the model is not in use.")
    optimizer_offload: bool = key(False, "Keep the optimizer's state in CPU memory between optimizer steps.")
    offload_policy: bool = key(
        False,
        "Keep parameters, gradients and optimizer state in CPU memory; a block's parameters are on the "
        "device only while it computes. It needs two or more ranks.",
    )
    use_torch_compile: bool = key(
        False,
        "Compile each block with torch.compile, for training and for generation with the same module. "
        "Decoding gains nothing by it.",
    )


@dataclass(frozen=True)
class ModelConfig:
    """A model: its folder, its dtype, its memory and its adapters."""

    path: str | None = key(
        None,
        "Hugging Face folder or hub name of the model; null for critic and reference: the actor's.",
    )
    tokenizer_path: str | None = key(None, "Tokenizer folder or hub name; null: the model's.")
    trust_remote_code: bool = key(False, "Run the code that comes with the model.")
    override_config: dict[str, Any] = key(
        {},
        "Entries that replace those of the model's config.json, for example {rope_scaling: {rope_type: "
        "yarn, factor: 4}}.",
    )
    enable_gradient_checkpointing: bool = key(
        True, "Recompute activations in the backward pass: much less memory, about a third more time."
    )
    enable_activation_offload: bool = key(
        False, "Keep activations for the backward pass in CPU memory: less device memory, more time."
    )
    use_liger: bool = key(
        False,
        "On CUDA, compute norms, gated layers and rotary positions by Liger's Triton kernels (extra "
        "`liger`). The last bits of results differ.",
        excludes("trainer.device=cpu", "Liger's kernels are Triton programs, which run on CUDA only"),
        excludes(".dtype=float64", "Liger's kernels compute in float32"),
        excludes(
            "actor_rollout_ref.rollout.exact=true",
            "Liger's kernels change the last bits of what is computed, and nothing shows them to be the same "
            "for any number of rows",
        ),
    )
    external_lib: str | None = key(
        None,
        "Module that is imported before the model is built, for example one that registers its "
        "architecture; null: none.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = key(
        "auto", "Dtype of the parameters; auto: float32 on a CPU, bfloat16 on CUDA."
    )
    freeze_vision_tower: bool = key(
        False, "Leave the weights of the part that reads pictures as they are, in a model that has one."
    )
    lora_rank: int = key(
        0,
        "Train low-rank adapters (LoRA) of this rank and leave the model's own weights as they are; 0: "
        "train all weights.",
        NEW_ADAPTERS[0],
        minimum=0,
    )
    lora_alpha: int = key(
        16, "Scale of the adapters: they are weighted by lora_alpha / lora_rank.", *NEW_ADAPTERS, minimum=1
    )
    lora_dropout: float = key(
        0.0,
        "Share of what adapters read that is dropped at random in updates, and nowhere else.",
        read_by(".lora_rank>0 or .lora_adapter_path", "without adapters all weights train"),
        minimum=0,
        below=1,
    )
    target_modules: str | list[str] = key(
        "all-linear",
        "Linear layers that get adapters: their names, a regular expression, or all-linear.",
        *NEW_ADAPTERS,
    )
    exclude_modules: str | list[str] | None = key(
        None,
        "Linear layers that get no adapters: their names or a regular expression; null: none is left out.",
        *NEW_ADAPTERS,
    )
    lora_adapter_path: str | None = key(
        None,
        "Folder of a trained adapter to go on from, which sets rank and target layers; null: new adapters.",
    )
    quantization: Literal["nf4"] | None = key(
        None,
        "nf4: each process holds all frozen weights of linear layers, in 4 bits (QLoRA); null: as they are.",
        needs(".lora_rank>0 or .lora_adapter_path", "the weights that train are not quantized"),
        excludes(".use_liger", "its kernels are not tried with layers in 4 bits"),
        excludes(".dtype=float64", "levels and scales are float32"),
    )


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    optimizer: Literal["AdamW", "AdamW8bit", "Muon", "SGD"] = key(
        "AdamW",
        "Update rule: AdamW, AdamW with moments of 8 bits, Muon for matrices with AdamW for embeddings, "
        "heads and vectors, or SGD, whose weight decay is added to the gradient.",
    )
    lr: float = key(1e-6, "Learning rate, at the top of the schedule.", minimum=0)
    weight_decay: float = key(0.01, "Decoupled weight decay, on matrices only.", minimum=0)
    betas: list[float] = key(
        [0.9, 0.999],
        "AdamW's two decay rates, of the mean of gradients and of the mean of their squares.",
        read_by(".optimizer!=SGD", "SGD has a momentum in their place"),
        minimum=0,
        below=1,
        fewest=2,
        most=2,
    )
    eps: float = key(
        1e-8,
        "AdamW's epsilon, which is added to the denominator.",
        read_by(".optimizer!=SGD", "SGD divides by nothing"),
        above=0,
    )
    momentum: float = key(
        0.95,
        "Momentum of Muon and SGD: the share of it that stays at each step.",
        read_by(".optimizer=Muon|SGD", "AdamW has betas in its place"),
        minimum=0,
        below=1,
    )
    muon_ns_steps: int = key(
        5,
        "Iterations that make the momentum of a matrix orthogonal.",
        read_by(".optimizer=Muon"),
        minimum=1,
    )
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "Factor of Muon's learning rate for a matrix [A, B]: match_rms_adamw is 0.2·sqrt(max(A, B)), for the "
        "learning rates of AdamW; original is sqrt(max(1, A / B)).",
        read_by(".optimizer=Muon"),
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = key(
        "constant",
        "Shape of the learning-rate schedule after warm-up; wsd stays at lr and falls in the last "
        "lr_wsd_decay_steps.",
    )
    lr_wsd_decay_steps: int = key(
        -1,
        "Optimizer steps of the fall at the end of wsd; -1: a tenth of all steps.",
        needs(".lr_scheduler_type=wsd", "no other schedule falls at its end", at=">-1"),
        minimum=-1,
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = key(
        "exponential",
        "Shape of the fall at the end of wsd.",
        read_by(".lr_scheduler_type=wsd", "no other schedule falls at its end"),
    )
    lr_warmup_steps: int = key(
        -1,
        "Optimizer steps over which the learning rate rises linearly to lr; -1: lr_warmup_steps_ratio "
        "decides.",
        at_most(".total_training_steps", "so the warm-up would never end"),
        minimum=-1,
    )
    lr_warmup_steps_ratio: float = key(
        0.0,
        "Length of the warm-up as a share of all optimizer steps.",
        read_by(".lr_warmup_steps<0", "the number of steps is given"),
        minimum=0,
        maximum=1,
    )
    min_lr_ratio: float = key(
        0.0,
        "Learning rate at the end of linear, cosine and wsd schedules, as a share of lr.",
        FALLS,
        minimum=0,
        maximum=1,
    )
    num_cycles: float = key(
        0.5,
        "Periods of the cosine over the schedule; 0.5 falls once from lr to the end.",
        read_by(".lr_scheduler_type=cosine"),
        above=0,
    )
    total_training_steps: int = key(
        -1,
        "Optimizer steps of the schedule; -1: those of the whole run.",
        read_by(f"{FALLS.other} or .lr_warmup_steps_ratio>0", "the learning rate depends on no end"),
        minimum=-1,
    )


@dataclass(frozen=True)
class CheckpointContentsConfig:
    """The parts of a checkpoint."""

    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"],
        "Parts of a checkpoint; hf_model adds a Hugging Face folder beside it.",
    )
    async_save: bool = key(
        False, "Go on training while a checkpoint is written; it counts only once it is whole."
    )
    load_contents: list[Literal["model", "optimizer", "extra"]] = key(
        ["model", "optimizer", "extra"], "Parts of a checkpoint that a resume reads."
    )


@dataclass(frozen=True)
class LearnerConfig:
    """The keys of every model that learns in a run of reinforcement learning."""

    grad_clip: float | None = key(
        1.0, "Largest norm of the gradient; a larger one is scaled down to it. null: no clipping.", above=0
    )
    optim: OptimConfig = group(OptimConfig)
    checkpoint: CheckpointContentsConfig = group(CheckpointContentsConfig)


@dataclass(frozen=True)
class ShardedLearnerConfig(LearnerConfig):
    """The keys of a model that trains in its own layout."""

    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Largest number of rows in one forward and backward pass; null: only the token limit counts. It "
        "changes memory and speed, not results.",
        minimum=1,
    )
    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that share the tokens of each row (Ulysses sequence parallelism), for long rows.", minimum=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig)


@dataclass(frozen=True)
class LogProbLimits:
    """The limits of one forward pass that computes log-probs."""

    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Largest number of rows in one forward pass for log-probs; null: only the token limit counts.",
        minimum=1,
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Largest number of tokens in one forward pass for log-probs; null: the actor's limit.",
        minimum=1,
    )


@dataclass(frozen=True)
class SamplingKeys:
    """What shapes the distribution that tokens are sampled from, in training and in validation.

    Training counts the log-probs of the whole distribution at the temperature.
    """

    top_k: int = key(
        -1,
        "Sample among the k most probable tokens only; -1: among all. Training still counts the whole "
        "distribution.",
        SAMPLES,
        minimum=-1,
    )
    top_p: float = key(
        1.0,
        "Sample among the smallest set of tokens that has this probability together; 1: among all. Training "
        "still counts the whole distribution.",
        SAMPLES,
        above=0,
        maximum=1,
    )
    min_p: float = key(
        0.0,
        "Never sample a token that is less probable than this share of the most probable one; 0: no limit.",
        SAMPLES,
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = key(
        1.0,
        "Above 1, tokens that the prompt or the response already has become less probable; 1: no penalty.",
        above=0,
    )
