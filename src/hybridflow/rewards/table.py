"""Tables of the built-in reward functions: names, data sources for `auto`, returned keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hybridflow.errors import ConfigError, RewardError
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

RewardFunction = Callable[..., Any]

_MODULES: dict[str, ModuleType] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "math": math,
    "math_dapo": math_dapo,
    "geometry3k": geometry3k,
    "code": code,
    "arithmetic_chain": arithmetic_chain,
    "reasoning_gym": reasoning_gym,
    "search_r1": search_r1,
    "format": format,
    "length": length,
    "judge": judge,
    "random": random,
}

REWARD_FUNCTIONS: dict[str, RewardFunction] = {
    name: module.compute_score for name, module in _MODULES.items()
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

ANSWER_FORMS: dict[str, str] = {
    "gsm8k": "#### {}",
    "arithmetic_chain": "#### {}",
    "math": "\\boxed{{{}}}",
    "math_dapo": "Answer: {}",
    "geometry3k": "<think></think>\\boxed{{{}}}",
    "search_r1": "<answer>{}</answer>",
}
"""The text in which a function finds a bare answer; {} is the answer. Others take it as it is."""

RETURNED: dict[str, tuple[str, ...]] = {
    "exact_match": ("acc",),
    "gsm8k": ("acc",),
    "math": ("acc",),
    "math_dapo": ("acc", "format", "pred"),
    "geometry3k": ("acc", "format"),
    "code": ("acc", "fenced", "verdict"),
    "arithmetic_chain": ("acc", "format"),
    "reasoning_gym": ("acc",),
    "search_r1": ("acc",),
    "format": (),
    "length": (),
    "judge": ("judge_answer",),
    "random": (),
}
"""The keys that each built-in function returns for every row, besides `score`."""

NEEDS_TRUTH = (
    "exact_match",
    "gsm8k",
    "math",
    "math_dapo",
    "geometry3k",
    "code",
    "arithmetic_chain",
    "search_r1",
)
"""The built-in functions that fail on a row without a ground truth."""

_STANDARD = ("data_source", "solution_str", "ground_truth", "extra_info", "messages", "runner")


def function_of(data_source: str) -> str | None:
    """Return the name of the function that `auto` takes for a data source, or None where it knows none."""
    by_prefix = [name for prefix, name in PREFIXES.items() if data_source.startswith(prefix)]
    known = DATA_SOURCES.get(data_source) or DATA_SOURCES.get(data_source.partition(":")[0])
    return known or next(iter(by_prefix), None)


def name_for_source(data_source: str) -> str:
    """Return the name of the built-in function that `auto` takes for a data source.

    `reasoning_gym:NAME` goes by its part before the colon. Raises RewardError for an unknown source.
    """
    name = function_of(data_source)
    if name is None:
        raise RewardError(unknown_source(data_source))
    return name


def unknown_source(data_source: str) -> str:
    """Return the message about a data source that `auto` knows no function for."""
    known = [*DATA_SOURCES, *(f"{prefix}…" for prefix in PREFIXES)]
    return (
        f"reward.function=auto knows no reward for data_source {data_source!r} (it knows: "
        f"{', '.join(known)}); set reward.function to one of {', '.join(REWARD_FUNCTIONS)}, give "
        "your own by reward.custom_reward_function.path=FILE.py:NAME, or choose another column by "
        "data.reward_fn_key"
    )


def auto(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Score the row by the built-in function that fits its data source."""
    return REWARD_FUNCTIONS[name_for_source(data_source)](
        data_source, solution_str, ground_truth, extra_info, **kwargs
    )


def find(name: str, *, key: str) -> RewardFunction:
    """Find a built-in function by its name; ConfigError, naming `key`, if there is none."""
    if name == "auto":
        return auto
    if name not in REWARD_FUNCTIONS:
        raise ConfigError(
            f"{key}: got {name!r}, wanted auto, {', '.join(REWARD_FUNCTIONS)} or path/to/file.py:name"
        )
    return REWARD_FUNCTIONS[name]


def prepare(name: str) -> None:
    """Import the packages that a built-in function needs. Raises RewardError if they are not installed."""
    module = _MODULES.get(name)
    if module is not None and hasattr(module, "prepare"):
        module.prepare()


def check_options(name: str, options: dict[str, Any], *, key: str) -> None:
    """Raise ConfigError for options that a built-in function does not have, or needs and lacks."""
    functions = [function for each, function in REWARD_FUNCTIONS.items() if name in ("auto", each)]
    parameters = {
        p.name: p for function in functions for p in inspect.signature(function).parameters.values()
    }
    known = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in _STANDARD]
    if unknown := [option for option in options if option not in known]:
        raise ConfigError(
            f"{key}: {name} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}"
        )
    missing = [
        option
        for option in known
        if parameters[option].default is inspect.Parameter.empty and option not in options
    ]
    if missing and name != "auto":
        raise ConfigError(
            f"{key}: {name} needs {', '.join(missing)}; for example {{name: {name}, weight: 1, "
            f"{missing[0]}: ...}}"
        )
    if name == "judge":
        judge.check(options)
