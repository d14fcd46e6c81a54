"""The rows of each step on disk, as they were trained: `rows/step_N/` of the run folder.

    TrainBatch ──keeping──► step ──► rows with all columns ──► rows/step_N/ ──read──► KeptStep
                                                                                         ├─ rows: as trained
                                                                                         └─ given(): as made

A column that follows from others (`input_ids`) is left out on disk. A column of the user's own that JSON
cannot hold is left out too, with a warning.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.config.recipes import read_recipe
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol import DataProto
from hybridflow.protocol.columns import BatchError
from hybridflow.protocol.storage import plain
from hybridflow.trainer.source import TrainBatch

logger = logging.getLogger(__name__)

FOLDER = "rows"
STEP = "step_"
FACTS = "kept"
"""The entry of `meta_info` on disk that says how the rows came."""
GIVEN_MASK = "given_loss_mask"
"""[B, R] bool on disk: `loss_mask` as the step was given it, before the step narrowed it."""
HOW_TO_KEEP = "set trainer.keep_rows=true"

_NAME = re.compile(rf"{STEP}(\d+)")
_LEFTOVER = re.compile(rf"\.tmp_{STEP}\d+_\d+")


@dataclass(frozen=True)
class KeptStep:
    """The rows of one step."""

    step: int
    rows: DataProto
    """The rows with all columns that the step has added."""
    epoch: int
    given_columns: tuple[str, ...]
    """The columns that the step was given."""
    given_loss_mask: torch.Tensor | None
    """[B, R] bool; None for a step without rows."""

    def given(self) -> DataProto:
        """Return the rows as the step was given them."""
        tensors = [name for name in map(str, self.rows.batch.keys()) if name in self.given_columns]
        columns = [name for name in self.rows.non_tensor_batch if name in self.given_columns]
        rows = self.rows.select(tensors, columns)
        if self.given_loss_mask is not None:
            rows.batch["loss_mask"] = self.given_loss_mask.clone()
        return rows


def config_of(run: Path, overrides: Sequence[str] = (), *, trains: bool = True) -> PPOConfig:
    """Return the configuration of a run folder, checked for what it needs to train where it `trains`.
    ConfigError for a folder that is none, or of a run that generates nothing.
    """
    recipe = run / "config.yaml"
    if not recipe.is_file():
        raise ConfigError(f"{run} is no run folder: config.yaml is missing")
    if "actor_rollout_ref" not in read_recipe(recipe):
        raise ConfigError(f"{run} is no run of `hybridflow train`: its config.yaml has no actor_rollout_ref")
    return prepare_config(
        PPOConfig, overrides, recipe=recipe, runs=trains, needs_model=trains, needs_files=trains
    ).config


class KeptRows:
    """The kept rows of a run folder, which need not have any."""

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir).expanduser() / FOLDER
        self._told: set[str] = set()

    def steps(self) -> list[int]:
        """Return the steps with kept rows, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def drop_after(self, step: int) -> None:
        """Remove the rows of later steps, which belong to a run that is replaced, and half-written ones."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.folder / f"{STEP}{later}")
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path)

    @contextmanager
    def keeping(self, made: TrainBatch, step: int) -> Iterator[None]:
        """Write the rows of `made` when the step has added its columns to them; nothing after an error."""
        given = made.rows.names()
        mask = made.rows.batch["loss_mask"] if "loss_mask" in made.rows else None
        yield
        self.write(KeptStep(step, made.rows, made.epoch, tuple(given), mask))

    def write(self, kept: KeptStep) -> Path:
        """Write the rows of a step, whole or not at all, in place of earlier ones; return their folder."""
        rows = kept.rows
        step = kept.step
        tensors: dict[str, Any] = {
            str(name): tensor for name, tensor in rows.batch.items() if name != "input_ids"
        }
        if kept.given_loss_mask is not None:
            tensors[GIVEN_MASK] = kept.given_loss_mask
        facts = {"step": step, "epoch": kept.epoch, "given": list(kept.given_columns)}
        saved = DataProto.from_dict(tensors, self._columns(rows), {**rows.meta_info, FACTS: facts})
        target = self.folder / f"{STEP}{step}"
        temporary = self.folder / f".tmp_{STEP}{step}_{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        saved.save_to_disk(temporary)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        return target

    def read(self, step: int) -> KeptStep:
        """Return the rows of a step. Raises DataError where they are missing or damaged."""
        folder = self.folder / f"{STEP}{step}"
        if not folder.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise DataError(
                f"{folder} is missing: the run kept rows of steps {there}. To keep those of all steps, "
                f"{HOW_TO_KEEP}"
            )
        rows = DataProto.load_from_disk(folder)
        facts = rows.meta_info.pop(FACTS, None)
        if not isinstance(facts, dict) or not {"step", "epoch", "given"} <= facts.keys():
            raise DataError(f"{folder} holds a batch, but not one that a run kept of a step")
        mask = rows.pop([GIVEN_MASK]).batch[GIVEN_MASK] if GIVEN_MASK in rows else None
        if {"prompts", "responses"} <= set(rows.names()):
            rows.batch["input_ids"] = torch.cat([rows.batch["prompts"], rows.batch["responses"]], dim=1)
        return KeptStep(int(facts["step"]), rows, int(facts["epoch"]), tuple(facts["given"]), mask)

    def _columns(self, rows: DataProto) -> dict[str, list[Any]]:
        """Return the columns that are no tensors, in JSON's types."""
        columns = {}
        for name, column in rows.non_tensor_batch.items():
            try:
                columns[name] = plain(column.tolist(), f"field {name!r}")
            except BatchError as error:
                if name not in self._told:
                    logger.warning("trainer.keep_rows leaves a column out: %s", error)
                    self._told.add(name)
        return columns


def not_kept(made: TrainBatch, step: int) -> AbstractContextManager[None]:
    """Return a context that keeps nothing."""
    return nullcontext()
