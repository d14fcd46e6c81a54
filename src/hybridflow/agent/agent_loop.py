"""verl's agent loops as agents: a user's class whose `run` calls the model by token ids.

row ──AgentLoopBase.run──► server_manager.generate ──► Policy, which records the calls
                     └──► AgentLoopOutput ──learned_calls──► the calls, without tokens that the loop left out

Rows come from the calls. What a loop returns says which sampled tokens are learned from: those in its
response with mask 1. A loop that needs rows besides one response, as of several agents, is an `Agent`.

Pictures go as in verl: `process_vision_info` finds them in messages, `apply_chat_template` writes their
placeholders, and `generate` is given them again with the ids, in which they have their places.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridflow.agent.conversation import Conversation, Seen
from hybridflow.agent.episode import AgentResult, Episode, Policy, TrajectoryFailed
from hybridflow.config import PPOConfig
from hybridflow.config.tree import to_tree
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.media import MediaReader, MediaSource
from hybridflow.data.messages import MEDIA_PARTS
from hybridflow.data.pictures import MediaError, media_in, read_picture
from hybridflow.data.processor import MediaProcessor, Read
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.protocol.prompt import Medium, MediumKind, Prompt
from hybridflow.protocol.trajectory import FINISHED, TRUNCATED, Outcome, PolicyCall
from hybridflow.rollout.base import GenerationOutput, SamplingParams
from hybridflow.tools.base import numbers_of

TAKEN = ("top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "min_tokens", "ignore_eos")
"""Sampling parameters that a call may set, besides stop and stop_token_ids."""
WITHOUT_EFFECT = {"logprobs", "skip_special_tokens", "include_stop_str_in_output", "detokenize", "n", "seed"}
"""Sampling parameters of other engines that do not affect ids and log-probs here."""


class TokenOutput(list[int]):
    """The ids that the policy sampled: a list, and an object with attributes, as in both forms of verl."""

    def __init__(self, output: GenerationOutput) -> None:
        super().__init__(output.token_ids)
        self.token_ids = list(output.token_ids)
        self.log_probs = list(output.log_probs)
        """Nats, one for each token."""
        self.stop_reason = "completed"
        self.routed_experts = None
        self.num_preempted = None
        self.extra_fields: dict[str, Any] = {}


class LoopPictures:
    """The pictures of one trajectory, each read once."""

    def __init__(self, reader: MediaReader | None) -> None:
        """`reader` is None for a model that reads text alone."""
        self.reader = reader
        self._kept: list[Read] = []

    async def read(self, images: Sequence[Any] | None, videos: Sequence[Any] | None) -> list[Seen]:
        """Return pictures, and then videos, as the model reads them; TrajectoryFailed where it reads none.

        MediaError for one that cannot be read.
        """
        sources = [MediaSource("image", image) for image in images or ()]
        sources += [MediaSource("video", video) for video in videos or ()]
        if not sources:
            return []
        if self.reader is None:
            raise TrajectoryFailed("data", "the loop gives pictures or videos, and the model reads text only")
        reads = await asyncio.to_thread(self.reader.read, sources)
        self._kept += reads
        return [Seen(source.kind, read) for source, read in zip(sources, reads, strict=True)]

    async def prompt(
        self, token_ids: tuple[int, ...], images: Sequence[Any] | None, videos: Sequence[Any] | None
    ) -> Prompt:
        """Return ids with their media, each where its placeholders are; of each kind in the order given.

        TrajectoryFailed where the ids have other placeholders.
        """
        ends = {"image": 0, "video": 0}
        media: list[Medium] = []
        for seen in await self.read(images, videos):
            own = seen.read.token_ids
            places = range(ends[seen.kind], len(token_ids) - len(own) + 1)
            start = next((place for place in places if token_ids[place : place + len(own)] == own), None)
            if start is None:
                raise _other_places()
            media += [replace(medium, start=start + medium.start) for medium in seen.read.media]
            ends[seen.kind] = start + len(own)
        media.sort(key=lambda medium: medium.start)
        if self.reader is not None:
            try:
                self.reader.check_places(token_ids, media)
            except MediaError as error:
                raise _other_places() from error
        return Prompt(token_ids, tuple(media))


def _other_places() -> TrajectoryFailed:
    return TrajectoryFailed(
        "environment",
        "the agent loop's prompt_ids have not the placeholders of its image_data and video_data: give all "
        "pictures of the prompt in their order, and ids of apply_chat_template(messages, images=…)",
    )


class AsyncLLMServerManager:
    """The model as the loop of one trajectory sees it."""

    def __init__(self, policy: Policy, pictures: LoopPictures | None = None) -> None:
        """`pictures` are those of the trajectory; None: it has none."""
        self._policy = policy
        self.pictures = pictures or LoopPictures(None)

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        **further: Any,
    ) -> TokenOutput:
        """Sample a continuation of `prompt_ids`; all requests of a trajectory go to one replica.

        Raises LengthReached where the model's context has no room for a token, and TrajectoryFailed where
        there is no output.
        """
        sampling = sampling_of(sampling_params, self._policy.sampling)
        ids = tuple(int(token) for token in prompt_ids)
        prompt = await self.pictures.prompt(ids, image_data, video_data)
        return TokenOutput(await self._policy.generate(prompt, sampling=sampling))


@dataclass
class AgentLoopMetrics:
    """Metrics of a trajectory."""

    generate_sequences: float = 0.0
    """Seconds in which the model answered."""
    tool_calls: float = 0.0
    """Seconds in which tools answered."""
    compute_score: float = 0.0
    num_preempted: int = -1
    """-1: not known."""


@dataclass
class AgentLoopOutput:
    """The result of an agent loop: one conversation as token ids."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    """Tokens after the first prompt: those of the policy, and those of tools and environments."""
    response_mask: Sequence[int]
    """For each token of the response, 1 where the policy sampled it and is to learn from it, else 0."""
    response_logprobs: Sequence[float] | None = None
    """Not read: log-probs are those of the calls."""
    reward_score: float | None = None
    """Reward of the trajectory; None: the run's reward function scores it."""
    num_turns: int = 0
    """Messages of the conversation, counted by the loop: the metric agent/num_messages, and `num_turns` in
    the `extra_info` of reward functions.
    """
    metrics: AgentLoopMetrics | Mapping[str, float] = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Reward functions find them in their `extra_info`; numbers are metrics too. `messages` is the
    conversation that the report shows.
    """
    multi_modal_data: Mapping[str, Any] | None = None
    """Not read, like the next two: pictures are those of the calls."""
    routed_experts: Any = None
    mm_processor_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class DictConfigWrap:
    """A configuration in a box, as loops are given it."""

    config: DictConfig


class AgentLoopBase(ABC):
    """Base class of agent loops; one instance runs one trajectory."""

    _class_initialized = False

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: AsyncLLMServerManager,
        tokenizer: Tokenizer,
        processor: Any = None,
        dataset_cls: type | None = None,
        data_config: DictConfigWrap | None = None,
        **kwargs: Any,
    ) -> None:
        """`kwargs` are the entry's own, of the YAML file."""
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.data_config = self.config.data
        self.apply_chat_template_kwargs = self.data_config.apply_chat_template_kwargs
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Tokenizer, processor: Any, **kwargs: Any) -> None:
        """Prepare what all instances share; called by each, so that a user's class checks first whether
        `cls._class_initialized`.
        """
        cls._class_initialized = True

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        remove_system_prompt: bool = False,
        **further: Any,
    ) -> list[int]:
        """Return the ids of messages and the generation prompt, with the placeholders of their pictures.

        With `remove_system_prompt` without what the template writes before the first message, so that the ids
        can follow others.
        """
        template = ChatTemplate(self.tokenizer, self.apply_chat_template_kwargs)
        seen = await self.server_manager.pictures.read(images, videos)
        conversation = Conversation(template, tools or (), processor=self._media_processor)
        conversation.begin(_with_places(messages), _in_order(messages, seen))
        ids = list(conversation.prompt.token_ids)
        if remove_system_prompt:
            empty = {"role": "user", "content": ""}
            once, twice = (
                self.tokenizer.apply_chat_template(
                    [empty] * count, return_dict=False, **self.apply_chat_template_kwargs
                )
                for count in (1, 2)
            )
            ids = ids[2 * len(once) - len(twice) :]
        return ids

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the pictures of messages as `images`, those of PIL, and their `videos` as they are given.

        Nothing where there are none, or the model reads text alone. MediaError for one that cannot be read.
        """
        reader = self.server_manager.pictures.reader
        found: dict[str, list[Any]] = {}
        for kind, part in _places(messages) if reader is not None else ():
            media: Any = media_in(part)
            if kind == "image":
                media = await asyncio.to_thread(read_picture, media, fetch=self.data_config.fetch_media)
            found.setdefault(f"{kind}s", []).append(media)
        return found

    @property
    def _media_processor(self) -> MediaProcessor | None:
        reader = self.server_manager.pictures.reader
        return None if reader is None else reader.processor

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run the trajectory; `kwargs` are the columns of the data row, its messages as `raw_prompt`."""


Loop = Callable[..., AgentLoopBase]
REGISTERED: dict[str, Loop] = {}
"""Agent loops by the names that `register` has given them."""


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Give the decorated agent loop a name, for the column `agent_name`, once its module is imported."""

    def keep(loop: Loop) -> Loop:
        REGISTERED[agent_name] = loop
        return loop

    return keep


class AgentLoopAgent:
    """Runs episodes with a user's agent loop."""

    def __init__(
        self,
        loop: Loop,
        kwargs: Mapping[str, Any],
        config: PPOConfig,
        tokenizer: Tokenizer,
        reader: MediaReader | None = None,
    ) -> None:
        """`reader` reads pictures; None: the model reads text alone."""
        self._reader = reader
        self._make = functools.partial(loop, **kwargs)
        tree = to_tree(config)
        tree["actor_rollout_ref"]["rollout"] |= {
            "prompt_length": config.data.max_prompt_length,
            "response_length": config.data.max_response_length,
        }
        self._config = OmegaConf.create(tree)
        # loops of today's releases of verl expect a list of ids of this method
        self._tokenizer = copy.copy(tokenizer)
        as_list = functools.partial(tokenizer.apply_chat_template, return_dict=False)
        self._tokenizer.apply_chat_template = as_list  # type: ignore[method-assign]

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Run one episode. TrajectoryFailed where the loop's response is not what the policy sampled."""
        loop = self._make(
            trainer_config=DictConfigWrap(self._config),
            server_manager=AsyncLLMServerManager(policy, LoopPictures(self._reader)),
            tokenizer=self._tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(self._config.data),
        )
        output = await loop.run(_as_params(episode.sampling), **_columns(episode, self._reader))
        if not isinstance(output, AgentLoopOutput):
            raise TrajectoryFailed(
                "environment",
                f"run() of the agent loop gave {type(output).__name__}, wanted an AgentLoopOutput of "
                "hybridflow.agent.agent_loop",
            )
        outcome = _outcome(policy.calls, output)
        extra = {"num_turns": output.num_turns, **output.extra_fields}
        return AgentResult(
            reward=output.reward_score,
            calls=learned_calls(policy.calls, output),
            outcome=outcome,
            messages=extra.pop("messages", ()),
            metrics=_numbers(output),
            extra_info=extra,
        )


def _as_params(sampling: SamplingParams) -> dict[str, Any]:
    """Return a run's sampling in verl's form."""
    return {
        "temperature": _temperature(sampling),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": True,
    }


def _temperature(sampling: SamplingParams) -> float:
    if sampling.takes_argmax:
        return 0.0
    return sampling.temperature


def sampling_of(params: Mapping[str, Any], run: SamplingParams) -> SamplingParams:
    """Return the sampling of a call that sets `params`; what it leaves out, or sets to None, is the run's.

    TrajectoryFailed for another temperature than the run's, at which training computes its log-probs, and for
    a name that is not known.
    """
    changes: dict[str, Any] = {}
    for name, value in params.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name == "temperature":
            if value != _temperature(run):
                raise TrajectoryFailed(
                    "environment",
                    f"the agent loop sets temperature={value}, and the run samples and trains at "
                    f"{_temperature(run)}: leave it out, or set actor_rollout_ref.rollout.temperature",
                )
        elif name == "stop":
            changes[name] = (value,) if isinstance(value, str) else tuple(value)
        elif name == "stop_token_ids":
            changes[name] = tuple(value)
        elif name == "max_new_tokens":
            changes["max_tokens"] = value
        elif name in TAKEN:
            changes[name] = value
        else:
            raise TrajectoryFailed(
                "environment",
                f"the agent loop sets {name}={value!r} in sampling_params, which is not read: wanted "
                f"temperature, stop, stop_token_ids, {', '.join(TAKEN)}",
            )
    most = changes.get("max_tokens", run.max_tokens)
    return replace(run, **{"min_tokens": min(run.min_tokens, most), **changes})


def _places(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[MediumKind, Mapping[str, Any]]]:
    """Yield the kinds and the parts of pictures and videos in messages, in their order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if kind := MEDIA_PARTS.get(str(part.get("type"))):
                yield kind, part


def _with_places(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose parts of pictures and videos are places alone."""
    ready = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            kinds = [MEDIA_PARTS.get(str(part.get("type"))) for part in content]
            content = [{"type": kind} if kind else part for kind, part in zip(kinds, content, strict=True)]
            message = {**message, "content": content}
        ready.append(message)
    return ready


def _in_order(messages: Sequence[Mapping[str, Any]], seen: Sequence[Seen]) -> list[Seen]:
    """Return pictures and videos in the order of their places; what has none comes last."""
    waiting = list(seen)
    ordered = []
    for kind, _ in _places(messages):
        found = next((each for each in waiting if each.kind == kind), None)
        if found is not None:
            waiting.remove(found)
            ordered.append(found)
    return ordered + waiting


def _columns(episode: Episode, reader: MediaReader | None) -> dict[str, Any]:
    """Return the columns of a data row as keyword arguments; messages have the row's pictures in their
    places, as in verl.
    """
    row = {name: value for name, value in episode.row.row.items() if name != "agent_name"}
    if reader is not None and episode.prompt.media and not isinstance(row["raw_prompt"], str):
        messages, sources = reader.in_parts(row["raw_prompt"], row)
        held = iter(sources)
        row["raw_prompt"] = [
            {
                **message,
                "content": [
                    {"type": part["type"], part["type"]: next(held).value} if part["type"] != "text" else part
                    for part in message["content"]
                ],
            }
            for message in messages
        ]
    extra_info = row.get("extra_info") or {}
    for name in ("tools_kwargs", "interaction_kwargs"):
        row.setdefault(name, extra_info.get(name) or {})
    return row


def _numbers(output: AgentLoopOutput) -> dict[str, float]:
    """Return the numbers of a loop; a negative number of preemptions means that it is unknown."""
    metrics = output.metrics
    if isinstance(metrics, AgentLoopMetrics):
        metrics = vars(metrics)
    found = numbers_of({"num_messages": output.num_turns, **metrics, **output.extra_fields})
    if found.get("num_preempted", 0.0) < 0:
        del found["num_preempted"]
    return found


def learned_calls(calls: Sequence[PolicyCall], output: AgentLoopOutput) -> list[PolicyCall]:
    """Return the calls with those sampled tokens only that the loop's response has with mask 1.

    A call without such tokens is not accepted. Of one with some, each run of them is a call, whose prompt has
    the tokens before: they are read, and not learned from. A sampled token belongs to the call that agrees
    with the response for the longest. TrajectoryFailed where a token with mask 1 is not what the policy
    sampled at its place.
    """
    if len(output.response_mask) != len(output.response_ids):
        raise TrajectoryFailed(
            "environment",
            f"the agent loop gave {len(output.response_ids)} response_ids with {len(output.response_mask)} "
            "numbers in response_mask: give one for each token",
        )
    ends = [_agreement(call, output) for call in calls]
    owners: dict[int, int] = {}
    for number in sorted(range(len(calls)), key=ends.__getitem__):
        owners |= dict.fromkeys(range(len(calls[number].prompt), ends[number]), number)
    first = len(output.prompt_ids)
    learned = [first + place for place, mask in enumerate(output.response_mask) if mask]
    strange = [place for place in learned if place not in owners]
    if strange or not learned:
        raise TrajectoryFailed("environment", _complaint(strange, output))
    kept: list[PolicyCall] = []
    for number, call in enumerate(calls):
        places = [place for place in learned if owners[place] == number]
        if len(places) == len(call.output.token_ids):
            kept.append(call)
        elif not places:
            kept.append(replace(call, accepted=False))
        else:
            kept += _parts(call, places)
    return kept


def _complaint(strange: Sequence[int], output: AgentLoopOutput) -> str:
    if not strange:
        return "the agent loop's response has no token with mask 1: nothing of it was sampled by the policy"
    place = strange[0] - len(output.prompt_ids)
    return (
        f"the agent loop's response says that the policy sampled its token {place} "
        f"(id {output.response_ids[place]}), and no call of server_manager.generate gave it after the tokens "
        "before it: return the ids of the prompts and answers as they were, with mask 0 for tokens of others"
    )


def _agreement(call: PolicyCall, output: AgentLoopOutput) -> int:
    """Return how many tokens of a call's prompt and answer stand at the start of the loop's conversation."""
    ids = (*call.prompt.token_ids, *call.output.token_ids)
    returned = (*output.prompt_ids, *output.response_ids)
    pairs = enumerate(zip(ids, returned, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ids), len(returned)))


def _parts(call: PolicyCall, places: Sequence[int]) -> list[PolicyCall]:
    """Return a call for each run of neighbouring `places` in the call's prompt and answer."""
    answer = call.output
    assert isinstance(answer, GenerationOutput), "a policy records what an engine gave"
    start = len(call.prompt)
    ids = (*call.prompt.token_ids, *answer.token_ids)
    parts = []
    for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        run_places = [place for _, place in run]
        part = slice(run_places[0] - start, run_places[-1] + 1 - start)
        output = replace(
            answer,
            token_ids=answer.token_ids[part],
            log_probs=answer.log_probs[part],
            policy_versions=answer.policy_versions[part],
            top_log_probs=None,
        )
        parts.append(PolicyCall(Prompt(ids[: run_places[0]], call.prompt.media), output))
    return parts


def _outcome(calls: Sequence[PolicyCall], output: AgentLoopOutput) -> Outcome:
    """Return truncated where a limit ended the last answer, or the loop cut its response inside of one."""
    length = len(output.prompt_ids) + len(output.response_ids)
    for call in calls:
        if _agreement(call, output) == length < len(call.prompt) + len(call.output.token_ids):
            return TRUNCATED
    last = calls[-1].output if calls else None
    if isinstance(last, GenerationOutput) and last.finish_reason == "length":
        return TRUNCATED
    return FINISHED
