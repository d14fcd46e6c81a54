"""What one trajectory starts from, what an agent gives back, and what an agent is.

Episode ──Agent.run(episode, policy)──► AgentResult, while the policy records each call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hybridflow.data.prompts import PromptRow
from hybridflow.errors import HybridFlowError
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.trajectory import FINISHED, Call, FailureCause, Outcome
from hybridflow.rollout.base import SamplingParams

if TYPE_CHECKING:
    from hybridflow.agent.policy import Policy


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
    """One sample of a group before it is played."""

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
    """What came of an episode, besides the calls that the policy has recorded."""

    reward: float | None = None
    """Reward of the whole trajectory; None: the run's reward function scores it."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """The part of `reward` that belongs to a call, by the call's number from 0; the rest is the end's."""
    outcome: Outcome = FINISHED
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation, for people and for reward functions."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the trajectory, shown as means over trajectories."""
    calls: Sequence[Call] | None = None
    """The calls as rows are made of them, where that is not as the policy has recorded them."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for reward functions, which find them in their `extra_info`."""


class Agent(Protocol):
    """Plays episodes by calling the policy; one instance serves all episodes of a run."""

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Play one episode. What it raises fails the trajectory; TrajectoryFailed names the cause."""


class TrajectoryFailed(HybridFlowError):
    """A trajectory cannot go on, for a cause that decides whether it is tried again."""

    def __init__(self, cause: FailureCause, detail: str) -> None:
        super().__init__(detail)
        self.cause: FailureCause = cause


class LengthReached(HybridFlowError):
    """The conversation has no room for a further token: the trajectory ends as truncated."""
