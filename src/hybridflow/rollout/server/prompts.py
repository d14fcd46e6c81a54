"""From the texts and messages of a request to token ids, after cheap checks of their number and length.

text ──check that it is Unicode and may fit──► a long one in slices, until they are too many tokens ──► ids

Separate threads turn requests into jobs: chat templates and tokenisation, away from the event loop.

    request ──run──► queue of short requests, of long ones or of pictures ──thread of that queue──► job
        └── its client goes away ──► dropped from the queue, or stopped at its next `check`

The queues keep one long text, and pictures, from holding up short texts; that of pictures has several
threads, so that a slow host does not hold up the pictures of others. The threads are daemons and not those of
asyncio, which a process waits for when it ends: a tokenizer that is at work ends with the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from hybridflow.data.pictures import FETCH_SECONDS, MOST_BYTES, MOST_SENT_PIXELS, MediaError, sent_file
from hybridflow.data.tokenizer import Tokenizer, encode_prompt, encode_rendered
from hybridflow.protocol.prompt import Medium, Prompt
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
PICTURE = "image_url"
"""Type of a part with a picture, in chat."""
NOTHING = Prompt(())
T = TypeVar("T")
Content = str | list[dict[str, Any]] | None
"""Content of a message: a text, or parts."""
Check = Callable[[], None]
"""Raises `Abandoned` where the job is not awaited any longer; called between parts of the work."""

MAX_PICTURES = 1024
"""Pictures of one request."""
MOST_PIXELS = 8 * MOST_SENT_PIXELS
"""Pixels of all pictures of one request."""
PICTURE_THREADS = 4
"""Requests with pictures that are read at once: the fetches of as many may be slow."""
DECODING = threading.Lock()
"""Held while a request's pictures are decoded: those of one take gigabytes at most."""
PICTURE_WORDS = re.compile(rb'"(image_url|input_image|image)"|\\u00[5-7]|\0')
"""What every body with a picture has: the type of its part, that with letters as numbers, or (UTF-16) a zero.
Quotes in a text do not count: in JSON a backslash stands before them.
"""

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
) -> tuple[list[str], list[Prompt]]:
    """Return the prompts as texts, where they are to be repeated (else none), and as ids."""
    texts, ids = _completion_ids(body, model, check)
    return texts, [picture_prompt("prompt", prompt, [], model, check) for prompt in ids]


def _completion_ids(
    body: CompletionBody, model: ServedModel, check: Check
) -> tuple[list[str], list[list[int]]]:
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
                raise too_long(param, at_least, model)
    return encode(model.tokenizer, text)


def check_characters(param: str, count: int, model: ServedModel) -> None:
    """Raise ApiError 400 for more characters than the longest tokens of the model's context have."""
    if count > model.max_model_len * model.longest_token:
        raise too_long(param, -(-count // model.longest_token), model)


def too_long(param: str, at_least: int, model: ServedModel, *, what: str = "this text") -> ApiError:
    """Return the 400 for a prompt that has `at_least` so many tokens, more than the model's context."""
    return ApiError(
        400,
        f"{param}: the model's context has {model.max_model_len} tokens, and {what} has at least "
        f"{at_least}: shorten it",
        param=param,
        code="context_length_exceeded",
    )


def joined_text(content: Content, param: str, *, kinds: Set[str] = TEXT, picture: str | None = None) -> str:
    """Return the text of a message whose content may be in parts; ApiError 400 for a part of another kind.

    `picture` is the type of parts that are taken elsewhere, which the message names.
    """
    for part in content if isinstance(content, list) else ():
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            taken = f"text and {picture} are" if picture else "text is"
            raise refuse(param, f"a part of type {part.get('type')!r} is not supported, only {taken}")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def chat_content(
    content: Content,
    param: str,
    picture: str,
    url_of: Callable[[Mapping[str, Any]], Any],
    *,
    kinds: Set[str] = TEXT,
) -> str | list[dict[str, Any]]:
    """Return a content of another interface as chat has it: a text or, where there are pictures, parts.

    `picture` is the interface's type of a part with a picture, and `url_of` gives its URL.
    """
    made: list[dict[str, Any]] = []
    for part in parts_with(picture, content):
        if part.get("type") == picture:
            made.append({"type": PICTURE, "image_url": {"url": url_of(part)}})
        else:
            text = joined_text([part], param, kinds=kinds, picture=picture)
            made.append({"type": "text", "text": text})
    return made or joined_text(content, param, kinds=kinds, picture=picture)


def parts_with(kind: str, content: Content) -> list[dict[str, Any]]:
    """Return the parts of a content of which one is of this type; none of any other content."""
    if isinstance(content, list) and any(part.get("type") == kind for part in content):
        return content
    return []


def text_in(content: Content) -> str:
    """Return the text of a content as chat templates take it, without its pictures."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


class SentPictures:
    """The pictures of one chat request, as they are found in its messages."""

    def __init__(self, model: ServedModel, check: Check) -> None:
        self.files: list[bytes] = []
        """In the order of their places."""
        self.digests: list[str] = []
        """Digests of the files."""
        self._model = model
        self._check = check
        self._pixels = 0
        self._ends = time.monotonic() + FETCH_SECONDS

    def content(self, content: Content, param: str) -> str | list[dict[str, str]]:
        """Return a content as chat templates take it, with a place for each picture, whose file is kept.

        ApiError 400 for a picture that cannot be taken, or that nobody here reads.
        """
        if parts := parts_with(PICTURE, content):
            return [
                self._take(part, f"{param}[{place}]")
                if part.get("type") == PICTURE
                else {"type": "text", "text": joined_text([part], param, picture=PICTURE)}
                for place, part in enumerate(parts)
            ]
        if self._model.reader is None:
            return joined_text(content, param)
        text = joined_text(content, param, picture=PICTURE)
        return text if self._model.takes_texts else [{"type": "text", "text": text}]

    def _take(self, part: Mapping[str, Any], param: str) -> dict[str, str]:
        reader = self._model.reader
        if reader is None:
            raise refuse(
                param,
                f"a part of type {PICTURE!r} is not supported, only text is: {self._model.pictures_refused}",
            )
        held = part.get("image_url")
        url = held.get("url") if isinstance(held, dict) else None
        if not isinstance(url, str):
            raise refuse(
                param,
                f"has no URL in 'image_url': wanted {{'type': {PICTURE!r}, 'image_url': {{'url': "
                "'data:image/png;base64,…'}}",
            )
        if len(self.files) == MAX_PICTURES:
            raise refuse(param, f"a request has at most {MAX_PICTURES} pictures: send fewer")
        self._check()
        try:
            left = self._ends - time.monotonic()
            file, pixels = sent_file(url, fetch=reader.config.fetch_media, seconds=left)
        except MediaError as error:
            raise refuse(param, str(error)) from error
        self._pixels += pixels
        if self._pixels > MOST_PIXELS:
            raise refuse(
                param,
                f"the pictures up to this one have {self._pixels} pixels, and those of a request at most "
                f"{MOST_PIXELS}: send fewer, or smaller ones",
            )
        if sum(map(len, self.files)) + len(file) > MOST_BYTES:
            told = (
                f"the pictures up to this one have more than {MOST_BYTES} bytes: send fewer, or smaller ones"
            )
            raise refuse(param, told)
        self.files.append(file)
        self.digests.append(hashlib.sha256(file).hexdigest())
        return {"type": "image"}


def picture_prompt(
    param: str,
    token_ids: Sequence[int],
    files: Sequence[bytes],
    model: ServedModel,
    check: Check,
    before: Prompt = NOTHING,
) -> Prompt:
    """Return a prompt that goes on behind `before`, with pictures in the places that its ids have for them.

    ApiError 400 where places and pictures are not as many, where a picture cannot be read, and where all is
    too long for the model's context, before a tensor is made of any picture: `picture_size` says what is
    decoded for that.
    """
    ids = list(token_ids)
    media: tuple[Medium, ...] = ()
    reader = model.reader
    if files or (reader is not None and reader.has_media(ids)):
        assert reader is not None, "without one no picture was taken"
        sources = reader.of_files(files)
        for whole in (False, True):
            with DECODING:
                check()  # its client may have gone while others decoded
                try:
                    reads = reader.read(sources, whole=whole)
                # a file may be made to do harm: decoders raise all sorts of errors
                except Exception as error:
                    told = f"a picture cannot be read ({error}): send another file, or leave it out"
                    raise refuse(param, told) from error
            try:
                expanded = reader.processor.expand(token_ids, ["image"] * len(reads), reads)
            except MediaError as error:
                mark = reader.processor.marks["image"]
                raise refuse(
                    param,
                    f"has {len(files)} pictures, and what the model reads of it another number of places for "
                    f"them ({mark}): leave {mark} out of texts, and send pictures in messages whose role the "
                    "chat template writes them for, such as 'user'",
                ) from error
            if len(before) + len(expanded.token_ids) > model.max_model_len:
                told = "the conversation with its pictures"
                raise too_long(param, len(before) + len(expanded.token_ids), model, what=told)
        ids = expanded.token_ids
        start = len(before)
        media = tuple(replace(medium, start=start + medium.start) for medium in expanded.media)
    return Prompt((*before.token_ids, *ids), (*before.media, *media))


@contextmanager
def template_errors_refused() -> Iterator[None]:
    """Raise ApiError 400 for whatever a chat template raises: it is a program of the model's."""
    try:
        yield
    except Exception as error:
        raise refuse("messages", f"the model's chat template does not take them: {error}") from error


def template_message(message: ChatMessage, place: int, pictures: SentPictures) -> dict[str, Any]:
    """Return a message as chat templates take it: its text as one string, or with places for its pictures,
    which are kept in `pictures`; arguments of calls as objects.
    """
    content = pictures.content(message.content, f"messages[{place}].content")
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
    """The three queues and their threads; `run` is called in an event loop. `max_queue`: requests that may
    wait to be read; more are answered with 429. `check_open` raises where nothing more is to be read. A
    request that is not read in `deadline_s` seconds is answered with 504; None: no limit.
    """

    def __init__(self, max_queue: int, check_open: Check, deadline_s: float | None) -> None:
        self.num_open = 0
        """Requests that are read or wait for it."""
        self._max_queue = max_queue
        self._check_open = check_open
        self._deadline_s = deadline_s
        self._short = self._queue("short")
        self._long = self._queue("long")
        self._pictures = self._queue("picture", PICTURE_THREADS)

    async def run(self, make: Callable[[Check], T], num_bytes: int, *, pictures: bool = False) -> T:
        """Return what `make` makes of a request of `num_bytes`, perhaps with `pictures`, or raise what it
        raises.

        Who stops waiting (cancellation, or the deadline: ApiError 504) takes the request out of the queue, or
        has `make` stop at its next check. ApiError 429 where too many requests wait.
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
        if pictures:
            tasks = self._pictures
        self.num_open += 1
        try:
            tasks.put(task)
            return await asyncio.wait_for(asyncio.wrap_future(task.answer), self._deadline_s)
        except TimeoutError as error:
            told = f"the request was not read within {self._deadline_s} s (--request-timeout of a server)"
            raise ApiError(504, told, code="deadline_passed") from error
        finally:
            task.abandoned = True
            self.num_open -= 1

    def _queue(self, name: str, threads: int = 1) -> queue.SimpleQueue[_Task[Any]]:
        """Return a queue of requests, with threads each of which reads one after the other."""
        tasks: queue.SimpleQueue[_Task[Any]] = queue.SimpleQueue()

        def work() -> None:
            while True:
                task = tasks.get()
                task.work()
                del task  # so that it is freed before the next one comes

        for _ in range(threads):
            threading.Thread(target=work, name=f"read {name} requests", daemon=True).start()
        return tasks
