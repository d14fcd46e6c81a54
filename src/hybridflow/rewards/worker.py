"""The scoring process: it loads the reward function, then answers requests until its socket closes.

    trainer ──setup: (RewardConfig, seed)──► worker ──ready or failed────────────► trainer
    trainer ──(ticket, request)────────────► worker ──taken, then scored: JSON───► trainer

Requests are pickles, made by the trainer of its own rows. Answers are JSON (`answers.py`): the reward
function makes the values, so the trainer must not run what it reads.
"""

from __future__ import annotations

import asyncio
import os
import pickle

from hybridflow.processes.channel import DriverEnd
from hybridflow.rewards.answers import encode, encode_outcome
from hybridflow.rewards.call import call, call_async, failure
from hybridflow.rewards.load import is_async
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.resolve import resolve
from hybridflow.rewards.table import RewardFunction

TICKET_BYTES = 8


def main(file_descriptor: int) -> None:
    """Serve on the inherited socket `file_descriptor`; return only if the function cannot be loaded."""
    trainer = DriverEnd(file_descriptor)
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


def _serve(trainer: DriverEnd, function: RewardFunction) -> None:
    while True:
        message = trainer.inbox.get()
        ticket = _take(trainer, message)
        outcome = _request(message)
        if isinstance(outcome, ScoreRequest):
            outcome = call(function, outcome)
        trainer.write(encode_outcome(ticket, outcome))


async def _serve_async(trainer: DriverEnd, function: RewardFunction, timeout: float) -> None:
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


def _take(trainer: DriverEnd, message: bytes) -> int:
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
