"""`*.fsdp_config.*`: how a model in training is spread over the ranks of its pool, and where it rests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.schema import excludes, group, key, needs


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
