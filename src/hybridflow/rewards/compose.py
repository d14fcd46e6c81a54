"""The function that the `reward.*` keys choose: a built-in one, the user's, or a weighted sum of terms.

score = Σ_i weight_i · term_i, each term's own value kept as a column. A term with `when: COLUMN` counts, and
is computed, only for rows whose value in that column is above 0 (or a true one, where it is no number);
otherwise its column is empty.

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

from hybridflow.config.convert import raise_all
from hybridflow.config.own_code import CALLED_WITH, CALLED_WITH_LISTS, DEFAULT_NAMES, TERM_KEYS
from hybridflow.config.reward import CUSTOM, MODEL_TERM, RewardConfig, reward_problems
from hybridflow.config.source_code import in_memory, shown
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.function import ROW, UNKNOWN, RewardFunction
from hybridflow.rewards.load import JudgeAccess, is_path, load_builtin, load_user_function, split_path
from hybridflow.rewards.result import normalize_result
from hybridflow.rewards.run_programs import ProgramRunner, build_runner

BATCH = "batch"
"""The `reward.manager` that calls the function with lists."""


def resolve(config: RewardConfig, seed: int, judge: JudgeAccess | None = None) -> RewardFunction:
    """Load the reward function that the configuration chooses, which may ask the run's `judge`.

    Raises ConfigError for a choice that cannot be loaded, RewardError if a built-in one needs an extra that
    is not installed.
    """
    raise_all(list(reward_problems(config)))  # a run from the command line was checked for this before
    custom = config.custom_reward_function
    options = dict(custom.reward_kwargs)
    runner = build_runner(config)
    if config.terms:
        return compose(load_terms(config.terms, seed, runner, judge))
    if custom.path:
        called_with = CALLED_WITH_LISTS if config.manager == BATCH else CALLED_WITH
        return load_user_function(
            custom.path, custom.name, options, key=CUSTOM, called_with=called_with, judge=judge
        )
    if is_path(config.function):
        return load_user_function(
            config.function, DEFAULT_NAMES[0], options, key="reward.function", judge=judge
        )
    return load_builtin(config.function, options, seed, runner, key="reward.function", judge=judge)


def describe(config: RewardConfig) -> str:
    """Describe the chosen function in a few words, for messages."""
    if config.terms:
        return "reward.terms " + " + ".join(shown(str(term.get("name"))) for term in config.terms)
    custom = config.custom_reward_function
    if custom.path:
        if ":" in custom.path:
            return custom.path
        return f"{custom.path}:{custom.name}"
    if in_memory(config.function):
        return f"the reward function {shown(config.function)}"
    return f"reward.function={config.function}"


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


def load_terms(
    terms: Sequence[dict[str, Any]], seed: int, runner: ProgramRunner, judge: JudgeAccess | None = None
) -> list[Term]:
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
            function = load_user_function(name, DEFAULT_NAMES[0], options_of(term), key=key, judge=judge)
            location, last = split_path(name)
            column = last or location.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
            loaded.append(_term(term, key, column, function))
        else:
            function = load_builtin(name, options_of(term), seed, runner, key=key, judge=judge)
            loaded.append(_term(term, key, name, function))
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
    summed = [term for term in terms if term.function is not None]
    always = [term for term in summed if term.condition is None]

    def total(results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the score and all columns; `results` has those of the terms that were computed."""
        score = 0.0
        columns: dict[str, Any] = {}
        extras: dict[str, Any] = {}
        for term in summed:
            columns[term.column] = None
            if term.column not in results:
                continue
            value, more = normalize_result(results[term.column])
            score += term.weight * value
            columns[term.column] = value
            extras = {**more, **extras}
        return {**extras, **columns, "score": score}

    def called(chosen: Sequence[Term], row: Mapping[str, Any]) -> dict[str, Any]:
        row = {**UNKNOWN, **row}
        return {term.column: term.function(**row) for term in chosen if term.function is not None}

    def due(results: Mapping[str, Any]) -> list[Term]:
        """Return the terms whose condition holds, by the results of those without one."""
        conditional = [(term, term.condition) for term in summed if term.condition is not None]
        columns = total(results) if conditional else {}
        return [term for term, condition in conditional if condition.holds(columns)]

    def compute_score(**row: Any) -> dict[str, Any]:
        results = called(always, row)
        results |= called(due(results), row)
        return total(results)

    async def compute_score_async(**row: Any) -> dict[str, Any]:
        results = await _gathered(called(always, row))
        results |= await _gathered(called(due(results), row))
        return total(results)

    is_async = any(term.function.is_async for term in summed if term.function)
    return RewardFunction(
        compute_score_async if is_async else compute_score,
        takes={name: name for name in ROW},
        # beside programs, a worker has one row at a time
        is_async=is_async and not any(term.runs_programs for term in summed),
    )


async def _gathered(results: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for those of the results that are awaitable."""

    async def value(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    values = await asyncio.gather(*map(value, results.values()))
    return dict(zip(results, values, strict=True))
