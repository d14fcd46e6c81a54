"""A checkpoint's actor as a Hugging Face folder that any tool reads.

    actor/state (parameters) ─┐
    actor/huggingface (config,├─► model ──► TARGET: safetensors, config, tokenizer ──read back──► equal to the state, bit for bit
      tokenizer)              ─┘

The folder appears under its name only after it was read back and compared.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER, MANIFEST, MODEL, STRUCTURE
from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.checkpoint.state import load_tree
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.build import build_policy
from hybridflow.models.export import save_hf
from hybridflow.models.policy import PolicyModel

logger = logging.getLogger(__name__)

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def merge(checkpoint_dir: str | Path, target_dir: str | Path, *, trust_remote_code: bool = False) -> Path:
    """Write the actor of a `global_step_N` folder (or of its `actor` folder) to `target_dir`, in the dtype it was trained in.

    Returns `target_dir`, which must not exist or be empty. CheckpointError where the checkpoint is damaged or holds no model, ModelError
    where its configuration cannot be read, ConfigError where `target_dir` cannot be used.
    """
    actor = _actor_folder(Path(checkpoint_dir).expanduser())
    target = Path(target_dir).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"target folder {target} exists and is not an empty folder: give the name of a new one")
    weights = _weights(actor)
    building = target.parent / f".tmp_{target.name}_{os.getpid()}"
    try:
        staged, final = building / "staged", building / "final"
        staged.mkdir(parents=True)
        _stage(actor / HF_FOLDER, weights, staged)
        policy = _policy(staged, weights, trust_remote_code)
        save_hf(policy, final)
        del policy
        for path in staged.iterdir():
            if not path.name.endswith(_WEIGHTS) and not (final / path.name).exists():
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, final / path.name)
        _policy(final, weights, trust_remote_code)
        os.replace(final, target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info("wrote %d tensors of %s to %s, read back and equal bit for bit", len(weights), actor, target)
    return target


def compare(checkpoint_dir: str | Path, hf_dir: str | Path, *, trust_remote_code: bool = False) -> int:
    """How many tensors of a Hugging Face folder equal the checkpoint's actor bit for bit; CheckpointError names one that differs."""
    weights = _weights(_actor_folder(Path(checkpoint_dir).expanduser()))
    _policy(Path(hf_dir).expanduser(), weights, trust_remote_code)
    return len(weights)


def _actor_folder(path: Path) -> Path:
    for folder in (path / ACTOR, path):
        if (folder / STRUCTURE).is_file():
            return folder
    what = f"it holds {', '.join(sorted(p.name for p in path.iterdir())[:8]) or 'nothing'}" if path.is_dir() else "there is no such folder"
    raise CheckpointError(f"no actor to merge at {path}: {what}. Give a global_step_N folder or the {ACTOR} folder in it")


def _weights(actor: Path) -> dict[str, Tensor]:
    """Parameters and buffers by their Hugging Face names."""
    if (actor.parent / MANIFEST).is_file():
        damage = read_manifest(actor.parent).damage(actor.parent, below=actor.name)
        if damage is not None:
            raise CheckpointError(f"checkpoint {actor.parent} is damaged: {damage}. Merge another step")
    else:
        logger.warning("%s has no %s beside it: its files cannot be verified", actor, MANIFEST)
    try:
        model: dict[str, Tensor] = load_tree(actor, only=MODEL)
    except KeyError:
        raise CheckpointError(f"the state in {actor} has no model: it was saved without 'model' in checkpoint.save_contents") from None
    whole = all(name.startswith("hf.") for name in model)  # the policy in training holds the Hugging Face module as `hf`
    return {name.removeprefix("hf.") if whole else name: tensor for name, tensor in model.items()}


def _stage(hf_folder: Path, weights: dict[str, Tensor], staged: Path) -> None:
    if not (hf_folder / "config.json").is_file():
        raise CheckpointError(f"{hf_folder / 'config.json'} is missing: without the model's configuration nothing can be merged")
    shutil.copytree(hf_folder, staged, dirs_exist_ok=True, ignore=lambda _, names: [name for name in names if name.endswith(_WEIGHTS)])
    seen: set[int] = set()
    apart = {}
    for name, tensor in weights.items():  # tied weights are one tensor here and two entries in the file
        apart[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    save_file(apart, staged / "model.safetensors", metadata={"format": "pt"})


def _policy(folder: Path, weights: dict[str, Tensor], trust_remote_code: bool) -> PolicyModel:
    """The model in a Hugging Face folder, proven equal to `weights`."""
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.dtype in _DTYPE_NAMES}
    main = max(dtypes, key=lambda dtype: sum(t.numel() for t in weights.values() if t.dtype == dtype), default=torch.float32)
    policy = build_policy(folder, device="cpu", dtype=_DTYPE_NAMES[main], trust_remote_code=trust_remote_code, probe=False)
    own = policy.hf.state_dict()
    odd = sorted(set(own) ^ set(weights))
    if odd:
        raise CheckpointError(f"{folder} and the checkpoint do not have the same {len(odd)} entries, for example {', '.join(odd[:3])}")
    for name, wanted in weights.items():
        if not _same_bits(own[name], wanted):
            got = f"{tuple(own[name].shape)} {own[name].dtype}"
            raise CheckpointError(f"{name} in {folder} ({got}) differs from the checkpoint's ({tuple(wanted.shape)} {wanted.dtype})")
    return policy


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)))
