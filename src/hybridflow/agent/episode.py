"""The input of an episode, its result, and the interface of an agent.

Episode ──Agent.run(episode, policy)──► AgentResult, while the policy records each call

`Policy` is the policy as one trajectory sees it: token ids in, token ids out, and every call recorded.

agent ──generate(prompt)──► limits, seed ──LLMClient──► output ──► calls (what `rows_of` makes rows of)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

from hybridflow.agent.journal import OUTPUT, SAMPLED, EpisodeJournal
from hybridflow.data.prompts import PromptRow
from hybridflow.errors import HybridFlowError
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.protocol.spans import Attribute, SpanLog
from hybridflow.protocol.trajectory import FINISHED, FailureCause, Outcome, PolicyCall
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.client import DeadlinePassed, LLMClient, ReplicaLost


def reward_facts(prompt: PromptRow) -> dict[str, Any]:
    """Return the columns of a prompt row that a reward function reads."""
    row = prompt.row
    return {
        "data_source": row.get("data_source"),
        "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        "extra_info": row.get("extra_info") or {},
    }


@dataclass(frozen=True)
class Episode:
    """One sample of a group before it runs."""

    row: PromptRow
    group: int
    """Number of the group, unique in a run."""
    sample: int
    """Number of the sample in its group, from 0."""
    group_seed: int
    """Seed of what the samples of a group share: the question of an environment."""
    seed: int
    """Seed of the draws of this sample alone."""
    sampling: SamplingParams
    """How tokens are drawn where an agent does not say."""

    @property
    def prompt(self) -> Prompt:
        """The data row's own prompt."""
        return self.row.prompt

    @property
    def facts(self) -> dict[str, Any]:
        """The columns of the row that a reward function reads, with `solution_str` still missing."""
        return reward_facts(self.row)


@dataclass(frozen=True)
class AgentResult:
    """The result of an episode, besides the calls that the policy has recorded."""

    reward: float | None = None
    """Reward of the whole trajectory; None: the run's reward function scores it."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """The part of `reward` that belongs to a call, by the call's number from 0; the rest is the end's."""
    outcome: Outcome = FINISHED
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation, for people and for reward functions."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the trajectory, shown as means over trajectories."""
    calls: Sequence[PolicyCall] | None = None
    """The calls as rows are made of them, where that is not as the policy has recorded them."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for reward functions, which find them in their `extra_info`."""


class Agent(Protocol):
    """Runs episodes by calling the policy; one instance serves all episodes of a run.

    One with `is_journaled = True` does everything that has effects through the policy's journal, so that its
    episodes can be continued by another process.
    """

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Run one episode. What it raises fails the trajectory; TrajectoryFailed names the cause."""


class TrajectoryFailed(HybridFlowError):
    """A trajectory cannot go on, for a cause that decides whether it is retried."""

    def __init__(self, cause: FailureCause, detail: str) -> None:
        super().__init__(detail)
        self.cause: FailureCause = cause


class LengthReached(HybridFlowError):
    """The conversation has no room for a further token: the trajectory ends as truncated."""


@dataclass(frozen=True)
class PolicyLimits:
    """Limits of the calls of a trajectory."""

    max_model_len: int
    """Most tokens of the prompt and the output of one call together."""
    max_prompt_length: int
    """Most tokens of the first prompt of a trajectory."""
    request_deadline: float
    """Seconds that one output may take."""
    lost_replicas: int
    """Further replicas that a call is sent to where one is lost."""


class Policy:
    """The calls of one trajectory; several may run at once."""

    def __init__(
        self,
        client: LLMClient,
        episode: Episode,
        limits: PolicyLimits,
        next_id: Callable[[], int],
        journal: EpisodeJournal | None = None,
    ) -> None:
        """`next_id` gives request ids that are unique among all trajectories; `journal` has the calls of this
        one that were made before.
        """
        self.journal = journal
        self.name = uuid4().hex if journal is None else journal.name
        """The ids of calls of tools and environments begin with it."""
        self.calls: list[PolicyCall] = []
        """The calls that were answered, in the order of their answers."""
        self.limits = limits
        self.sampling = episode.sampling
        self.log = SpanLog()
        """The calls, tools and environment that the trajectory has waited for."""
        self._client = client
        self._seed = episode.seed
        self._next_id = next_id
        self._begun = 0
        self._running: set[int] = set()
        self._closed = False
        self._sticky = object()

    async def generate(self, prompt: Prompt, *, sampling: SamplingParams | None = None) -> GenerationOutput:
        """Sample a continuation of a prompt, and record the call.

        Its tokens are as many as `sampling` and the model's context allow. Raises LengthReached where there
        is no room for one, and TrajectoryFailed where there is no output.
        """
        sampling = sampling or self.sampling
        room = self._room(prompt)
        if sampling.max_tokens > room:
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        number = self._begun
        self._begun += 1
        seed = derive_seed(self._seed, "call", number) if number else self._seed
        request = GenerationRequest(self._next_id(), prompt, sampling, seed)
        with self.log.span("generate") as span:
            if self.journal is None:
                output = await self._answer(request)
            else:
                answer = partial(self._answer, request)
                output = await self.journal.once(f"{SAMPLED}{number}", prompt.key, OUTPUT, answer)
            span.attributes, span.texts = facts_of(prompt, output)
        self.calls.append(PolicyCall(prompt, output))
        return output

    async def close(self) -> None:
        """End running calls, and accept no further ones: the trajectory has ended."""
        self._closed = True
        await self._client.abort(list(self._running))

    def _room(self, prompt: Prompt) -> int:
        """Return the most tokens that an output may have."""
        limits = self.limits
        if not self._begun and len(prompt) > limits.max_prompt_length:
            raise TrajectoryFailed(
                "data",
                f"the first prompt has {len(prompt)} tokens, and data.max_prompt_length="
                f"{limits.max_prompt_length}: raise it, or make the prompt shorter",
            )
        room = limits.max_model_len - len(prompt)
        if room < 1:
            raise LengthReached(
                f"the conversation has {len(prompt)} tokens, and actor_rollout_ref.rollout.max_model_len="
                f"{limits.max_model_len} leaves no room for a further one"
            )
        return room

    async def _answer(self, request: GenerationRequest) -> GenerationOutput:
        for attempt in range(self.limits.lost_replicas + 1):
            if self._closed:
                raise TrajectoryFailed("cancelled", "its trajectory has ended")
            running = request.request_id
            self._running.add(running)
            try:
                output = await self._client.generate(
                    request, sticky=self._sticky, deadline_s=self.limits.request_deadline
                )
            except DeadlinePassed as error:
                raise TrajectoryFailed("deadline", str(error)) from error
            except ReplicaLost as error:
                if attempt == self.limits.lost_replicas or self._client.failure is not None:
                    raise TrajectoryFailed("infrastructure", str(error)) from error
                request = replace(request, request_id=self._next_id())
                await asyncio.sleep(0)
                continue
            finally:
                self._running.discard(running)
            return _checked(output)
        raise AssertionError("the last attempt returns or raises")


def _checked(output: GenerationOutput) -> GenerationOutput:
    if output.finish_reason == "abort":
        raise TrajectoryFailed("cancelled", f"request {output.request_id} was aborted")
    if output.finish_reason == "error":
        cause: FailureCause = "data" if output.refused else "infrastructure"
        raise TrajectoryFailed(cause, str(output.error))
    return output


def facts_of(
    prompt: Prompt, output: GenerationOutput
) -> tuple[dict[str, Attribute], dict[str, str | Sequence[int]]]:
    """Return the attributes of a call's span: counts of tokens, versions of weights, and its token ids."""
    attributes: dict[str, Attribute] = {
        "prompt_tokens": len(prompt),
        "response_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
    }
    if output.policy_versions:
        attributes["version_first"] = output.policy_versions[0]
        attributes["version_last"] = output.policy_versions[-1]
    return attributes, {"prompt_text": prompt.token_ids, "response_text": output.token_ids}
