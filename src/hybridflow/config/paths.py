"""Paths and addresses as keys give them: with :// they are remote, ~ is the home folder."""

from __future__ import annotations

import re
from pathlib import Path

_PASSWORD = re.compile(r"(?<=://)[^/\s]*@")


def without_password(address: str) -> str:
    """Return an address without its user and password, for logs and for what others read."""
    return _PASSWORD.sub("…@", address)


def is_remote(path: str) -> bool:
    """Return whether an address is for fsspec (hdfs://, s3://, …) and no local path."""
    return "://" in path


def local(path: str) -> Path:
    """Return a local path with ~ expanded."""
    return Path(path).expanduser()


def is_written_as_path(path: str) -> bool:
    """Return whether a path can only be a local one, by the way it is written, and no name on a hub."""
    return path.startswith(("/", "./", "../", "~", "$")) or path.count("/") > 1 or path.endswith("/")


def unwritable(key: str, folder: str | Path, error: Exception) -> str:
    """Explain why the folder that a key is set to cannot be written, and what to do."""
    return f"{key}={why_unwritable(key, folder, error)}"


def why_unwritable(key: str, folder: str | Path, error: Exception) -> str:
    """Explain why a folder cannot be written, and what to do; `key` says where folders are set."""
    whole = local(str(folder)).absolute()
    for path in (whole, *whole.parents):
        if path.exists() and not path.is_dir():
            return (
                f"{folder} cannot be written: {path} is a file, and a folder is wanted there. Move the file, "
                f"or set {key} to another folder"
            )
    reason = getattr(error, "strerror", None) or error
    return f"{folder} cannot be written ({reason}): make room, or set {key} to a folder that you may write"
