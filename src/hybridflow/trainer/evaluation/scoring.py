"""Answers are scored while others are still generated; a failure is a result that has no score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.episodes.scoring import conversation_of
from hybridflow.rewards.manager import RewardSession
from hybridflow.rewards.request import ScoreRequest
from hybridflow.trainer.evaluation.answers import Answer
from hybridflow.trainer.evaluation.results import Scored


class AnswerScores:
    """The scores of the answers of one evaluation; without a session nothing is scored."""

    def __init__(self, session: RewardSession | None) -> None:
        self._session = session
        self._added: list[Scored] = []
        self._to_score: list[int] = []

    def add(
        self, answer: Answer, prompt: Any, source: str, truth: Any, extra_info: Mapping[str, Any]
    ) -> None:
        """Have an answer scored. One that failed, or has its environment's reward, is kept as it is.

        `prompt`, a text or messages, `source`, `truth` and `extra_info` are what the data say of its prompt.
        """
        row = Scored(
            answer, source, truth, score=answer.reward or 0.0, failed=answer.failed, detail=answer.detail
        )
        if self._session is not None and not answer.failed and answer.reward is None:
            facts = {**extra_info, **answer.extra_info}
            messages = conversation_of(prompt, answer.response, facts)
            request = ScoreRequest(
                source, answer.response, truth, facts, tuple(answer.response_ids), messages, prompt
            )
            self._session.add(len(self._added), request)
            self._to_score.append(len(self._added))
        self._added.append(row)

    def result(self) -> list[Scored]:
        """Wait for all scores; return the answers in the order of prompts and samples."""
        outcomes = self._session.outcomes() if self._to_score and self._session is not None else []
        for place, outcome in zip(self._to_score, outcomes, strict=True):
            row = self._added[place]
            failed = f"reward: {outcome.error}" if outcome.error else ""
            self._added[place] = Scored(
                row.answer, row.source, row.truth, outcome.score, outcome.extras, failed, outcome.detail
            )
        return sorted(self._added, key=lambda row: (row.answer.prompt, row.answer.sample))
