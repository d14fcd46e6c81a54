"""A LoRA adapter as a folder in peft's format: adapter_config.json and adapter_model.safetensors.

A pickle is never read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.errors import ModelError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
QUANTIZATION = "base_quantization"
"""The entry that says how the run of an adapter held its base; older checkpoints have it in CONFIG, and peft
warns of it there.
"""
BASE = "base.json"
"""The file of an adapter's folder with that entry, where the base was not held as it is."""
PREFIX = "base_model.model."
"""Prefix that peft puts before a layer's name in the causal language model."""

_KEPT = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "biases in adapters",
    "modules_to_save": "whole layers in training (modules_to_save)",
    "target_parameters": "adapters on bare parameters (target_parameters)",
    "trainable_token_indices": "tokens in training (trainable_token_indices)",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "aLoRA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow routing",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as read from its folder."""

    path: Path
    settings: dict[str, Any]
    """Rank and alpha, as arguments of peft's LoraConfig."""
    tensors: dict[str, Tensor]
    """Tensors by `LAYER.lora_A` and `LAYER.lora_B`, where LAYER is a name in the causal language model."""
    base: str | None
    """The model that the adapter was trained on."""


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of adapter_config.json; ModelError where it is missing or is not plain LoRA."""
    path = Path(folder).expanduser()
    try:
        config: dict[str, Any] = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"adapter folder {path}: cannot read {CONFIG} ({error}). Give a folder that peft's "
            "save_pretrained wrote"
        ) from error
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"adapter folder {path} holds a {config.get('peft_type')!r} adapter: only LORA is supported"
        )
    odd = [what for key, what in _REFUSED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        odd.append("biases in training (bias)")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        odd.append(f"a start that changed the base (init_lora_weights={config['init_lora_weights']!r})")
    if odd:
        raise ModelError(
            f"adapter folder {path} has {', '.join(odd)}: only plain LoRA is supported. Merge it into the "
            "model with peft first"
        )
    return config


def base_quantization(folder: str | Path) -> str | None:
    """Return how the run of an adapter held its base: nf4, or None: as it is. Raises ModelError for a folder
    without an adapter.
    """
    own = Path(folder).expanduser() / BASE
    found = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else read_adapter_config(folder)
    held: str | None = found.get(QUANTIZATION)
    return held


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read an adapter; ModelError names the part that is missing or not supported."""
    path = Path(folder).expanduser()
    config = read_adapter_config(path)
    if not (path / WEIGHTS).is_file():
        there = sorted(each.name for each in path.iterdir())
        raise ModelError(
            f"adapter folder {path} has no {WEIGHTS} (pickles are never loaded); found: {', '.join(there)}"
        )
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter folder {path}: cannot read {WEIGHTS}: {error}") from error
    parts = {name.removeprefix(PREFIX).removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    odd = [name for name in parts if not name.endswith((".lora_A", ".lora_B"))]
    alone = [name for name in parts if name[:-1] + ("B" if name.endswith("A") else "A") not in parts]
    if odd or alone or not parts:
        raise ModelError(
            f"adapter folder {path}: {WEIGHTS} holds {(odd + alone + ['nothing'])[0]!r}, wanted pairs of "
            "lora_A and lora_B"
        )
    return AdapterFile(
        path,
        {key: config[key] for key in _KEPT if config.get(key) is not None},
        parts,
        config.get("base_model_name_or_path"),
    )


def write_adapter_config(folder: Path, config: Any, quantization: str | None = None) -> None:
    """Write `config`, a peft LoraConfig, to a folder, and how its base is held if that is not as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    if quantization is not None:
        (folder / BASE).write_text(json.dumps({QUANTIZATION: quantization}) + "\n", encoding="utf-8")


def write_adapter_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors, named `LAYER.lora_A` and `LAYER.lora_B`, under the names that peft reads."""
    named = {f"{PREFIX}{name}.weight": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
