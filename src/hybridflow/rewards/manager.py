"""Rows in, scores out; `reward.on_error` decides about the rows whose reward function failed.

requests, one by one ─► scorer (pool or in process) ─► outcomes ─► raise | score 0 | drop ─► ScoredBatch
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.errors import RewardError
from hybridflow.rewards.result import OpenScoring, Scorer, ScoreRequest, ScoringOutcome

logger = logging.getLogger(__name__)

MAX_RESPONSE = 200
"""Characters that are shown of a response."""

OnError = Literal["raise", "zero", "drop"]


@dataclass(frozen=True)
class ScoredBatch:
    """The scores of B rows, in their order.

    `extras` has one list of B values for each further key that the function returned: floats where all values
    are numbers (NaN for rows without one), else the values as they are (None for rows without one).
    """

    scores: list[float]
    token_scores: list[tuple[float, ...]]
    """For each row the scores of its sampled tokens, which sum up to its score; empty where it has none."""
    extras: dict[str, list[Any]]
    dropped: list[str]
    """Kind of the error of rows that reward.on_error=drop leaves out, which have score 0; else empty."""
    metrics: dict[str, float]
    times: list[tuple[float, float]]
    """When the function was called for each row and when it had ended, in seconds since the epoch."""


class RewardManager:
    """The scores of rows by one reward function, with `reward.on_error` applied to the rows where it fails.

    `function` describes the reward function in messages; `has_file` says whether a command could load it.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        on_error: OnError = "raise",
        function: str = "the reward function",
        has_file: bool = True,
    ) -> None:
        self._scorer = scorer
        self._on_error = on_error
        self._function = function
        self._has_file = has_file
        self._shown = False

    def add_scorer(self, around: Callable[[Scorer], Scorer]) -> None:
        """Add a scorer that completes the outcomes; it is given the present one."""
        self._scorer = around(self._scorer)

    def open(self) -> RewardSession:
        """Open a session for rows that come one by one."""
        return RewardSession(self, self._scorer.open())

    def outcomes(self, rows: Sequence[ScoreRequest]) -> list[ScoringOutcome]:
        """Score the rows and return each outcome, before `reward.on_error` is applied."""
        with self.open() as session:
            for place, row in enumerate(rows):
                session.add(place, row)
            return session.outcomes()

    def judge(
        self, rows: Sequence[ScoreRequest], outcomes: Sequence[ScoringOutcome], seconds: float
    ) -> ScoredBatch:
        """Apply `reward.on_error` to the outcomes of the rows, after `seconds` of waiting for them.

        Raises RewardError for the first row whose reward failed, if `reward.on_error` is raise.
        """
        failed = [position for position, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            first = outcomes[failed[0]]
            report = self._report(failed[0], rows[failed[0]], first)
            if self._on_error == "raise":
                raise RewardError(self._refusal(report, first, rows[failed[0]].solution_str))
            self._warn(report, len(failed), len(rows))
        dropped = [""] * len(rows)
        if self._on_error == "drop":
            dropped = [outcome.error for outcome in outcomes]
        return ScoredBatch(
            scores=[outcome.score for outcome in outcomes],
            token_scores=[outcome.token_scores for outcome in outcomes],
            extras=_columns(outcomes, zero_failed=self._on_error == "zero"),
            dropped=dropped,
            metrics=_metrics(outcomes, seconds),
            times=[(outcome.ended - outcome.seconds, outcome.ended) for outcome in outcomes],
        )

    def close(self) -> None:
        """End the scoring processes."""
        self._scorer.close()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _report(self, position: int, row: ScoreRequest, outcome: ScoringOutcome) -> str:
        which = f"row {position} of the batch"
        if isinstance(row.extra_info, dict) and row.extra_info.get("index") is not None:
            which += f", index {row.extra_info['index']}"
        return (
            f"{self._function} failed on {which}, data_source {row.data_source!r} "
            f"({outcome.error}):\n{outcome.detail}"
        )

    def _refusal(self, report: str, outcome: ScoringOutcome, response: str) -> str:
        longer = ""
        if outcome.error == "timeout":
            longer = "raise reward.timeout; "
        trial = "`hybridflow reward-test` tries it on a few rows"
        if not self._has_file:
            trial = f"call it with this row's response, {response[:MAX_RESPONSE]!r}"
        return (
            f"{report}\nMend the function ({longer}{trial}), or let "
            "the run go on: reward.on_error=zero scores such rows 0, reward.on_error=drop leaves them out of "
            "the loss"
        )

    def _warn(self, report: str, num_failed: int, num_rows: int) -> None:
        so = {"zero": "scored 0", "drop": "left out of the loss"}[self._on_error]
        if self._shown:
            logger.warning("the reward failed on %d of %d rows (%s)", num_failed, num_rows, so)
            return
        self._shown = True
        logger.warning(
            "the reward failed on %d of %d rows (%s; reward.on_error=%s). %s",
            num_failed,
            num_rows,
            so,
            self._on_error,
            report,
        )


class RewardSession:
    """Rows that are scored while more of them come. Leaving it without a result ends the running requests."""

    def __init__(self, manager: RewardManager, scoring: OpenScoring) -> None:
        self._manager = manager
        self._scoring = scoring
        self._places: list[int] = []
        self._rows: list[ScoreRequest] = []

    def add(self, place: int, row: ScoreRequest) -> None:
        """Submit one more row for scoring, the one at `place` of the batch."""
        self._places.append(place)
        self._rows.append(row)
        self._scoring.add(row)

    def outcomes(self) -> list[ScoringOutcome]:
        """Wait for all outcomes; return them in the order of the rows' places."""
        found = self._scoring.outcomes()
        return [found[number] for number in self._order()]

    def result(self) -> ScoredBatch:
        """Wait for all scores, in the order of the rows' places.

        Raises RewardError for the first row whose reward failed, if `reward.on_error` is raise.
        """
        started = time.perf_counter()
        found = self._scoring.outcomes()
        seconds = time.perf_counter() - started
        order = self._order()
        return self._manager.judge(
            [self._rows[number] for number in order], [found[number] for number in order], seconds
        )

    def _order(self) -> list[int]:
        return sorted(range(len(self._places)), key=self._places.__getitem__)

    def __enter__(self) -> RewardSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._scoring.close()


def _columns(outcomes: Sequence[ScoringOutcome], zero_failed: bool) -> dict[str, list[Any]]:
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.extras))
    columns: dict[str, list[Any]] = {}
    for name in names:
        values = [outcome.extras.get(name) for outcome in outcomes]
        if name == "acc" and zero_failed:  # a reward that counts as 0 counts as a wrong answer, too
            for position, outcome in enumerate(outcomes):
                if outcome.error:
                    values[position] = 0.0
        given = [value for value in values if value is not None]
        if given and all(isinstance(value, (bool, int, float)) for value in given):
            values = [math.nan if value is None else float(value) for value in values]
        columns[name] = values
    return columns


def _metrics(outcomes: Sequence[ScoringOutcome], seconds: float) -> dict[str, float]:
    by_type = Counter(outcome.error for outcome in outcomes if outcome.error)
    tries = {
        "reward/num_retries": float(sum(max(0, outcome.tries - 1) for outcome in outcomes)),
        "reward/num_cached": float(sum(outcome.tries == 0 for outcome in outcomes)),
    }
    return {
        **{name: count for name, count in tries.items() if count},
        "reward/num_errors": float(sum(by_type.values())),
        "reward/num_timeouts": float(by_type["timeout"]),
        "reward/seconds": seconds,
        "reward/seconds_per_row_max": max((outcome.seconds for outcome in outcomes), default=0.0),
        **{f"reward/num_errors/{kind}": float(count) for kind, count in sorted(by_type.items())},
    }
