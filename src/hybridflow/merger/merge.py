"""Conversion of a checkpoint's actor or critic into a Hugging Face folder that any tool reads.

    all weights trained   shards ──a tensor at a time──► staged folder ──► model ──► TARGET
    a critic              the same, as a token classifier with one label, which critic.model.path reads
    adapters, fold        base, rounded as the run held it, + adapters ──► W + s·B·A ──► TARGET
    adapters, keep        adapters ──► TARGET, an adapter folder of peft that names its base

Weights are written in the dtype of the model that the run started from, or in another on request. The folder
is read back and compared before it appears under its name: its tensors are equal bit for bit to those that
were to be written, and log-probs on a probe batch are within a tolerance of the checkpoint's model where
weights were rounded or adapters are involved. One model is in memory at a time.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.config.explain import format_bytes
from hybridflow.errors import CheckpointError, ConfigError, ModelError
from hybridflow.merger.source import Source, folder_dtype
from hybridflow.models.adapters.adapter_folder import CONFIG, PREFIX, WEIGHTS
from hybridflow.models.adapters.lora import (
    LoraSettings,
    adapter_part,
    add_lora,
    fold_adapters,
    load_with_peft,
)
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.build_score import build_score
from hybridflow.models.files.export import Exported, give_usual_modes, save_hf
from hybridflow.models.files.probe import difference, probe_log_probs, probe_tolerance
from hybridflow.models.policy import PolicyModel
from hybridflow.models.score import ScoreModel

logger = logging.getLogger(__name__)

Lora = Literal["fold", "keep"]
Dtype = Literal["source", "trained", "float32", "bfloat16", "float16"]
"""Dtype of merged weights: that of the model the run started from, that of training, or this."""


def merge(
    checkpoint_dir: str | Path,
    target_dir: str | Path,
    *,
    lora: Lora | None = None,
    base_model: str | None = None,
    dtype: Dtype = "source",
    trust_remote_code: bool = False,
) -> Path:
    """Write the actor of a `global_step_N` folder, or the role of a folder in it, to `target_dir`.

    Weights are written in `dtype`, by default that of the model that the run started from. Adapters are
    folded into their base, or with `lora` keep stay adapters; `base_model` is where the base is if not where
    it was, and for a critic the model that it began from if that was not the actor's. Returns `target_dir`,
    which must not exist or be empty. CheckpointError where the checkpoint is damaged, lacks its base or does
    not fit `dtype`, ModelError where its configuration cannot be read, ConfigError where `target_dir` cannot
    be used.
    """
    target = Path(target_dir).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"target folder {target} exists and is not an empty folder: give the name of a new one"
        )
    source = Source.open(Path(checkpoint_dir).expanduser(), base_model, trust_remote_code)
    if lora is not None and not source.with_adapters:
        raise ConfigError(
            f"--lora {lora}: {source.folder} holds no adapters, all of its weights were trained. Leave "
            "--lora out"
        )
    if lora == "keep" and dtype != "source":
        raise ConfigError(
            f"--dtype {dtype} with --lora keep: adapters that stay adapters are written as they were "
            "trained. Leave --dtype out"
        )
    if dtype == "source":
        written = source.model_dtype
    elif dtype == "trained":
        written = source.dtype
    else:
        written = dtype
    building = target.parent / f".tmp_{target.name}_{os.getpid()}"
    staged = building / "staged"
    final = building / "final"
    try:
        staged.mkdir(parents=True)
        source.stage_config(staged)
        if not source.with_adapters:
            proof = _merge_weights(source, staged, final, written, trust_remote_code)
        elif lora == "keep":
            proof = _keep(source, staged, final, source.base(base_model), trust_remote_code)
        else:
            proof = _fold(source, final, source.base(base_model), written, trust_remote_code)
        for path in staged.iterdir():
            if (
                not path.name.endswith((".safetensors", ".safetensors.index.json"))
                and not (final / path.name).exists()
            ):
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, final / path.name)
        give_usual_modes(final)
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
    """Return in words how a folder that `merge` wrote agrees with the checkpoint's actor.

    Raises CheckpointError that says what differs.
    """
    source = Source.open(Path(checkpoint_dir).expanduser(), base_model, trust_remote_code)
    folder = Path(hf_dir).expanduser()
    if (folder / CONFIG).is_file() and source.with_adapters:
        return _check_adapter(source, folder)
    written = folder_dtype(folder) or source.dtype
    if not source.with_adapters:
        policy = (_load_critic if source.is_value else _load)(folder, source.dtype, trust_remote_code)
        return _check_bits(policy, _fingerprints(_in_dtype(source.items(), source, written)), folder, written)
    policy = _with_adapters(source, source.base(base_model), trust_remote_code)
    wanted = probe_log_probs(policy)
    narrow = _narrowest(policy, written)
    del policy
    return _check_log_probs(_load(folder, source.dtype, trust_remote_code), wanted, narrow, folder)


def _merge_weights(source: Source, staged: Path, final: Path, written: str, trust_remote_code: bool) -> str:
    logger.info("joining %d tensors (%s) from their shards", len(source.tensors), source.dtype)
    source.stage_weights(staged)
    load = _load_critic if source.is_value else _load
    policy = load(staged, source.dtype, trust_remote_code)
    wanted = None
    if isinstance(policy, PolicyModel) and _loses_bits(source.dtype, written):
        wanted = probe_log_probs(policy)
    narrow = _narrowest(policy, written)
    prints = _fingerprints(_in_dtype(source.items(), source, written))
    _save(policy, final, source, written)
    del policy
    again = load(final, source.dtype, trust_remote_code)
    proof = _check_bits(again, prints, final, written)
    if wanted is None or not isinstance(again, PolicyModel):
        return proof
    return f"{proof}; {_check_log_probs(again, wanted, narrow, final)}"


def _fold(source: Source, final: Path, base: str, written: str, trust_remote_code: bool) -> str:
    policy = _with_adapters(source, base, trust_remote_code)
    wanted = probe_log_probs(policy)
    fold_adapters(policy)
    narrow = _narrowest(policy, written)
    prints = _fingerprints(_in_dtype(policy.hf.state_dict().items(), source, written))
    _save(policy, final, source, written)
    del policy
    again = _load(final, source.dtype, trust_remote_code)
    return f"{_check_bits(again, prints, final, written)}; {_check_log_probs(again, wanted, narrow, final)}"


def _keep(source: Source, staged: Path, final: Path, base: str, trust_remote_code: bool) -> str:
    if source.quantization is not None:
        logger.warning(
            "the run computed with its base in %s, and readers of an adapter compute with the base as it is: "
            "their log-probs differ from the run's. Only --lora fold writes what was trained",
            source.quantization,
        )
    policy = _with_adapters(source, base, trust_remote_code, quantized=False)
    wanted = probe_log_probs(policy)
    narrow = _narrowest(policy, source.dtype)
    del policy
    source.write_adapter(final, base)
    (staged / "config.json").unlink()  # a folder with it would be taken for a whole model
    again = _load(base, source.dtype, trust_remote_code)
    load_with_peft(again, final)
    return f"{_check_adapter(source, final)}; {_check_log_probs(again, wanted, narrow, final)}"


def _with_adapters(
    source: Source, base: str, trust_remote_code: bool, *, quantized: bool = True
) -> PolicyModel:
    """Return the checkpoint's model; with `quantized` its base is held as the run held it."""
    logger.info(
        "loading the base %s and putting the checkpoint's adapters on it (%d tensors)",
        base,
        len(source.tensors),
    )
    policy = _load(base, source.dtype, trust_remote_code)
    with TemporaryDirectory() as folder:
        source.write_adapter(Path(folder), base)
        held = source.quantization if quantized else None
        add_lora(policy, LoraSettings(0, adapter_path=folder, quantization=held))
    return policy


def _save(policy: Exported, final: Path, source: Source, written: str) -> None:
    dtype = getattr(torch, written)
    if written != source.dtype:
        logger.info("weights are written in %s, and were trained in %s", written, source.dtype)
    size = sum(tensor.numel() * dtype.itemsize for tensor in policy.parameters())
    logger.info("writing %s", format_bytes(size))
    save_hf(policy, final, dtype=dtype)


def _loses_bits(trained: str, written: str) -> bool:
    """Return whether numbers of one dtype are rounded when they are written in the other."""
    wide: torch.dtype = getattr(torch, written)
    return torch.promote_types(getattr(torch, trained), wide) != wide


def _in_dtype(
    tensors: Iterable[tuple[str, Tensor]], source: Source, written: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as they are after they were written in one dtype and read in that of training.

    The head of a critic, which computes in float32 or wider, is read so too, with its numbers rounded.
    Raises CheckpointError for numbers that the written dtype cannot hold.
    """
    trained: torch.dtype = getattr(torch, source.dtype)
    for name, tensor in tensors:
        if not tensor.is_floating_point() or (written == source.dtype and tensor.dtype == trained):
            yield name, tensor
            continue
        rounded = tensor.to(getattr(torch, written))
        if bool((rounded.isinf() & tensor.isfinite()).any()):
            raise CheckpointError(
                f"{name} has numbers up to {float(tensor.abs().max()):.3g}, which {written} cannot hold: "
                "merge with --dtype bfloat16 or --dtype float32"
            )
        yield name, rounded.to(trained).to(tensor.dtype if source.is_value else trained)


def _load(path: str | Path, dtype: str, trust_remote_code: bool) -> PolicyModel:
    return build_policy(path, device="cpu", dtype=dtype, trust_remote_code=trust_remote_code, probe=False)


def _load_critic(path: str | Path, dtype: str, trust_remote_code: bool) -> ScoreModel:
    try:
        model = build_score(
            "token_score", path, device="cpu", dtype=dtype, trust_remote_code=trust_remote_code, probe=False
        )
    except ModelError as error:
        raise CheckpointError(
            f"the critic does not fit the actor's configuration, so it began from another model: name that "
            f"one's folder with --base_model. {error}"
        ) from error
    assert isinstance(model, ScoreModel), "a reward model of tokens"
    return model


Fingerprints = dict[str, tuple[str, str]]
"""A description of each tensor and the digest of its bytes, by name."""


def _fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> Fingerprints:
    return {name: (f"{tuple(tensor.shape)} {tensor.dtype}", _digest(tensor)) for name, tensor in tensors}


def _digest(tensor: Tensor) -> str:
    return blake2b(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _check_bits(policy: Exported, wanted: Fingerprints, folder: Path, written: str) -> str:
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
    trained = str(policy.dtype).removeprefix("torch.")
    if _loses_bits(trained, written):
        return f"{len(wanted)} tensors, all equal bit for bit to the checkpoint's rounded to {written}"
    return f"{len(wanted)} tensors, all equal bit for bit"


def _narrowest(policy: Exported, written: str) -> torch.dtype:
    """Return the narrowest dtype that a policy's weights pass through; log-probs are compared by it."""
    if _loses_bits(str(policy.dtype).removeprefix("torch."), written):
        rounded: torch.dtype = getattr(torch, written)
        return rounded
    return policy.dtype


def _check_log_probs(policy: PolicyModel, wanted: Tensor, dtype: torch.dtype, folder: Path) -> str:
    logger.info("comparing log-probs on a probe batch with those of the checkpoint's model")
    found = difference(probe_log_probs(policy), wanted, dtype)
    limit = probe_tolerance(dtype)
    if not found <= limit:  # also where it is nan
        raise CheckpointError(
            f"{folder} and the checkpoint do not give the same log-probs: they differ by {found:.3g} nats, "
            f"and {limit:.3g} is allowed for {str(dtype).removeprefix('torch.')}. Write wider "
            "weights (--dtype trained); for adapters, give the model that the run started from (--base_model)"
        )
    return f"log-probs of a probe batch within {found:.2g} nats of those of the checkpoint's model"


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
