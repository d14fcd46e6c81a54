"""The built-in agent: a conversation with tools, an environment, both, or neither.

first observation ──► policy ──► text, tool calls
                         ▲            │ calls ──► tools ──► their answers ──┐
                         │            └ text ──► environment.step ──► Step ──┤ done? ──► AgentResult
                         └──────────────── what the model reads next ◄──────┘
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from hybridflow.agent.conversation import Conversation, Message, Seen, ids_of, messages_of
from hybridflow.agent.episode import AgentResult, Episode, LengthReached, Policy, TrajectoryFailed
from hybridflow.agent.hosted_environment import EnvironmentSpec, HostedEnvironment
from hybridflow.agent.journaled import JournaledEnvironment, JournaledTool
from hybridflow.config.agent import AgentConfig, MultiTurnConfig
from hybridflow.data.chat_template import ChatTemplate, TemplateDifference
from hybridflow.data.media import MediaReader, no_media
from hybridflow.data.tokenizer import Tokenizer, text_of, without_special
from hybridflow.environments.base import Observation
from hybridflow.errors import DataError
from hybridflow.processes.local import HostsLike
from hybridflow.protocol.trajectory import FINISHED, TRUNCATED, Outcome
from hybridflow.rollout.base import GenerationOutput
from hybridflow.tools.base import ToolAnswer, ToolFailed, numbers_of
from hybridflow.tools.parsers import KNOWN_TAGS, TOOL_PARSERS, ToolCall
from hybridflow.tools.parsers.calls import NO_JSON
from hybridflow.tools.parsers.response import (
    PROMPT_END,
    OtherFormats,
    ReadResponse,
    ends_in_thinking,
    other_format,
    read_response,
    unread_message,
)
from hybridflow.tools.toolset import OpenTools, Toolset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatParts:
    """The parts that all conversations of a run share."""

    tokenizer: Tokenizer
    template: ChatTemplate
    parser: str
    """Name of the format of tool calls."""
    tools: Toolset
    hosts: HostsLike
    """Where the code of tools and environments runs."""
    multi_turn: MultiTurnConfig
    agent: AgentConfig
    reader: MediaReader | None = None
    """Reads pictures; None for a model of text."""
    pictures_refused: str | None = None
    """Why the engines of the run read no pictures, with what to set; None: they do."""
    other_formats: OtherFormats = field(default_factory=OtherFormats)
    """Other formats than `parser` in which the model was seen to write calls."""

    @cached_property
    def longest_token(self) -> int:
        """Characters of the tokenizer's longest token."""
        return max((len(token) for token in self.tokenizer.get_vocab()), default=1)


class ChatAgent:
    """Runs conversations. Without an environment the row's own prompt begins them, and the first turn
    without a tool call ends them.
    """

    is_journaled = True

    def __init__(
        self, parts: ChatParts, environment: EnvironmentSpec | None = None, *, rewarded: bool = True
    ) -> None:
        """Where the environment is not `rewarded`, the run's reward function scores its trajectories, and
        finds the environment's rewards as `extra_info["turn_scores"]`.
        """
        self._parts = parts
        self._environment = environment
        self._rewarded = rewarded
        self._has_told = False

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Play one conversation to its end."""
        parts = self._parts
        journal = policy.journal
        journaled = None if journal is None else partial(JournaledTool, journal=journal)
        environment = await self._opened(episode, policy)
        methods = environment.tools() if environment is not None else []
        try:
            tools = await parts.tools.open(parts.hosts, _tools_kwargs(episode), methods, journaled)
            dialogue = _Dialogue(parts, policy, tools, environment, self._rewarded)
            try:
                await dialogue.to_the_end(episode)
            except BaseException:
                with suppress(ToolFailed):  # the first failure is the one to report
                    await tools.close(score=False)
                raise
            result = await dialogue.result(await tools.close(score=True))
            self._tell_difference(dialogue.difference)
            return result
        except ToolFailed as error:
            raise TrajectoryFailed(error.cause, str(error)) from error
        finally:
            if environment is not None:
                await environment.close()

    async def _opened(self, episode: Episode, policy: Policy) -> HostedEnvironment | None:
        """Return the environment of an episode; one with a journal is made when it is needed."""
        spec = self._environment
        if spec is None:
            return None
        hosts = self._parts.hosts
        deadline = self._parts.agent.call_deadline
        if policy.journal is not None:
            return JournaledEnvironment(spec, episode, hosts, deadline, policy.journal)
        return HostedEnvironment(spec, await spec.made(episode, hosts, deadline), deadline, policy.name)

    def _tell_difference(self, difference: TemplateDifference | None) -> None:
        """Log the first difference; all are counted."""
        if difference is not None and not self._has_told:
            self._has_told = True
            logger.warning(
                "the tokens of a conversation are not those of its chat template: %s; later ones are counted "
                "only (agent/template_differences)",
                difference,
            )


def _tools_kwargs(episode: Episode) -> Mapping[str, Any]:
    """Return the options of a row for its tools, by their names."""
    extra_info = episode.row.row.get("extra_info") or {}
    return extra_info.get("tools_kwargs") or {}


@dataclass
class _Dialogue:
    """A running conversation."""

    parts: ChatParts
    policy: Policy
    tools: OpenTools
    environment: HostedEnvironment | None
    rewarded: bool
    """Whether the environment's rewards are the trajectory's."""
    outcome: Outcome = FINISHED
    num_answers: int = 0
    """Answers of tools and of the environment."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    tool_rewards: list[float] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers of tools and of the environment, the newest of each name."""
    counts: Counter[str] = field(default_factory=Counter)
    difference: TemplateDifference | None = None
    """Where the tokens are not what the chat template renders, if that was checked."""

    def __post_init__(self) -> None:
        self.conversation = Conversation(
            self.parts.template,
            self.tools.schemas,
            most_characters=self.policy.limits.max_model_len * self.parts.longest_token,
            strip_thinking=self.parts.agent.strip_thinking,
            processor=None if self.parts.reader is None else self.parts.reader.processor,
        )

    async def to_the_end(self, episode: Episode) -> None:
        """Take turns until something ends the conversation."""
        row = {**episode.row.row, "raw_prompt": episode.row.row.get("raw_prompt")}
        if self.environment is None:
            prompt = row["raw_prompt"]
            if self.tools.schemas and not isinstance(prompt, str):
                self.conversation.begin(*await self._look(prompt, row))
            else:
                messages = messages_of(prompt) if prompt else []
                self.conversation.begin_rendered(episode.prompt, messages)
        else:
            with self.policy.log.span("environment", method="reset"):
                observation = await self.environment.reset(row)
            self.conversation.begin(*await self._look(observation, row))
        try:
            while not await self._turn():
                pass
        except LengthReached:
            self.outcome = TRUNCATED

    async def _turn(self) -> bool:
        """Take one turn of the model and its answer; return whether the conversation has ended."""
        call = len(self.policy.calls)
        output = await self.policy.generate(self.conversation.prompt)
        read = self._read(output)
        self.counts["malformed"] += len(read.problems)
        self.conversation.answer(output, _assistant_message(read.text, read.calls))
        if output.finish_reason == "length":
            self.outcome = TRUNCATED
            return True
        asks_tools = bool(read.calls or read.problems)
        if not asks_tools and self.environment is None:
            return True
        # the environment still hears a last answer in words, since its reward may hang on it
        if self._is_last(call) and asks_tools:
            self.outcome = TRUNCATED
            return True
        if asks_tools:
            self.num_answers += 1
            self.conversation.add(*await self._look(await self._tool_messages(read, call)))
            return False
        return await self._step(read.text, call)

    async def _look(
        self, observation: Observation, row: dict[str, Any] | None = None
    ) -> tuple[Observation, list[Seen]]:
        """Return an observation with the places of its pictures, and the pictures as the model reads them.

        Those of a data row stand in its places in the first observation. DataError for a picture that cannot
        be read, and for any where the model reads text alone.
        """
        if ids_of(observation) is not None:
            return observation, []
        messages = messages_of(observation)
        reader = self.parts.reader
        if reader is None:
            no_media(messages)
            return messages, []
        messages, sources = reader.in_parts(messages, row or {}, of_agent=True)
        if not sources:
            return messages, []
        if self.parts.pictures_refused:
            raise DataError(f"a tool or an environment gives pictures, and {self.parts.pictures_refused}")
        reads = await asyncio.to_thread(reader.read, sources)
        return messages, [Seen(source.kind, read) for source, read in zip(sources, reads, strict=True)]

    async def _step(self, text: str, call: int) -> bool:
        assert self.environment is not None, "without an environment such a turn is the last"
        with self.policy.log.span("environment", method="step") as span:
            step = await self.environment.step(text)
            span.attributes |= {"reward": step.reward, "done": step.done}
        self.turn_rewards[call] = self.turn_rewards.get(call, 0.0) + step.reward
        self.numbers |= numbers_of(step.extra)
        if step.done:
            return True
        if self._is_last(call):
            self.outcome = TRUNCATED
            return True
        self.num_answers += 1
        self.conversation.add(*await self._look(step.observation))
        return False

    def _is_last(self, call: int) -> bool:
        """Return whether the model may take no turn after the one of this call."""
        limits = self.parts.multi_turn
        most_turns = limits.max_assistant_turns
        most_answers = limits.max_user_turns
        if most_turns is not None and call + 1 >= most_turns:
            return True
        return most_answers is not None and self.num_answers >= most_answers

    async def _tool_messages(self, read: ReadResponse, call: int) -> list[Message]:
        """Run tool calls; return the messages with their answers, and with the errors of unreadable calls."""
        calls = read.calls
        answers: list[ToolAnswer] = []
        if calls:
            answers = await self.tools.call(calls, self.policy.log, f"{self.policy.name}.{call}")
        messages: list[Message] = []
        for number, (made, answer) in enumerate(zip(calls, answers, strict=True)):
            self.counts["tool_calls"] += 1
            if answer.problem:
                self.counts[answer.problem] += 1
            self.tool_rewards.append(answer.reward)
            if answer.reward:
                self.turn_rewards[call] = self.turn_rewards.get(call, 0.0) + answer.reward
            self.numbers |= numbers_of(answer.metrics)
            messages.append(
                {
                    "role": "tool",
                    "name": made.name,
                    "tool_call_id": made.id or _call_id(number),
                    "content": self._content(answer),
                }
            )
        if read.problems:
            messages.append(
                {
                    "role": "tool",
                    "name": "unknown",
                    "tool_call_id": _call_id(len(calls)),
                    "content": unread_message(read.problems, TOOL_PARSERS[self.parts.parser].example),
                }
            )
        return messages

    def _content(self, answer: ToolAnswer) -> str | list[dict[str, Any]]:
        """Return what the model reads of a tool's answer; one that reads text alone is told of pictures."""
        if not answer.images:
            return answer.text
        if self.parts.reader is None:
            _warn_of_pictures()
            return f"{answer.text}\n(pictures left out, as you read text only: {len(answer.images)})".strip()
        text = [{"type": "text", "text": answer.text}] if answer.text else []
        return [*({"type": "image", "url": image} for image in answer.images), *text]

    def _read(self, output: GenerationOutput) -> ReadResponse:
        """Return the plain text of an output, its tool calls, and the errors of invalid calls."""
        ids = output.token_ids
        tokenizer = self.parts.tokenizer
        tools = self.tools.schemas
        if not tools:
            return ReadResponse(str(tokenizer.decode(list(ids), skip_special_tokens=True)), [], [])
        if output.finish_reason == "stop" and isinstance(output.stop_reason, int | None):
            ids = ids[:-1]
        name = self.parts.parser
        text = text_of(tokenizer, without_special(tokenizer, ids, KNOWN_TAGS))
        thinks = ends_in_thinking(text_of(tokenizer, self.conversation.prompt.token_ids[-PROMPT_END:]))
        cut = output.finish_reason == "length"
        read = read_response(name, text, tools, in_thinking=thinks, cut=cut)
        problems = read.problems
        if not read.calls:
            other = other_format(name, text, tools, problems=bool(problems), in_thinking=thinks)
            if other:
                self.parts.other_formats.warn(other, name)
                problems = [f"it is written in the format {other}, and calls are read in the format {name}"]
        return replace(read, text=read.text.strip(), problems=problems)

    async def result(self, tool_score: float) -> AgentResult:
        """Return the result of the conversation; `tool_score` is the score that tools give to all of it."""
        reward = None
        turn_rewards: Mapping[int, float] = {}
        if self.environment is not None and self.rewarded:
            turn_rewards = self.turn_rewards
            with self.policy.log.span("environment", method="score"):
                whole = await self.environment.score()
            reward = sum(self.turn_rewards.values()) + (whole or 0.0) + tool_score
        metrics = {f"environment/{name}": value for name, value in self.numbers.items()}
        if self.tools.schemas:
            names = ("tool_calls", "malformed", "unknown", "raised", "deadline", "too_many")
            metrics |= {f"tools/{name}": float(self.counts[name]) for name in names}
        metrics["boundary_merges"] = float(self.conversation.num_merges)
        mode = self.parts.multi_turn.tokenization_sanity_check_mode
        if mode != "disable":
            self.difference = self.conversation.difference(mode)
            metrics["template_differences"] = float(self.difference is not None)
        facts: dict[str, Any] = {}
        if self.tools.schemas:
            facts["tool_rewards"] = self.tool_rewards
            facts["tool_score"] = tool_score
        if self.environment is not None:
            facts["turn_scores"] = [self.turn_rewards[call] for call in sorted(self.turn_rewards)]
        return AgentResult(
            reward,
            turn_rewards,
            self.outcome,
            self.conversation.messages,
            metrics,
            extra_info=facts,
        )


@cache
def _warn_of_pictures() -> None:
    logger.warning("tools answer with pictures, which are left out: the model reads text only")


def _assistant_message(text: str, calls: Sequence[ToolCall]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or _call_id(number),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for number, call in enumerate(calls)
        ]
    return message


def _arguments(call: ToolCall) -> Any:
    """Return the arguments as chat templates take them: an object, or the text where it is none."""
    try:
        return json.loads(call.arguments)
    except NO_JSON:
        return call.arguments


def _call_id(number: int) -> str:
    """Return the id of a call in its turn: nine letters and digits, the only form that mistral's takes."""
    return f"call{number:05d}"
