"""A root folder with the interpreter and its libraries in it, read-only, and nothing else of the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hybridflow.sandbox.system_calls import (
    AT_RECURSIVE,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    make_read_only,
    mount,
    pivot_root,
)

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")


def enter_private_root(folder: str, readable: Sequence[str]) -> None:
    """Build the root over an empty folder and move into it; this process is the first of its pid namespace.

    `readable` are folders, besides the system's libraries. Raises OSError.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    bound: list[str] = []
    # a folder comes before those in it
    for path in sorted({*readable, *LIBRARIES}):
        inside = any(path == each or path.startswith(each + "/") for each in bound)
        if not inside and os.path.lexists(path):
            _show(path, folder + path)
            bound.append(path)
    for path in DEVICES:
        Path(folder + path).parent.mkdir(exist_ok=True)
        Path(folder + path).touch()
        mount(path, folder + path, None, MS_BIND)
    for path in ("/proc", SCRATCH):
        Path(folder + path).mkdir()
    os.symlink(SCRATCH, folder + "/dev/shm")
    if not os.path.lexists(folder + "/tmp"):
        os.symlink(SCRATCH, folder + "/tmp")
    mount("proc", folder + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    make_read_only(folder, 0)
    pivot_root(folder)


def _show(path: str, place: str) -> None:
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        Path(place).mkdir(exist_ok=True)
    else:
        Path(place).touch()
    mount(path, place, None, MS_BIND | MS_REC)
    make_read_only(place, AT_RECURSIVE)


def mount_scratch(megabytes: int) -> None:
    """Give this process an empty scratch folder, and hide /proc; in its own mount namespace."""
    options = f"size={megabytes}m,nr_inodes=16k,mode=700"
    mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, options)
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,nr_inodes=1,mode=500")
