"""The policy as one trajectory sees it: token ids in, token ids out, and every call recorded.

agent ──generate(prompt)──► limits, seed ──LLMClient──► output ──► calls (what `rows_of` makes rows of)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybridflow.agent.episode import Episode, LengthReached, TrajectoryFailed
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.protocol.spans import Attribute, SpanLog
from hybridflow.protocol.trajectory import Call, FailureCause
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.client import DeadlinePassed, LLMClient, ReplicaLost


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
        self, client: LLMClient, episode: Episode, limits: PolicyLimits, next_id: Callable[[], int]
    ) -> None:
        """`next_id` gives request ids that are unique among all trajectories."""
        self.calls: list[Call] = []
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
        """Have the policy continue a prompt, and record the call.

        Its tokens are as many as `sampling` and the model's context allow. Raises LengthReached where there
        is no room for one, and TrajectoryFailed where there is no output.
        """
        sampling = sampling or self.sampling
        room = self._room(prompt)
        if sampling.max_tokens > room:
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        seed = self._seed
        if self._begun:
            seed = derive_seed(self._seed, "call", self._begun)
        self._begun += 1
        with self.log.span("generate") as span:
            output = await self._answer(GenerationRequest(self._next_id(), prompt, sampling, seed))
            span.attributes, span.texts = facts_of(prompt, output)
        self.calls.append(Call(prompt, output))
        return output

    async def close(self) -> None:
        """End the calls that still run, and take no further ones: the trajectory has ended."""
        self._closed = True
        await self._client.abort(list(self._running))

    def _room(self, prompt: Prompt) -> int:
        """Return how many tokens an output may have."""
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
    """Return what a span says of a call: numbers of tokens and versions of weights, and its token ids."""
    attributes: dict[str, Attribute] = {
        "prompt_tokens": len(prompt),
        "response_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
    }
    if output.policy_versions:
        attributes["version_first"] = output.policy_versions[0]
        attributes["version_last"] = output.policy_versions[-1]
    return attributes, {"prompt_text": prompt.token_ids, "response_text": output.token_ids}
