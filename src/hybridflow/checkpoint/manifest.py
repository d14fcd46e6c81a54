"""The manifest of a checkpoint: the size and SHA-256 of every file in it, and its own digest.

folder ──write_manifest──► manifest.json ──read_manifest──► Manifest ──damage(folder)──► the difference
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import MANIFEST, SHARDS, STRUCTURE, TENSORS, step_folders, step_of
from hybridflow.errors import CheckpointError


def as_dict(value: Any, name: str) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.80}, and an object is wanted")
    return value


def as_list(value: Any, name: str) -> list[Any]:
    """Return a JSON array."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r:.80}, and a list is wanted")
    return value


def as_count(value: Any, name: str) -> int:
    """Return an integer that is not negative; `true` is no integer."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r:.80}, and an integer of 0 or more is wanted")
    return value


def as_counts(value: Any, name: str) -> tuple[int, ...]:
    """Return a list of integers that are not negative."""
    return tuple(as_count(each, name) for each in as_list(value, name))


FORMAT = 2

HASHING_THREADS = 4

MAX_NAME = 255
"""Characters in a name that file systems accept."""

_SHA256 = re.compile("[0-9a-f]{64}")

_whole: dict[tuple[Path, str], tuple[Mapping[str, FileDigest], list[tuple[int, ...]]]] = {}
"""Folders found intact by this process: the digests, and each file's inode and times before it was read."""


@dataclass(frozen=True)
class FileDigest:
    """The size and digest that a file must have."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, and its place in the run's order of saving."""

    step: int
    sequence: int
    """1 for a run's first checkpoint, then 2 and so on; after going back, lower steps come later."""
    roles: tuple[str, ...]
    """The folders with a state of the driver (`state.py`)."""
    files: Mapping[str, FileDigest]
    """The digest of each file, by its path below the checkpoint folder."""

    @property
    def engines(self) -> tuple[str, ...]:
        """The folders with an engine's state (`shard_index.py`)."""
        return tuple(name.removesuffix(f"/{SHARDS}") for name in self.files if name.endswith(f"/{SHARDS}"))

    def damage(self, folder: Path, *, below: str = "") -> str | None:
        """Describe the first file that differs from the manifest; return None where all files are intact.

        With `below`, only the files in that folder of the checkpoint are looked at. A folder that this
        process has found intact is read again only if one of its files is another or was written since.
        """
        wanted = {
            folder / name: digest
            for name, digest in self.files.items()
            if not below or name.startswith(f"{below}/")
        }
        seen: list[tuple[int, ...]] = []
        try:
            for path, digest in wanted.items():
                if not path.is_file():
                    return f"{path} is missing"
                entry = path.stat()
                if entry.st_size != digest.size:
                    return f"{path} has {entry.st_size} bytes, and the manifest says {digest.size}"
                seen.append((entry.st_ino, entry.st_mtime_ns, entry.st_ctime_ns))
            key = (folder.resolve(), below)
            if _whole.get(key) == (self.files, seen):
                return None
            for (path, digest), got in zip(wanted.items(), _digests(wanted), strict=True):
                if got != digest.sha256:
                    return f"{path} has SHA-256 {got}, and the manifest says {digest.sha256}"
        except OSError as error:
            return f"a file of {folder} cannot be read: {error}"
        _whole[key] = (self.files, seen)
        return None


def sequence_of(folder: Path) -> int | None:
    """Return a checkpoint's number in the order of saving, or None where its manifest cannot be read."""
    try:
        return read_manifest(folder).sequence
    except CheckpointError:
        return None  # loading reports the damage; here the folder is only left out of the order


def folders_by_age(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run by order of saving.

    One whose manifest cannot be read comes right after that of the step before.
    """
    aged: list[tuple[int, bool, int, Path]] = []
    before = 0
    for folder in step_folders(run_dir):
        sequence = sequence_of(folder)
        before = max(before, sequence or 0)
        place = before if sequence is None else sequence
        aged.append((place, sequence is None, step_of(folder) or 0, folder))
    return [folder for *_, folder in sorted(aged)]


def write_manifest(
    folder: Path, *, step: int, sequence: int, roles: tuple[str, ...], known: Mapping[str, FileDigest]
) -> None:
    """Write the manifest of all files that are in the folder; files in `known` are not read again.

    Raises CheckpointError where a file in `known` is missing or has another size than its writer reported.
    """
    paths = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    for name, digest in known.items():
        seen = "is missing"
        if name in paths:
            size = paths[name].stat().st_size
            if size == digest.size:
                continue
            seen = f"has {size} bytes"
        raise CheckpointError(
            f"{name} {seen}, although a rank wrote {digest.size} bytes of it into {folder}: "
            "trainer.default_local_dir must be on a file system that all nodes share"
        )
    unknown = {name: path for name, path in paths.items() if name not in known}
    digests = {**known} | {
        name: FileDigest(path.stat().st_size, digest)
        for (name, path), digest in zip(unknown.items(), _digests(unknown.values()))
    }
    files = {name: asdict(digests[name]) for name in paths}
    content = {"format": FORMAT, "step": step, "sequence": sequence, "roles": list(roles), "files": files}
    (folder / MANIFEST).write_text(_text(content), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest and check every field of it.

    Raises CheckpointError, which names the file and the reason, where the manifest is missing, was changed,
    has another format, or says something that no writer of this format says.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return parse_manifest(path, content)


def parse_manifest(path: Path | str, data: bytes) -> Manifest:
    """Return the manifest in these bytes, as `read_manifest` does; `path` is named where they are wrong."""
    try:
        text = data.decode("utf-8")
        content = json.loads(text)
        unchanged = _check_digest(path, text, content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _parse(path, unchanged)


def _check_digest(path: Path | str, text: str, content: Any) -> dict[str, Any]:
    """Return the manifest's fields without its own digest; raise CheckpointError where the digest differs."""
    fields: dict[str, Any] = {}
    if isinstance(content, dict):
        fields = dict(content)
    claimed = fields.pop("digest", None)
    expected = _digest(fields)
    if claimed != expected or text != _text(fields):
        raise CheckpointError(
            f"{path} was changed: it says that its digest is {claimed!r:.80}, and its content has {expected}"
        )
    return fields


def _parse(path: Path | str, fields: Mapping[str, Any]) -> Manifest:
    if fields.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {fields.get('format')!r:.80}, and this version reads format {FORMAT}: use "
            "the version of hybridflow that wrote it"
        )
    try:
        roles = tuple(_relative(role) for role in as_list(fields["roles"], "roles"))
        files = {
            _relative(name): _file_digest(name, entry)
            for name, entry in as_dict(fields["files"], "files").items()
        }
        step = as_count(fields["step"], "step")
        manifest = Manifest(step, as_count(fields["sequence"], "sequence"), roles, files)
        # the files are listed that its own states are made of
        if not manifest.files:
            raise ValueError("it lists no files")
        wanted = [f"{folder}/{STRUCTURE}" for folder in (*manifest.roles, *manifest.engines)]
        wanted += [f"{role}/{TENSORS}" for role in manifest.roles]
        missing = [name for name in wanted if name not in manifest.files]
        if missing:
            raise ValueError(f"it does not list the file {missing[0]!r:.80}")
    except KeyError as error:
        raise CheckpointError(f"{path} is not a valid manifest: it has no field {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a valid manifest: {error}") from error
    return manifest


def _file_digest(name: str, entry: Any) -> FileDigest:
    fields = as_dict(entry, f"the entry of {name!r:.80}")
    sha256 = fields.get("sha256")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"the sha256 of {name!r:.80} is {sha256!r:.80}, not 64 hexadecimal digits")
    return FileDigest(as_count(fields.get("size"), f"the size of {name!r:.80}"), sha256)


def _relative(name: Any) -> str:
    """Return a path that stays below the checkpoint folder; raise ValueError for any other value."""
    parts = str(name).split("/")
    odd = not {"", ".", ".."}.isdisjoint(parts) or len(max(parts, key=len)) > MAX_NAME
    if odd or not isinstance(name, str) or not name.isprintable():
        raise ValueError(f"{name!r:.80} is not the relative path of a file below the checkpoint folder")
    return name


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the digests of files in the order of the paths; hashing releases Python's lock."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        yield from pool.map(file_digest, paths)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"
