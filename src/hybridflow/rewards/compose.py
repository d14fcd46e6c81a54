"""Terms in, one reward function out: score = Σ_i weight_i · term_i, each term's own value kept as a column.
A term with `when: COLUMN` counts, and is computed, only for rows whose value in that column is above 0 (or a
true one, where it is no number); otherwise its column is empty.

    reward.terms:
      - {name: gsm8k, weight: 1}
      - {name: length, weight: -0.1, max_chars: 400}
      - {name: my.py:politeness, when: format}
      - {name: reward_model, weight: 0.5, when: format}

The term reward_model is no function: `trainer/ppo/model_rewards.py` adds it.

A term's column has the function's name, or the term's `key`. Other columns that a term returns (acc, ...) are
kept; where two terms return the same one, the earlier term's stands. Where a term is async, rows share an
event loop, unless `code` would hold it up.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config.own_code import DEFAULT_NAMES, MESSAGES, TERM_KEYS, TOKENS
from hybridflow.config.reward import MODEL_TERM
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.load import (
    PROMPT,
    WHERE_NAMED,
    is_async,
    is_path,
    load_builtin,
    load_user_function,
    takes,
)
from hybridflow.rewards.result import normalize_result
from hybridflow.rewards.run_programs import Runner
from hybridflow.rewards.table import RewardFunction


@dataclass(frozen=True)
class Condition:
    """The column that decides whether a term counts."""

    column: str

    def holds(self, columns: Mapping[str, Any]) -> bool:
        """Return whether the row's value is above 0; RewardError where the row has no such column."""
        if self.column not in columns:
            raise RewardError(
                f"reward.terms: when={self.column} names no column of the row; it has "
                f"{', '.join(columns) or 'none'}"
            )
        value = columns[self.column]
        if isinstance(value, (bool, int, float)):
            return value > 0
        return bool(value)


@dataclass(frozen=True)
class Term:
    """One summand: its column, its weight, when it counts, and the function with its options bound."""

    column: str
    weight: float
    condition: Condition | None
    function: RewardFunction | None
    """None for the score of the reward model."""
    runs_programs: bool
    """It is `code`, which holds up whatever shares a thread with it."""


def model_term(terms: Sequence[dict[str, Any]]) -> Term:
    """Return the term of the reward model, which the checks of the keys have found."""
    position, term = next((n, term) for n, term in enumerate(terms) if term["name"] == MODEL_TERM)
    key = f"reward.terms[{position}]"
    if options := options_of(term):
        raise ConfigError(f"{key}: {MODEL_TERM} has no option {', '.join(options)}: set reward.reward_model")
    return _term(term, key, "reward_model_score", None)


def load_terms(terms: Sequence[dict[str, Any]], seed: int, runner: Runner) -> list[Term]:
    """Load the functions of `reward.terms`. Raises ConfigError for a term without a name, or a weight that is
    no number.
    """
    loaded: list[Term] = []
    for position, term in enumerate(terms):
        key = f"reward.terms[{position}]"
        if not isinstance(term, dict) or not isinstance(term.get("name"), str):
            raise ConfigError(f"{key}: got {term!r}, wanted {{name: FUNCTION, weight: NUMBER, ...options}}")
        name = term["name"]
        if name == MODEL_TERM:
            loaded.append(model_term([term]))
        elif is_path(name):
            function = load_user_function(name, DEFAULT_NAMES[0], options_of(term), key=key)
            loaded.append(_term(term, key, _function_name(name), function))
        else:
            loaded.append(_term(term, key, name, load_builtin(name, options_of(term), seed, runner, key=key)))
    columns = [term.column for term in loaded]
    conditional = {term.column for term in loaded if term.condition is not None or term.function is None}
    for made in loaded:
        if made.function is not None and made.condition is not None and made.condition.column in conditional:
            raise ConfigError(
                f"reward.terms: {made.column} has when={made.condition.column}, which has a condition itself "
                "or is the reward model's: name a term that is computed for every row"
            )
    if twice := {column for column in columns if columns.count(column) > 1}:
        raise ConfigError(
            f"reward.terms: two terms make the column {', '.join(sorted(twice))}; give each its own `key`"
        )
    return loaded


def options_of(term: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a term that are options of its function."""
    return {str(name): value for name, value in term.items() if name not in TERM_KEYS}


def _term(term: dict[str, Any], key: str, column: str, function: RewardFunction | None) -> Term:
    weight = term.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"{key}: got weight={weight!r}, wanted a number")
    condition = None
    if "when" in term:
        condition = Condition(str(term["when"]))
    name = str(term.get("key", column))
    return Term(name, float(weight), condition, function, runs_programs=term["name"] == "code")


def compose(terms: Sequence[Term]) -> RewardFunction:
    """Return the weighted sum of the functions as one reward function, which is async if one is.

    Terms with a condition come after the others, whose columns it may name.
    """
    functions = [(term, term.function) for term in terms if term.function is not None]

    def total(results: Sequence[Any]) -> dict[str, Any]:
        score = 0.0
        columns: dict[str, Any] = {}
        extras: dict[str, Any] = {}
        for (term, _), result in zip(functions, results, strict=True):
            columns[term.column] = None
            if result is _LEFT_OUT:
                continue
            value, more = normalize_result(result)
            score += term.weight * value
            columns[term.column] = value
            extras = {**more, **extras}
        return {**extras, **columns, "score": score}

    def wanted(known: Sequence[Any]) -> list[bool]:
        """Return which terms are computed: those without a condition, then those whose condition holds."""
        if not known:
            return [term.condition is None for term, _ in functions]
        columns = total(known)
        return [term.condition is not None and term.condition.holds(columns) for term, _ in functions]

    def merged(first: Sequence[Any], then: Sequence[Any]) -> list[Any]:
        return [late if early is _LEFT_OUT else early for early, late in zip(first, then, strict=True)]

    def wave(row: dict[str, Any], known: Sequence[Any]) -> list[Any]:
        chosen = zip(functions, wanted(known), strict=True)
        return [function(**_taken(function, row)) if now else _LEFT_OUT for (_, function), now in chosen]

    def compute_score(
        messages: Any = (), response_ids: Any = (), raw_prompt: Any = None, **row: Any
    ) -> dict[str, Any]:
        row |= {MESSAGES: messages, TOKENS: response_ids, PROMPT: raw_prompt}
        results = wave(row, [])
        if _LEFT_OUT in results:
            results = merged(results, wave(row, results))
        return total(results)

    async def compute_score_async(
        messages: Any = (), response_ids: Any = (), raw_prompt: Any = None, **row: Any
    ) -> dict[str, Any]:
        row |= {MESSAGES: messages, TOKENS: response_ids, PROMPT: raw_prompt}
        results = await asyncio.gather(*map(_awaited, wave(row, [])))
        if _LEFT_OUT in results:
            results = merged(results, await asyncio.gather(*map(_awaited, wave(row, results))))
        return total(results)

    def compute_score_alone(
        messages: Any = (), response_ids: Any = (), raw_prompt: Any = None, **row: Any
    ) -> Any:
        return compute_score_async(messages, response_ids, raw_prompt, **row)

    if not any(is_async(function) for _, function in functions):
        return compute_score
    if any(term.runs_programs for term, _ in functions):
        return compute_score_alone  # no coroutine function: a worker has one row at a time
    return compute_score_async


_LEFT_OUT = object()
"""In place of the result of a term that was not computed."""


def _taken(function: RewardFunction, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a function gets of the row: tokens, messages and prompt only where it names them."""
    without = [name for name in WHERE_NAMED if not takes(function, name)]
    return {name: value for name, value in row.items() if name not in without}


async def _awaited(result: Any) -> Any:
    if inspect.isawaitable(result):
        return await result
    return result


def _function_name(path: str) -> str:
    """The name in "file.py:name", else the file's name without its ending."""
    location, _, last = path.rpartition(":")
    if location:
        return last
    return last.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
