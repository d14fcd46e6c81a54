"""A conversation as token ids: rendered once, then extended turn by turn, never re-tokenised.

observation ──begin──► ids ──answer(output)──► ids + sampled ids ──add(observation)──► ids + given ids

Pictures come read, in the order of their places in the messages, and their placeholders stand among the ids.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hybridflow.agent.episode import LengthReached
from hybridflow.data.chat_template import ChatTemplate, CheckMode, TemplateDifference, check_conversation
from hybridflow.data.pictures import MediaError
from hybridflow.data.processor import MediaProcessor, Read
from hybridflow.environments.base import Observation
from hybridflow.errors import DataError
from hybridflow.protocol.prompt import MediumKind, Prompt
from hybridflow.rollout.base import GenerationOutput

Message = Mapping[str, Any]


class Seen(NamedTuple):
    """A picture or a video of a conversation, as the model reads it."""

    kind: MediumKind
    read: Read


class Conversation:
    """The ids and the messages of one trajectory so far."""

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        most_characters: int = sys.maxsize,
        strip_thinking: bool = False,
        processor: MediaProcessor | None = None,
    ) -> None:
        """A text of more than `most_characters` has no room in the model's context: it is not even tokenised.

        With `strip_thinking` each prompt is rendered again, so that the template may leave out what the
        model has thought in earlier turns. `processor` is that of a model that reads pictures.
        """
        self.messages: list[Message] = []
        self.prompt = Prompt(())
        """What the model reads next."""
        self.num_merges = 0
        """Places where sampled and given tokens would be joined if they were tokenised as one text."""
        self._template = template
        self._tools = list(tools) or None
        self._strip_thinking = strip_thinking
        self._last_token: int | None = None
        self._ids_only = False
        self._most_characters = most_characters
        self._processor = processor
        self._seen: list[Seen] = []

    def difference(self, mode: CheckMode) -> TemplateDifference | None:
        """Return where the ids differ from what the template renders of all messages, or None.

        Conversations without a template, or rendered again in each turn, are not compared, and neither are
        those whose first prompt came rendered with pictures.
        """
        if self._ids_only or self._strip_thinking or self._came_with_pictures or mode == "disable":
            return None
        return check_conversation(
            self._template,
            self.prompt.token_ids,
            self.messages,
            self._tools,
            mode,
            read=lambda ids: self._behind(Prompt(()), ids, self._seen).token_ids,
        )

    @property
    def _came_with_pictures(self) -> bool:
        """Whether the first prompt came rendered, with pictures that only its token ids place."""
        return len(self.prompt.media) > sum(len(each.read.media) for each in self._seen)

    def begin_rendered(self, prompt: Prompt, messages: Sequence[Message]) -> None:
        """Set the first prompt, which was rendered from these messages before."""
        self.messages += messages
        self.prompt = prompt

    def begin(self, observation: Observation, seen: Sequence[Seen] = ()) -> None:
        """Set the first prompt: a text is a user's message; ids and prompts are taken as they are.

        `seen` are the pictures of the observation's messages, here and in `add`.
        """
        ids = ids_of(observation)
        if ids is not None:
            self._ids_only = True
            self.prompt = self._joined(Prompt(()), ids)
            return
        self.messages += self._readable(observation)
        self._seen += seen
        self.prompt = self._rendered()

    def _readable(self, observation: Observation) -> list[Message]:
        """Return the messages of an observation; LengthReached where they cannot fit into the context."""
        messages = messages_of(observation)
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if size > self._most_characters:
            raise LengthReached(
                f"an observation has {size} characters, and more than {self._most_characters} have no room "
                "in the context (actor_rollout_ref.rollout.max_model_len)"
            )
        return messages

    def answer(self, output: GenerationOutput, message: Message) -> None:
        """Add the tokens that the model has sampled, and the message they encode."""
        self.messages.append(message)
        ends_its_turn = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        self._last_token = output.token_ids[-1] if ends_its_turn else None
        self.prompt = Prompt((*self.prompt.token_ids, *output.token_ids), self.prompt.media)

    def add(self, observation: Observation, seen: Sequence[Seen] = ()) -> None:
        """Add what the model reads next: a text is a user's message, ids are added as they are."""
        ids = ids_of(observation)
        if ids is not None:
            self.prompt = self._joined(self.prompt, ids)
        elif self._ids_only:
            raise DataError(
                "an environment began with token ids and answers with text: give token ids in every turn, or "
                "in none"
            )
        else:
            new = self._readable(observation)
            if self._strip_thinking and self._came_with_pictures:
                raise DataError(
                    "agent.strip_thinking renders a conversation again, and the pictures of a prompt that is "
                    "a text cannot be placed again: give messages, or set agent.strip_thinking=false"
                )
            self.messages += new
            self._seen += seen
            if self._strip_thinking:
                self.prompt = self._rendered()
                return
            given = self._template.after_answer(self._last_token, new, self._tools)
            self.num_merges += int(self._template.boundary_merges(self.prompt.token_ids, given))
            self.prompt = self._behind(self.prompt, given, seen)

    def _rendered(self) -> Prompt:
        return self._behind(Prompt(()), self._template.begin(self.messages, self._tools), self._seen)

    def _behind(self, before: Prompt, ids: Sequence[int], seen: Sequence[Seen]) -> Prompt:
        """Return a prompt with rendered ids behind it, in which pictures have all their placeholders.

        DataError where the template has not written each picture once.
        """
        if not seen:
            return Prompt((*before.token_ids, *ids), before.media)
        assert self._processor is not None, "nobody else has read them"
        kinds = [each.kind for each in seen]
        try:
            expanded = self._processor.expand(ids, kinds, [each.read for each in seen])
        except MediaError as error:
            raise DataError(
                f"messages have {len(seen)} pictures, and the chat template does not write each of them "
                "once: use one that writes pictures in the messages of all roles, of tools too"
            ) from error
        return self._joined(before, Prompt(tuple(expanded.token_ids), expanded.media))

    def _joined(self, before: Prompt, given: Prompt) -> Prompt:
        """Return two prompts as one; DataError for a placeholder without its picture."""
        if self._processor is not None:
            num_places = sum(token in self._processor.placeholders for token in given.token_ids)
            if num_places != sum(medium.length for medium in given.media):
                raise DataError(
                    f"token ids have {num_places} placeholders of pictures and the media for "
                    f"{sum(medium.length for medium in given.media)}: give messages with pictures, or a "
                    "Prompt with its media"
                )
        start = len(before)
        media = tuple(replace(medium, start=start + medium.start) for medium in given.media)
        return Prompt(before.token_ids + given.token_ids, before.media + media)


def messages_of(observation: Observation) -> list[Message]:
    """Return the messages of an observation that is a text or messages; DataError for anything else."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, Sequence) and all(
        isinstance(each, Mapping) and "role" in each for each in observation
    ):
        return [dict(each) for each in observation if isinstance(each, Mapping)]
    raise DataError(
        f"an environment gave {type(observation).__name__}, wanted a text, a list of messages with a role, "
        "token ids or a Prompt"
    )


def ids_of(observation: Observation) -> Prompt | None:
    """Return an observation that is token ids, or a prompt of them; None for text and messages."""
    if isinstance(observation, Prompt):
        return observation
    if isinstance(observation, Sequence) and not isinstance(observation, str) and len(observation):
        ids = [each for each in observation if isinstance(each, int)]
        if len(ids) == len(observation):
            return Prompt(tuple(ids))
    return None
