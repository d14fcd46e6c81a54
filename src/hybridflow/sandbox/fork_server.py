"""The process that waits in the private root, with Python loaded, and forks for each execution.

    launcher ──namespaces──► fork server (first of its pid namespace, another uid, no program runs in it)
                                └── for each request: a pid and a mount namespace ──► init of the execution

Runs in a fresh interpreter with the standard library only. It never reads a request: the init of the
execution does, so that no execution finds anything of another in its memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pwd
import select
import shutil
import signal
import site
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from hybridflow.sandbox import landlock, messages, seccomp
from hybridflow.sandbox.execution import run_execution
from hybridflow.sandbox.private_root import DEVICES, LIBRARIES, SCRATCH, enter_private_root
from hybridflow.sandbox.process_tree import end_descendants
from hybridflow.sandbox.program import Room
from hybridflow.sandbox.system_calls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_KEEPCAPS,
    PR_SET_PDEATHSIG,
    prctl,
    set_capabilities,
    unshare,
)

UIDS = range(64999, 61184, -1)
"""The range to search for an unused uid: above those of people and services, below the user `nobody`."""
_SYS_ADMIN = 1 << 21
_MODULES = (
    "base64 bisect collections copy dataclasses datetime decimal fractions functools heapq io itertools"
)
_MODULES += " json math operator pickle random re statistics string textwrap time traceback typing"


def main(file_descriptor: int) -> None:
    """Serve on an inherited socket. The first message says what to build, the answer which layers there are.

    It is {readable, site_packages, folder, private}, the answer {layers: name -> why it is not active or ""}.
    """
    channel = socket.socket(fileno=file_descriptor)
    plan = messages.receive(channel)
    layers = {"private_root": "not asked for", "namespaces": "not asked for"}
    if os.geteuid() != 0:
        uid = 0
    else:
        taken = {entry.pw_uid for entry in pwd.getpwall()}
        uid = next(uid for uid in UIDS if uid not in taken)
    if plan["private"]:
        try:
            _enter_namespaces()
        except OSError as error:
            layers["namespaces"] = str(error)
            layers["private_root"] = "it needs namespaces"
            messages.send(channel, {"layers": layers})
            return
        if child := os.fork():
            channel.close()
            os.waitpid(child, 0)
            return
        try:
            enter_private_root(plan["folder"], plan["readable"])
        except OSError as error:
            layers["private_root"] = str(error)
            layers["namespaces"] = "it needs the private root"  # a worker without one is in none
            messages.send(channel, {"layers": layers})
            return
        layers |= {"private_root": "", "namespaces": ""}
        room = Room([*plan["readable"], *LIBRARIES], [*DEVICES, SCRATCH], SCRATCH, private=True)
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        scratch = os.path.join(plan["folder"], "scratch")
        if not all(folder.stat().st_mode & 0o001 for folder in Path(os.__file__).resolve().parents):
            uid = 0
        if uid:
            os.chown(plan["folder"], uid, uid)
        room = Room([*plan["readable"], *LIBRARIES], [*DEVICES, scratch], scratch, private=False)
    layers["other_uid"] = _become(uid, private=plan["private"])
    # the programs may have the same uid, and must not look into this process
    prctl(PR_SET_DUMPABLE, 0)
    if plan["private"]:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of uid would take it away
    room.limit_processes = plan["private"] or bool(uid)
    layers |= _probe(room)
    room.landlock = not layers["landlock"]
    room.seccomp = not layers["seccomp"]
    sys.path += plan["site_packages"]
    for name in _MODULES.split():
        __import__(name)
    site.setquit()
    site.sethelper()
    gc.freeze()  # a collection in a program would copy what is shared with this process
    messages.send(channel, {"layers": layers})
    with contextlib.suppress(OSError):  # the other side has ended in the middle of an execution
        _serve(channel, room)
    if not plan["private"]:
        shutil.rmtree(plan["folder"], ignore_errors=True)


def _enter_namespaces() -> None:
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if os.geteuid() == 0:
        unshare(flags)
        return
    uid = os.geteuid()
    gid = os.getegid()
    unshare(flags | CLONE_NEWUSER)
    _map(uid, gid)


def _map(uid: int, gid: int) -> None:
    """Keep the ids of this process in its new user namespace."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _become(uid: int, *, private: bool) -> str:
    """Change from root to an unused uid, for good, and return why not otherwise.

    With `private`, in its own user namespace: there the process may still mount, and its children are
    counted apart from what else has the uid.
    """
    if not uid:
        return "only root can change to another uid, and only where others may read the interpreter's folder"
    if private:
        prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if private:
        set_capabilities(_SYS_ADMIN)
        prctl(PR_SET_DUMPABLE, 1)
        unshare(CLONE_NEWUSER)
        _map(uid, uid)
    return ""


def _probe(room: Room) -> dict[str, str]:
    """Probe in a separate process which of the layers that a program gets at its start are available."""
    found = {}
    steps: dict[str, Callable[[], None]] = {
        "landlock": lambda: landlock.restrict(room.readable, room.writable),
        "seccomp": seccomp.install,
    }
    for name, step in steps.items():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                step()
            except (OSError, KeyError) as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            found[name] = pipe.read()
        if os.waitpid(child, 0)[1]:
            found[name] = "a process under it was killed"
    return found


def _serve(channel: socket.socket, room: Room) -> None:
    proc = os.open("/proc", os.O_RDONLY)
    while True:
        select.select([channel], [], [])
        if not channel.recv(1, socket.MSG_PEEK):
            return
        child = os.fork()
        if child == 0:
            if not room.private:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                run_execution(channel, room, proc)
            unshare(CLONE_NEWPID | CLONE_NEWNS)
            if os.fork() == 0:
                run_execution(channel, room, proc)
            os._exit(0)
        os.waitpid(child, 0)
        if not room.private:
            end_descendants(os.getpid(), proc)
            shutil.rmtree(room.scratch, ignore_errors=True)
        with contextlib.suppress(ChildProcessError):
            while True:  # the init of the execution, which takes all of its processes along
                os.waitpid(-1, 0)
        messages.send(channel, {"ended": True})
