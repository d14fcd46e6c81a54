"""Facts about a model for builders of runs: its keys as arguments, end tokens, and the cost of a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybridflow.config import PPOConfig
from hybridflow.config.model import ModelConfig
from hybridflow.config.needs import has_own_reference, needs_reference
from hybridflow.data.remote import hub_folder
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import ModelError
from hybridflow.models.files.build import generation_end_tokens, import_external, shape_of
from hybridflow.models.files.size import active_parameters, workload_of
from hybridflow.models.liger import check_liger
from hybridflow.protocol.balancing import Workload


@contextmanager
def naming_model(key: str, path: str | None) -> Iterator[None]:
    """Have a ModelError of this context begin with the key that chose the model, and its value."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{key}={path}: {error}") from error


def model_arguments(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `build_policy` and `build_score`, after importing `external_lib`.

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


def check_reference_tokens(config: PPOConfig, tokenizer: Tokenizer) -> None:
    """Raise ModelError where a separate reference has a tokenizer that gives tokens other ids."""
    model = config.actor_rollout_ref.ref.model
    if not needs_reference(config) or not has_own_reference(config) or model.path is None:
        return
    folder = Path(hub_folder(model.path)).expanduser()
    if model.tokenizer_path is None and not any(folder.glob("tokenizer*")):
        return
    theirs = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code).get_vocab()
    ours = tokenizer.get_vocab()
    for token in sorted(ours, key=lambda token: ours[token]):
        if theirs.get(token) != ours[token]:
            raise ModelError(
                f"actor_rollout_ref.ref.model.path={model.path}: its tokenizer gives {token!r} the id "
                f"{theirs.get(token)}, and the actor's {ours[token]}. The reference reads the actor's token "
                "ids, so choose a model with the actor's tokenizer"
            )


def end_tokens(config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a response: the tokenizer's and those of the model's generation config."""
    import_external(config)
    configured = generation_end_tokens(str(config.path), trust_remote_code=config.trust_remote_code)
    return sorted({int(token) for token in [tokenizer.eos_token_id, *configured] if token is not None})


def row_cost(model: ModelConfig) -> Workload:
    """Return the cost of a row for a model, by its length; the model's configuration is enough."""
    shape = shape_of(model)
    return workload_of(shape, active_parameters(shape, trust_remote_code=model.trust_remote_code))
