"""Export of a model as an ordinary Hugging Face folder: config, safetensors, generation config, tokenizer.

Adapters are folded into the weights, and written beside them in peft's format.

    shards on the ranks ─a layer at a time─► whole tensors ─► model-0000i-of-0000n.safetensors, each file by
    one rank ─► index
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from hybridflow.distributed.process_group import gather_objects, rank_and_size
from hybridflow.distributed.shards import is_absent
from hybridflow.errors import ModelError
from hybridflow.models.adapters.adapter_folder import write_adapter_config, write_adapter_weights
from hybridflow.models.adapters.lora import (
    PlainEntry,
    adapter_config,
    adapter_tensors,
    base_name,
    has_adapters,
    plain_state,
    quantized_layers,
)
from hybridflow.models.files.progress import without_progress_bars
from hybridflow.models.policy import PolicyModel
from hybridflow.models.score import ScoreModel

ADAPTER_FOLDER = "lora_adapter"
"""Name of the adapter's folder below a Hugging Face folder. It is a separate folder, since a loader that
finds an adapter's configuration takes the folder for an adapter.
"""
MAX_FILE_BYTES = 4 * 2**30

_LAYER = re.compile(r"(.*?\.\d+)\.")


Exported = PolicyModel | ScoreModel


def save_hf(policy: Exported, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write the weights of a policy or a reward model to `folder`, which transformers reads anywhere.

    The weights are written in `dtype`, or in their own where it is None.
    """
    if has_adapters(policy) or dtype not in (None, policy.dtype):
        save_hf_sharded(policy, folder, dtype=dtype)
    else:
        with without_progress_bars():
            policy.hf.save_pretrained(folder)


def give_usual_modes(folder: Path) -> None:
    """Give the weight files of a folder the mode of any new file, which the umask says.

    safetensors writes them so that only their owner can read them.
    """
    new = folder / ".new"
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.unlink()
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def save_config(policy: Exported, folder: Path) -> None:
    """Write the Hugging Face folder without weights and tokenizer; of adapters their configuration.

    The configuration's dtype is that of the model's own folder, whatever dtype it is trained in: merging the
    checkpoint writes the weights in it.
    """
    _write_config(policy, folder, policy.source_dtype)
    if has_adapters(policy) and isinstance(policy, PolicyModel):
        _write_adapter_config(policy, folder / ADAPTER_FOLDER)


def _write_adapter_config(policy: PolicyModel, folder: Path) -> None:
    held = "nf4" if quantized_layers(policy) else None
    write_adapter_config(folder, adapter_config(policy), held)


def save_adapter(policy: PolicyModel, folder: Path) -> None:
    """Write the adapters in peft's format; all ranks of the world call this, and the first writes."""
    tensors = dict(whole_tensors(policy, dict(adapter_tensors(policy))))
    if rank_and_size()[0] == 0:
        _write_adapter_config(policy, folder)
        write_adapter_weights(folder, tensors)


def save_hf_sharded(
    model: Exported,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a Hugging Face folder from a sharded model.

    All ranks of the world, if there is one, call this, and each writes its share of the files. A layer at a
    time is gathered, and a rank keeps at most one file's tensors. Adapters are folded in, and a policy's are
    written beside.
    `dtypes` has the compute dtypes of weights whose shards are wider, by names of `model.state_dict()`;
    `dtype` is the one in which all weights are written, or None to keep theirs. Raises ModelError on every
    rank where one could not write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank, world_size = rank_and_size()
    dtypes = {model.file_name(name): each for name, each in dtypes.items()}
    entries = _entries(model)
    read = WholeReader(model, {name: entry.tensor for name, entry in entries.items()})
    files = _plan(entries, max_file_bytes)
    places: dict[str, tuple[str, int]] = {}
    error: str | None = None
    for number, buckets in enumerate(files):
        mine = number % world_size == rank
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for bucket in buckets:
            # collective: every rank comes by here
            gathered = {
                each: _rounded(read(each, entries[each].value(), dtypes.get(each)), dtype) for each in bucket
            }
            if mine:
                tensors |= {
                    key: value.cpu() for key, value in revert_weight_conversion(model.hf, gathered).items()
                }
        if mine and error is None:
            try:
                save_file(
                    {key: value.contiguous() for key, value in tensors.items()},
                    folder / name,
                    metadata={"format": "pt"},
                )
            # the other ranks wait for this one in the next gather: it goes on
            except (OSError, SafetensorError) as caught:
                error = f"{folder / name}: {caught}"
        places |= {key: (name, value.numel() * value.element_size()) for key, value in tensors.items()}
    # send every rank the places of all tensors; ModelError on all ranks where one failed
    reports = gather_objects((dict(places), error))
    failed = [each for _, each in reports if each is not None]
    if failed:
        raise ModelError(f"cannot write the model: {failed[0]}. Make room or give another folder")
    for theirs, _ in reports:
        places.update(theirs)
    if rank == 0:
        if len(files) > 1:
            content = {
                "metadata": {"total_size": sum(size for _, size in places.values())},
                "weight_map": {key: places[key][0] for key in sorted(places)},
            }
            text = json.dumps(content, indent=2) + "\n"
            (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        _write_config(model, folder, dtype or dtypes.get(next(iter(entries)), model.dtype))
    if has_adapters(model) and isinstance(model, PolicyModel):
        save_adapter(model, folder / ADAPTER_FOLDER)
    if world_size > 1:
        dist.barrier()


def plain_weights(
    model: PolicyModel, dtypes: Mapping[str, torch.dtype] = MappingProxyType({}), *, folded: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights as files have them, a layer at a time, whole and on the model's device.

    Tied weights come under each of their names. Adapters are folded in, or left out with `folded` false. All
    ranks of a sharded model read it to the end together. `dtypes` has the compute dtypes of weights that are
    kept in a wider one, by names of the model without adapters.
    """
    entries = _entries(model)
    plain = {name.removeprefix("hf."): entry for name, entry in plain_state(model).items()}
    read = WholeReader(model, {name: entry.tensor for name, entry in plain.items()})
    for names in (names for file in _plan(entries, MAX_FILE_BYTES) for names in file):
        values = {name: entries[name].value(folded=folded) for name in names}
        gathered = {name: read(name, value, dtypes.get(f"hf.{name}")) for name, value in values.items()}
        yield from revert_weight_conversion(model.hf, gathered).items()
    for name in sorted(base_name(tied) for tied in _tied(model)):
        if name in plain:
            yield name, read(name, plain[name].value(folded=folded), dtypes.get(f"hf.{name}"))


def _tied(model: Exported) -> set[str]:
    """Return the names of tied parameters that also have an earlier name."""
    first: dict[int, str] = {}
    return {
        name
        for name, parameter in model.hf.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def _entries(model: Exported) -> dict[str, PlainEntry]:
    """Return the entries of the files by Hugging Face names; tied weights occur once."""
    tied = _tied(model)
    skipped = [re.compile(pattern) for pattern in model.hf._keys_to_ignore_on_save or ()]
    plain = {model.file_name(name): entry for name, entry in plain_state(model).items()}
    return {
        name: entry
        for name, entry in plain.items()
        if name not in tied and not any(each.search(name) for each in skipped)
    }


def _plan(entries: dict[str, PlainEntry], max_bytes: int) -> list[list[list[str]]]:
    """Return files as lists of buckets of names; a bucket is a layer.

    A layer stays together, because what files store in another form (experts) is made from all of it.
    """
    buckets: dict[str, list[str]] = {}
    for name in entries:
        layer = name
        if match := _LAYER.match(name):
            layer = match.group(1)
        buckets.setdefault(layer, []).append(name)
    files: list[list[list[str]]] = [[]]
    filled = 0
    for names in buckets.values():
        size = sum(entries[name].tensor.numel() * entries[name].tensor.element_size() for name in names)
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(names)
        filled += size
    return files


class WholeReader:
    """Reads whole tensors of a model by name, for which all ranks of the model ask together.

    What other stages of a pipeline hold comes from the first of them that holds it.
    """

    def __init__(self, model: Exported, tensors: Mapping[str, Tensor]) -> None:
        self._column = model.column
        self._device = model.device
        self._holders: dict[str, int] = {}
        """The stage that each tensor comes from."""
        if self._column is not None:
            here = [name for name, tensor in tensors.items() if not is_absent(tensor)]
            for stage, names in enumerate(gather_objects(here, self._column.forward)):
                for name in names:
                    self._holders.setdefault(name, stage)

    def __call__(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the whole of a tensor, which may be a shard or absent here, in `dtype`."""
        if self._column is None:
            return whole(tensor, dtype)
        holder = self._holders[name]
        if self._column.stage == holder:
            value = whole(tensor, dtype).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=self._device)
        dist.broadcast(value, group=self._column.forward, group_src=holder)
        return value


def whole_tensors(model: PolicyModel, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors of a model, in their order; all of its ranks read them to the end together."""
    read = WholeReader(model, tensors)
    return ((name, read(name, tensor)) for name, tensor in tensors.items())


@torch.no_grad()
def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a whole tensor in `dtype`; where it is sharded, all ranks call this together."""
    if dtype is not None:
        tensor = tensor.to(dtype)
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor.detach()


def _rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating-point tensor in `dtype`; integers, and any tensor where it is None, as they are."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _write_config(policy: Exported, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configurations of model and generation, with the dtype of the weights if it is known."""
    config: Any = deepcopy(policy.config)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(policy.hf).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    generation = getattr(policy.hf, "generation_config", None)  # a classifier has none
    if generation is not None:
        generation.save_pretrained(folder)
