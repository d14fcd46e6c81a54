"""Terms in, one reward function out: score = Σ_i weight_i · term_i, each term's own value kept as a column.

    reward.terms:
      - {name: gsm8k, weight: 1}
      - {name: length, weight: -0.1, max_chars: 400}
      - {name: my.py:politeness}

A term's column has the function's name, or the term's `key`. Other columns that a term returns (acc, ...) are
kept; where two terms return the same one, the earlier term's stands.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.load import DEFAULT_NAMES, is_async, is_path, load_builtin, load_user_function
from hybridflow.rewards.result import normalize_result
from hybridflow.rewards.run_programs import Runner
from hybridflow.rewards.table import RewardFunction


@dataclass(frozen=True)
class Term:
    """One summand: its column, its weight and the function with its options bound."""

    column: str
    weight: float
    function: RewardFunction


def load_terms(terms: Sequence[dict[str, Any]], seed: int, runner: Runner) -> list[Term]:
    """Load `reward.terms`. Raises ConfigError for a term without a name, or a weight that is no number."""
    loaded: list[Term] = []
    for position, term in enumerate(terms):
        key = f"reward.terms[{position}]"
        if not isinstance(term, dict) or not isinstance(term.get("name"), str):
            raise ConfigError(f"{key}: got {term!r}, wanted {{name: FUNCTION, weight: NUMBER, ...options}}")
        options = {str(name): value for name, value in term.items() if name not in ("name", "weight", "key")}
        weight = term.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ConfigError(f"{key}: got weight={weight!r}, wanted a number")
        name = term["name"]
        column = name
        if is_path(name):
            function = load_user_function(name, DEFAULT_NAMES[0], options, key=key)
            column = _function_name(name)
        else:
            function = load_builtin(name, options, seed, runner, key=key)
        loaded.append(Term(str(term.get("key", column)), float(weight), function))
    columns = [term.column for term in loaded]
    if twice := {column for column in columns if columns.count(column) > 1}:
        raise ConfigError(
            f"reward.terms: two terms make the column {', '.join(sorted(twice))}; give each its own `key`"
        )
    return loaded


def compose(terms: Sequence[Term]) -> RewardFunction:
    """Return the weighted sum of the terms as one reward function, which is async if a term is."""

    def total(results: Sequence[Any]) -> dict[str, Any]:
        score = 0.0
        columns: dict[str, Any] = {}
        extras: dict[str, Any] = {}
        for term, result in zip(terms, results, strict=True):
            value, more = normalize_result(result)
            score += term.weight * value
            columns[term.column] = value
            extras = {**more, **extras}
        return {**extras, **columns, "score": score}

    def compute_score(**row: Any) -> dict[str, Any]:
        return total([term.function(**row) for term in terms])

    async def compute_score_async(**row: Any) -> dict[str, Any]:
        return total(await asyncio.gather(*(evaluate(term, row) for term in terms)))

    async def evaluate(term: Term, row: dict[str, Any]) -> Any:
        result = term.function(**row)
        if inspect.isawaitable(result):
            return await result
        return result

    if any(is_async(term.function) for term in terms):
        return compute_score_async
    return compute_score


def _function_name(path: str) -> str:
    """The name in "file.py:name", else the file's name without its ending."""
    location, _, last = path.rpartition(":")
    if location:
        return last
    return last.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
