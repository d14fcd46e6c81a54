"""A model's chat template in conversations of several turns: messages in, exactly the new token ids out.

messages ──begin──► first prompt ──► the model answers ──► after_answer(new messages) ──► given token ids

Sampled ids are never tokenised again: what follows an answer is rendered behind a placeholder in its place,
in the shortest conversation that the template takes, and tokenised by itself. What users, tools and
environments say stays text: letters that look like a special token are tokenised as letters.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hybridflow.data.messages import Message
from hybridflow.data.tokenizer import Tokenizer, encode_rendered, render_chat, special_tokens, text_of
from hybridflow.errors import DataError

Tools = Sequence[Mapping[str, Any]]
CheckMode = Literal["strict", "ignore_strippable", "disable"]
"""Values of `tokenization_sanity_check_mode`."""

PLACEHOLDERS = ("Qzx1vA", "Kwy2uB")
"""Two, as what follows an answer must not depend on it."""
PROBE = "Vbn3wC"
WINDOW = 8
"""Tokens on each side of a boundary that are looked at for a merge."""
SHOWN = 12
"""Tokens around a difference that are shown."""
BREAK = "\ufdd0"
"""Stands inside what would be read as a special token; Unicode keeps this character out of texts."""
BLANK = str.maketrans("", "", f" \n\t\r{BREAK}")


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """Renderer of conversations for one tokenizer; immutable, and shared by all trajectories."""

    tokenizer: Tokenizer
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template (`data.apply_chat_template_kwargs`)."""
    template: str | None = None
    """Template in place of the tokenizer's own."""

    def begin(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the ids of a conversation and the generation prompt; raises what the template raises."""
        return self.encode(self.render(self.as_text(messages), tools, add_generation_prompt=True))

    def as_text(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose special tokens `encode` reads as text, but for those of the assistant."""
        return [
            message if message.get("role") == "assistant" else self._broken(message) for message in messages
        ]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text, in which no part of `as_text` is a special token.

        A tokenizer that puts a space before every text puts one where a special token was broken.
        """
        return [token for part in text.split(BREAK) for token in encode_rendered(self.tokenizer, part)]

    def after_answer(
        self,
        last_token: int | None,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        final: bool = False,
    ) -> list[int]:
        """Return the token ids that follow an answer of the assistant, up to where it answers again.

        They are all that the template writes after the answer: the end of its turn, `messages`, and the
        generation prompt unless `final`. `last_token` is the stop token with which the sampled answer ended;
        then the template's end of the turn is left out. It is None where a limit or a stop text cut the
        answer; then nothing is left out. Raises DataError where the template takes no such messages, or
        writes what follows in dependence on the answer.
        """
        ids = self.encode(self._text_after_answer(self.as_text(messages), tools, final=final))
        if last_token is None:
            return ids
        plain_end = encode_rendered(self.tokenizer, self._plain_end)
        # the end may be of several tokens, which the model writes
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, plain_end, strict=False))
        end = [token for token, _ in pairs]
        if last_token in end:
            return ids[end.index(last_token) + 1 :]
        if ids[:1] == [last_token]:
            return ids[1:]
        if self._marks.isdisjoint(plain_end):
            return ids  # nothing ends a turn but the next one's beginning
        place = next((place for place, token in enumerate(ids) if token in self._marks), -1)
        return ids[place + 1 :]

    def check(self, tools: Tools | None = None) -> None:
        """Raise DataError where the template does not go on after an answer with a user's message, or, with
        `tools`, with a tool's result, or leaves out what it says.
        """
        probes = [{"role": "user", "content": PROBE}]
        if tools:
            name = tools[0].get("function", tools[0]).get("name", "tool")
            probes.append({"role": "tool", "content": PROBE, "name": name})
        self.after_answer(None, [], final=True)
        for probe in probes:
            if PROBE not in self._text_after_answer([probe], tools, final=False):
                raise DataError(
                    f"the chat template of {self.tokenizer.name_or_path or 'the tokenizer'} leaves out "
                    f"messages of {probe['role']}, so the model would not see them: use a template with them"
                )

    def shows(self, tools: Tools) -> bool:
        """Return whether the template writes tools into a prompt at all."""
        messages = [{"role": "user", "content": "1"}]
        without = self.render(messages, None, add_generation_prompt=True)
        return self.render(messages, tools, add_generation_prompt=True) != without

    def boundary_merges(self, answer: Sequence[int], given: Sequence[int]) -> bool:
        """Return whether answer and given tokens, tokenised as one text, would have a token across both."""
        if not answer or not given or answer[-1] in self._marks or given[0] in self._marks:
            return False
        before = text_of(self.tokenizer, answer[-WINDOW:])
        after = text_of(self.tokenizer, given[:WINDOW])
        apart = encode_rendered(self.tokenizer, before) + encode_rendered(self.tokenizer, after)
        return encode_rendered(self.tokenizer, before + after) != apart

    def render(
        self, messages: Sequence[Message], tools: Tools | None = None, *, add_generation_prompt: bool
    ) -> str:
        """Return the text of a conversation; raises what the template raises."""
        return render_chat(
            self.tokenizer, messages, self.arguments(tools), add_generation_prompt=add_generation_prompt
        )

    def arguments(self, tools: Tools | None = None) -> dict[str, Any]:
        """Return the arguments of `apply_chat_template` beside the messages."""
        arguments = dict(self.options)
        if tools:
            arguments["tools"] = list(tools)
        if self.template is not None:
            arguments["chat_template"] = self.template
        return arguments

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Finds what the tokenizer reads as a special token."""
        special = set(special_tokens(self.tokenizer).values())
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _broken(self, value: Any) -> Any:
        """Return a message, or what is in it, with special tokens broken behind their first letter."""
        if isinstance(value, str):
            return self._special.sub(lambda found: f"{found[0][:1]}{BREAK}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {name: self._broken(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(inner) for inner in value]
        return value

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Ids of special and of added tokens; an added token may be white space, which marks nothing."""
        added = self.tokenizer.added_tokens_decoder.items()
        marks = {place for place, token in added if token.content.strip()}
        return frozenset(marks | set(self.tokenizer.all_special_ids))

    @cached_property
    def _plain_end(self) -> str:
        """Text after a plain answer that is the last message."""
        return self._text_after_answer([], None, final=True)

    def _text_after_answer(self, messages: Sequence[Message], tools: Tools | None, *, final: bool) -> str:
        problem: Exception | None = None
        for turns in zip(*(_turns(messages, placeholder) for placeholder in PLACEHOLDERS), strict=True):
            try:
                tail = self._tail(turns, tools, final=final)
                closing = self._closing([turn[:1] for turn in turns], tools)
            except Exception as error:  # a template is a program of the model's: anything may come out of it
                problem = error
                continue
            if tail.startswith(closing):
                return tail.removeprefix(closing)
            problem = DataError("it writes a call in another way once more follows")
        roles = ", ".join(str(message.get("role")) for message in messages) or "nobody"
        raise DataError(
            f"the chat template of {self.tokenizer.name_or_path or 'the tokenizer'} cannot go on after an "
            f"answer with messages of {roles} ({problem}): use a tokenizer or a template that takes them"
        ) from problem

    def _tail(self, turns: Sequence[Sequence[Message]], tools: Tools | None, *, final: bool) -> str:
        """Return the text after the placeholder; `turns` are the same messages with each placeholder."""
        tails = set()
        for turn, placeholder in zip(turns, PLACEHOLDERS, strict=True):
            conversation = [{"role": "user", "content": "1"}, *turn]
            text = self.render(conversation, tools, add_generation_prompt=not final)
            _, found, tail = text.partition(placeholder)
            if not found:
                raise DataError("it does not write the answer")
            tails.add(tail)
        if len(tails) > 1:
            raise DataError("what it writes after an answer depends on the answer")
        return tails.pop()

    def _closing(self, answers: Sequence[Sequence[Message]], tools: Tools | None) -> str:
        """Return the text after the placeholder that belongs to the answer: the end of a call."""
        if "tool_calls" not in answers[0][0]:
            return ""
        tail = self._tail(answers, tools, final=True)
        if tail.endswith(self._plain_end):
            return tail.removesuffix(self._plain_end)
        # a call may end its turn with its own token
        marks = [token for token in encode_rendered(self.tokenizer, tail) if token in self._marks]
        return tail[: tail.rindex(text_of(self.tokenizer, marks[-1:]))]


def _turns(messages: Sequence[Message], placeholder: str) -> Iterator[list[Message]]:
    """An answer with the placeholder, and `messages`, in the forms that templates want.

    Before results of tools the answer is the calls: of all of them or of the last, with arguments as an
    object or as JSON, with an empty content or none, with the ids of the results or with ids of nine digits.
    """
    results = list(itertools.takewhile(lambda message: message.get("role") == "tool", messages))
    forms = itertools.product((True, False), dict.fromkeys((len(results), 1)), (False, True), ("", None))
    for own_ids, num_calls, as_text, content in forms if results else ():
        named: list[Message] = [
            {"name": "tool", "tool_call_id": f"{place:09d}", **result} for place, result in enumerate(results)
        ]
        if not own_ids:
            named = [{**result, "tool_call_id": f"{place:09d}"} for place, result in enumerate(named)]
        calls = [_call(result, "1", as_text) for result in named[-num_calls:]]
        calls[-1] = _call(named[-1], placeholder, as_text)
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        yield [answer, *named, *messages[len(results) :]]
    yield [{"role": "assistant", "content": placeholder}, *messages]


def _call(result: Message, argument: str, as_text: bool) -> dict[str, Any]:
    arguments: Any = {"value": argument}
    if as_text:
        arguments = json.dumps(arguments)
    function = {"name": result["name"], "arguments": arguments}
    return {"id": result["tool_call_id"], "type": "function", "function": function}


@dataclass(frozen=True)
class TemplateDifference:
    """First place where a row differs from its conversation as the template renders it."""

    position: int
    """Number of tokens that are equal."""
    row: str
    """Text of the row around that place."""
    rendered: str
    """Text that the template renders around it."""

    def __str__(self) -> str:
        return f"at token {self.position} the row has {self.row!r}, and the chat template {self.rendered!r}"


def check_conversation(
    template: ChatTemplate,
    token_ids: Sequence[int],
    messages: Sequence[Message],
    tools: Tools | None = None,
    mode: CheckMode = "strict",
    *,
    read: Callable[[Sequence[int]], Sequence[int]] = list,
) -> TemplateDifference | None:
    """Return where the ids of a row differ from those of its whole conversation, rendered at once.

    The row may lack the end that the template writes after the last answer. With `ignore_strippable`
    differences of spaces, tabs and line ends pass; with `disable` all do. Raises what the template raises.
    `read` gives pictures the tokens that they have in a row.
    """
    if mode == "disable":
        return None
    text = template.render(template.as_text(messages), tools, add_generation_prompt=False)
    rendered = list(read(template.encode(text)))
    row = list(token_ids)
    ends = [template.after_answer(last, [], final=True) for last in (None, *row[-1:])]
    wholes = [row, *(row + end for end in ends)]
    if rendered in wholes:
        return None
    if mode == "ignore_strippable":
        texts = [text_of(template.tokenizer, whole).translate(BLANK) for whole in wholes]
        if text_of(template.tokenizer, rendered).translate(BLANK) in texts:
            return None
    pairs = enumerate(zip(row, rendered, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(row), len(rendered)))
    around = slice(max(0, place - SHOWN), place + SHOWN)
    return TemplateDifference(
        place, text_of(template.tokenizer, row[around]), text_of(template.tokenizer, rendered[around])
    )
