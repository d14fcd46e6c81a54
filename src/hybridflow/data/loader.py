"""Batches of rows that resume exactly: dataset and sampler in, lists of rows out, position as plain data.

    sampler ──indices──► StatefulLoader ──[row] * batch_size──► trainer
    state_dict = {epoch, position in rows, the sampler's own state}

`for batch in loader` gives the rest of the current epoch; the next `for` gives the next epoch. A sampler
decides the order of the rows in an epoch by (seed, epoch) alone; one of your own (`data.sampler.class_path`)
has the `Sampler` protocol below, and a curriculum sampler also has `update(batch)`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterator, Sized
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.data import DataLoader

from hybridflow.errors import CheckpointError, ConfigError, DataError
from hybridflow.protocol.randomness import generator


class Sampler(Protocol):
    """Row indices, an epoch at a time; constructed as `cls(dataset, seed)`.

    `set_epoch(epoch)` is called when an epoch begins and `iter(sampler)` then gives its `len(sampler)`
    indices, drawn one batch at a time.
    """

    def set_epoch(self, epoch: int) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


@runtime_checkable
class CurriculumSampler(Protocol):
    """A sampler that gets each finished batch (a DataProto with scores, …) and may order the rest by it."""

    def update(self, batch: Any) -> None: ...


@runtime_checkable
class StatefulSampler(Protocol):
    """A sampler that keeps its own place in an epoch.

    After `load_state_dict`, `iter(sampler)` goes on where the saved epoch stood. The state is plain data
    (numbers, strings, lists, dicts, tensors). Samplers without these methods are fast-forwarded instead,
    which is exact where the order depends on (seed, epoch) alone.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class GrowingDataset(Protocol):
    """A dataset that gets further items at its end while the run goes on, and keeps them in checkpoints."""

    num_given: int
    """Items that it had at the start."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ShuffledSampler:
    """Every row once an epoch, in an order keyed by (seed, "shuffle", epoch)."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.size = len(dataset)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=generator(self.seed, "shuffle", self.epoch)).tolist()

    def __len__(self) -> int:
        return self.size


class SequentialSampler:
    """Every row once an epoch, in the order of the data."""

    def __init__(self, dataset: Sized, seed: int = 0) -> None:
        self.size = len(dataset)

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)

    def __len__(self) -> int:
        return self.size


logger = logging.getLogger(__name__)

READ_SECONDS = 600.0
"""How long a process that reads ahead may take over one batch before the run ends with an error."""

Item_co = TypeVar("Item_co", covariant=True)
Item = TypeVar("Item")


class MapDataset(Sized, Protocol[Item_co]):
    """Anything with a length and items by number."""

    def __getitem__(self, index: int) -> Item_co: ...


class StatefulLoader(Generic[Item]):
    """Batches of `batch_size` rows in the sampler's order, from `position` (in rows) in `epoch` on.

    With `num_workers` > 0 rows are read ahead by that many processes; the batches are the same. `size_key` is
    the key that set the batch size, for messages. Raises DataError where `drop_last` would leave no batch,
    ConfigError for workers with a sampler whose order is not fixed in advance.
    """

    def __init__(
        self,
        dataset: MapDataset[Item],
        sampler: Sampler,
        batch_size: int,
        drop_last: bool = False,
        *,
        num_workers: int = 0,
        size_key: str = "data.train_batch_size",
    ) -> None:
        if drop_last and len(sampler) < batch_size:
            raise DataError(
                f"the training data has {len(sampler)} usable rows, fewer than {size_key}={batch_size}: "
                f"set {size_key}={len(sampler)} or less, or add data"
            )
        if num_workers and isinstance(sampler, (CurriculumSampler, StatefulSampler)):
            raise ConfigError(
                f"data.dataloader_num_workers={num_workers} reads ahead, and {type(sampler).__name__} "
                "decides its order as it goes: set data.dataloader_num_workers=0"
            )
        if isinstance(sampler, CurriculumSampler) and not isinstance(sampler, StatefulSampler):
            logger.warning(
                "%s has update but no state_dict/load_state_dict: a resumed run will not repeat its order",
                type(sampler).__name__,
            )
        self.dataset = dataset
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.size_key = size_key
        self.epoch = 0
        self.position = 0
        self._least = 1
        if drop_last:
            self._least = batch_size  # rows that make a batch

    def __len__(self) -> int:
        """Number of batches in a whole epoch."""
        return (len(self.sampler) + self.batch_size - self._least) // self.batch_size

    def __iter__(self) -> Iterator[list[Item]]:
        """Yield the rest of the current epoch; `state_dict` between two batches counts the first as done."""
        batches = self._index_batches()
        if self.num_workers:
            yield from self._read_ahead(list(batches))
        else:
            for indices in batches:
                rows = [self.dataset[index] for index in indices]
                self._advance(len(indices))
                yield rows

    def endless(self) -> Generator[list[Item], None, None]:
        """Yield the batches of this epoch and all that follow. Raises DataError for an epoch without one."""
        while True:
            batches = 0
            for batch in self:
                batches += 1
                yield batch
            if not batches:
                raise DataError(
                    f"epoch {self.epoch} gives no batch: {type(self.sampler).__name__} has "
                    f"{len(self.sampler)} rows in it, and {self.size_key}={self.batch_size} are needed"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the place where the next batch begins, as plain data."""
        state: dict[str, Any] = {"epoch": self.epoch, "position": self.position, "order": self._order()}
        if isinstance(self.sampler, StatefulSampler):
            state["sampler"] = self.sampler.state_dict()
        if isinstance(self.dataset, GrowingDataset):
            state |= {"dataset": self.dataset.state_dict(), "rows": len(self.sampler)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises CheckpointError where only one of the checkpoint's and this run's samplers keeps a state, and
        where rows were added that this run's dataset cannot take.
        """
        stateful = isinstance(self.sampler, StatefulSampler)
        if stateful != ("sampler" in state):
            had = {True: "without", False: "with"}[stateful]
            raise CheckpointError(
                f"the checkpoint was made {had} a sampler that keeps a state, this run has "
                f"{type(self.sampler).__name__}; use the sampler of the checkpoint (data.sampler)"
            )
        if isinstance(self.dataset, GrowingDataset):
            if "dataset" in state:
                self.dataset.load_state_dict(state["dataset"])
                self._set_size(min(int(state["rows"]), len(self.dataset)))
        elif "dataset" in state:
            raise CheckpointError(
                "the data of the checkpoint's run had grown, and this run's do not grow: set data.datagen as "
                "it was"
            )
        here = self._order()
        changed = [
            f"{name} was {value} and is {here.get(name, 'none')}"
            for name, value in state.get("order", {}).items()
            if value != here.get(name)
        ]
        if changed:
            logger.warning(
                "the data is not that of the checkpoint (%s): the batches after resuming differ",
                ", ".join(changed),
            )
        if isinstance(self.sampler, StatefulSampler):
            self.sampler.load_state_dict(state["sampler"])
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        # to the next epoch, where what is left of this one makes no batch of this run's size
        self._advance(0)

    def _order(self) -> dict[str, Any]:
        """The values that the order of the batches depends on, for a resumed run to compare."""
        rows = len(self.sampler)
        if isinstance(self.dataset, GrowingDataset):
            rows = self.dataset.num_given
        names = {
            "number of rows": rows,
            "batch size": self.batch_size,
            "sampler": type(self.sampler).__name__,
        }
        if isinstance(self.sampler, ShuffledSampler):
            names["seed"] = self.sampler.seed
        return names

    def _set_size(self, rows: int) -> None:
        """Set how many rows the epoch has; a sampler of the user's own sees to that itself."""
        if isinstance(self.sampler, (ShuffledSampler, SequentialSampler)):
            self.sampler.size = rows

    def _advance(self, count: int) -> None:
        self.position += count
        if len(self.sampler) - self.position < self._least:
            self.epoch += 1
            self.position = 0

    def _index_batches(self) -> Iterator[list[int]]:
        """Lists of row indices to the end of this epoch, drawn from the sampler as they are asked for."""
        own_place = isinstance(self.sampler, StatefulSampler)
        if self.position == 0 and isinstance(self.dataset, GrowingDataset):
            self._set_size(len(self.dataset))
        if self.position == 0 or not own_place:
            self.sampler.set_epoch(self.epoch)
        indices = iter(self.sampler)
        if not own_place:
            indices = itertools.islice(indices, self.position, None)
        left = len(self.sampler) - self.position
        while left >= self._least:
            batch = list(itertools.islice(indices, min(self.batch_size, left)))
            if len(batch) < min(self.batch_size, left):
                raise DataError(
                    f"{type(self.sampler).__name__} ended {left - len(batch)} rows early: its length is "
                    f"{len(self.sampler)}"
                )
            if odd := [index for index in batch if not 0 <= index < len(self.dataset)]:
                raise DataError(
                    f"{type(self.sampler).__name__} gave row {odd[0]}; the data has rows 0 to "
                    f"{len(self.dataset) - 1}"
                )
            left -= len(batch)
            yield batch

    def _read_ahead(self, batches: list[list[int]]) -> Iterator[list[Item]]:
        reader: DataLoader[Any] = DataLoader(
            self.dataset,  # type: ignore[arg-type]
            batch_sampler=batches,
            num_workers=self.num_workers,
            timeout=READ_SECONDS,
            collate_fn=list,
            # its own: the worker seeds that torch draws must not touch the global stream
            generator=torch.Generator().manual_seed(0),
        )
        for rows in reader:
            self._advance(len(rows))
            yield rows
