"""Reward functions that name `completions`: lists by name in, a list of numbers out.

    solution_strs, extra_infos, … ──as columns──► function(prompts, completions, COLUMN, …)
        ──► one number for each completion, None counting as 0

A column is a column of the data, as a list; `ground_truth` and `data_source` are there always. Where rows are
scored one by one, the lists have one entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.config.own_code import COMPLETIONS
from hybridflow.errors import RewardError
from hybridflow.rewards.table import RewardFunction

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be given by name."""


def with_columns(function: RewardFunction, *, is_coroutine: bool) -> RewardFunction:
    """Return a function of the lists of all rows, as `reward.manager=batch` calls it.

    It raises RewardError where the function names what is no column, or returns no list of the right length.
    """

    def compute_scores(
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Mapping[str, Any]],
        response_ids: Sequence[Sequence[int]],
        raw_prompt: Sequence[Any],
        **options: Any,
    ) -> Any:
        columns = {
            **_columns(extra_infos),
            "extra_info": list(extra_infos),
            "data_source": list(data_sources),
            "ground_truth": list(ground_truths),
            "prompts": list(raw_prompt),
            COMPLETIONS: [_completion(*pair) for pair in zip(raw_prompt, solution_strs, strict=True)],
            "completion_ids": [list(ids) for ids in response_ids],
        }
        return function(**_named(function, columns, options))

    def compute_lists(**lists: Any) -> list[Any]:
        return _results(compute_scores(**lists), len(lists["solution_strs"]))

    async def compute_lists_async(**lists: Any) -> list[Any]:
        return _results(await compute_scores(**lists), len(lists["solution_strs"]))

    chosen: Callable[..., Any] = compute_lists
    if is_coroutine:
        chosen = compute_lists_async
    chosen.__signature__ = inspect.signature(compute_scores)  # type: ignore[attr-defined]
    return chosen


def with_columns_of_one(function: RewardFunction, *, is_coroutine: bool) -> RewardFunction:
    """Return a function of one response, which gives lists of one entry to `function`."""
    lists = with_columns(function, is_coroutine=is_coroutine)

    def arguments(
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        response_ids: Sequence[int] = (),
        raw_prompt: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        return {
            **options,
            "data_sources": [data_source],
            "solution_strs": [solution_str],
            "ground_truths": [ground_truth],
            "extra_infos": [extra_info],
            "response_ids": [response_ids],
            "raw_prompt": [raw_prompt],
        }

    def compute_score(**row: Any) -> Any:
        return lists(**arguments(**row))[0]

    async def compute_score_async(**row: Any) -> Any:
        return (await lists(**arguments(**row)))[0]

    chosen: Callable[..., Any] = compute_score
    if is_coroutine:
        chosen = compute_score_async
    chosen.__signature__ = inspect.signature(arguments)  # type: ignore[attr-defined]
    return chosen


def _columns(extra_infos: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for info in extra_infos for name in info)
    return {str(name): [info.get(name) for info in extra_infos] for name in names}


def _completion(prompt: Any, text: str) -> Any:
    """Return the text where the prompt is one, else a list with the assistant's message."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def _named(
    function: RewardFunction, columns: Mapping[str, list[Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the function takes of the columns and options. Raises RewardError for what there is not."""
    given = {**columns, **options}
    parameters = inspect.signature(function).parameters.values()
    needed = [each.name for each in parameters if each.kind in NAMED and each.default is each.empty]
    if missing := [name for name in needed if name not in given]:
        raise RewardError(
            f"the reward function names {', '.join(missing)}, which is no column of the data; there are "
            f"{', '.join(sorted(given))}"
        )
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return given
    named = {each.name for each in parameters}
    return {name: value for name, value in given.items() if name in named}


def _results(results: Any, wanted: int) -> list[Any]:
    if isinstance(results, str | Mapping) or not hasattr(results, "__len__") or len(results) != wanted:
        raise RewardError(
            f"the reward function returned {str(results)[:80]!r}, a {type(results).__name__}; one that names "
            f"completions returns a list with a number for each completion, here {wanted}"
        )
    return [0.0 if result is None else result for result in results]
