"""A reward tried on a few rows before a run (`hybridflow reward-test`): rows and a stand-in response in, a
table out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.errors import DataError, RewardError
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.request import ScoreRequest
from hybridflow.rewards.table import ANSWER_FORMS, name_for_source

GROUND_TRUTH = "ground_truth"
EMPTY = "empty"


def dry_run(
    manager: RewardManager,
    rows: Sequence[Mapping[str, Any]],
    config: RewardConfig,
    *,
    response: str = GROUND_TRUTH,
    num_rows: int = 10,
    reward_fn_key: str = "data_source",
) -> list[dict[str, Any]]:
    """Score the first `num_rows` rows and return, for each, row, data_source, response, ground_truth, score,
    extras, seconds, error.

    `response` says what stands in for a response: "ground_truth" (the answer itself, written as the row's
    built-in function wants it, `#### 72` for gsm8k; expect full scores), "empty" (expect none) or the name of
    a column. `reward.on_error` is not applied: a failing row has score None and its error. Raises DataError
    for a row without the columns that scoring needs.
    """
    chosen = rows[:num_rows]
    requests = [
        _request(position, row, config, response, reward_fn_key) for position, row in enumerate(chosen)
    ]
    return [
        {
            "row": position,
            "data_source": request.data_source,
            "response": request.solution_str,
            "ground_truth": request.ground_truth,
            "score": None if outcome.error else outcome.score,
            "extras": outcome.extras,
            "seconds": outcome.seconds,
            "error": f"{outcome.error}: {outcome.detail}" if outcome.error else "",
        }
        for position, (request, outcome) in enumerate(zip(requests, manager.outcomes(requests), strict=True))
    ]


def _request(
    position: int, row: Mapping[str, Any], config: RewardConfig, response: str, reward_fn_key: str
) -> ScoreRequest:
    reward_model = row.get("reward_model")
    if (
        reward_fn_key not in row
        or not isinstance(reward_model, Mapping)
        or "ground_truth" not in reward_model
    ):
        raise DataError(
            f"row {position}: wanted the columns {reward_fn_key} and reward_model with a ground_truth, got "
            f"{sorted(map(str, row))}; "
            "see data.reward_fn_key for the first"
        )
    source, truth = str(row[reward_fn_key]), reward_model["ground_truth"]
    if response == GROUND_TRUTH:
        text = _answer_form(config, source).format(truth)
    elif response == EMPTY:
        text = ""
    elif response in row:
        text = str(row[response])
    else:
        raise DataError(
            f"row {position} has no column {response!r} to take as the response; it has "
            f"{sorted(map(str, row))}"
        )
    extra_info = row.get("extra_info")
    return ScoreRequest(source, text, truth, dict(extra_info) if isinstance(extra_info, Mapping) else {})


def _answer_form(config: RewardConfig, data_source: str) -> str:
    if config.terms or config.custom_reward_function.path:
        return "{}"
    try:
        name = name_for_source(data_source) if config.function == "auto" else config.function
    except RewardError:  # an unknown source: scoring the row says so
        return "{}"
    return ANSWER_FORMS.get(name, "{}")
