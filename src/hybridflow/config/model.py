"""Model, optimizer and engine keys that actor, critic and SFT share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import key


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = key(None, "Hugging Face folder or hub name (for the critic, null: the actor's)")
    tokenizer_path: str | None = key(None, "tokenizer folder or hub name; null: the model's")
    trust_remote_code: bool = key(False, "let the model's own code run")
    override_config: dict[str, Any] = key(
        {}, "entries that replace some of the model's config.json, for example rope scaling"
    )
    enable_gradient_checkpointing: bool = key(
        True, "recompute activations in the backward pass: less memory, a third more time"
    )
    enable_activation_offload: bool = key(
        False, "keep activations for the backward pass in CPU memory: less device memory, more time"
    )
    use_liger: bool = key(
        False,
        "on CUDA: norms, gated layers and rotary positions by Liger's Triton kernels (extra `liger`); the "
        "last bits differ",
    )
    external_lib: str | None = key(
        None, "module to import before the model is built, for example one that registers it"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = key(
        "auto", "dtype of the parameters; auto: float32 on CPU, bfloat16 on CUDA"
    )
    lora_rank: int = key(
        0,
        "train low-rank adapters of this rank and leave the model's own weights; 0: train all weights",
        minimum=0,
    )
    lora_alpha: int = key(16, "adapters count lora_alpha / lora_rank", minimum=1)
    target_modules: str | list[str] = key(
        "all-linear", "linear layers that get adapters: their names, a regular expression, or all-linear"
    )
    exclude_modules: str | list[str] | None = key(None, "layers that get none: names or a regular expression")
    lora_adapter_path: str | None = key(
        None, "folder of a trained adapter to go on from; its own rank and targets hold"
    )


@dataclass(frozen=True)
class OptimConfig:
    lr: float = key(1e-6, "learning rate at the top of the schedule", minimum=0)
    weight_decay: float = key(0.01, "decoupled weight decay, on matrices only", minimum=0)
    betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates")
    eps: float = key(1e-8, "AdamW's epsilon", above=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant", "shape of the schedule after warm-up"
    )
    lr_warmup_steps: int = key(
        -1, "optimizer steps of linear warm-up; -1: from lr_warmup_steps_ratio", minimum=-1
    )
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all optimizer steps", minimum=0, maximum=1)
    min_lr_ratio: float = key(0.0, "where linear and cosine end, as a share of lr", minimum=0, maximum=1)
    num_cycles: float = key(0.5, "periods of the cosine", above=0)
    total_training_steps: int = key(
        -1, "optimizer steps of the schedule; -1: from the length of the run", minimum=-1
    )


@dataclass(frozen=True)
class CheckpointContentsConfig:
    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"],
        "what a checkpoint holds; hf_model adds a Hugging Face folder beside it",
    )
    async_save: bool = key(False, "go on while a checkpoint is written; it counts only once it is whole")
    load_contents: list[Literal["model", "optimizer", "extra"]] = key(
        ["model", "optimizer", "extra"], "what a resume reads"
    )
