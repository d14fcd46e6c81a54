"""From the texts and messages of a request to token ids, after cheap checks of their number and length.

text ──check that it is Unicode and may fit──► a long one in slices, until they are too many tokens ──► ids

Separate threads turn requests into jobs: chat templates and tokenisation, away from the event loop.

    request ──run──► queue of short or of long requests ──thread of that queue──► job
        └── its client goes away ──► dropped from the queue, or stopped at its next `check`

The two queues keep one long text from holding up short ones. The threads are daemons and not
those of asyncio, which a process waits for when it ends: a tokenizer that is at work ends with the process.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hybridflow.data.tokenizer import Tokenizer, encode_prompt, encode_rendered
from hybridflow.rollout.base import is_unicode
from hybridflow.rollout.server.errors import ApiError, refuse
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.schema import MAX_CHOICES, ChatMessage, CompletionBody

ROLES = {"developer": "system"}
"""Roles of OpenAI's interface that chat templates know by another name."""
TEXT = frozenset({"text"})
SLICE = 2**16
"""Characters that are tokenised at once, before it is known that the text fits."""
CUT_TOKENS = 64
"""Tokens that a slice may have more than the same text has as a part of the whole: more than any cut makes.
"""
T = TypeVar("T")
Check = Callable[[], None]
"""Raises `Abandoned` where the job is not awaited any longer; called between parts of the work."""

LONG_BODY = 64 * 2**10
"""Bytes at which a request counts as long."""


def check_count(num_prompts: int, n: int) -> None:
    """Raise ApiError 400 where a request asks for too many responses."""
    if num_prompts * n > MAX_CHOICES:
        raise refuse(
            "n", f"{num_prompts} prompts times {n} responses are more than {MAX_CHOICES} in one request"
        )


def check_ids(param: str, ids: list[int], model: ServedModel) -> None:
    """Raise ApiError 400 for a token id that the model does not have."""
    wrong = next((token for token in ids if not 0 <= token < model.vocabulary), None)
    if wrong is not None:
        raise refuse(
            param, f"holds token id {wrong}, and the model's vocabulary is 0..{model.vocabulary - 1}"
        )


def completion_prompts(
    body: CompletionBody, model: ServedModel, check: Check
) -> tuple[list[str], list[list[int]]]:
    """Return the prompts as texts, where they are to be repeated (else none), and as ids."""
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not given:
        raise refuse("prompt", "is an empty list")
    if isinstance(given[0], int):
        given = [given]
    check_count(len(given), body.n)
    if not isinstance(given[0], list):
        encode = encode_prompt if body.add_special_tokens else encode_rendered
        ids = [encode_text("prompt", text, model, check, encode) for text in given]
        return (given if body.echo else []), ids
    check_ids("prompt", [token for prompt in given for token in prompt], model)
    if not body.echo:
        return [], given
    skip = body.skip_special_tokens
    return [str(model.tokenizer.decode(prompt, skip_special_tokens=skip)) for prompt in given], given


def encode_text(
    param: str,
    text: str,
    model: ServedModel,
    check: Check,
    encode: Callable[[Tokenizer, str], list[int]] = encode_rendered,
) -> list[int]:
    """Return the ids of a text; ApiError 400 for one that is no Unicode or longer than the model's context.

    The length is checked before the text is tokenised as a whole, which may take minutes for a text that
    cannot fit. `check` is called now and then; what it raises ends the work.
    """
    check()
    if not is_unicode(text):
        raise refuse(param, "holds half of a surrogate pair (such as \\ud800), which is no character")
    check_characters(param, len(text), model)
    if len(text) > SLICE:
        at_least = 0
        for start in range(0, len(text), SLICE):
            check()
            at_least += len(encode_rendered(model.tokenizer, text[start : start + SLICE])) - CUT_TOKENS
            if at_least > model.max_model_len:
                raise _too_long(param, at_least, model)
    return encode(model.tokenizer, text)


def check_characters(param: str, count: int, model: ServedModel) -> None:
    """Raise ApiError 400 for more characters than the longest tokens of the model's context have."""
    if count > model.max_model_len * model.longest_token:
        raise _too_long(param, -(-count // model.longest_token), model)


def _too_long(param: str, at_least: int, model: ServedModel) -> ApiError:
    return ApiError(
        400,
        f"{param}: the model's context has {model.max_model_len} tokens, and this text has at least "
        f"{at_least}: shorten it",
        param=param,
        code="context_length_exceeded",
    )


def joined_text(content: str | list[dict[str, Any]] | None, param: str, *, kinds: Set[str] = TEXT) -> str:
    """Return the text of a message whose content may be in parts; ApiError 400 for a part of another kind."""
    for part in content if isinstance(content, list) else ():
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise refuse(param, f"a part of type {part.get('type')!r} is not supported, only text is")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


@contextmanager
def template_errors_refused() -> Iterator[None]:
    """Raise ApiError 400 for whatever a chat template raises: it is a program of the model's."""
    try:
        yield
    except Exception as error:
        raise refuse("messages", f"the model's chat template does not take them: {error}") from error


def template_message(message: ChatMessage, place: int) -> dict[str, Any]:
    """Return a message as chat templates take it: its text as one string, arguments of calls as objects."""
    content = joined_text(message.content, f"messages[{place}].content")
    made: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": content}
    made |= message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    calls = []
    for call in message.tool_calls or ():
        name = call.function.name
        field = f"messages[{place}].tool_calls"
        try:
            arguments = json.loads(call.function.arguments)
        except RecursionError as error:
            raise refuse(field, f"arguments of {name!r} are no JSON: nested too deeply") from error
        except ValueError as error:
            raise refuse(field, f"arguments of {name!r} are no JSON: {error}") from error
        calls.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}})
    if calls:
        made["tool_calls"] = calls
    return made


class Abandoned(Exception):
    """The client of a request has gone away."""


@dataclass(eq=False)
class _Task(Generic[T]):
    """One request that is to be read, and who waits for it."""

    make: Callable[[Check], T]
    check_open: Check
    answer: Future[T] = field(default_factory=Future)
    abandoned: bool = False

    def work(self) -> None:
        """Make the job and hand it, or what was raised, to the event loop."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(self.make(self._check))
        except StopIteration as error:  # an awaitable cannot raise it, and the request would wait for ever
            told = RuntimeError(f"the chat template or the tokenizer raised {error!r}")
            self.answer.set_exception(told)
        except BaseException as error:
            self.answer.set_exception(error)

    def _check(self) -> None:
        if self.abandoned:
            raise Abandoned
        self.check_open()


class JobReaders:
    """The two queues and their threads; `run` is called in an event loop. `max_queue`: requests that may wait
    to be read; more are answered with 429. `check_open` raises where nothing more is to be read.
    """

    def __init__(self, max_queue: int, check_open: Check) -> None:
        self.num_open = 0
        """Requests that are read or wait for it."""
        self._max_queue = max_queue
        self._check_open = check_open
        self._short = self._queue("short")
        self._long = self._queue("long")

    async def run(self, make: Callable[[Check], T], num_bytes: int) -> T:
        """Return what `make` makes of a request of `num_bytes`, or raise what it raises.

        Who stops waiting (cancellation) takes the request out of the queue, or has `make` stop at its next
        check. ApiError 429 where too many requests wait.
        """
        if self.num_open >= self._max_queue:
            raise ApiError(
                429,
                f"{self.num_open} requests wait to be tokenised, the limit (--max-queue): try again later",
                code="queue_full",
            )
        task = _Task(make, self._check_open)
        tasks = self._short
        if num_bytes >= LONG_BODY:
            tasks = self._long
        self.num_open += 1
        try:
            tasks.put(task)
            return await asyncio.wrap_future(task.answer)
        finally:
            task.abandoned = True
            self.num_open -= 1

    def _queue(self, name: str) -> queue.SimpleQueue[_Task[Any]]:
        """Return a queue of requests, with a thread that reads one after the other."""
        tasks: queue.SimpleQueue[_Task[Any]] = queue.SimpleQueue()

        def work() -> None:
            while True:
                task = tasks.get()
                task.work()
                del task  # so that it is freed before the next one comes

        threading.Thread(target=work, name=f"read {name} requests", daemon=True).start()
        return tasks
