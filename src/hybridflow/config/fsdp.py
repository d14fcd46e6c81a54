"""`*.fsdp_config.*`: how a model in training is spread over the ranks of its pool, and where it rests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.schema import group, key


@dataclass(frozen=True)
class MixedPrecisionConfig:
    param_dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "dtype in which sharded parameters are gathered and computed with; auto: the model's dtype"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "dtype in which gradients are summed over ranks"
    )


@dataclass(frozen=True)
class FSDPConfig:
    fsdp_size: int = key(
        -1, "ranks that share one copy of the parameters; -1: all; fewer: several copies (HSDP)", minimum=-1
    )
    tensor_parallel_size: int = key(1, "ranks that split each dense layer among them", minimum=1)
    reshard_after_forward: bool = key(
        True, "free a block's gathered parameters after its forward; false: keep them for the backward"
    )
    forward_prefetch: bool = key(False, "gather the next block's parameters while one computes")
    mixed_precision: MixedPrecisionConfig = group(MixedPrecisionConfig)
    param_offload: bool = key(False, "parameters rest in CPU memory between phases")
    optimizer_offload: bool = key(False, "the optimizer's state rests in CPU memory between steps")
    offload_policy: bool = key(
        False,
        "parameters, gradients and optimizer live in CPU memory; a block visits the device when it computes",
    )
    use_torch_compile: bool = key(
        False,
        "compile each block with torch.compile, for training and for generation with the same module; "
        "decoding gains nothing by it",
    )
