"""The models, adapters and tokenizer that a checkpoint was made with, without which it means nothing.

config ──model_facts──► {key: identity or value}      kept in every checkpoint
facts of a checkpoint, facts of a run ──changed_facts──► a line for each that differs

A local folder is known by its content, so that a copy at another place is the same model, and a hub's model
by its name. No tensor is loaded: of the weights, their headers and some blocks of bytes are looked at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.model import VOCABULARY_FILES, ModelConfig
from hybridflow.config.paths import is_remote, local

VOLATILE = ("_name_or_path", "transformers_version")
"""Entries of a config.json that say where it comes from and by which version it was written."""
BLOCK = 4096
BLOCKS = 32
"""Number of blocks of bytes of a file of weights that are looked at, spread over all of it."""


def model_facts(config: PPOConfig | SFTConfig) -> dict[str, Any]:
    """Return the facts of the models that a checkpoint of this run has, by dotted key, in JSON's types."""
    models = {"model": config.model} if isinstance(config, SFTConfig) else _trained(config)
    facts: dict[str, Any] = {}
    for block, model in models.items():
        facts |= {f"{block}.{name}": value for name, value in _facts_of(model).items()}
    facts["data.tokenizer"] = _tokenizer_identity(str(config.data.tokenizer))
    read: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return read


def changed_facts(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return `key: old → new` for each fact that differs between a checkpoint and a run."""
    # a role that only one of them has is told where its state is missing
    blocks = {key.rpartition(".")[0] for key in now} & {key.rpartition(".")[0] for key in saved}
    names = [key for key in {**saved, **now} if key.rpartition(".")[0] in blocks]
    return [f"{key}: {saved.get(key)} → {now.get(key)}" for key in names if saved.get(key) != now.get(key)]


def _trained(config: PPOConfig) -> dict[str, ModelConfig]:
    found = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    if config.critic.enable:
        found["critic.model"] = config.critic.model
    if config.reward.process_reward_model.enable:
        found["reward.process_reward_model.model"] = config.reward.process_reward_model.model
    return found


def _facts_of(model: ModelConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": _model_identity(str(model.path)),
        "override_config": model.override_config,
        "lora_rank": model.lora_rank,
    }
    if model.lora_adapter_path:
        facts["lora_rank"] = None
        facts["lora_adapter_path"] = _adapter_identity(model.lora_adapter_path)
    elif model.lora_rank:
        facts |= {
            "lora_alpha": model.lora_alpha,
            "target_modules": _in_order(model.target_modules),
            "exclude_modules": _in_order(model.exclude_modules),
        }
    return facts


def _in_order(modules: str | list[str] | None) -> str | list[str] | None:
    """Return names of modules, of which the order says nothing, always in the same one."""
    return sorted(set(modules)) if isinstance(modules, list) else modules


def _model_identity(path: str) -> str:
    """Return the architecture of a local folder with a digest of its content, or the name of any other."""
    folder = local(path)
    if is_remote(path) or not folder.is_dir():
        return path
    shape = _read_json(folder / "config.json")
    digest = hashlib.sha256(_canonical(shape, VOLATILE))
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode())
        for block in _some_blocks(file):
            digest.update(block)
    name = shape.get("model_type", "model") if isinstance(shape, dict) else "model"
    return f"{name} {digest.hexdigest()[:16]}"


def _adapter_identity(path: str) -> str:
    """Return the digest of an adapter's settings: its weights are in the checkpoint."""
    folder = local(path)
    if is_remote(path) or not folder.is_dir():
        return path
    settings = _read_json(folder / "adapter_config.json")
    return f"adapter {hashlib.sha256(_canonical(settings, ('base_model_name_or_path',))).hexdigest()[:16]}"


def _tokenizer_identity(path: str) -> str:
    """Return the digest of the files of a local tokenizer that say its tokens, or the name of any other."""
    folder = local(path)
    files = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
    if is_remote(path) or not files:
        return path
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return f"tokenizer {digest.hexdigest()[:16]}"


def _some_blocks(file: Path) -> Iterator[bytes]:
    """Give the size of a file, its header, and blocks of bytes that are spread over it."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as bytes_of:
        header = min(int.from_bytes(bytes_of.read(8), "little"), size)
        yield bytes_of.read(header)
        for number in range(BLOCKS):
            bytes_of.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
            yield bytes_of.read(BLOCK)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _canonical(content: Any, without: tuple[str, ...]) -> bytes:
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in without}
    return json.dumps(content, sort_keys=True).encode()
