"""Conversations for supervised fine-tuning: rows in, token ids and their loss mask out.

    {messages} or {prompt, response} ──► text and the spans that the assistant wrote
    {text} ──► plain text, all of it learned
                                     ──► SFTRow(input_ids, loss_mask)

The model learns the tokens that the assistant has to generate: its text and the end token after it, and
nothing of a template's decoration. Rows are tokenised once, while the dataset is built, so that rows that
cannot be used are counted and shown before training.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config.data import SFTDataConfig
from hybridflow.data.chat_template import BREAK, ChatTemplate, Tools
from hybridflow.data.files import RaggedInts, Row, Rows, as_rows
from hybridflow.data.media import MediaReader, MediaSource
from hybridflow.data.messages import Message, check_messages, check_tools, prompt_of
from hybridflow.data.pictures import MediaError
from hybridflow.data.prompts import truncate
from hybridflow.data.row_report import RowReport
from hybridflow.data.row_schema import plain_text, require_conversations
from hybridflow.data.tokenizer import Tokenizer, check_template, encode_prompt, encode_rendered, render_marked
from hybridflow.errors import DataError
from hybridflow.protocol.prompt import Medium

logger = logging.getLogger(__name__)

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class SFTRow:
    """One conversation: token ids, and 1 on those to learn; `index` is the row of the data."""

    input_ids: list[int]
    loss_mask: list[int]
    index: int
    media: tuple[Medium, ...] = ()
    """The pictures and videos among the tokens."""


Encoded = tuple[list[int], list[int]]
"""Token ids of a conversation, and 1 on those to learn."""


class SFTDataset:
    """The conversations of `rows` that can be used; item i is an SFTRow.

    Takes the column `data.messages_key` where there is one, else `data.prompt_key` (a templated string or
    messages) and `data.response_key`; the plain text of `data.text_key` where that is set. Raises DataError
    for missing columns, conversations over `data.max_length` with `truncation=error`, no usable row.
    """

    def __init__(self, rows: Rows | Sequence[Row], tokenizer: Tokenizer, config: SFTDataConfig) -> None:
        self.rows = as_rows(rows)
        self._kept: list[int] = []
        self._ids = RaggedInts()
        self._mask = RaggedInts()
        if not len(self.rows):
            raise DataError(f"{self.rows.source} has no rows")
        column = require_conversations(self.rows, config)
        encoder = ConversationEncoder(self.rows, tokenizer, config, column, media=True)
        self.encoder = encoder
        self.report = RowReport(self.rows.source, len(self.rows))
        for index, [(ids, mask)] in usable_rows(self.rows, self.report, encoder.encode_alone, config):
            self._kept.append(index)
            self._ids.append(ids)
            self._mask.append(mask)
        self.num_overlong = len(self.report.overlong)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, position: int) -> SFTRow:
        ids = self._ids[position]
        index = self._kept[position]
        media: tuple[Medium, ...] = ()
        if self.encoder.has_media(ids):
            media = self.encoder.media(self.rows[index], ids)
        return SFTRow(ids, self._mask[position], index, media)


def usable_rows(
    rows: Rows, report: RowReport, encode: Callable[[Row], list[Encoded]], config: SFTDataConfig
) -> Iterator[tuple[int, list[Encoded]]]:
    """Yield (index, conversations) of each row of which `encode` makes conversations with something to learn.

    Conversations over `data.max_length` are handled as `data.truncation` says. What is left out is counted
    in `report`, which is closed at the end.
    """
    limit = config.max_length
    num_kept = 0
    for index, found in report.encoded(rows, lambda _, row: encode(row)):
        reason = "the assistant says nothing"
        if report.is_overlong(index, max(len(ids) for ids, _ in found), limit):
            # error: all of them are named once all rows are read
            if config.truncation in ("drop", "error"):
                continue
            found = [
                (truncate(ids, limit, config.truncation), truncate(mask, limit, config.truncation))
                for ids, mask in found
            ]
            reason = "nothing left to learn after truncation"
        # the first token has nothing before it to be predicted from
        if not all(any(mask[1:]) for _, mask in found):
            report.failed(index, reason)
            continue
        num_kept += 1
        yield index, found
    if report.overlong:
        text = report.overlong_rows("conversations", "data.max_length", limit)
        if config.truncation == "error":
            raise DataError(f"{text}; raise it, or set data.truncation=left, right or drop")
        if not num_kept:
            raise DataError(
                f"{text}, and data.truncation={config.truncation} leaves none; raise data.max_length"
            )
        done = f"cut (data.truncation={config.truncation})"
        if config.truncation == "drop":
            done = "dropped"
        logger.warning("%s: %s", text, done)
    report.close()


class ConversationEncoder:
    """Makes token ids and masks of the conversations in `rows`, which stand in `messages_column`; None: in
    `data.prompt_key` and `data.response_key`. Pictures and videos are read with `media`, else refused.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        config: SFTDataConfig,
        messages_column: str | None,
        *,
        media: bool = False,
    ) -> None:
        self.source = rows.source
        self.tokenizer = tokenizer
        self.config = config
        self.messages_column = messages_column
        self._ignores_tools = False
        self.reader: MediaReader | None = None
        self._whole = False  # token ids and masks need no more of a picture than its size
        self._media: tuple[Medium, ...] = ()  # of the conversation that was encoded last, where `_whole`
        if media:
            self.reader = MediaReader.for_rows(rows, tokenizer, config)
        else:
            rows.refuse_media("answers are compared by their text alone")
        if config.text_key is None:
            first = rows[0].get(config.prompt_key)
            wrap = config.wrap_prompts or messages_column is not None
            check_template(tokenizer, rows.source, first, wrap=wrap, use="are learned")

    def encode_alone(self, row: Row) -> list[Encoded]:
        """Return the one conversation of a row."""
        return [self.encode(row)]

    def has_media(self, ids: Sequence[int]) -> bool:
        """Return whether a conversation has pictures or videos, by its token ids."""
        return self.reader is not None and self.reader.has_media(ids)

    def media(self, row: Row, ids: Sequence[int]) -> tuple[Medium, ...]:
        """Return the pictures and videos of a row whose token ids are known; MediaError as `encode`."""
        assert self.reader is not None, "there are media where they are read"
        self._whole = True
        try:
            self.encode(row)
        finally:
            self._whole = False
        self.reader.check_places(ids, self._media)
        return self._media

    def encode(self, row: Row) -> Encoded:
        """Return token ids and loss mask of a row; TypeError or ValueError where it is no conversation."""
        config = self.config
        if self.messages_column is not None:
            return self.conversation(check_messages(row[self.messages_column], media=self._reads), row)
        if config.text_key is not None:
            return encode_text(self.tokenizer, plain_text(row, config.text_key))
        response = row[config.response_key]
        if not isinstance(response, str):
            raise TypeError(f"{config.response_key} is {type(response).__name__}, wanted a string")
        return self.answer(response, row)

    def answer(self, response: str, row: Row) -> Encoded:
        """Return the row's prompt and a response to it; TypeError or ValueError where it has no prompt."""
        config = self.config
        prompt: str | list[Message] = ""
        if row[config.prompt_key] != "" or config.wrap_prompts:
            prompt = prompt_of(row[config.prompt_key], wrap=config.wrap_prompts, media=self._reads)
        if isinstance(prompt, str):
            pair = encode_pair(self.tokenizer, prompt, response)
            return self._with_media(*pair, self.reader.of_text(row) if self.reader else [])
        return self.conversation([*prompt, {"role": "assistant", "content": response}], row)

    def conversation(self, messages: Sequence[Message], row: Row) -> Encoded:
        """Return a conversation with the row's tools; raises what `encode_conversation` does."""
        options = dict(self.config.apply_chat_template_kwargs)
        thinking = row.get(self.config.enable_thinking_key)
        if thinking is not None:
            options["enable_thinking"] = bool(thinking)
        sources: list[MediaSource] = []
        if self.reader is not None:
            messages, sources = self.reader.in_parts(messages, row)
        template = ChatTemplate(self.tokenizer, options)
        ids, mask = encode_conversation(template, messages, self._tools(row))
        return self._with_media(ids, mask, sources)

    @property
    def _reads(self) -> bool:
        return self.reader is not None

    def _with_media(self, ids: list[int], mask: list[int], sources: Sequence[MediaSource]) -> Encoded:
        """Return ids and mask with the tokens of pictures, which are never learned."""
        if self.reader is None:
            return ids, mask
        expanded = self.reader.expand(ids, sources, whole=self._whole)
        mask = expanded.spread(mask)
        self._media = expanded.media
        tokens = zip(expanded.token_ids, mask, strict=True)
        if any(learned and token in self.reader.processor.placeholders for token, learned in tokens):
            raise MediaError("the assistant writes a picture or a video, and only texts are learned")
        long = len(expanded.token_ids)
        if sources and long > self.config.max_length and self.config.truncation in ("left", "right"):
            raise MediaError(
                f"it has {long} tokens with its pictures, and data.truncation={self.config.truncation} would "
                "cut the places of pictures: raise data.max_length"
            )
        return expanded.token_ids, mask

    def _tools(self, row: Row) -> list[dict[str, Any]]:
        """Return the tools of a row; a text that is no JSON counts where the user has named its column."""
        key = self.config.tools_key
        tools = row.get(key) or []
        try:
            return check_tools(tools)
        except json.JSONDecodeError as error:
            if key != SFTDataConfig().tools_key:
                raise ValueError(f"{key} is text that is no JSON: {error}") from error
            if not self._ignores_tools:
                self._ignores_tools = True
                logger.warning(
                    "%s has a column %s with text that is no JSON (%.40r): it is left out where it is; "
                    "data.tools_key names the column with the tools",
                    self.source,
                    key,
                    tools,
                )
            return []


def encode_pair(tokenizer: Tokenizer, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """Return the token ids and the loss mask of a templated prompt and its response.

    They are tokenised apart, as in generation, and closed by the end token exactly once. Raises ValueError
    for an empty response or a tokenizer without an end token.
    """
    if not response:
        raise ValueError("the response is empty")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end token to close the response with")
    prompt_ids = []
    if prompt:
        prompt_ids = encode_prompt(tokenizer, prompt)
    ids = encode_rendered(tokenizer, response)
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(int(tokenizer.eos_token_id))
    return prompt_ids + ids, [0] * len(prompt_ids) + [1] * len(ids)


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a plain text, with the tokenizer's first token where it has one and closed by
    the end token exactly once, and a mask that learns all of them but the first token.

    Raises ValueError for a tokenizer without an end token.
    """
    ids, mask = encode_pair(tokenizer, "", text)
    first = tokenizer.bos_token_id
    started = encode_prompt(tokenizer, text)[:1] == [first]
    if started and ids[:1] != [first]:
        ids = [int(first), *ids]
        mask = [0, *mask]
    return ids, mask


def encode_conversation(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation by the chat template, and a mask, 1 on the assistant's.

    Where the template marks these tokens ({% generation %}) its marks count; else they are the text that each
    assistant turn adds to the text rendered before it. Where the template rewrites earlier turns (those of
    Qwen3 take thoughts away), the ids are those that a rollout of several turns would have. As in generation,
    letters that look like a special token are one in the assistant's words alone. Raises ValueError where
    neither can be determined.
    """
    tokenizer = template.tokenizer
    source = tokenizer.chat_template
    safe = template.as_text(messages)
    marked = isinstance(source, str) and _GENERATION_TAG.search(source) is not None
    if marked and safe != list(messages):
        ids, mask = _mask_spans(template, *render_marked(tokenizer, safe, template.arguments(tools)))
    elif marked:
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **template.arguments(tools),
        )
        ids = list(encoded["input_ids"])
        mask = list(encoded["assistant_masks"])
    else:
        text = template.render(safe, tools, add_generation_prompt=False)
        try:
            spans = assistant_spans(template, safe, text, tools)
        except RewrittenTurn as problem:
            try:
                ids, mask = _encode_by_turn(template, safe, tools)
            except DataError:
                raise problem from None
        else:
            ids, mask = _mask_spans(template, text, spans)
    return ids, _end_at_end_token(tokenizer, ids, mask)


def last_answer(mask: Sequence[int]) -> tuple[int, int]:
    """Return (start, end) of the last run of ones of a mask; ValueError where there is none."""
    if 1 not in mask:
        raise ValueError("the answer is empty")
    end = len(mask) - list(reversed(mask)).index(1)
    start = next((place + 1 for place in range(end - 1, -1, -1) if not mask[place]), 0)
    return start, end


class RewrittenTurn(ValueError):
    """The template renders a turn differently when more messages follow."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"the chat template renders the text up to message {number} differently when more messages "
            "follow, so the assistant's tokens cannot be told apart: split the conversation into one row "
            "per answer, or use a template with {% generation %} marks"
        )


def assistant_spans(
    template: ChatTemplate, messages: Sequence[Message], text: str, tools: Tools | None = None
) -> list[tuple[int, int]]:
    """Return (begin, end), in characters, of each assistant's turn in `text`, the rendered conversation.

    Raises RewrittenTurn where the text rendered so far is no beginning of the whole.
    """
    spans = []
    for number in _answers(messages):
        before, answer = _answer_text(template, messages, number, tools)
        if not text.startswith(before + answer):
            raise RewrittenTurn(number)
        spans.append((len(before), len(before + answer)))
    return spans


def _answers(messages: Sequence[Message]) -> list[int]:
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not numbers:
        raise ValueError("no message has the role assistant: there is nothing to learn")
    return numbers


def _answer_text(
    template: ChatTemplate, messages: Sequence[Message], number: int, tools: Tools | None
) -> tuple[str, str]:
    """Return the text before message `number` and the text that it adds, when it is the last."""
    before = template.render(messages[:number], tools, add_generation_prompt=True)
    through = template.render(messages[: number + 1], tools, add_generation_prompt=False)
    if not through.startswith(before):
        raise RewrittenTurn(number)
    return before, through[len(before) :]


def _encode_by_turn(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools | None
) -> tuple[list[int], list[int]]:
    """Return ids and mask with each answer as it was when it was the last, as a rollout keeps it."""
    answers = _answers(messages)
    ids = template.begin(messages[: answers[0]], tools)
    mask = [0] * len(ids)
    end = template.after_answer(None, [], tools, final=True)
    for number, following in zip(answers, [*answers[1:], len(messages)], strict=True):
        answer = encode_rendered(template.tokenizer, _answer_text(template, messages, number, tools)[1])
        if not end or answer[-len(end) :] != end:
            raise RewrittenTurn(number)
        final = following == len(messages)
        # the first token of the end is the answer's own: a model stops with it
        answer = answer[: -len(end)] + end[:1]
        given = template.after_answer(end[0], messages[number + 1 : following], tools, final=final)
        ids += answer + given
        mask += [1] * len(answer) + [0] * len(given)
    return ids, mask


def _mask_spans(
    template: ChatTemplate, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Tokens of `text`, as `ChatTemplate.encode` gives them, and 1 on those that begin inside a span."""
    tokenizer = template.tokenizer
    if tokenizer.is_fast:
        ids: list[int] = []
        starts: list[int] = []
        place = 0
        for part in text.split(BREAK):
            encoded = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
            ids += encoded["input_ids"]
            starts += [place + begin for begin, _ in encoded["offset_mapping"]]
            place += len(part) + len(BREAK)
        return ids, [int(any(begin <= start < end for begin, end in spans)) for start in starts]
    ids = template.encode(text)
    mask = [0] * len(ids)
    # slow tokenizers give no offsets: count the tokens of the text up to each border
    for begin, end in spans:
        first = template.encode(text[:begin])
        last = template.encode(text[:end])
        if ids[: len(first)] != first or ids[: len(last)] != last:
            raise ValueError(
                "the tokenizer joins the assistant's text with the text around it; use a fast tokenizer "
                "(tokenizer.json)"
            )
        mask[len(first) : len(last)] = [1] * (len(last) - len(first))
    return ids, mask


def _end_at_end_token(tokenizer: Tokenizer, ids: list[int], mask: list[int]) -> list[int]:
    """The mask with each run of ones closed by the end token.

    The end token is added where it follows the run, and blank decoration after it is taken off.
    """
    end = tokenizer.eos_token_id
    mask = list(mask)
    closed = False
    if end is None:
        return mask
    for position in range(1, len(ids)):
        if ids[position] == end and mask[position - 1]:
            mask[position] = 1
            closed = True
        elif closed and mask[position] and not str(tokenizer.decode([ids[position]])).strip():
            mask[position] = 0
        else:
            closed = False
    return mask
