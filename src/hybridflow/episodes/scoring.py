"""Scores trajectories as soon as they end, while others are still generated.

Trajectory ──ended──► reward processes ──ScoredBatch, rewarded──► Trajectory with its reward, or failed
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridflow.agent.conversation import Message, messages_of
from hybridflow.errors import DataError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol.fields import FIELDS
from hybridflow.protocol.spans import TraceSpan
from hybridflow.protocol.trajectory import FailureCause, Outcome, Trajectory
from hybridflow.rewards.manager import RewardSession, ScoredBatch
from hybridflow.rewards.result import ScoreRequest

logger = logging.getLogger(__name__)


class Scoring:
    """The trajectories of one generation call on their way to a reward, which `session` scores."""

    def __init__(self, session: RewardSession, prompts: Sequence[Any] = ()) -> None:
        """`prompts` has the messages or the text of each place's prompt, for a reward model."""
        self._session = session
        self._prompts = prompts
        self._trajectories: dict[int, Trajectory] = {}
        self._to_score: list[int] = []

    def ended(self, place: int, trajectory: Trajectory) -> None:
        """Submit a trajectory that has just ended for scoring; one that failed, or has its environment's
        reward, is kept as it is.
        """
        self._trajectories[place] = trajectory
        if not trajectory.failed and trajectory.reward is None:
            self._to_score.append(place)
            facts = trajectory.extra
            prompt = self._prompts[place] if self._prompts else None
            request = ScoreRequest(
                facts["data_source"],
                facts["solution_str"],
                facts["ground_truth"],
                facts["extra_info"],
                trajectory.sampled_ids,
                conversation_of(prompt, facts["solution_str"], facts["extra_info"]),
                prompt,
            )
            self._session.add(place, request)

    def rewarded(
        self, scored: ScoredBatch, *, failures_count: bool = True
    ) -> tuple[list[Trajectory], Metrics]:
        """Return the trajectories with what the session has `scored`, in the order of their places.

        `extra` then also has what the reward has returned. A trajectory whose reward failed has failed too,
        if `reward.on_error` is drop; without `failures_count` (in validation, where an answer that cannot be
        scored is a wrong one) it has the reward 0. A key with the name of one of our columns, or `reward`,
        the name of the score in validation, is left out with a warning.
        """
        metrics = Metrics()
        for name, value in scored.metrics.items():
            if name.endswith("_max"):
                metrics.add_max(name, value)
            else:
                metrics.add_sum(name, value)
        for row, place in enumerate(sorted(self._to_score)):
            error = scored.dropped[row]
            start, end = scored.times[row]
            reward = TraceSpan("reward", start, end, {"score": scored.scores[row]}, error=error)
            trajectory = self._trajectories[place]
            trajectory = replace(trajectory, spans=(*trajectory.spans, reward))
            if error and failures_count:
                cause: FailureCause = "deadline" if error == "timeout" else "environment"
                outcome = Outcome("failed", cause, f"the reward failed ({error})")
                self._trajectories[place] = replace(trajectory, outcome=outcome)
                continue
            results = {key: values[row] for key, values in scored.extras.items()}
            ours = tuple(
                key for key in results if key in trajectory.extra or key in FIELDS or key == "reward"
            )
            if ours:
                _warn_of_names(ours)
            extra = {**trajectory.extra, **{key: results[key] for key in results if key not in ours}}
            self._trajectories[place] = replace(
                trajectory, reward=scored.scores[row], token_rewards=scored.token_scores[row], extra=extra
            )
        return [self._trajectories[place] for place in sorted(self._trajectories)], metrics


def conversation_of(prompt: Any, response: str, extra_info: Mapping[str, Any]) -> Sequence[Message]:
    """Return the conversation as an agent gives it in `extra_info`, else the prompt with the response; empty
    where the prompt is neither a text nor messages.
    """
    told: Sequence[Message] = extra_info.get("messages") or ()
    if told:
        return told
    try:
        return [*messages_of(prompt), {"role": "assistant", "content": response}]
    except DataError:
        return ()


@functools.lru_cache(maxsize=16)
def _warn_of_names(keys: tuple[str, ...]) -> None:
    """Log a warning once for each set of keys, not at every step."""
    logger.warning(
        "the reward returns %s, names of our own columns: not kept; return them by other names",
        ", ".join(keys),
    )
