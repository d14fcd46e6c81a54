"""Writing so that a machine may stop at any moment: what is seen under its final name is whole and on the
disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files below a folder, then all folders, inner ones first."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))


def replace_file(path: Path, text: str) -> None:
    """Give a file a new content at once: a reader sees the old one or the new one."""
    temporary = path.with_name(f".tmp_{path.name}_{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock file; gives False, without waiting, where a living process holds it.

    The system lets go of it with the process that held it, however that ended. Where the file system has no
    locks it is taken as free.
    """
    with path.open("a") as file:
        held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        try:
            yield held
        finally:
            if held:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)
