"""A reward function as it was loaded, and how it is called with a row.

    row (by the names of ROW) ──takes──► function(**arguments) ──► a result, or an awaitable of one

A function that names `completions` gets lists by name, and returns a list of numbers, None counting as 0:

    rows ──as columns──► function(prompts, completions, COLUMN, …) ──► one number for each completion

A column is a column of the data; `ground_truth` and `data_source` are there always. Where rows are scored one
by one, the lists have one entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from hybridflow.config.own_code import (
    CALLED_WITH,
    CALLED_WITH_LISTS,
    COMPLETIONS,
    MESSAGES,
    TOKENS,
    named_arguments,
    needed_arguments,
    reward_names,
    takes_any_name,
)
from hybridflow.errors import RewardError
from hybridflow.rewards.result import PROMPT

ROW = (*CALLED_WITH, TOKENS, MESSAGES, PROMPT)
"""What is known of a response; a function gets the last three only where it names them."""
UNKNOWN: Mapping[str, Any] = MappingProxyType({TOKENS: (), MESSAGES: (), PROMPT: None})
"""The defaults for the rest of a row where a user's manager gives no more than `CALLED_WITH`."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RewardFunction:
    """A function that scores a row; for `reward.manager=batch` one that scores a list of rows."""

    function: Callable[..., Any]
    """The function with its options bound."""
    takes: Mapping[str, str]
    """Its parameters that come from the row, and what of `ROW` each gets."""
    is_async: bool = False
    """Calls of it give coroutines that may share an event loop."""

    @classmethod
    def of(cls, function: Callable[..., Any], options: Mapping[str, Any] = NO_OPTIONS) -> RewardFunction:
        """Bind the options of a function that scores one row."""
        return cls(partial(function, **options), _names(function, CALLED_WITH), _is_async(function))

    @classmethod
    def of_columns(
        cls, function: Callable[..., Any], options: Mapping[str, Any], *, all_rows: bool
    ) -> RewardFunction:
        """Bind the options of a function that names `completions`; `all_rows`: it scores a list of rows."""
        score_rows = partial(_score_columns, function, options)

        def compute_score(**row: Any) -> Any:
            return _then(score_rows([{**UNKNOWN, **row}]), lambda results: results[0])

        takes = {name: name for name in (*CALLED_WITH, TOKENS, PROMPT)}
        return cls(score_rows if all_rows else compute_score, takes, _is_async(function))

    @classmethod
    def of_lists(cls, function: Callable[..., Any], options: Mapping[str, Any]) -> RewardFunction:
        """Bind the options of a function that scores the lists of a list of rows."""
        singular = dict(zip(CALLED_WITH_LISTS, CALLED_WITH, strict=True))
        names = _names(function, CALLED_WITH_LISTS)
        takes = {parameter: singular.get(name, name) for parameter, name in names.items()}

        def score_rows(rows: Sequence[Row]) -> Any:
            lists = {parameter: [row[name] for row in rows] for parameter, name in takes.items()}
            return function(**options, **lists)

        return cls(score_rows, takes, _is_async(function))

    def arguments(self, row: Row) -> dict[str, Any]:
        """Return the arguments of the function for a row."""
        return {parameter: row[name] for parameter, name in self.takes.items() if name in row}

    def row_for_manager(self, row: Row) -> dict[str, Any]:
        """Return the part of a row that a manager of the user's is given."""
        return {name: row[name] for name in (*CALLED_WITH, *self.takes.values())}

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Call the function with what it takes of a row; what is no part of a row is passed on as it is."""
        row = {**dict(zip(CALLED_WITH, positional, strict=False)), **named}
        more = {name: value for name, value in row.items() if name not in ROW}
        return self.function(**more, **self.arguments(row))


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None for one that is written in C and has none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _names(function: Callable[..., Any], called_with: Sequence[str]) -> dict[str, str]:
    """Return the parameters of a function that come from the row, and what each gets."""
    signature = signature_of(function)
    if signature is None:
        return {name: name for name in called_with}
    names = reward_names(signature, called_with)
    if PROMPT in signature.parameters:
        names[PROMPT] = PROMPT
    return names


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of a function, a partial or an object with __call__ gives a coroutine."""
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def _then(result: Any, finish: Callable[[Any], Any]) -> Any:
    """Return `finish` of a result, or a coroutine of it where the result is awaitable."""
    if not inspect.isawaitable(result):
        return finish(result)

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return finish(await awaitable)

    return wait(result)


def _score_columns(function: Callable[..., Any], options: Mapping[str, Any], rows: Sequence[Row]) -> Any:
    """Call a function that names `completions`, and return its results, of which each is a number.

    Raises RewardError where it names what is no column, or returns no list of the right length.
    """
    infos = [row["extra_info"] for row in rows]
    names = dict.fromkeys(name for info in infos for name in info)
    given = {
        **{str(name): [info.get(name) for info in infos] for name in names},
        "extra_info": infos,
        "data_source": [row["data_source"] for row in rows],
        "ground_truth": [row["ground_truth"] for row in rows],
        "prompts": [row[PROMPT] for row in rows],
        COMPLETIONS: [_completion(row[PROMPT], row["solution_str"]) for row in rows],
        "completion_ids": [list(row[TOKENS]) for row in rows],
        **options,
    }
    signature = inspect.signature(function)
    if missing := [name for name in needed_arguments(signature) if name not in given]:
        raise RewardError(
            f"the reward function names {', '.join(missing)}, which is no column of the data; there are "
            f"{', '.join(sorted(given))}"
        )
    if not takes_any_name(signature):
        given = {name: value for name, value in given.items() if name in named_arguments(signature)}
    return _then(function(**given), lambda results: _numbers(results, len(rows)))


def _completion(prompt: Any, text: str) -> Any:
    """Return the text where the prompt is one, else a list with the assistant's message."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def _numbers(results: Any, wanted: int) -> list[Any]:
    if isinstance(results, str | Mapping) or not hasattr(results, "__len__") or len(results) != wanted:
        raise RewardError(
            f"the reward function returned {str(results)[:80]!r}, a {type(results).__name__}; one that names "
            f"completions returns a list with a number for each completion, here {wanted}"
        )
    return [0.0 if result is None else result for result in results]
