"""The manifest of a checkpoint: size and SHA-256 of every file in it, and of itself.

folder ──write_manifest──► manifest.json ──read_manifest──► Manifest ──damage(folder)──► what differs, in words
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import MANIFEST
from hybridflow.errors import CheckpointError

FORMAT = 1


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
    """1 for the first checkpoint that a run saved, then 2 and so on: a run that went back saves lower steps later."""
    roles: tuple[str, ...]
    """Top-level parts that hold a state."""
    files: Mapping[str, FileDigest]
    """By path below the checkpoint folder."""

    def damage(self, folder: Path, *, below: str = "") -> str | None:
        """What is wrong with the first file that differs (with `below`, of those in that folder), None where all are as written."""
        for name, wanted in self.files.items():
            if not name.startswith(f"{below}/" if below else ""):
                continue
            path = folder / name
            if not path.is_file():
                return f"{path} is missing"
            size = path.stat().st_size
            if size != wanted.size:
                return f"{path} has {size} bytes, the manifest says {wanted.size}"
            got = file_digest(path)
            if got != wanted.sha256:
                return f"{path} has SHA-256 {got}, the manifest says {wanted.sha256}"
        return None


def write_manifest(folder: Path, *, step: int, sequence: int, roles: tuple[str, ...]) -> None:
    """Write the manifest of all files that are in the folder now."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": file_digest(path)} for path in paths}
    content = {"format": FORMAT, "step": step, "sequence": sequence, "roles": list(roles), "files": files}
    (folder / MANIFEST).write_text(_text(content), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest. CheckpointError where it is missing, was changed or belongs to a newer version."""
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
        raise CheckpointError(f"{path} was changed: it says its digest is {claimed}, its content has {expected}")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this version reads {FORMAT}: use the version that wrote it")
    files = {name: FileDigest(entry["size"], entry["sha256"]) for name, entry in content["files"].items()}
    return Manifest(content["step"], content["sequence"], tuple(content["roles"]), files)


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"
