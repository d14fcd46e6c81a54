"""DataProto: the rows that flow between the controller and the workers.

In: tensors and Python values from the loader, the rollout and the workers, all with one entry a row. Out: the
same rows, cut, joined, reordered. Rows carry `uid` (their group) and `row_id` (themselves) through all of it.
Field names, shapes and units are in `protocol/fields.py`; padded tensors become packed tokens in
`protocol/packing.py`.

A column may be elsewhere, in shards of other processes (`remote`, see `protocol/remote.py`): then it takes
part in all of this without its values. It may be here as well, and a call of a worker reads it there: putting
other values into such a column (`batch[name] = …`) takes it out of `remote`.

Methods that change the object they are called on, as users of verl expect: `union` and `|=`, `pop`, `rename`,
`reorder`, `padding`, `narrow_loss_mask`, `fresh_row_ids`. All others leave it alone and return a new one;
`meta_info` is copied, never shared.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, cast, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from hybridflow.protocol import storage
from hybridflow.protocol.columns import (
    BatchError,
    ObjectArray,
    first_difference,
    join,
    object_array,
    row_indices,
    same,
)
from hybridflow.protocol.randomness import generator
from hybridflow.protocol.remote import RemoteColumn

logger = logging.getLogger(__name__)

ONE_BATCH_DIM = "rows have one batch dim here; groups are named by the column uid, and reshaped by the reader"


@dataclass
class DataProtoItem:
    """One row: `item["responses"]` looks in the tensors, then in the other columns."""

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.batch[key] if key in self.batch else self.non_tensor_batch[key]

    def __contains__(self, key: str) -> bool:
        return key in self.batch or key in self.non_tensor_batch

    def keys(self) -> list[str]:
        """Names of all fields of the row."""
        return [*self.batch, *self.non_tensor_batch]


class DataProto:
    """Rows with tensor fields, other fields and facts about the batch as a whole.

    Example: `DataProto.from_dict({"values": torch.zeros(2, 3)}, {"uid": ["a", "b"]})` has 2 rows;
    `data.batch["values"]` is [2, 3].
    """

    batch: TensorDict
    """Tensors whose first dim is the row."""
    non_tensor_batch: dict[str, ObjectArray]
    """Arrays of Python objects, one a row."""
    meta_info: dict[str, Any]
    """Facts of the whole batch."""
    remote: dict[str, RemoteColumn]
    """Columns that are elsewhere, and maybe here too."""

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        remote: Mapping[str, RemoteColumn] | None = None,
    ) -> None:
        self.non_tensor_batch = {
            name: object_array(column, name) for name, column in (non_tensor_batch or {}).items()
        }
        self.meta_info = deepcopy(dict(meta_info or {}))
        self.remote = dict(remote or {})
        if batch is None:
            sizes = [*map(len, self.non_tensor_batch.values()), *map(len, self.remote.values()), 0]
            batch = TensorDict({}, batch_size=[sizes[0]])
        self.batch = batch
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raise BatchError where a field has another number of rows than the batch."""
        columns: dict[str, ObjectArray | RemoteColumn] = {**self.remote, **self.non_tensor_batch}
        for name, column in columns.items():
            if len(column) != len(self):
                raise BatchError(f"field {name!r} has {len(column)} rows but the batch has {len(self)}")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all fields that are tensors, by name."""
        return cast("dict[str, Tensor]", dict(self.batch.items()))

    # ---- making

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Rows from named tensors [B, ...] and named sequences of B values. Raises BatchError where row
        counts differ, and for more batch dims than one. `auto_padding` asks for nothing: `chunk` takes any
        number of rows.
        """
        if num_batch_dims != 1:
            raise BatchError(f"num_batch_dims={num_batch_dims}: {ONE_BATCH_DIM}")
        columns = {name: object_array(column, name) for name, column in (non_tensors or {}).items()}
        num_rows: int | None = None
        for name, value in (tensors or {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise BatchError(
                    f"field {name!r} must be a tensor with one entry a row, got {type(value).__name__}"
                )
        for name, rows in [
            *((n, len(t)) for n, t in (tensors or {}).items()),
            *((n, len(c)) for n, c in columns.items()),
        ]:
            if num_rows is not None and rows != num_rows:
                raise BatchError(f"field {name!r} has {rows} rows but the fields before it have {num_rows}")
            num_rows = rows
        return cls(TensorDict(dict(tensors or {}), batch_size=[num_rows or 0]), columns, meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Rows from one dictionary: tensors become tensor fields, all else becomes columns of objects."""
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        return cls.from_dict(
            tensors, {name: value for name, value in data.items() if name not in tensors}, meta_info
        )

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Rows from a TensorDict [B]: its stacks of objects become columns, and its single objects become
        `meta_info`, beside what is given.
        """
        tensors: dict[str, Tensor] = {}
        columns: dict[str, Any] = {}
        facts = dict(meta_info or {})
        for name in map(str, tensor_dict.keys()):
            value = tensor_dict.get(name)
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, NonTensorData):
                facts[name] = value.data
            else:
                columns[name] = value.tolist()
        return cls.from_dict(tensors, columns, facts, num_batch_dims)

    @classmethod
    def concat(cls, parts: Sequence[DataProto]) -> DataProto:
        """Rows of all parts in order; parts without rows are passed over.

        `meta_info` is joined and must agree, except `metrics`, which becomes the list of the parts' entries.
        Raises BatchError for no parts, differing fields, widths or facts.
        """
        if not parts:
            raise BatchError("cannot concatenate: no parts were given")
        meta_info = _join_meta([part.meta_info for part in parts])
        filled = [part for part in parts if len(part)] or [parts[0]]
        names = set(filled[0].batch.keys())
        columns = set(filled[0].non_tensor_batch)
        for index, part in enumerate(filled[1:], start=1):
            odd = (names ^ set(part.batch.keys())) | (columns ^ set(part.non_tensor_batch))
            if odd:
                raise BatchError(f"cannot concatenate: parts 0 and {index} do not both have {sorted(odd)}")
        joined = cls.from_dict(
            {name: join(name, [part.batch[name] for part in filled]) for name in filled[0].tensors()},
            {
                name: np.concatenate([part.non_tensor_batch[name] for part in filled])
                for name in filled[0].non_tensor_batch
            },
            meta_info,
        )
        joined.remote = {
            name: RemoteColumn.concat([part.remote.get(name, len(part)) for part in filled])
            for name in dict.fromkeys(name for part in filled for name in part.remote)
        }
        return joined

    # ---- looking

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])

    def __contains__(self, key: str) -> bool:
        return key in self.batch.keys() or key in self.non_tensor_batch  # noqa: SIM118

    def has(self, name: str) -> bool:
        """Return whether all rows have this column, here or elsewhere."""
        return name in self or (name in self.remote and self.remote[name].is_complete)

    def names(self) -> list[str]:
        """Return the names of all fields that are here, the tensors first."""
        return [*map(str, self.batch.keys()), *self.non_tensor_batch]

    def to_tensordict(self) -> TensorDict:
        """Return the rows as a TensorDict [B]: columns as stacks of objects, facts as single objects."""
        clash = sorted(self.meta_info.keys() & set(self.names()))
        if clash:
            raise BatchError(f"meta_info and the fields both have {clash}: rename one")
        found = TensorDict(self.tensors(), batch_size=[len(self)])
        for name, column in self.non_tensor_batch.items():
            found[name] = NonTensorStack(*column.tolist()) if len(self) else NonTensorStack.from_list([])
        for name, value in self.meta_info.items():
            found.set_non_tensor(name, deepcopy(value))
        return found

    def get_data_info(self) -> str:
        """Return a text with a line for each field: shape, dtype and device, or the types of its values."""
        lines = ["batch"]
        lines += [f"  {name}: {tuple(t.shape)} ({t.dtype}) {t.device}" for name, t in self.tensors().items()]
        for title, values in (("non_tensor_batch", self.non_tensor_batch), ("meta_info", self.meta_info)):
            lines.append(title)
            for name, value in values.items():
                kinds = sorted({type(each).__name__ for each in value}) if title != "meta_info" else []
                lines.append(f"  {name}: {' | '.join(kinds) or type(value).__name__}")
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> None:
        """Log how many bytes the tensors take, and how many values the columns of objects have."""
        size = sum(tensor.element_size() * tensor.numel() for tensor in self.tensors().values())
        number = len(self) * len(self.non_tensor_batch)
        text = f"{size / 2**30:.6f} GiB of tensors and {number} Python values"
        logger.info("%s", ", ".join(filter(None, (prefix, text))))

    def __repr__(self) -> str:
        fields = [
            f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in self.batch.items()
        ]
        return (
            f"DataProto({len(self)} rows; {', '.join([*fields, *self.non_tensor_batch])}; meta_info "
            f"{list(self.meta_info)})"
        )

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...
    @overload
    def __getitem__(
        self, item: slice | Sequence[int] | Sequence[bool] | np.ndarray[Any, Any] | Tensor
    ) -> DataProto: ...
    def __getitem__(self, item: Any) -> DataProto | DataProtoItem:
        """A row for an integer; rows for a slice, a list, an array or a tensor of integers, or a boolean
        mask.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if not isinstance(item, int | np.integer):
            return self.select_idxs(item)
        row = int(row_indices([int(item)], len(self))[0])
        return DataProtoItem(
            {name: tensor[row] for name, tensor in self.tensors().items()},
            {name: column[row] for name, column in self.non_tensor_batch.items()},
            deepcopy(self.meta_info),
        )

    # ---- choosing rows

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray[Any, Any] | Tensor) -> DataProto:
        """The rows at `idxs`, in that order; a boolean mask keeps the rows where it is true."""
        index = row_indices(idxs, len(self))
        tensors = {name: tensor[index.to(tensor.device)] for name, tensor in self.tensors().items()}
        columns = {name: column[index.numpy()] for name, column in self.non_tensor_batch.items()}
        remote = {name: column[index.numpy()] for name, column in self.remote.items()}
        return DataProto(TensorDict(tensors, batch_size=[len(index)]), columns, self.meta_info, remote)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows `start` to `end`, as Python slices count. Tensors are views of this object's."""
        if step is not None and step < 1:
            return self.select_idxs(range(*slice(start, end, step).indices(len(self))))
        where = slice(start, end, step)
        tensors = {name: tensor[where] for name, tensor in self.tensors().items()}
        columns = {name: column[where] for name, column in self.non_tensor_batch.items()}
        remote = {name: column[where] for name, column in self.remote.items()}
        size = len(range(len(self))[where])
        return DataProto(TensorDict(tensors, batch_size=[size]), columns, self.meta_info, remote)

    def chunk(self, chunks: int) -> list[DataProto]:
        """Exactly `chunks` pieces whose sizes differ by at most one, longer ones first; with few rows the
        last ones are empty.
        """
        if chunks < 1:
            raise BatchError(f"cannot cut {len(self)} rows into {chunks} pieces: at least 1 is needed")
        each, longer = divmod(len(self), chunks)
        cuts = [index * each + min(index, longer) for index in range(chunks + 1)]
        return [self.slice(start, end) for start, end in pairwise(cuts)]

    def split(self, split_size: int) -> list[DataProto]:
        """Pieces of `split_size` rows, the last one with what is left."""
        if split_size < 1:
            raise BatchError(
                f"cannot split {len(self)} rows into pieces of {split_size}: at least 1 row is needed"
            )
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row `repeat_times` times: `a a b b` interleaved, else `a b a b`. Row ids repeat too (see
        `fresh_row_ids`).
        """
        if repeat_times < 0:
            raise BatchError(f"cannot repeat rows {repeat_times} times")
        rows = torch.arange(len(self))
        return self.select_idxs(
            rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)
        )

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray[Any, Any] | Tensor) -> DataProto:
        """Each row as often as `repeat_times` says, one number for each row; row ids repeat too."""
        times = torch.as_tensor(np.asarray(repeat_times), dtype=torch.int64)
        if times.shape != (len(self),) or bool((times < 0).any()):
            raise BatchError(
                f"repeat_times has shape {tuple(times.shape)}, wanted one number of 0 or more for each of "
                f"the {len(self)} rows"
            )
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Cut the tensor fields `split_keys` [B, C, …] along their second dim into [B · n_split, C / n_split,
        …], and repeat each row of all other fields `n_split` times.
        """
        keys = list(split_keys or ())
        odd = [name for name in keys if name not in self.batch or self.batch[name].dim() < 2]
        fit = [name for name in keys if name not in odd]
        uneven = [name for name in fit if n_split < 1 or self.batch[name].shape[1] % n_split]
        if n_split < 1 or odd or uneven:
            raise BatchError(
                f"cannot cut columns into {n_split}: {odd} are no tensor fields [B, C, …], and {uneven} have "
                "a C that it does not divide"
            )
        unfolded = self.repeat(n_split)
        for name in keys:
            unfolded.batch[name] = self.batch[name].reshape(
                len(self) * n_split, self.batch[name].shape[1] // n_split, *self.batch[name].shape[2:]
            )
        return unfolded

    def is_padding_enabled(self) -> bool:
        """Return False: no rows have to be added, as `chunk` cuts any number of them."""
        return False

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Add a row to this object `padding_size` times, as `with_extra_rows` does: its last one, or with
        "first" its first one.
        """
        if padding_size < 0 or (padding_size and not len(self)):
            raise BatchError(f"cannot add {padding_size} rows to {len(self)}")
        added = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.with_extra_rows([added] * padding_size)
        self.batch = padded.batch
        self.non_tensor_batch = padded.non_tensor_batch
        self.remote = padded.remote

    def with_extra_rows(self, rows: Sequence[int]) -> DataProto:
        """Return all rows and `rows` once more at the end, from which nothing is learned: where there is a
        `loss_mask` or `response_mask`, their `loss_mask` is empty.
        """
        extended = self.select_idxs([*range(len(self)), *rows])
        mask = next((name for name in ("loss_mask", "response_mask") if name in self), None)
        if mask is not None:
            keep = torch.ones_like(extended.batch[mask], dtype=torch.bool)
            keep[len(self) :] = False
            extended.narrow_loss_mask(keep)
        return extended

    def reorder(self, indices: Sequence[int] | np.ndarray[Any, Any] | Tensor) -> DataProto:
        """Put this object's rows in the order `indices`, a permutation of all rows; returns it."""
        index = row_indices(indices, len(self))
        if sorted(index.tolist()) != list(range(len(self))):
            raise BatchError(
                f"reorder needs each of the {len(self)} rows once, got {len(index)} indices; use "
                "select_idxs to pick rows"
            )
        moved = self.select_idxs(index)
        self.batch = moved.batch
        self.non_tensor_batch = moved.non_tensor_batch
        self.remote = moved.remote
        return self

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of `mini_batch_size` rows (the last of an epoch may be smaller), `epochs` times over.

        With a seed each epoch has its own order, keyed by (seed, epoch); without, rows come in order. Of
        `dataloader_kwargs` there is `shuffle` alone: false is the order of the rows, true wants a seed.
        """
        asked = dict(dataloader_kwargs or {})
        shuffle = asked.pop("shuffle", seed is not None)
        if asked or (shuffle and seed is None):
            raise BatchError(
                f"make_iterator: dataloader_kwargs={dict(dataloader_kwargs or {})} with seed={seed}: there "
                "is shuffle alone, and an order that is drawn wants a seed"
            )
        if mini_batch_size < 1:
            raise BatchError(f"mini_batch_size must be at least 1, got {mini_batch_size}")
        for epoch in range(epochs):
            order = torch.arange(len(self))
            if shuffle and seed is not None:
                order = torch.randperm(len(self), generator=generator(seed, "make_iterator", epoch))
            for start in range(0, len(self), mini_batch_size):
                yield self.select_idxs(order[start : start + mini_batch_size])

    # ---- choosing fields

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return the named fields only, wherever they are; None keeps all of a kind. Remote columns are kept
        where either list names them, and all of them where `batch_keys` is None. With `deepcopy` the Python
        values are copies. Raises BatchError for a missing field.
        """
        tensors = _pick("tensor field", self.tensors(), batch_keys, self.remote)
        columns = _pick("non-tensor field", self.non_tensor_batch, non_tensor_batch_keys, self.remote)
        meta_info = _pick("meta_info entry", self.meta_info, meta_info_keys)
        named = self.remote if batch_keys is None else (*batch_keys, *(non_tensor_batch_keys or ()))
        remote = {name: self.remote[name] for name in named if name in self.remote}
        if deepcopy:
            columns = copy.deepcopy(columns)
        return DataProto(TensorDict(tensors, batch_size=[len(self)]), columns, meta_info, remote)

    def only(self, names: Collection[str]) -> DataProto:
        """Return the named fields of either kind, as `select` does."""
        objects = [name for name in names if name in self.non_tensor_batch]
        return self.select([name for name in names if name not in objects], objects)

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Take the named fields out of this object and return them as a new one."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for name in (*batch_keys, *non_tensor_batch_keys):
            self.remote.pop(name, None)
            self.non_tensor_batch.pop(name, None)
            if name in self.batch:
                del self.batch[name]
        for name in meta_info_keys:
            del self.meta_info[name]
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Give fields of this object new names; returns it."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        kept = {*self.batch.keys(), *self.non_tensor_batch} - set(old)
        missing = [name for name in old if name not in self and name not in self.remote]
        taken = sorted(kept & set(new))
        if len(old) != len(new) or len(set(new)) != len(new) or missing or taken:
            raise BatchError(f"cannot rename {old} to {new}: missing {missing}, already there {taken}")
        names = dict(zip(old, new, strict=True))
        self.batch = TensorDict(
            {names.get(name, name): tensor for name, tensor in self.tensors().items()},
            batch_size=[len(self)],
        )
        self.non_tensor_batch = {
            names.get(name, name): column for name, column in self.non_tensor_batch.items()
        }
        self.remote = {names.get(name, name): column for name, column in self.remote.items()}
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the fields and facts of `other` to this object; returns it.

        A name that both have must hold the same values (NaN equals NaN): BatchError names the field and the
        first row that differs.
        """
        if not _fields(self) and not self.remote:
            self.batch = TensorDict({}, batch_size=[len(other)])
        if len(self) != len(other) and (_fields(other) or other.remote):
            raise BatchError(f"cannot join a batch of {len(self)} rows with one of {len(other)}")
        mine = _fields(self)
        theirs = _fields(other)
        for name in mine.keys() & theirs.keys():
            row = first_difference(mine[name], theirs[name])
            if row is not None:
                raise BatchError(
                    f"field {name!r} is on both sides and differs, first in row {row}: `|=` only adds fields"
                )
        for name in self.meta_info.keys() & other.meta_info.keys():
            if not same(self.meta_info[name], other.meta_info[name]):
                raise BatchError(
                    f"meta_info[{name!r}] is on both sides and differs: {self.meta_info[name]!r}, "
                    f"{other.meta_info[name]!r}"
                )
        for name, value in theirs.items():
            if name in mine:
                continue
            if isinstance(value, Tensor):
                self.batch[name] = value
            else:
                self.non_tensor_batch[name] = value
        self.remote |= other.remote
        self.meta_info |= deepcopy(other.meta_info)
        return self

    def __ior__(self, other: DataProto) -> DataProto:
        return self.union(other)

    def __or__(self, other: DataProto) -> DataProto:
        return self.select().union(other)

    def to(self, device: torch.device | str) -> DataProto:
        """The same rows with tensors on `device`."""
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def with_tensors(self, tensors: dict[str, Tensor]) -> DataProto:
        """The same rows with these tensors, one for each name, in place of their own."""
        whole = TensorDict(tensors, batch_size=[len(self)])
        return DataProto(whole, self.non_tensor_batch, self.meta_info, self.remote)

    # ---- columns that are elsewhere

    def by_reference(self) -> DataProto:
        """Return the rows without the values of columns that are elsewhere too."""
        remote = {name: column for name, column in self.remote.items() if column.is_complete}
        tensors = {name: tensor for name, tensor in self.tensors().items() if name not in remote}
        columns = {name: column for name, column in self.non_tensor_batch.items() if name not in remote}
        return DataProto(TensorDict(tensors, batch_size=[len(self)]), columns, self.meta_info, remote)

    def materialized(self) -> DataProto:
        """Return the rows with the values of all columns, those that are elsewhere too; wait for them.

        Raises what those have raised who made them, and WorkerLost where they were lost with a node.
        """
        if not self.remote:
            return self
        missing = {name: column for name, column in self.remote.items() if name not in self}
        shards = {id(shard): shard for column in missing.values() for shard in column.shards}
        arrived = {
            key: shard if isinstance(shard, DataProto) else shard.result() for key, shard in shards.items()
        }
        tensors = self.tensors()
        columns = dict(self.non_tensor_batch)
        for name, column in missing.items():
            values = column.gather(arrived)
            if isinstance(values, Tensor):
                tensors[name] = values
            else:
                columns[name] = values
        return DataProto(TensorDict(tensors, batch_size=[len(self)]), columns, self.meta_info)

    # ---- what rows carry

    def fresh_row_ids(self, above: int = -1) -> DataProto:
        """Give every row whose `row_id` an earlier row has a new one, above the largest and above `above`;
        number from 0 where there are none.
        """
        ids = self.batch["row_id"].tolist() if "row_id" in self else list(range(len(self)))
        free = max([*ids, above]) + 1
        seen: set[int] = set()
        for row, row_id in enumerate(ids):
            if row_id in seen:
                ids[row], free = free, free + 1
            seen.add(ids[row])
        self.batch["row_id"] = torch.tensor(ids, dtype=torch.int64)
        return self

    def narrow_loss_mask(self, keep: Tensor) -> DataProto:
        """Learn only where `keep` [B, R] bool is true as well; the one way to change `loss_mask`, which
        starts as `response_mask`.
        """
        mask = self.batch["loss_mask" if "loss_mask" in self else "response_mask"].bool()
        if keep.shape != mask.shape or keep.dtype != torch.bool:
            raise BatchError(f"keep must be bool {tuple(mask.shape)}, got {keep.dtype} {tuple(keep.shape)}")
        self.batch["loss_mask"] = mask & keep.to(mask.device)
        return self

    # ---- disk

    def save_to_disk(self, folder: str | Path) -> None:
        """Write `tensors.safetensors` and `meta.json` into `folder`. Raises BatchError naming a field that
        JSON cannot hold.
        """
        rows = self.materialized()
        columns = {name: column.tolist() for name, column in rows.non_tensor_batch.items()}
        storage.write(Path(folder), rows.tensors(), columns, self.meta_info, len(self))

    @classmethod
    def load_from_disk(cls, folder: str | Path) -> DataProto:
        """Read what `save_to_disk` wrote. Raises DataError for a folder that is missing, incomplete or
        damaged.
        """
        tensors, columns, meta_info, num_rows = storage.read(Path(folder))
        return cls(TensorDict(tensors, batch_size=[num_rows]), columns, meta_info)


def _fields(data: DataProto) -> dict[str, Tensor | ObjectArray]:
    return {**data.tensors(), **data.non_tensor_batch}


def _pick(
    what: str, fields: Mapping[str, Any], names: Sequence[str] | None, remote: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    missing = [name for name in names or () if name not in fields and name not in (remote or {})]
    if missing:
        raise BatchError(f"no {what} {missing[0]!r}: the batch has {sorted(fields)}")
    return dict(fields) if names is None else {name: fields[name] for name in names if name in fields}


def _join_meta(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for index, part in enumerate(parts):
        for name, value in part.items():
            if name == "metrics":
                joined.setdefault(name, []).extend(value if isinstance(value, list) else [value])
            elif name in joined and not same(joined[name], value):
                raise BatchError(
                    f"cannot concatenate: meta_info[{name!r}] is {joined[name]!r} before and {value!r} in "
                    f"part {index}"
                )
            else:
                joined[name] = value
    return joined


def pad_to_divisor(data: DataProto, n: int) -> tuple[DataProto, int]:
    """Repeat the first rows at the end until the number of rows divides by n; returns the batch and how many
    were added.

    Where there is a `loss_mask` or `response_mask`, the added rows have a `loss_mask` of zeros. An empty
    batch stays empty.
    """
    if n < 1:
        raise BatchError(f"cannot pad {len(data)} rows to a multiple of {n}")
    pad_size = -len(data) % n
    if pad_size == 0:
        return data, 0
    return data.with_extra_rows([row % len(data) for row in range(pad_size)]), pad_size


def unpad(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"cannot drop {pad_size} of {len(data)} rows")
    return data.slice(0, len(data) - pad_size) if pad_size else data


class PendingRows(Protocol):
    """Anything whose `get()` waits for rows, such as one rank's answer to a call that does not block."""

    def get(self) -> DataProto: ...


class DataProtoFuture:
    """The rows that `futures` will give, joined by `collect` at the first access; the result is kept."""

    def __init__(
        self,
        futures: Sequence[PendingRows],
        collect: Callable[[Sequence[DataProto]], DataProto] = DataProto.concat,
    ) -> None:
        self._futures = list(futures)
        self._collect = collect
        self._result: DataProto | None = None
        self._lock = Lock()

    def get(self) -> DataProto:
        """Wait for all rows. An error in a part is raised here, and again at the next call."""
        with self._lock:
            if self._result is None:
                self._result = self._collect([future.get() for future in self._futures])
                self._futures = []  # the parts need not live on beside the whole
            return self._result

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """`chunks` futures for the pieces that `DataProto.chunk` will cut, without waiting."""
        if chunks < 1:
            raise BatchError(f"cannot cut a future into {chunks} pieces: at least 1 is needed")
        return [DataProtoFuture([self], partial(_piece, index, chunks)) for index in range(chunks)]

    @classmethod
    def concat(cls, parts: Sequence[PendingRows]) -> DataProtoFuture:
        """One future for the rows of all parts, in order, without waiting."""
        if not parts:
            raise BatchError("cannot concatenate: no futures were given")
        return cls(parts)


def _piece(index: int, chunks: int, parts: Sequence[DataProto]) -> DataProto:
    return parts[0].chunk(chunks)[index]
