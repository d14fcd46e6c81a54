"""Programs of the model, run behind the kernel's layers by warm workers: what rewards and tools use.

with SandboxPool(config.reward.sandbox) as pool:
    verdict = pool.run("print(input())", stdin="5")     # Verdict(status="ok", stdout="5\\n", ...)
    verdict = await pool.run_async("print(1)")
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import queue
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Self

import hybridflow
from hybridflow.config.reward import SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.sandbox import messages
from hybridflow.sandbox.cgroup import Cgroup
from hybridflow.sandbox.layers import LAYERS, missing_layers
from hybridflow.sandbox.verdict import Limits, Verdict

START_SECONDS = 60.0
"""Seconds in which a worker must be there."""
GRACE_SECONDS = 20.0
"""Seconds beyond an execution's wall time in which its verdict must be there."""
END_SECONDS = 10.0
"""Seconds in which a worker must end by itself, before it is killed."""
OWN_MEMORY_MB = 64
"""MiB of a worker's own processes in its cgroup, besides a program's memory and scratch folder."""
OWN_PROCESSES = 12
"""Processes of a worker's own in its cgroup, and those above a program's limit that show it goes beyond."""
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hybridflow.sandbox.fork_server import main; "
    "main(int(sys.argv[2]))"
)


def limits_of(config: SandboxConfig) -> Limits:
    """Return the limits that the keys set."""
    return Limits(
        wall_s=config.timeout,
        cpu_s=config.cpu_time,
        memory_mb=config.memory_limit_mb,
        address_space_mb=config.address_space_mb,
        processes=config.max_processes,
        output_kb=config.max_output_kb,
        scratch_mb=config.scratch_mb,
    )


class Sandbox:
    """One warm worker, which runs one program at a time. It is started when it is first needed.

    Raises ConfigError at its start where a needed layer is missing and not given up.
    """

    def __init__(self, config: SandboxConfig | None = None, *, cgroup: bool = True) -> None:
        """Take the keys; `cgroup=False` does without the kernel's groups, for tests."""
        self.config = config or SandboxConfig()
        self.limits = limits_of(self.config)
        self._with_cgroup = cgroup
        self._lock = threading.Lock()
        self._worker: _ForkServer | None = None

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        limits: Limits | None = None,
        channel: socket.socket | None = None,
    ) -> Verdict:
        """Run a Python program to its end and return how it ended; no program makes this raise.

        The program is `main.py` in an empty folder with `files` (relative path -> text). Of `limits`, what is
        above those of the keys counts as theirs. `channel` is file descriptor 3 of the program, and is closed
        here: an end of a pair of sockets, whose other end a program in another sandbox may have.
        """
        with self._lock, channel or contextlib.nullcontext():
            limits = limits or self.limits
            least = {
                name: min(value, getattr(self.limits, name))
                for name, value in dataclasses.asdict(limits).items()
            }
            for name in files or {}:
                if problem := _problem_of_path(name):
                    return Verdict("refused", stderr=f"the file {name!r}: {problem}")
            request = {
                "code": code,
                "stdin": stdin,
                "files": dict(files or {}),
                "arguments": list(arguments),
                "limits": least,
            }
            worker = self._started()
            verdict = worker.run(request, channel)
            if not worker.usable:
                self._worker = None
                worker.close()
            return verdict

    def layers(self) -> dict[str, str]:
        """Return for each layer why it is not active, or "". Raises ConfigError like `run`."""
        with self._lock:
            return self._started().layers

    def close(self) -> None:
        """End the worker, with whatever runs in it."""
        with self._lock:
            if self._worker:
                self._worker.close()
                self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _started(self) -> _ForkServer:
        if self._worker is None:
            worker = _start(self.limits, cgroup=self._with_cgroup)
            try:
                _refuse_missing(worker.layers, self.config.give_up)
            except ConfigError:
                worker.close()
                raise
            self._worker = worker
        return self._worker


class SandboxPool:
    """`num_workers` sandboxes. Safe to use from several threads; executions beyond the workers wait."""

    def __init__(self, config: SandboxConfig | None = None, *, num_workers: int = 2) -> None:
        self._all = [Sandbox(config) for _ in range(num_workers)]
        self._free: queue.LifoQueue[Sandbox] = queue.LifoQueue()  # the warmest first
        for each in self._all:
            self._free.put(each)
        self._threads = ThreadPoolExecutor(len(self._all), thread_name_prefix="sandbox")

    def run(self, code: str, **request: Any) -> Verdict:
        """Run a program in the next free sandbox, see `Sandbox.run`."""
        sandbox = self._free.get()
        try:
            return sandbox.run(code, **request)
        finally:
            self._free.put(sandbox)

    async def run_async(self, code: str, **request: Any) -> Verdict:
        """Run a program without holding up the event loop."""
        call = functools.partial(self.run, code, **request)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def layers(self) -> dict[str, str]:
        """Return for each layer why it is not active, or "". Raises ConfigError where too few are."""
        return self._all[0].layers()

    def close(self) -> None:
        """End all workers after their running programs."""
        self._threads.shutdown(cancel_futures=True)
        for each in self._all:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _ForkServer:
    """A fork server that runs, and the socket to it."""

    def __init__(self, limits: Limits, *, private: bool, cgroup: bool) -> None:
        self.folder = tempfile.mkdtemp(prefix="hybridflow-sandbox-")
        self.usable = True
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.layers = dict.fromkeys(LAYERS, "")
        self.cgroup: Cgroup | None = None
        try:
            if cgroup:
                memory = limits.memory_mb + limits.scratch_mb + OWN_MEMORY_MB
                self.cgroup = Cgroup(memory << 20, limits.processes + OWN_PROCESSES)
            else:
                self.layers["cgroup"] = "not asked for"
        except OSError as error:
            self.layers["cgroup"] = str(error)
        self.socket, theirs = socket.socketpair()
        source = str(Path(hybridflow.__file__).parent.parent)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START, source, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                cwd="/",
                env={"LANG": "C.UTF-8"},
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _end, self.process, self.socket, self.folder, self.cgroup)
        self.socket.settimeout(START_SECONDS)
        site_packages = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
        plan = {
            "readable": _readable(site_packages),
            "site_packages": site_packages,
            "folder": self.folder,
            "private": private,
        }
        try:
            self._enter_cgroup()
            messages.send(self.socket, plan)
            self.layers |= messages.receive(self.socket)["layers"]
            if private:  # the root is built, and needs its folder no more; else the worker removes it
                shutil.rmtree(self.folder, ignore_errors=True)
        except (OSError, EOFError) as error:
            self.errors.seek(0)
            said = self.errors.read().decode(errors="replace").strip()
            self.close()
            raise ConfigError(
                f"the sandbox for programs did not start on this machine: {said or error}; see "
                "`hybridflow doctor`, or use a remote sandbox"
            ) from error

    def _enter_cgroup(self) -> None:
        if self.cgroup:
            try:
                self.cgroup.add(self.process.pid)
            except OSError as error:  # groups may be made here, but processes not moved
                self.layers["cgroup"] = str(error)
                self.cgroup = None

    def run(self, request: dict[str, Any], channel: socket.socket | None) -> Verdict:
        """Run one request. Afterwards `usable` is False if the worker must be replaced."""
        before = self._hits()
        self.usable = False
        fields: dict[str, Any] = {
            "status": "lost",
            "stderr": "the init of the execution ended without a verdict",
        }
        try:
            self.socket.settimeout(request["limits"]["wall_s"] + GRACE_SECONDS)
            messages.send(self.socket, {**request, "channel": channel is not None})
            if channel:
                # no other process holds this end, so that the other one closes when the program has ended
                socket.send_fds(self.socket, [b"1"], [channel.fileno()])
                channel.close()
            answer = messages.receive(self.socket)
            if "ended" not in answer:
                fields = answer
                messages.receive(self.socket)
                self.usable = True
        except (OSError, EOFError, ValueError, TypeError) as error:
            fields = {"status": "lost", "stderr": f"{type(error).__name__}: {error}"}
        if fields["status"] in ("killed", "raised", "lost"):
            for controller, status in (("memory", "memory_exceeded"), ("pids", "process_exceeded")):
                if self._hits()[controller] > before[controller]:
                    fields["status"] = status
                    break
        return Verdict(**fields)

    def _hits(self) -> dict[str, int]:
        if self.cgroup is None:
            return {"memory": 0, "pids": 0}
        return self.cgroup.hits()

    def close(self) -> None:
        """End the worker."""
        self._finalizer()
        self.errors.close()


def _end(
    process: subprocess.Popen[bytes], channel: socket.socket, folder: str, cgroup: Cgroup | None
) -> None:
    # the worker ends by itself, with all that is below it, when the other end is closed
    channel.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    if cgroup:
        cgroup.remove()


def _start(limits: Limits, *, cgroup: bool) -> _ForkServer:
    """Start a worker with as many layers as there are here, and note why the others are not."""
    if sys.platform != "linux":
        raise ConfigError(f"the sandbox needs Linux, this is {sys.platform}: use a remote sandbox")
    worker = _ForkServer(limits, private=True, cgroup=cgroup)
    reasons = {name: worker.layers[name] for name in ("private_root", "namespaces")}
    if any(reasons.values()):
        worker.close()
        worker = _ForkServer(limits, private=False, cgroup=cgroup)
        worker.layers |= reasons
    return worker


def _refuse_missing(layers: dict[str, str], give_up: Sequence[str]) -> None:
    missing = missing_layers(layers, is_root=os.geteuid() == 0)
    refused = [name for name in missing if name not in give_up]
    if refused:
        why = "; ".join(f"{name} ({layers[name]}), without which {LAYERS[name].without}" for name in refused)
        raise ConfigError(
            f"programs of the model are not run here, because layers of the sandbox are missing: {why}. Use "
            "another machine or a remote sandbox, or do without by naming them: reward.sandbox.give_up="
            f"[{','.join([*give_up, *refused])}]"
        )


def find_layers() -> dict[str, str]:
    """Return for each layer why it is not active on this machine, or "", whatever is needed of them."""
    try:
        worker = _start(Limits(), cgroup=True)
    except (ConfigError, OSError) as error:
        return dict.fromkeys(LAYERS, str(error))
    worker.close()
    return worker.layers


def _readable(site_packages: Sequence[str]) -> list[str]:
    """Return the folders of the interpreter and its packages."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *site_packages}
    found |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return sorted(str(Path(each).resolve()) for each in found if each) + sorted(found)


def _problem_of_path(name: str) -> str:
    path = PurePosixPath(name)
    if not name or "\0" in name:
        return "it is no path"
    if path.is_absolute() or ".." in path.parts:
        return "its path must be relative and stay in the folder"
    return ""
