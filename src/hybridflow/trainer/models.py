"""Facts of a model for those who build with it: its keys as arguments, end tokens, and the cost of a row."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.config.model import ModelConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.models.build import generation_end_tokens, import_external, shape_of
from hybridflow.models.flops import active_parameters, workload_of
from hybridflow.models.liger import check_liger
from hybridflow.protocol.balancing import Workload


def model_arguments(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `build_policy` and `build_value`, after importing `external_lib`.

    Raises ConfigError where the model asks for kernels that cannot run on `device`.
    """
    assert config.path is not None, "the checks ask for a model path"
    if config.use_liger:
        check_liger(device)
    import_external(config)
    return {
        "path": config.path,
        "device": device,
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "override_config": config.override_config,
        "gradient_checkpointing": config.enable_gradient_checkpointing,
        "use_liger": config.use_liger,
    }


def end_tokens(config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a response: the tokenizer's and those of the model's generation config."""
    import_external(config)
    configured = generation_end_tokens(str(config.path), trust_remote_code=config.trust_remote_code)
    return sorted({int(token) for token in [tokenizer.eos_token_id, *configured] if token is not None})


def row_cost(model: ModelConfig) -> Workload:
    """Return what a row costs a model, by its length; the model's configuration is enough."""
    shape = shape_of(model)
    return workload_of(shape, active_parameters(shape, trust_remote_code=model.trust_remote_code))
