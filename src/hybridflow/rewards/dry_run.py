"""A trial of a reward on a few rows (`hybridflow reward-test`): rows and responses in, a table out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.errors import DataError
from hybridflow.rewards.load import REWARD_FUNCTIONS, function_of
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.result import ScoreRequest

GROUND_TRUTH = "ground_truth"
EMPTY = "empty"


def dry_run(
    manager: RewardManager,
    rows: Sequence[Mapping[str, Any]],
    config: RewardConfig,
    *,
    response: str | Sequence[str] = GROUND_TRUTH,
    num_rows: int = 10,
    are_conversations: bool = False,
) -> list[dict[str, Any]]:
    """Score the first `num_rows` rows.

    Returns for each: row, data_source, prompt, response, ground_truth, score, extras, seconds, error.
    `response` is a list with a response for each row, or a word that `choose_responses` explains. With
    `are_conversations`, `extra_info` has `num_turns` and `messages` as a run with agents gives them: here one
    turn, after the row's prompt. `reward.on_error` is not applied: a failing row has score None and its
    error. Raises DataError for a row without the columns that scoring needs.
    """
    chosen = rows[:num_rows]
    responses = response
    if isinstance(response, str):
        _, responses = choose_responses(response, chosen, config)
    requests = [
        _request(position, row, text, are_conversations)
        for position, (row, text) in enumerate(zip(chosen, responses, strict=True))
    ]
    table = []
    for position, outcome in enumerate(manager.outcomes(requests)):
        request = requests[position]
        result: dict[str, Any] = {
            "row": position,
            "data_source": request.data_source,
            "prompt": prompt_text(chosen[position].get("raw_prompt")),
            "response": request.solution_str,
            "ground_truth": request.ground_truth,
            "score": outcome.score,
            "extras": outcome.extras,
            "seconds": outcome.seconds,
            "error": "",
        }
        if outcome.error:
            result |= {"score": None, "error": f"{outcome.error}: {outcome.detail}"}
        table.append(result)
    return table


def choose_responses(
    response: str, rows: Sequence[Mapping[str, Any]], config: RewardConfig
) -> tuple[str, list[str]]:
    """Return in words what is fed for the word `response`, and the response to each row.

    "ground_truth" is the answer itself, written as the row's built-in function wants it (`#### 72` for
    gsm8k); "empty" is the empty text. Another word is the name of a column, else of a file whose text is the
    response to every row, else it is that text itself. Raises DataError for a file that cannot be read, and
    where the ground truth is asked for and no row has one.
    """
    if response == GROUND_TRUTH:
        needed = [_needed(place, row) for place, row in enumerate(rows)]
        if rows and all(truth is None for _, truth in needed):
            raise DataError(
                "--response ground_truth: the rows have no ground truth (reward_model.ground_truth or the "
                "column answer), so no right response is known; name a column that holds one "
                "(--response COLUMN), give a text or a file, or let the model answer (--response generate)"
            )
        forms = [answer_form(config, source) for source, _ in needed]
        written = ""
        if special := sorted({*forms} - {"{}"}):
            written = f", written as {' or '.join(special).replace('{}', 'ANSWER')}"
        words = f"the ground truth of each row{written}: a right reward scores it as right"
        return words, [form.format(_one_of(truth)) for form, (_, truth) in zip(forms, needed, strict=True)]
    if response == EMPTY:
        return "the empty text: a right reward scores it as wrong", [""] * len(rows)
    if any(response in row for row in rows):
        return f"the column {response} of the data", [str(row.get(response, "")) for row in rows]
    if not Path(response).is_file():
        words = f"the text {response!r}, for every row (there is no column or file of that name)"
        return words, [response] * len(rows)
    try:
        text = Path(response).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--response {response} cannot be read: {error}") from error
    return f"the text of the file {response}, for every row", [text] * len(rows)


def _one_of(ground_truth: Any) -> Any:
    """Return the first of several right answers, which may be under `target`."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target", ground_truth)
    if isinstance(ground_truth, (list, tuple)) and ground_truth:
        return ground_truth[0]
    return ground_truth


def prompt_text(prompt: object) -> str:
    """Return a prompt as text for a reader: the string, or each message with its role."""
    if not isinstance(prompt, (list, tuple)):
        return str(prompt or "")
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def answer_form(config: RewardConfig, data_source: str) -> str:
    """Return the text in which the row's built-in function finds a bare answer; {} is the answer.

    Raises DataError for code, which has no such text.
    """
    if config.terms or config.custom_reward_function.path:
        return "{}"
    name: str | None = config.function
    if name == "auto":
        name = function_of(data_source)  # None for an unknown source: scoring the row says so
    if name == "code":
        raise DataError(
            "--response ground_truth: the ground truth of code is its test cases, and no program that passes "
            "them; name a column of solutions, a file with one, or empty"
        )
    if name not in REWARD_FUNCTIONS:
        return "{}"
    return REWARD_FUNCTIONS[name].answer_form


def _needed(position: int, row: Mapping[str, Any]) -> tuple[str, Any]:
    """The data source and the ground truth of a row."""
    reward_model = row.get("reward_model")
    if (
        "data_source" not in row
        or not isinstance(reward_model, Mapping)
        or "ground_truth" not in reward_model
    ):
        raise DataError(
            f"row {position}: wanted the columns data_source and reward_model with a ground_truth, got "
            f"{sorted(map(str, row))}; see data.reward_fn_key for the first"
        )
    return str(row["data_source"]), reward_model["ground_truth"]


def _request(position: int, row: Mapping[str, Any], text: str, is_conversation: bool) -> ScoreRequest:
    source, truth = _needed(position, row)
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, Mapping):
        extra_info = {}
    prompt = row.get("raw_prompt") or []
    before = prompt
    if isinstance(prompt, str):
        before = [{"role": "user", "content": prompt}]
    messages = [*before, {"role": "assistant", "content": text}]
    if is_conversation:
        extra_info = {**extra_info, "num_turns": 1, "messages": messages}
    return ScoreRequest(source, text, truth, dict(extra_info), messages=messages, prompt=prompt)
