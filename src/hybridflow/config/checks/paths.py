"""The checks of data files, of a user's own code, of resume folders and of the run folder.

Each yields one line per problem. Remote addresses are not looked at here.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.config.data import TASKS
from hybridflow.config.paths import is_remote, is_written_as_path, local, unwritable
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.trainer import TrainerConfig

DATA_SUFFIXES = (".parquet", ".pq", ".json", ".jsonl", ".ndjson")


def no_data(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line where a run that trains has neither files nor a task."""
    if not config.data.train_files and not config.data.task.name:
        yield (
            "no training data: set data.train_files to parquet, json or jsonl files, or "
            "data.task.name=arithmetic_chain"
        )


def task_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for an unknown task, and for a missing file of the user's."""
    task = config.data.task
    if task.name and task.name not in TASKS and ":" not in task.name:
        yield (
            f"data.task.name={task.name}: there is {', '.join(TASKS)}, reasoning_gym:NAME, "
            "environment:NAME, or your own path/to/file.py:factory"
        )
    if task.name and not task.name.startswith(("reasoning_gym:", "environment:")):
        yield from plugin_problem("data.task.name", task.name)


def train_file_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each problem of the files of training data."""
    yield from _file_problems("data.train_files", config.data.train_files, config)


def val_file_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each problem of the files of validation data."""
    yield from _file_problems("data.val_files", config.data.val_files, config)


def _file_problems(key: str, files: str | list[str], config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each missing local file, and one where files and task are both set.

    A user's own dataset class may read files of any kind, folders, and what is no file: "owner/name" may be a
    data set of a hub.
    """
    own_class = isinstance(config, PPOConfig) and bool(config.data.custom_cls.path)
    for file in [files] if isinstance(files, str) else files:
        if not file or is_remote(file):
            continue
        if own_class:
            named_as_file = is_written_as_path(file) or local(file).suffix.lower() in DATA_SUFFIXES
            if named_as_file and not local(file).exists():
                yield f"{key}: there is no {file}"
        elif not local(file).is_file():
            yield f"{key}: there is no file {file}" + (
                " ($HOME is for the shell to fill in)" if "$" in file else ""
            )
        if not own_class and local(file).suffix.lower() not in DATA_SUFFIXES:
            yield f"{key}={file}: wanted a file that ends in {', '.join(DATA_SUFFIXES)}"
    if files and config.data.task.name:
        yield f"{key}={files} and data.task.name={config.data.task.name} are both set: leave one out"


def plugin_problem(
    key: str, place: str | None, name: str | None = None, needs_name: str = ""
) -> Iterator[str]:
    """Yield one line where user code, `path.py:name` or `package.module:name`, has no file or no name; and
    one for a name, of the key `needs_name`, that stands alone.
    """
    if needs_name and name and not place:
        yield f"{needs_name}={name} without {key}: set it"
    if not place or (":" not in place and not needs_name and name is None):
        return
    path, _, inner = place.rpartition(":") if ":" in place else (place, "", "")
    if needs_name and not inner and not name:
        yield f"{key}={place} without a name: set {needs_name}, or write {place}:NAME"
    if ":" in place and (not inner or not path):
        yield f"{key}={place}: wanted path/to/file.py:name or package.module:name"
    if (path.endswith(".py") or "/" in path) and not is_remote(path) and not local(path).exists():
        yield f"{key}: there is no file {path}"


def resume_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line where the folder to go on from is not there."""
    trainer = config.trainer
    path = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and path and not local(path).is_dir():
        yield f"trainer.resume_from_path: there is no folder {path}"


def folder_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each folder that can be neither written nor made; none is made here."""
    trainer = config.trainer
    folders = {"trainer.default_local_dir": trainer.default_local_dir}
    if isinstance(trainer, TrainerConfig):
        folders |= {
            f"trainer.{n}": getattr(trainer, n) or "" for n in ("rollout_data_dir", "validation_data_dir")
        }
    for key, folder in folders.items():
        if not folder and key != "trainer.default_local_dir":
            continue
        if not folder or is_remote(folder):
            yield f"{key}={folder}: wanted a local folder"
            continue
        try:
            _look_at(local(folder))
        except OSError as error:
            yield unwritable(key, folder, error)
    remote = trainer.remote_checkpoint_dir
    if remote is not None and not is_remote(remote):
        yield (
            f"trainer.remote_checkpoint_dir={remote}: wanted an address such as hdfs://host/folder, "
            "s3://bucket/folder or file:///folder; null: no copies"
        )


def _look_at(folder: Path) -> None:
    """Raise OSError where the nearest folder that exists cannot be written."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))


def first_row(files: str | list[str]) -> dict[str, Any]:
    """Return the first row of local data files; {} where it cannot be read, which loading them reports."""
    names = [files] if isinstance(files, str) else files
    try:
        row = _read_first_row(next(local(name) for name in names if not is_remote(name)))
    except Exception:  # an error in the file is reported, by name and row, where the data is loaded
        return {}
    return row if isinstance(row, dict) else {}


def _read_first_row(path: Path) -> Any:
    if path.suffix.lower() in (".parquet", ".pq"):
        import pyarrow.parquet

        return next(pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1)).to_pylist()[0]
    if path.suffix.lower() == ".json":
        return json.loads(path.read_text(encoding="utf-8"))[0]
    with path.open(encoding="utf-8") as lines:
        return json.loads(next(line for line in lines if line.strip()))
