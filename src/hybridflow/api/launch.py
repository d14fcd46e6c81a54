"""From the arguments of a call to a run of the command: its configuration, its trainer, its messages.

arguments ──values──► prepare_config ──► data into the run folder ──► trainer/main.py: run ──► Run

Data of a program become the files that a run reads.

path, list of paths ──────────────────────────────────────► as they are
list of dicts or texts, datasets.Dataset, DataFrame ──rows──► RUN/data/train.jsonl
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.api.build import save_loaded
from hybridflow.api.callbacks import Callbacks, CallbackTracker, as_callbacks
from hybridflow.api.result import Run
from hybridflow.config import RUNS
from hybridflow.config.load import Loaded, load_config, prepare_config
from hybridflow.errors import BY_CALLBACK, ConfigError, DataError, Stopped
from hybridflow.observability.notebook import displayed
from hybridflow.trainer.fallback import fallback
from hybridflow.trainer.main import run
from hybridflow.trainer.run_folder import RunFolder

logger = logging.getLogger(__name__)
Model = str | os.PathLike[str] | Any
"""A folder, a hub name, or a loaded model of transformers."""
Overrides = Mapping[str, Any] | Sequence[str]
"""Keys and values, nested or with dotted names, or words as the command takes them: "key=value"."""

START_MODEL = "start_model"
"""Folder in the run folder for a model that was given in memory."""

_one_run = threading.Lock()
Dataset = str | os.PathLike[str] | Sequence[Any]
"""Paths, rows, or an object with rows such as a `datasets.Dataset` or a pandas DataFrame."""

WANTED = (
    "wanted a list of dicts or of texts, a datasets.Dataset, a pandas DataFrame, or paths of parquet, json "
    "or jsonl files"
)


@dataclass(frozen=True)
class RunArguments:
    """The arguments that all kinds of runs have."""

    command: str
    """The command that does the same: train, sft, dpo or reward-model."""
    recipe: str | os.PathLike[str] | None
    model: Model | None
    tokenizer: Any
    dataset: Dataset | None
    val_dataset: Dataset | None
    output_dir: str | os.PathLike[str] | None
    resume: bool | str | os.PathLike[str] | None
    callbacks: Callbacks
    overrides: Overrides
    progress: bool
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values that further arguments set."""
    check: Callable[[Any], None] = lambda config: None
    """Called with the complete configuration."""

    def prepare(self, values: Mapping[str, Any], *, needs_all: bool = True) -> Loaded[Any]:
        """Return the complete and checked configuration; `values` come before the overrides.

        Without `needs_all` no model and no files are looked at.
        """
        words, keys = _split(self.overrides)
        return prepare_config(
            RUNS[self.command],
            words,
            self.recipe_name,
            values={**values, **keys},
            needs_model=needs_all,
            needs_files=needs_all,
            fallback=fallback,
        )

    @property
    def recipe_name(self) -> str | None:
        """The recipe's name or path."""
        if self.recipe is None:
            return None
        return os.fspath(self.recipe)

    def folder(self) -> Path:
        """Return the run folder."""
        words, keys = _split(self.overrides)
        values = {**self.values, **_of_run(self), **keys}
        loaded = load_config(RUNS[self.command], words, self.recipe_name, values=values)
        return Path(loaded.config.trainer.default_local_dir).expanduser()


@contextmanager
def only_run() -> Iterator[None]:
    """Keep other runs of this process out; a running event loop of this thread is paused meanwhile.

    Raises ConfigError while another run is going on.
    """
    if not _one_run.acquire(blocking=False):
        raise ConfigError(
            "another run is going on in this process, and two would share its devices and its display: wait "
            "for its end, or start a process for each"
        )
    try:
        with _outside_event_loop():
            yield
    finally:
        _one_run.release()


def launch(call: RunArguments) -> Run:
    """Run what a call asks for, inside `only_run`. Raises whatever the command would report."""
    folder = call.folder()
    told = CallbackTracker(as_callbacks(call.callbacks), folder)
    data, rows = _data(call, folder)
    values = {**call.values, **_of_run(call), **data, **_model(call, folder)}
    loaded_model = hasattr(call.model, "save_pretrained")
    if rows or loaded_model:
        call.check(call.prepare(values, needs_all=False).config)
        with RunFolder(folder).held():
            for file, content in rows.items():
                content.write(file)
            if loaded_model:
                save_loaded(call.model, call.tokenizer, folder / START_MODEL)
    prepared = call.prepare(values)
    call.check(prepared.config)
    for note in prepared.notes:
        logger.info("note: %s", note)
    with displayed(call.progress) as views:

        def prepare(trainer: Any) -> None:
            if "trainer.save_freq" not in prepared.given:
                trainer.save_freq = trainer.total_steps  # else the weights would be gone with the call
            trainer.trackers.trackers += [*views, told]
            told.start(trainer.total_steps)

        message = _run_to_end(prepared.config, prepare, told, call.progress)
    told.end()
    return Run(folder, message=message, notes=prepared.notes)


def _run_to_end(config: Any, prepare: Callable[[Any], None], told: CallbackTracker, shown: bool) -> str:
    """Run; return why it ended before its last step, or nothing. In a notebook Ctrl-C is a reason too.

    With `shown` the reason is logged too, which Python prints where the program has set up no logging.
    """
    try:
        run(config, prepare)
    except Stopped as stopped:
        if told.error is not None:
            raise told.error from None
        interactive = stopped.number == signal.SIGINT and hasattr(sys, "ps1")
        if stopped.at_once or not (stopped.number == BY_CALLBACK or interactive):
            raise
        message = stopped.message.replace("the same command", "the same call")
        if stopped.number == BY_CALLBACK:
            message = message.replace("interrupted", "ended by a callback", 1)
        if shown:
            logger.warning("%s", message)
        return message
    return ""


def _split(overrides: Overrides) -> tuple[list[str], dict[str, Any]]:
    """Return overrides as words or as keys and values."""
    if isinstance(overrides, Mapping):
        return [], _plain(overrides)
    words = isinstance(overrides, list | tuple) and all(isinstance(word, str) for word in overrides)
    if not words:
        raise ConfigError(
            f"overrides: got {overrides!r}, wanted a dict such as {{'trainer.total_training_steps': 20}}, or "
            "a list of words such as ['trainer.total_training_steps=20']"
        )
    return list(overrides), {}


def _plain(value: Any) -> Any:
    """Return a value as a recipe would have it: paths as texts, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _of_run(call: RunArguments) -> dict[str, Any]:
    """Return the keys of the run folder and of the checkpoint to resume from."""
    values: dict[str, Any] = {}
    if call.output_dir is not None:
        values["trainer.default_local_dir"] = os.fspath(call.output_dir)
    if isinstance(call.resume, bool):
        values["trainer.resume_mode"] = "auto" if call.resume else "disable"
    elif call.resume is not None:
        values["trainer.resume_mode"] = "resume_path"
        values["trainer.resume_from_path"] = os.fspath(call.resume)
    return values


def _data(call: RunArguments, folder: Path) -> tuple[dict[str, Any], dict[Path, RowsInMemory]]:
    """Return the keys of the data, and the files that are to be written first."""
    values: dict[str, Any] = {}
    written: dict[Path, RowsInMemory] = {}
    for argument, split in (("dataset", "train"), ("val_dataset", "val")):
        dataset = getattr(call, argument)
        if dataset is None:
            continue
        found = files_or_rows(dataset, argument)
        if isinstance(found, RowsInMemory):
            file = folder / "data" / f"{split}.jsonl"
            written[file] = found
            found = [str(file)]
        values[f"data.{split}_files"] = found
    if "data.train_files" in values:
        values["data.task.name"] = None  # a recipe may have its own task
    return values, written


def _model(call: RunArguments, folder: Path) -> dict[str, Any]:
    """Return the keys of the model and the tokenizer. Raises ConfigError for what is neither."""
    key = "actor_rollout_ref.model.path" if call.command == "train" else "model.path"
    if hasattr(call.model, "save_pretrained"):
        if not hasattr(call.tokenizer, "save_pretrained"):
            raise ConfigError(
                f"model is a loaded {type(call.model).__name__}: give its tokenizer too, as tokenizer="
            )
        return {key: str(folder / START_MODEL)}
    values: dict[str, Any] = {}
    for name, value in ((key, call.model), ("data.tokenizer", call.tokenizer)):
        if value is not None and not isinstance(value, str | os.PathLike):
            raise ConfigError(
                f"{name}: got {type(value).__name__}, wanted a folder or a hub name; a loaded model and its "
                "tokenizer are given together, as model= and tokenizer="
            )
        if value is not None:
            values[name] = os.fspath(value)
    return values


@contextmanager
def _outside_event_loop() -> Iterator[None]:
    """Let code that starts its own event loop run in this thread, also where one is running already."""
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.set_event_loop(loop)
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)


@dataclass(frozen=True)
class RowsInMemory:
    """Rows that are in memory, and the name of the argument that they were given as."""

    argument: str
    rows: Sequence[Any]

    def write(self, file: Path) -> None:
        """Write the rows as JSON lines, whole or not at all. Raises DataError for one that is no JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as lines:
            for number, row in enumerate(self.rows):
                lines.write(self._line(number, row))
        os.replace(partial, file)

    def _line(self, number: int, row: Any) -> str:
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise DataError(f"{self.argument}, row {number}: got {type(row).__name__}, {WANTED}")
        try:
            line = json.dumps(dict(row), ensure_ascii=False, default=_as_json) + "\n"
            line.encode("utf-8")  # half of a surrogate pair has no bytes
            return line
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.argument}, row {number}: {error}; wanted texts, numbers, lists and dicts"
            ) from error


def files_or_rows(dataset: Dataset, argument: str) -> list[str] | RowsInMemory:
    """Return the paths, or the rows that are to be written. Raises DataError for what is neither."""
    if isinstance(dataset, str | os.PathLike):
        return [os.fspath(dataset)]
    frame: Any = dataset
    if hasattr(frame, "iloc"):  # a pandas DataFrame, which iterates over its columns and has NaN for no value
        dataset = frame.astype(object).where(frame.notna(), None).to_dict("records")
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__len__") or not isinstance(dataset, Iterable):
        raise DataError(f"{argument}: got {type(dataset).__name__}, {WANTED}")
    if not len(dataset):
        raise DataError(f"{argument} is empty: it has no rows")
    if all(isinstance(row, os.PathLike) or _is_file(row) for row in dataset):
        return [os.fspath(row) for row in dataset]
    return RowsInMemory(argument, dataset)


def _is_file(row: Any) -> bool:
    return isinstance(row, str) and row.endswith((".parquet", ".pq", ".json", ".jsonl", ".ndjson"))


def _as_json(value: Any) -> Any:
    """Return an array or a number of a library as JSON has them; TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON")
