"""The init of one execution: it starts the program, collects what it prints, and ends it at its limits.

It is the first process of its pid namespace, so the program cannot end it, and whatever the program has
started ends with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

from hybridflow.sandbox import messages
from hybridflow.sandbox.private_root import mount_scratch
from hybridflow.sandbox.process_tree import TreeUsage, end_descendants, usage_of_descendants
from hybridflow.sandbox.program import MAIN, Room, run_program
from hybridflow.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, prctl

LOOK_SECONDS = 0.02
"""How often the memory and the processes of the program are checked."""
SHARE_OF_LOOKING = 0.1
"""Part of the time that these checks may take, where there are many processes."""


class _Output:
    """What comes through one pipe, up to a cap."""

    def __init__(self, cap: int) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.cap = cap
        self.data = bytearray()
        self.open = True

    @property
    def full(self) -> bool:
        return len(self.data) > self.cap

    def read(self) -> None:
        """Take what is there."""
        with contextlib.suppress(BlockingIOError):
            while self.open and not self.full:
                part = os.read(self.reading, 1 << 16)
                self.data += part
                self.open = bool(part)

    def text(self) -> str:
        return bytes(self.data[: self.cap]).decode("utf-8", errors="replace")


def run_execution(channel: socket.socket, room: Room, proc: int) -> None:
    """Read one request, run it and send the fields of its verdict; ends the process, or goes on as the
    program.

    The request is {code, stdin, files, arguments, limits, channel}; where `channel` is true, the file
    descriptor that the program gets as 3 comes after it. `proc` is a file descriptor of /proc as the fork
    server sees it.
    """
    request = messages.receive(channel)
    limits = request["limits"]
    given = socket.recv_fds(channel, 1, 1)[1] if request["channel"] else []
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if room.private:
        mount_scratch(limits["scratch_mb"])
    else:
        shutil.rmtree(room.scratch, ignore_errors=True)
        os.mkdir(room.scratch, 0o700)
    for name, content in {**request["files"], MAIN: request["code"]}.items():
        path = Path(room.scratch, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", errors="surrogatepass")
    outputs = [_Output(limits["output_kb"] << 10) for _ in range(2)]
    stdin = os.memfd_create("stdin")
    os.write(stdin, request["stdin"].encode("utf-8", errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    is_ready, ready = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        kept = [stdin, *(each.writing for each in outputs), *given, ready]
        for number, file_descriptor in enumerate(kept):
            os.dup2(file_descriptor, number)
        os.closerange(len(kept), os.sysconf("SC_OPEN_MAX"))
        run_program(request["code"], request["arguments"], limits, room, len(kept) - 1)
    for file_descriptor in (ready, *given, *(each.writing for each in outputs)):
        os.close(file_descriptor)
    watch = _Watch(child, outputs, limits, proc, began)
    stopped = watch.until_end(channel)
    fields = watch.fields(stopped)
    os.set_blocking(is_ready, False)
    if not stopped and not os.read(is_ready, 1):
        fields["status"] = "refused"
    if not room.private:
        end_descendants(os.getpid(), proc)
    messages.send(channel, fields)
    os._exit(0)


class _Watch:
    """Supervises one program."""

    def __init__(
        self, child: int, outputs: list[_Output], limits: dict[str, Any], proc: int, began: float
    ) -> None:
        self.child = child
        self.outputs = outputs
        self.limits = limits
        self.proc = proc
        self.began = began
        self.peak = 0
        self.cpu_s = 0.0
        self.own_pid = int(os.readlink("self", dir_fd=proc))

    def until_end(self, channel: socket.socket) -> str:
        """Wait until the program ends by itself ("") or is stopped, and return by which limit."""
        ended = os.pidfd_open(self.child)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(channel, select.POLLRDHUP)
        for each in self.outputs:
            poll.register(each.reading, select.POLLIN)
        deadline = self.began + self.limits["wall_s"]
        pause = LOOK_SECONDS
        look = self.began + pause
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timed_out"
            if now >= look:
                if stopped := self._look():
                    return stopped
                took = time.monotonic() - now
                pause = max(LOOK_SECONDS, took / SHARE_OF_LOOKING)
                look = now + took + pause
            wait = min(deadline, look) - time.monotonic()
            events = dict(poll.poll(max(0, int(wait * 1000) + 1)))
            for each in self.outputs:
                each.read()
                if each.full:
                    return "output_exceeded"
                if not each.open and each.reading in events:
                    poll.unregister(each.reading)
            if ended in events:
                return ""
            if channel.fileno() in events:
                return "lost"

    def _look(self) -> str:
        usage = usage_of_descendants(self.own_pid, self.proc)
        self._note(usage)
        if usage.memory > self.limits["memory_mb"] << 20:
            return "memory_exceeded"
        if usage.processes > self.limits["processes"]:
            return "process_exceeded"
        if usage.cpu_s > self.limits["cpu_s"]:
            return "cpu_exceeded"
        return ""

    def _note(self, usage: TreeUsage) -> None:
        self.peak = max(self.peak, usage.memory)
        self.cpu_s = max(self.cpu_s, usage.cpu_s)

    def fields(self, stopped: str) -> dict[str, Any]:
        """End what is left of the program, and return the fields of its verdict."""
        wall_s = time.monotonic() - self.began
        if stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGKILL)
        _, status, usage = os.wait4(self.child, 0)
        for each in self.outputs:
            each.read()
        exit_code = os.waitstatus_to_exitcode(status)
        self.cpu_s = max(self.cpu_s, usage.ru_utime + usage.ru_stime)
        peak = max(self.peak, usage.ru_maxrss << 10)
        return {
            "status": stopped or self._status(exit_code),
            "exit_code": None if stopped else exit_code,
            "stdout": self.outputs[0].text(),
            "stderr": self.outputs[1].text(),
            "cut": any(each.full for each in self.outputs),
            "wall_s": wall_s,
            "cpu_s": self.cpu_s,
            "peak_memory_mb": peak / (1 << 20),
        }

    def _status(self, exit_code: int) -> str:
        if any(each.full for each in self.outputs):
            return "output_exceeded"
        if exit_code == 0:
            return "ok"
        if exit_code == -signal.SIGXCPU or (exit_code < 0 and self.cpu_s >= self.limits["cpu_s"]):
            return "cpu_exceeded"
        if exit_code < 0:
            return "killed"
        last_line = self.outputs[1].text().rstrip().rpartition("\n")[2]
        if last_line.startswith("MemoryError"):
            return "memory_exceeded"
        return "raised"
