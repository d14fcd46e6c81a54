"""The manifest of a checkpoint: size and SHA-256 of every file in it, and of itself.

folder ──write_manifest──► manifest.json ──read_manifest──► Manifest ──damage(folder)──► what differs, in
words
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import MANIFEST, SHARDS
from hybridflow.errors import CheckpointError

FORMAT = 2

HASHING_THREADS = 4

_whole: dict[tuple[Path, str], tuple[Mapping[str, FileDigest], list[tuple[int, ...]]]] = {}
"""Folders that this process has found whole: by what digests, and what the file system said of their files
before they were read.
"""


@dataclass(frozen=True)
class FileDigest:
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What was saved, and when in the run's order of saving."""

    step: int
    sequence: int
    """1 for the first checkpoint that a run saved, then 2 and so on: a run that went back saves lower steps
    later.
    """
    roles: tuple[str, ...]
    """Folders that hold a state of the driver (`state.py`)."""
    files: Mapping[str, FileDigest]
    """By path below the checkpoint folder."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Folders that hold an engine's state (`shard_index.py`)."""
        return tuple(name.removesuffix(f"/{SHARDS}") for name in self.files if name.endswith(f"/{SHARDS}"))

    def damage(self, folder: Path, *, below: str = "") -> str | None:
        """What is wrong with the first file that differs (with `below`, of those in that folder), None where
        all are as written.

        A folder that this process has found whole is read again only if one of its files is another or was
        written since.
        """
        wanted = {
            folder / name: digest
            for name, digest in self.files.items()
            if name.startswith(f"{below}/" if below else "")
        }
        seen: list[tuple[int, ...]] = []
        for path, digest in wanted.items():
            if not path.is_file():
                return f"{path} is missing"
            entry = path.stat()
            if entry.st_size != digest.size:
                return f"{path} has {entry.st_size} bytes, the manifest says {digest.size}"
            seen.append((entry.st_ino, entry.st_mtime_ns, entry.st_ctime_ns))
        key = (folder.resolve(), below)
        if _whole.get(key) == (self.files, seen):
            return None
        for (path, digest), got in zip(wanted.items(), _digests(wanted), strict=True):
            if got != digest.sha256:
                return f"{path} has SHA-256 {got}, the manifest says {digest.sha256}"
        _whole[key] = (self.files, seen)
        return None


def write_manifest(
    folder: Path, *, step: int, sequence: int, roles: tuple[str, ...], known: Mapping[str, FileDigest]
) -> None:
    """Write the manifest of all files that are in the folder now; those in `known` are not read again.

    CheckpointError where a known one is not there as its writer left it.
    """
    paths = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    for name, digest in known.items():
        size = paths[name].stat().st_size if name in paths else None
        if size != digest.size:
            seen = "is not there" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{name} {seen}, though a rank wrote {digest.size} bytes of it into {folder}: "
                "trainer.default_local_dir must be on a file "
                "system that all nodes share"
            )
    unknown = {name: path for name, path in paths.items() if name not in known}
    digests = {
        name: FileDigest(path.stat().st_size, digest)
        for (name, path), digest in zip(unknown.items(), _digests(unknown.values()))
    }
    files = {name: asdict(known[name] if name in known else digests[name]) for name in paths}
    content = {"format": FORMAT, "step": step, "sequence": sequence, "roles": list(roles), "files": files}
    (folder / MANIFEST).write_text(_text(content), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest. CheckpointError where it is missing, was changed or belongs to a newer
    version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    content = content if isinstance(content, dict) else {}
    claimed = content.pop("digest", None)
    expected = _digest(content)
    if claimed != expected or text != _text(content):
        raise CheckpointError(
            f"{path} was changed: it says its digest is {claimed}, its content has {expected}"
        )
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}, this version reads {FORMAT}: use the version that "
            "wrote it"
        )
    files = {name: FileDigest(entry["size"], entry["sha256"]) for name, entry in content["files"].items()}
    return Manifest(content["step"], content["sequence"], tuple(content["roles"]), files)


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(paths: Iterable[Path]) -> Iterator[str]:
    """In the order of the paths; several at a time, since hashing keeps no other thread from running."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        yield from pool.map(file_digest, paths)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"
