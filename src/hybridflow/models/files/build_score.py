"""Load a reward model, for one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridflow.models.files.build import Kind, enable_gradient_checkpointing, load_whole, resolve_dtype
from hybridflow.models.files.probe_architecture import probe_architecture
from hybridflow.models.liger import patch_liger
from hybridflow.models.score import ScoreModel


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
) -> ScoreModel:
    """Load a reward model of a row (`score`) or of each token (`token_score`).

    The folder is that of a sequence or token classifier, or of a causal LM, which gets a new head whose
    scores are 0. A head in the files may also have one of the names in `models/score.py`. The other
    arguments and errors are those of `build_policy`; the architecture is probed on a small model.
    """
    hf = load_whole(path, device, resolve_dtype(dtype, device), trust_remote_code, override_config, kind)
    if probe:
        probe_architecture(
            hf.config, torch.device(device), trust_remote_code=trust_remote_code, use_liger=use_liger
        )
    if use_liger:
        patch_liger(hf)
    if gradient_checkpointing:
        enable_gradient_checkpointing(hf)
    return ScoreModel(hf, of_rows=kind == "score")
