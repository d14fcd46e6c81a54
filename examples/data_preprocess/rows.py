"""The common part of the preparation scripts: raw rows from the hub or a local folder in, parquet out.

The parquet files have the project's row schema (docs/rewards.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.data.files import load_rows
from hybridflow.errors import HybridFlowError

SPLITS = ("train", "test")
SUFFIXES = (".parquet", ".jsonl", ".json")


def arguments(description: str, default_save_dir: str) -> argparse.Namespace:
    """Parse the options that every preparation script takes."""
    return argument_parser(description, default_save_dir).parse_args()


def argument_parser(description: str, default_save_dir: str) -> argparse.ArgumentParser:
    """Return a parser of these options, for scripts that have more."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--local_dataset_path",
        help="folder with train and test files (parquet, json or jsonl); without it: from the hub",
    )
    parser.add_argument(
        "--local_save_dir",
        default=default_save_dir,
        help=f"folder for the two parquet files (default {default_save_dir})",
    )
    parser.add_argument(
        "--hdfs_dir",
        help="address of a folder that gets a copy of both files: hdfs://…, s3://…; none without",
    )
    parser.add_argument(
        "--max_samples", type=int, default=-1, help="at most this many rows of each split; -1: all"
    )
    return parser


def raw_rows(
    dataset: str, config: str | None, split: str, local_path: str | None
) -> Iterator[dict[str, Any]]:
    """Return the rows of one split of the hub's dataset, or of the files of that split in a local folder."""
    if local_path:
        return iter(load_rows([str(file) for file in split_files(Path(local_path).expanduser(), split)]))
    try:
        import datasets
    except ImportError:
        sys.exit(
            f"reading {dataset} from the hub needs the package datasets (pip install datasets); or give "
            "--local_dataset_path FOLDER"
        )
    return iter(datasets.load_dataset(dataset, config, split=split))


def split_files(folder: Path, split: str) -> list[Path]:
    """List the files of a split: `train.jsonl`, `train-00000-of-00001.parquet`, or one folder below."""
    if not folder.is_dir():
        sys.exit(f"--local_dataset_path: no folder {folder}")
    found = sorted(
        f
        for f in (*folder.glob(f"{split}*"), *folder.glob(f"*/{split}*"))
        if f.suffix in SUFFIXES and f.is_file()
    )
    if not found:
        present = ", ".join(sorted(f.name for f in folder.iterdir())) or "nothing"
        sys.exit(
            f"--local_dataset_path: {folder} has no {split}*.parquet, .jsonl or .json; it has: {present}"
        )
    return found


def copy_to(address: str, file: Path) -> str:
    """Copy a file into the folder at an address that fsspec opens; returns the address of the copy."""
    try:
        filesystem, folder = fsspec.core.url_to_fs(address)
        filesystem.makedirs(folder, exist_ok=True)
        filesystem.put_file(str(file), f"{folder}/{file.name}")
    except Exception as error:  # each file system raises its own kinds
        sys.exit(
            f"{file} is written, but not copied to --hdfs_dir {address}: {type(error).__name__}: {error}"
        )
    return f"{address.rstrip('/')}/{file.name}"


def write_splits(
    convert: Callable[[dict[str, Any], str, int], dict[str, Any] | None],
    options: argparse.Namespace,
    dataset: str,
    config: str | None = None,
    hub_splits: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Convert both splits and write them; `convert(raw row, split, index)` gives a row, or None to leave it
    out. `hub_splits` has the hub's dataset and its split for each of ours that is not there by its name.
    """
    folder = Path(options.local_save_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        rows: list[dict[str, Any]] = []
        name, hub_split = (hub_splits or {}).get(split, (dataset, split))
        if options.local_dataset_path:
            hub_split = split
        try:
            for index, raw in enumerate(raw_rows(name, config, hub_split, options.local_dataset_path)):
                if len(rows) == options.max_samples:
                    break
                row = convert(raw, split, index)
                if row is not None:
                    rows.append(row)
        except KeyError as error:
            sys.exit(f"row {len(rows)} of {split} has no column {error}; its columns: {', '.join(raw)}")
        except (HybridFlowError, ValueError) as error:
            sys.exit(f"row {len(rows)} of {split}: {error}" if isinstance(error, ValueError) else str(error))
        if not rows:
            sys.exit(f"{split}: no row is left to write (--max_samples {options.max_samples})")
        target = folder / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), target)
        print(f"{len(rows):>7} rows  {target}")
        if options.hdfs_dir:
            print(f"{'copied to':>12}  {copy_to(options.hdfs_dir, target)}")
    print("first row:", json.dumps(rows[0], indent=2, ensure_ascii=False, default=_shown))


def _shown(value: Any) -> str:
    """Return a value that JSON does not know in words."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return repr(value)
