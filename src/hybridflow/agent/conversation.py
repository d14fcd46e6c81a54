"""A conversation as token ids: rendered once, then extended turn by turn, never re-tokenised.

observation ──begin──► ids ──answer(output)──► ids + sampled ids ──add(observation)──► ids + given ids
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.agent.episode import LengthReached
from hybridflow.data.chat_template import ChatTemplate, CheckMode, TemplateDifference, check_conversation
from hybridflow.environments.base import Observation
from hybridflow.errors import DataError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput

Message = Mapping[str, Any]


class Conversation:
    """The ids and the messages of one trajectory so far."""

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        most_characters: int = sys.maxsize,
        strip_thinking: bool = False,
    ) -> None:
        """A text of more than `most_characters` has no room in the model's context: it is not even tokenised.

        With `strip_thinking` each prompt is rendered again, so that the template may leave out what the
        model has thought in earlier turns.
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

    def difference(self, mode: CheckMode) -> TemplateDifference | None:
        """Return where the ids differ from what the template renders of all messages, or None.

        Conversations without a template, or rendered again in each turn, are not compared.
        """
        if self._ids_only or self._strip_thinking or mode == "disable":
            return None
        return check_conversation(self._template, self.prompt.token_ids, self.messages, self._tools, mode)

    def begin_rendered(self, prompt: Prompt, messages: Sequence[Message]) -> None:
        """Set the first prompt, which was rendered from these messages before."""
        self.messages += messages
        self.prompt = prompt

    def begin(self, observation: Observation) -> None:
        """Set the first prompt: a text is a user's message; ids and prompts are taken as they are."""
        ids = _ids_of(observation)
        if ids is not None:
            self._ids_only = True
            self.prompt = ids
            return
        self.messages += self._readable(observation)
        self.prompt = Prompt(tuple(self._template.begin(self.messages, self._tools)))

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

    def add(self, observation: Observation) -> None:
        """Add what the model reads next: a text is a user's message, ids are added as they are."""
        ids = _ids_of(observation)
        if ids is not None:
            given: Sequence[int] = ids.token_ids
        elif self._ids_only:
            raise DataError(
                "an environment began with token ids and answers with text: give token ids in every turn, or "
                "in none"
            )
        else:
            new = self._readable(observation)
            self.messages += new
            if self._strip_thinking:
                self.prompt = Prompt(tuple(self._template.begin(self.messages, self._tools)))
                return
            given = self._template.after_answer(self._last_token, new, self._tools)
            self.num_merges += int(self._template.boundary_merges(self.prompt.token_ids, given))
        self.prompt = Prompt((*self.prompt.token_ids, *given), self.prompt.media)


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


def _ids_of(observation: Observation) -> Prompt | None:
    if isinstance(observation, Prompt):
        return observation
    if isinstance(observation, Sequence) and not isinstance(observation, str) and len(observation):
        ids = [each for each in observation if isinstance(each, int)]
        if len(ids) == len(observation):
            return Prompt(tuple(ids))
    return None
