"""The scoring process: it loads the reward function, then answers requests until its socket closes.

    trainer ──setup: (RewardConfig, seed)──► worker ──ready or failed────────────► trainer
    trainer ──(ticket, request)────────────► worker ──taken, then scored: JSON───► trainer

Requests are pickles, made by the trainer of its own rows. Answers are JSON (`answers.py`): the reward
function makes the values, so the trainer must not run what it reads. A thread reads the socket at all times;
where the trainer closes it, the worker ends, and its keeper ends all that the reward function started.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
from queue import SimpleQueue

from hybridflow.rewards.answers import encode, encode_outcome
from hybridflow.rewards.call import call, call_async, failure
from hybridflow.rewards.channel import frame, take_messages
from hybridflow.rewards.load import is_async
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.resolve import resolve
from hybridflow.rewards.table import RewardFunction

TICKET_BYTES = 8
_CHUNK = 1 << 20


class _TrainerEnd:
    """The worker's end of the socket: blocking writes, and a thread that reads into `inbox`."""

    def __init__(self, file_descriptor: int) -> None:
        # otherwise a process that the reward function starts would hold the socket open
        os.set_inheritable(file_descriptor, False)
        self._socket = socket.socket(fileno=file_descriptor)
        self._socket.setblocking(True)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def write(self, payload: bytes) -> None:
        """Send one message; end the process where the trainer is gone."""
        if os.getpid() != self._process:
            os._exit(1)  # a fork that the reward function made and let return: only the worker answers
        try:
            with self._lock:
                self._socket.sendall(frame(payload))
        except OSError:
            os._exit(1)

    def _read(self) -> None:
        buffer = bytearray()
        try:
            while chunk := self._socket.recv(_CHUNK):
                buffer += chunk
                for message in take_messages(buffer):
                    self.inbox.put(message)
        finally:  # the trainer closed the socket or is dead, or the reward function closed it
            os._exit(1)


def main(file_descriptor: int) -> None:
    """Serve on the inherited socket `file_descriptor`; return only if the function cannot be loaded."""
    trainer = _TrainerEnd(file_descriptor)
    config, seed = pickle.loads(trainer.inbox.get())
    try:
        function = resolve(config, seed)
    except BaseException as error:  # the user's file is imported here
        outcome = failure(error, 0.0)
        trainer.write(encode({"state": "failed", "error": outcome.error, "detail": outcome.detail}))
        return
    asynchronous = is_async(function)
    trainer.write(encode({"state": "ready", "is_async": asynchronous, "process_id": os.getpid()}))
    if asynchronous:
        asyncio.run(_serve_async(trainer, function, config.timeout))
    _serve(trainer, function)


def _serve(trainer: _TrainerEnd, function: RewardFunction) -> None:
    while True:
        message = trainer.inbox.get()
        ticket = _take(trainer, message)
        outcome = _request(message)
        if isinstance(outcome, ScoreRequest):
            outcome = call(function, outcome)
        trainer.write(encode_outcome(ticket, outcome))


async def _serve_async(trainer: _TrainerEnd, function: RewardFunction, timeout: float) -> None:
    async def answer(message: bytes) -> None:
        ticket = _take(trainer, message)
        outcome = _request(message)
        if isinstance(outcome, ScoreRequest):
            outcome = await call_async(function, outcome, timeout)
        trainer.write(encode_outcome(ticket, outcome))

    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    while True:
        task = loop.create_task(answer(await loop.run_in_executor(None, trainer.inbox.get)))
        tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(tasks.discard)


def _take(trainer: _TrainerEnd, message: bytes) -> int:
    """The ticket of a request, after telling the trainer that its scoring begins."""
    ticket = int.from_bytes(message[:TICKET_BYTES], "big")
    trainer.write(encode({"state": "taken", "ticket": ticket}))
    return ticket


def _request(message: bytes) -> ScoreRequest | Outcome:
    """The request in a message, or the error of a request that this process cannot read."""
    try:
        request: ScoreRequest = pickle.loads(message[TICKET_BYTES:])
    except Exception as error:  # a ground truth of a class that this process cannot import
        return failure(error, 0.0)
    return request
