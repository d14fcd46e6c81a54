"""Load a critic or a reward model, for one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridflow.models.files.build import (
    Kind,
    enable_gradient_checkpointing,
    is_classifier,
    load_whole,
    resolve_dtype,
    settle_policy,
    wrap,
)
from hybridflow.models.files.probe_architecture import probe_architecture
from hybridflow.models.liger import patch_liger
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel


def build_score(
    kind: Kind,
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    use_liger: bool = False,
    probe: bool = True,
) -> ValueModel:
    """Load a critic (`value`), or a reward model of a row (`score`) or of each token (`token_score`).

    The folder is that of a classifier, of tokens for a critic, or of a causal LM, which gets a new head whose
    numbers are 0. A head in the files may also have one of the names in `models/value.py`. The other
    arguments and errors are those of `build_policy`; a classifier's architecture is probed on a small model.
    """
    hf = load_whole(path, device, resolve_dtype(dtype, device), trust_remote_code, override_config, kind)
    if not is_classifier(kind, hf.config):
        if probe or use_liger:
            settle_policy(PolicyModel(hf), use_liger, probe)
    else:
        if probe:
            probe_architecture(
                hf.config, torch.device(device), trust_remote_code=trust_remote_code, use_liger=use_liger
            )
        if use_liger:
            patch_liger(hf)
    if gradient_checkpointing:
        enable_gradient_checkpointing(hf)
    model = wrap(kind, hf)
    assert isinstance(model, ValueModel), f"{kind} is built by build_policy"
    return model
