"""Log-probs of the reference model, computed once for all comparisons and kept in the run folder.

    dataset ──digest──┐
    weights ──checksum┤
    model's settings ─┴─► RUN/reference/SPLIT, if it has the same; else one pass over the data ──► dataset

The reference is the model as the run starts, before a checkpoint is read; of a model with adapters it is the
base below them. So no second model is ever in memory.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from hybridflow.data.preference import Comparison, PreferenceDataset
from hybridflow.errors import DataError
from hybridflow.observability.progress import progress
from hybridflow.protocol import DataProto
from hybridflow.workers.comparison import ComparisonGroup, ComparisonWorker

logger = logging.getLogger(__name__)

COLUMN = "ref_log_prob_sum"


def add_reference(
    datasets: dict[str, PreferenceDataset],
    group: ComparisonGroup,
    folder: Path,
    make_rows: Callable[[Sequence[Comparison]], DataProto],
    *,
    batch_size: int,
    without_adapters: bool,
    settings: str,
) -> None:
    """Give each dataset, by the name of its split, the sums of the reference's log-probs.

    `folder` keeps them; those of other data, weights or `settings` of the model are replaced.
    """
    weights = group.call(ComparisonWorker.checksum)
    for split, dataset in datasets.items():
        place = folder / split
        key = f"{dataset.digest()} {weights} {settings}"
        found = _kept(place, key)
        if found is None:
            found = _computed(dataset, group, make_rows, batch_size, without_adapters)
            found.meta_info["key"] = key
            shutil.rmtree(place, ignore_errors=True)  # so that no kill leaves new sums under the old key
            found.save_to_disk(place)
        else:
            logger.info("log-probs of the reference for %s are those of %s", split, place)
        dataset.reference = found.batch[COLUMN].view(-1, 2)


def _kept(place: Path, key: str) -> DataProto | None:
    with suppress(DataError):
        found = DataProto.load_from_disk(place)
        if found.meta_info.get("key") == key:
            return found
    return None


def _computed(
    dataset: PreferenceDataset,
    group: ComparisonGroup,
    make_rows: Callable[[Sequence[Comparison]], DataProto],
    batch_size: int,
    without_adapters: bool,
) -> DataProto:
    starts = range(0, len(dataset), batch_size)
    sums = []
    for start in progress.each(starts, "batch", len(starts)):
        items = [dataset[index] for index in range(start, min(start + batch_size, len(dataset)))]
        rows = group.call(ComparisonWorker.log_prob_sums, make_rows(items), without_adapters=without_adapters)
        sums.append(rows.batch[COLUMN])
    return DataProto.from_dict({COLUMN: torch.cat(sums)})
