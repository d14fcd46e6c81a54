"""The layers between a program and the machine: what each is for, and which a run may not be without."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IsolationLayer:
    """One layer, and what a program can do where it is missing."""

    what: str
    without: str
    needed: bool
    """Sandboxes refuse to start without it, unless it is given up by name."""


LAYERS = {
    "private_root": IsolationLayer(
        "a root folder with the interpreter and its libraries only, read-only",
        "a program may read and write this user's files, where Landlock does not keep it from them",
        needed=True,
    ),
    "namespaces": IsolationLayer(
        "its own processes, network (none), shared memory, host name and users",
        "a program sees other processes, may send signals to those of its user, and may leave some behind",
        needed=True,
    ),
    "other_uid": IsolationLayer(
        "a user id that nobody has",
        "a program has the id of this user",
        needed=False,
    ),
    "landlock": IsolationLayer(
        "rules on files, TCP and signals that a process cannot take back",
        "the private root alone keeps a program from files",
        needed=False,
    ),
    "seccomp": IsolationLayer(
        "system calls that no program needs fail: tracing, mounting, io_uring, sockets that are not local",
        "a program may use all of the kernel's system calls, with their faults",
        needed=True,
    ),
    "cgroup": IsolationLayer(
        "the kernel's caps on memory and processes",
        "rlimits of each process hold them, and a watchdog that looks 50 times a second",
        needed=False,
    ),
}


def missing_layers(reasons: dict[str, str], *, is_root: bool) -> list[str]:
    """Return the needed layers that are not active; `reasons` says for each why not, or is "".

    Root needs another uid: there, uid 0 would remain itself in any user namespace.
    """
    needed = [name for name, layer in LAYERS.items() if layer.needed or (name == "other_uid" and is_root)]
    return [name for name in needed if reasons.get(name, "not reported")]
