"""The model of a role in a checkpoint: tensors that are read one at a time, its configuration, its adapters.

global_step_N or a role's folder ──manifest, digests──► Source ──stage──► a folder that `build_policy`
reads
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER, MANIFEST, MODEL, STRUCTURE
from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.checkpoint.shard_index import SavedTensors, read_tensors
from hybridflow.checkpoint.state import write_tensors
from hybridflow.errors import CheckpointError
from hybridflow.models.adapters.adapter_folder import (
    CONFIG,
    QUANTIZATION,
    base_quantization,
    read_adapter_config,
    write_adapter_weights,
)
from hybridflow.models.adapters.lora import adapter_part, is_adapter
from hybridflow.models.files.build import token_classifier
from hybridflow.models.files.export import ADAPTER_FOLDER

logger = logging.getLogger(__name__)

ONE_LABEL = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
STAGED_BYTES = 2**30
"""Bytes of tensors that are in memory at most, plus one tensor, while a checkpoint goes into a folder."""

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}
"""The dtypes in which a model is trained."""
_FOLDER_DTYPES = (*_DTYPE_NAMES.values(), "float16")
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True)
class Source:
    """The model of a role in a checkpoint."""

    folder: Path
    tensors: SavedTensors
    """Tensors by their names in the module in training; each is read when it is asked for."""
    began_from: Path | None = None
    """Folder of the model that a critic began from; None for one that began from the actor's."""
    trust_remote_code: bool = False
    """Whether the model's own code may run."""

    @classmethod
    def open(cls, path: Path, began_from: str | None = None, trust_remote_code: bool = False) -> Source:
        """Open a `global_step_N` folder (its actor) or a role's folder; `began_from` is for a critic.

        Raises CheckpointError where it is damaged or holds no policy.
        """
        folder = _role_folder(path)
        if (folder.parent / MANIFEST).is_file():
            logger.info("verifying %s: each of its files is read and digested", folder)
            damage = read_manifest(folder.parent).damage(folder.parent, below=folder.name)
            if damage is not None:
                raise CheckpointError(f"checkpoint {folder.parent} is damaged: {damage}. Merge another step")
        else:
            logger.warning("%s has no %s beside it: its files cannot be verified", folder, MANIFEST)
        base = Path(began_from) if began_from else None
        source = cls(folder, read_tensors(folder, MODEL), base, trust_remote_code)
        # a critic stands beside its actor, and has no folder of a model of its own
        if source.is_value and (folder.resolve().name == ACTOR or (folder / HF_FOLDER).is_dir()):
            raise CheckpointError(
                f"{folder} holds a reward model, which is not merged: its run has saved the classifier as "
                f"{folder / HF_FOLDER}, if checkpoint.save_contents has hf_model"
            )
        if source.is_value and source.with_adapters:
            raise CheckpointError(
                f"{folder} holds adapters of a critic, which no tool reads: only critics whose weights were "
                "all trained are merged. The run itself goes on from it"
            )
        return source

    @property
    def is_value(self) -> bool:
        """Whether this is a critic, which becomes a token classifier with one label."""
        return any(name.startswith("backbone.") for name in self.tensors)

    @property
    def hf_folder(self) -> Path:
        """Folder of the configuration and the tokenizer."""
        if self.is_value:
            return self.began_from or self.folder.parent / ACTOR / HF_FOLDER
        return self.folder / HF_FOLDER

    @property
    def with_adapters(self) -> bool:
        """Whether only adapters were trained, which are then all that the checkpoint holds."""
        return any(is_adapter(name) for name in self.tensors)

    @property
    def quantization(self) -> str | None:
        """How the run held the base of its adapters: nf4, or None: as it is."""
        return base_quantization(self.hf_folder / ADAPTER_FOLDER)

    @property
    def dtype(self) -> str:
        """The dtype of most of the numbers, by the name that `build_policy` takes."""
        sizes: Counter[torch.dtype] = Counter()
        for name in self.tensors:
            sizes[self.tensors.dtype(name)] += math.prod(self.tensors.shape(name))
        for other in sizes.keys() - _DTYPE_NAMES.keys():
            del sizes[other]
        return _DTYPE_NAMES[max(sizes, key=lambda each: sizes[each], default=torch.float32)]

    @property
    def model_dtype(self) -> str:
        """The dtype of the weights that the run started from, or `dtype` if the checkpoint lacks it."""
        return folder_dtype(self.hf_folder) or self.dtype

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors by their Hugging Face names, one at a time."""
        renamed = {"hf.": ""}
        if self.is_value:
            _, backbone, head = token_classifier(self.hf_folder, self.trust_remote_code)
            renamed = {"backbone.": f"{backbone}.", "head.": f"{head}."}
        for name in self.tensors:
            part = next(part for part in renamed if name.startswith(part))
            yield renamed[part] + name.removeprefix(part), self.tensors[name]

    def base(self, given: str | None) -> str:
        """Return where the base of the adapters is: `given`, or the place in the checkpoint.

        Raises CheckpointError where there is no base in that place.
        """
        if given is not None:
            return given
        config = read_adapter_config(self.hf_folder / ADAPTER_FOLDER)
        written = str(config.get("base_model_name_or_path") or "")
        if not written or (written.startswith("/") and not Path(written).is_dir()):
            raise CheckpointError(
                f"{self.folder} holds adapters of the model {written or '(unknown)'}, which is not there: a "
                "checkpoint of a LoRA run holds only what was trained. Name the folder of that model with "
                "--base_model"
            )
        return written

    def stage_config(self, target: Path) -> None:
        """Copy configuration and tokenizer without any weights."""
        if not (self.hf_folder / "config.json").is_file():
            raise CheckpointError(
                f"{self.hf_folder / 'config.json'} is missing: without the model's configuration nothing "
                "can be merged. For a critic, name the model that it began from with --base_model"
            )
        shutil.copytree(self.hf_folder, target, dirs_exist_ok=True, ignore=_weights_and_adapter)
        if self.is_value:
            config = json.loads((target / "config.json").read_text(encoding="utf-8"))
            kind, *_ = token_classifier(self.hf_folder, self.trust_remote_code)
            config |= {"architectures": [kind], **ONE_LABEL}
            (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def stage_weights(self, target: Path) -> None:
        """Write all tensors into safetensors files that transformers reads, a gigabyte at a time."""
        batch: dict[str, Tensor] = {}
        places: dict[str, str] = {}
        for name, tensor in self.items():
            if sum(each.numel() * each.element_size() for each in batch.values()) >= STAGED_BYTES:
                _write_part(target, batch, places)
            batch[name] = tensor
        _write_part(target, batch, places)
        index = {"metadata": {}, "weight_map": places}
        (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    def write_adapter(self, folder: Path, base: str) -> None:
        """Write the adapters in peft's format, with the checkpoint's configuration and the base's name."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {**read_adapter_config(self.hf_folder / ADAPTER_FOLDER), "base_model_name_or_path": base}
        config.pop(QUANTIZATION, None)  # peft warns of what it does not know
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_adapter_weights(folder, {adapter_part(name): self.tensors[name] for name in self.tensors})


def folder_dtype(folder: Path) -> str | None:
    """Return the dtype that a Hugging Face folder's configuration names; None where it names no usual one."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    said = content.get("dtype") or content.get("torch_dtype")
    return said if said in _FOLDER_DTYPES else None


def _write_part(target: Path, batch: dict[str, Tensor], places: dict[str, str]) -> None:
    name = f"part-{len(set(places.values()))}.safetensors"
    write_tensors(target / name, batch)
    places |= dict.fromkeys(batch, name)
    batch.clear()


def _role_folder(path: Path) -> Path:
    for folder in (path / ACTOR, path):
        if (folder / STRUCTURE).is_file():
            return folder
    what = "there is no such folder"
    if path.is_dir():
        what = f"it holds {', '.join(sorted(p.name for p in path.iterdir())[:8]) or 'nothing'}"
    raise CheckpointError(
        f"no actor to merge at {path}: {what}. Give a global_step_N folder, or in it the folder of the "
        f"{ACTOR} or the critic"
    )


def _weights_and_adapter(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(_WEIGHTS) or name == ADAPTER_FOLDER]
