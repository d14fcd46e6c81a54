"""The built-in reward functions: their names, the data sources for `auto`, and what is known of each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hybridflow.config.own_code import CALLED_WITH, MESSAGES
from hybridflow.errors import ConfigError
from hybridflow.rewards.functions import (
    arithmetic_chain,
    code,
    exact_match,
    format,
    geometry3k,
    gsm8k,
    judge,
    length,
    math,
    math_dapo,
    random,
    reasoning_gym,
    search_r1,
)

_STANDARD = (*CALLED_WITH, MESSAGES, "runner")


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward function."""

    module: ModuleType
    """It has the function, `compute_score`, and may have `prepare`, which imports what that needs."""
    returns: tuple[str, ...] = ()
    """The keys that it returns for every row, besides `score`."""
    needs_truth: bool = False
    """It fails on a row without a ground truth."""
    answer_form: str = "{}"
    """The text in which it finds a bare answer, {}."""

    def options(self) -> dict[str, inspect.Parameter]:
        """Return its parameters that come neither from the row nor from the run."""
        parameters = inspect.signature(self.module.compute_score).parameters
        return {name: each for name, each in parameters.items() if name not in _STANDARD}


REWARD_FUNCTIONS: dict[str, BuiltIn] = {
    "exact_match": BuiltIn(exact_match, ("acc",), needs_truth=True),
    "gsm8k": BuiltIn(gsm8k, ("acc",), needs_truth=True, answer_form="#### {}"),
    "math": BuiltIn(math, ("acc",), needs_truth=True, answer_form="\\boxed{{{}}}"),
    "math_dapo": BuiltIn(math_dapo, ("acc", "format", "pred"), needs_truth=True, answer_form="Answer: {}"),
    "geometry3k": BuiltIn(
        geometry3k, ("acc", "format"), needs_truth=True, answer_form="<think></think>\\boxed{{{}}}"
    ),
    "code": BuiltIn(code, ("acc", "fenced", "verdict"), needs_truth=True),
    "arithmetic_chain": BuiltIn(arithmetic_chain, ("acc", "format"), needs_truth=True, answer_form="#### {}"),
    "reasoning_gym": BuiltIn(reasoning_gym, ("acc",)),
    "search_r1": BuiltIn(search_r1, ("acc",), needs_truth=True, answer_form="<answer>{}</answer>"),
    "format": BuiltIn(format),
    "length": BuiltIn(length),
    "judge": BuiltIn(judge, ("judge_answer",)),
    "random": BuiltIn(random),
}
DATA_SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "math_dapo": "math_dapo",
    "hiyouga/geometry3k": "geometry3k",
    **dict.fromkeys(("code", "codecontests", "apps", "codeforces", "taco"), "code"),
    "arithmetic_chain": "arithmetic_chain",
    "red_squares": "exact_match",
    "reasoning_gym": "reasoning_gym",
}
PREFIXES: dict[str, str] = {
    "aime": "math_dapo",
    "numina_": "math",
    "searchR1_": "search_r1",
}
"""Beginnings of data sources, which come in several."""


def function_of(data_source: str) -> str | None:
    """Return the name of the function that `auto` takes for a data source, or None where it knows none.

    `reasoning_gym:NAME` goes by its part before the colon.
    """
    by_prefix = [name for prefix, name in PREFIXES.items() if data_source.startswith(prefix)]
    known = DATA_SOURCES.get(data_source) or DATA_SOURCES.get(data_source.partition(":")[0])
    return known or next(iter(by_prefix), None)


def unknown_source(data_source: str) -> str:
    """Return the message about a data source that `auto` knows no function for."""
    known = [*DATA_SOURCES, *(f"{prefix}…" for prefix in PREFIXES)]
    return (
        f"reward.function=auto knows no reward for data_source {data_source!r} (it knows: "
        f"{', '.join(known)}); set reward.function to one of {', '.join(REWARD_FUNCTIONS)}, give "
        "your own by reward.custom_reward_function.path=FILE.py:NAME, or choose another column by "
        "data.reward_fn_key"
    )


def check_name(name: str, *, key: str) -> None:
    """Raise ConfigError, naming `key`, where there is no built-in function of this name."""
    if name != "auto" and name not in REWARD_FUNCTIONS:
        raise ConfigError(
            f"{key}: got {name!r}, wanted auto, {', '.join(REWARD_FUNCTIONS)} or path/to/file.py:name"
        )


def check_options(name: str, options: Mapping[str, Any], *, key: str) -> None:
    """Raise ConfigError for options that a built-in function does not have, or needs and lacks."""
    functions = REWARD_FUNCTIONS.values() if name == "auto" else [REWARD_FUNCTIONS[name]]
    parameters = {option: each for function in functions for option, each in function.options().items()}
    if unknown := [option for option in options if option not in parameters]:
        raise ConfigError(
            f"{key}: {name} has no option {', '.join(unknown)}; it has: {', '.join(parameters) or 'none'}"
        )
    missing = [
        option
        for option, parameter in parameters.items()
        if parameter.default is parameter.empty and option not in options
    ]
    if missing and name != "auto":
        raise ConfigError(
            f"{key}: {name} needs {', '.join(missing)}; for example {{name: {name}, weight: 1, "
            f"{missing[0]}: ...}}"
        )
    if name == "judge":
        judge.check(options)
