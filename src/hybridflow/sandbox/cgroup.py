"""A control group for a worker: the kernel's own caps on the memory and the processes of all in it."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "hybridflow-sandbox"
_FILES = {  # controller: file of the cap in version 2, in version 1
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
}
_EVENTS = {  # controller: file and word that count how often the cap was hit
    "memory": (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill")),
    "pids": (("pids.events", "max"), ("pids.events", "max")),
}
_numbers = itertools.count()


class Cgroup:
    """Caps on a process and all that it starts, beneath the cgroup of this process."""

    def __init__(self, memory: int, processes: int) -> None:
        """Make the group; memory in bytes. Raises OSError where this user may not, or a controller is off."""
        self.folders: dict[str, Path] = {}
        name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        caps = {"memory": memory, "pids": processes}
        try:
            for controller, (parent, version) in parents().items():
                _sweep(parent)
                folder = parent / name
                folder.mkdir(exist_ok=True)
                self.folders[controller] = folder
                (folder / _FILES[controller][version == 1]).write_text(str(caps[controller]))
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Put a process into the group, before it starts others."""
        for folder in self.folders.values():
            (folder / "cgroup.procs").write_text(str(pid))

    def hits(self) -> dict[str, int]:
        """Return how often each cap was hit so far: processes killed for memory, forks refused."""
        found = {}
        for controller, folder in self.folders.items():
            found[controller] = 0
            for name, word in _EVENTS[controller]:
                with contextlib.suppress(OSError):
                    words = dict(line.split() for line in (folder / name).read_text().splitlines())
                    found[controller] = int(words.get(word, 0))
                    break
        return found

    def remove(self) -> None:
        """Remove the group; one whose processes have not all ended yet is left to a later sweep."""
        for folder in self.folders.values():
            with contextlib.suppress(OSError):
                folder.rmdir()


def parents() -> dict[str, tuple[Path, int]]:
    """Return for each controller the folder that groups can be made in, and its version. Raises OSError."""
    found: dict[str, tuple[Path, int]] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in _FILES:
            if controller in controllers.split(","):
                found[controller] = (ROOT / controller / path.lstrip("/"), 1)
            elif not controllers:
                found.setdefault(controller, (ROOT / path.lstrip("/"), 2))
    for controller, (folder, version) in found.items():
        if version == 2:
            # a group with processes in it has no children with caps, but may have siblings
            delegated = [each for each in (folder, folder.parent) if _has(each, controller)]
            if not delegated:
                raise OSError(f"the controller {controller} is not delegated in {folder}")
            found[controller] = (delegated[0], 2)
    if len(found) < len(_FILES):
        raise OSError("there is no cgroup for memory and processes")
    return found


def _has(folder: Path, controller: str) -> bool:
    """Whether groups in the folder get the controller. Raises OSError in a folder that is no group."""
    return controller in (folder / "cgroup.subtree_control").read_text().split()


def _sweep(parent: Path) -> None:
    """Remove empty groups that processes which are gone have left."""
    for folder in parent.glob(f"{PREFIX}-*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            with contextlib.suppress(OSError):
                for inner in folder.glob(f"{PREFIX}-*"):
                    inner.rmdir()
                folder.rmdir()
