"""The scoring process: loads the reward function, then answers requests until its pipe closes.

    parent ──setup: (RewardConfig, seed)──► worker ──("ready", is_async) or ("failed", error type, text)──►
    parent ──(ticket, request)────────────► worker ──(ticket, Outcome)────────────────────────────────────►

Messages are pickles between two processes of one run. A thread reads the pipe at all times, so a parent never
blocks on a busy worker, and a worker whose parent is gone ends at once, with every process that the reward
function started.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

from hybridflow.rewards.call import call, call_async, failure
from hybridflow.rewards.load import is_async
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.resolve import resolve
from hybridflow.rewards.table import RewardFunction

TICKET_BYTES = 8
ORPHAN_GRACE = 10.0  # seconds past the deadline after which a worker that nobody killed ends itself


def main(file_descriptor: int) -> None:
    """Serve on the inherited socket `file_descriptor`; returns only if the reward function cannot be loaded."""
    # else a process that the reward function starts would hold the pipe open
    os.set_inheritable(file_descriptor, False)
    pipe = Connection(file_descriptor)
    config, seed = pickle.loads(pipe.recv_bytes())
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    try:
        function = resolve(config, seed)
    except BaseException as error:  # the user's file is imported here
        outcome = failure(error, 0.0)
        _send(pipe, ("failed", outcome.error, outcome.detail))
        return
    _send(pipe, ("ready", is_async(function), ""))
    if is_async(function):
        asyncio.run(_serve_async(pipe, inbox, function, config.timeout))
    _serve(pipe, inbox, function, config.timeout)


def _read(pipe: Connection, inbox: SimpleQueue[bytes]) -> None:
    try:
        while True:
            inbox.put(pipe.recv_bytes())
    except (EOFError, OSError):  # the parent closed the pipe, or is dead
        _end_group()


def _end_group() -> None:
    """End this process and what the reward function started (they share its process group)."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _serve(pipe: Connection, inbox: SimpleQueue[bytes], function: RewardFunction, timeout: float) -> None:
    while True:
        message = inbox.get()
        # Should the parent die while a function hangs inside C code, the reader thread never runs: this timer
        # needs no interpreter.
        faulthandler.dump_traceback_later(min(timeout, 1e6) + ORPHAN_GRACE, exit=True, file=2)
        request = _decode(message)
        outcome = call(function, request) if isinstance(request, ScoreRequest) else request
        faulthandler.cancel_dump_traceback_later()
        _send(pipe, (message[:TICKET_BYTES], outcome))


async def _serve_async(
    pipe: Connection, inbox: SimpleQueue[bytes], function: RewardFunction, timeout: float
) -> None:
    async def answer(message: bytes) -> None:
        request = _decode(message)
        outcome = (
            await call_async(function, request, timeout) if isinstance(request, ScoreRequest) else request
        )
        _send(pipe, (message[:TICKET_BYTES], outcome))

    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    while True:
        task = loop.create_task(answer(await loop.run_in_executor(None, inbox.get)))
        tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(tasks.discard)


def _decode(message: bytes) -> ScoreRequest | Outcome:
    try:
        request: ScoreRequest = pickle.loads(message[TICKET_BYTES:])
    except Exception as error:  # a ground truth of a class that this process cannot import
        return failure(error, 0.0)
    return request


def _send(pipe: Connection, message: tuple[object, ...]) -> None:
    try:
        pipe.send_bytes(pickle.dumps(message))
    except OSError:  # the parent is gone
        _end_group()
