"""A checkpoint's actor as a Hugging Face folder that any tool reads.

    all weights trained:  shards ──a tensor at a time──► staged folder ──► model ──► TARGET ──read back──►
    equal to the shards, bit for bit
    adapters, fold:       base + adapters ──► W + s·B·A ──► TARGET ──read back──► equal bit for bit; log-probs
    those of base + adapters
    adapters, keep:       TARGET is an adapter folder of peft and names its base ──read back by peft──► the
    same log-probs

One model is in memory at a time. The folder appears under its name only after it was read back and compared.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.config.explain import format_bytes
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.merger.source import Source
from hybridflow.models.adapter_folder import CONFIG, PREFIX, WEIGHTS
from hybridflow.models.build import build_policy
from hybridflow.models.export import save_hf
from hybridflow.models.lora import LoraSettings, adapter_part, add_lora, fold_adapters, load_with_peft
from hybridflow.models.policy import PolicyModel
from hybridflow.models.probe import difference, probe_log_probs, probe_tolerance

logger = logging.getLogger(__name__)

Lora = Literal["fold", "keep"]


def merge(
    checkpoint_dir: str | Path,
    target_dir: str | Path,
    *,
    lora: Lora | None = None,
    base_model: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the actor of a `global_step_N` folder (or of its `actor` folder) to `target_dir`, in the dtype it
    was trained in.

    Adapters are folded into their base, or with `lora` keep stay adapters; `base_model` is where the base is
    if not where it was. Returns `target_dir`, which must not exist or be empty. CheckpointError where the
    checkpoint is damaged, holds no policy or lacks its base, ModelError where its configuration cannot be
    read, ConfigError where `target_dir` cannot be used.
    """
    target = Path(target_dir).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"target folder {target} exists and is not an empty folder: give the name of a new one"
        )
    source = Source.open(Path(checkpoint_dir).expanduser())
    if lora is not None and not source.with_adapters:
        raise ConfigError(
            f"--lora {lora}: {source.folder} holds no adapters, all of its weights were trained. Leave "
            "--lora out"
        )
    building = target.parent / f".tmp_{target.name}_{os.getpid()}"
    staged, final = building / "staged", building / "final"
    try:
        staged.mkdir(parents=True)
        source.stage_config(staged)
        if not source.with_adapters:
            proof = _merge_weights(source, staged, final, trust_remote_code)
        elif lora == "keep":
            proof = _keep(source, staged, final, source.base(base_model), trust_remote_code)
        else:
            proof = _fold(source, final, source.base(base_model), trust_remote_code)
        for path in staged.iterdir():
            if (
                not path.name.endswith((".safetensors", ".safetensors.index.json"))
                and not (final / path.name).exists()
            ):
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, final / path.name)
        os.replace(final, target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info("wrote %s from %s: %s", target, source.folder, proof)
    return target


def compare(
    checkpoint_dir: str | Path,
    hf_dir: str | Path,
    *,
    base_model: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """In words, how far a folder that `merge` wrote is what the checkpoint's actor is; CheckpointError says
    what differs.
    """
    source, folder = Source.open(Path(checkpoint_dir).expanduser()), Path(hf_dir).expanduser()
    if not source.with_adapters:
        policy = _load(folder, source.dtype, trust_remote_code)
        return _check_bits(policy, _fingerprints(source.items()), folder)
    if (folder / CONFIG).is_file():
        return _check_adapter(source, folder)
    policy = _with_adapters(source, source.base(base_model), trust_remote_code)
    wanted, dtype = probe_log_probs(policy), policy.dtype
    del policy
    return _check_log_probs(_load(folder, source.dtype, trust_remote_code), wanted, dtype, folder)


def _merge_weights(source: Source, staged: Path, final: Path, trust_remote_code: bool) -> str:
    logger.info("joining %d tensors (%s) from their shards", len(source.tensors), source.dtype)
    source.stage_weights(staged)
    policy = _load(staged, source.dtype, trust_remote_code)
    _say_writing(policy)
    save_hf(policy, final)
    del policy
    return _check_bits(_load(final, source.dtype, trust_remote_code), _fingerprints(source.items()), final)


def _fold(source: Source, final: Path, base: str, trust_remote_code: bool) -> str:
    policy = _with_adapters(source, base, trust_remote_code)
    wanted = probe_log_probs(policy)
    fold_adapters(policy)
    _say_writing(policy)
    save_hf(policy, final)
    prints, dtype = _fingerprints(policy.hf.state_dict().items()), policy.dtype
    del policy
    again = _load(final, source.dtype, trust_remote_code)
    return f"{_check_bits(again, prints, final)}; {_check_log_probs(again, wanted, dtype, final)}"


def _keep(source: Source, staged: Path, final: Path, base: str, trust_remote_code: bool) -> str:
    policy = _with_adapters(source, base, trust_remote_code)
    wanted, dtype = probe_log_probs(policy), policy.dtype
    del policy
    source.write_adapter(final, base)
    (staged / "config.json").unlink()  # a folder with it would be taken for a whole model
    again = _load(base, source.dtype, trust_remote_code)
    load_with_peft(again, final)
    return f"{_check_adapter(source, final)}; {_check_log_probs(again, wanted, dtype, final)}"


def _with_adapters(source: Source, base: str, trust_remote_code: bool) -> PolicyModel:
    """What the checkpoint's actor was in training."""
    logger.info(
        "loading the base %s and putting the checkpoint's adapters on it (%d tensors)",
        base,
        len(source.tensors),
    )
    policy = _load(base, source.dtype, trust_remote_code)
    with TemporaryDirectory() as folder:
        source.write_adapter(Path(folder), base)
        add_lora(policy, LoraSettings(0, adapter_path=folder))
    return policy


def _say_writing(policy: PolicyModel) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in policy.parameters())
    logger.info("writing %s", format_bytes(size))


def _load(path: str | Path, dtype: str, trust_remote_code: bool) -> PolicyModel:
    return build_policy(path, device="cpu", dtype=dtype, trust_remote_code=trust_remote_code, probe=False)


Fingerprints = dict[str, tuple[str, str]]
"""By name: what a tensor is in words, and the digest of its bytes."""


def _fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> Fingerprints:
    return {name: (f"{tuple(tensor.shape)} {tensor.dtype}", _digest(tensor)) for name, tensor in tensors}


def _digest(tensor: Tensor) -> str:
    return blake2b(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _check_bits(policy: PolicyModel, wanted: Fingerprints, folder: Path) -> str:
    logger.info("reading it back: %d tensors are compared bit for bit", len(wanted))
    own = policy.hf.state_dict()
    odd = sorted(set(own) ^ set(wanted))
    if odd:
        raise CheckpointError(
            f"{folder} and the checkpoint do not have the same {len(odd)} entries, for example "
            f"{', '.join(odd[:3])}"
        )
    for name, got in _fingerprints(own.items()).items():
        if got != wanted[name]:
            raise CheckpointError(
                f"{name} in {folder} ({got[0]}) differs from the checkpoint's ({wanted[name][0]})"
            )
    return f"{len(wanted)} tensors, all equal bit for bit"


def _check_log_probs(policy: PolicyModel, wanted: Tensor, dtype: torch.dtype, folder: Path) -> str:
    logger.info("comparing log-probs on a probe batch with those of the base with its adapters")
    found, allowed = difference(probe_log_probs(policy), wanted, dtype), probe_tolerance(dtype)
    if not found <= allowed:  # also where it is nan
        raise CheckpointError(
            f"{folder} and the checkpoint on its base do not give the same log-probs: they differ by "
            f"{found:.3g} nats, {allowed:.3g} is "
            "allowed. Is the base the model that the run started from (--base_model)?"
        )
    return f"log-probs of a probe batch within {found:.2g} nats of those of the base with its adapters"


def _check_adapter(source: Source, folder: Path) -> str:
    wanted = {f"{PREFIX}{adapter_part(name)}.weight": source.tensors[name] for name in source.tensors}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        odd = sorted(set(file.keys()) ^ set(wanted))
        odd += [
            name
            for name in sorted(set(file.keys()) & set(wanted))
            if _digest(file.get_tensor(name)) != _digest(wanted[name])
        ]
    if odd:
        raise CheckpointError(f"{odd[0]} in {folder / WEIGHTS} differs from the checkpoint's")
    return f"{len(wanted)} tensors, all equal bit for bit"
