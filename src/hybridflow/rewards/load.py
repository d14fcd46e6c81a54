"""Loading of reward functions: a name or a path with options in, a RewardFunction out.

"gsm8k"                       a built-in function
"path/to/file.py:name"        a user's function; also "package.module:name"
"path/to/file.py"             a user's compute_score or compute_reward

The table of the built-in reward functions has their names, the data sources for `auto`, and what is known
of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hybridflow.config.own_code import (
    CALLED_WITH,
    CALLED_WITH_LISTS,
    COMPLETIONS,
    DEFAULT_NAMES,
    MESSAGES,
    defined_as,
    reward_fault,
)
from hybridflow.config.reward import JUDGE_OFFERS, JUDGE_TERM
from hybridflow.config.source_code import shown
from hybridflow.data.plugin import load_module, load_object
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.function import RewardFunction, signature_of
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
from hybridflow.rewards.run_programs import ProgramRunner

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


@dataclass(frozen=True)
class JudgeAccess:
    """What a process needs to ask the run's generative reward model."""

    address: str
    """HOST:PORT of its server."""
    model: str
    """The name under which it is served; any other is answered too."""
    tokenizer: str
    """Folder or hub name of its tokenizer."""
    trust_remote_code: bool = False

    @property
    def url(self) -> str:
        """The base URL of its OpenAI-compatible endpoint."""
        return f"http://{self.address}/v1"

    def offered(self, names: Container[str]) -> dict[str, Any]:
        """Return the arguments of `JUDGE_OFFERS` that are among the names of a function's parameters; its
        tokenizer is loaded only for a function that names it.
        """
        makers: dict[str, Callable[[], Any]] = {
            "reward_router_address": lambda: self.address,
            "reward_model_name": lambda: self.model,
            "reward_model_tokenizer": self._tokenizer,
        }
        return {name: makers[name]() for name in JUDGE_OFFERS if name in names}

    def _tokenizer(self) -> Any:
        # by its name: transformers takes seconds, and most rewards do without
        load_tokenizer = load_object("hybridflow.data.tokenizer:load_tokenizer", key="reward_model_tokenizer")
        return load_tokenizer(self.tokenizer, self.trust_remote_code)


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


def load_builtin(
    name: str,
    options: Mapping[str, Any],
    seed: int,
    runner: ProgramRunner,
    *,
    key: str,
    judge: JudgeAccess | None = None,
) -> RewardFunction:
    """Load a built-in function and bind its options, and what runs programs. One that asks a model asks the
    run's own `judge`, unless its options name an endpoint.

    Raises ConfigError for an unknown name or option, or where programs cannot run here; RewardError if what
    it needs is not installed.
    """
    check_name(name, key=key)
    if name == JUDGE_TERM and judge is not None and "base_url" not in options:
        options = {"model": judge.model, **options, "base_url": judge.url}
    check_options(name, options, key=key)
    if name == "auto":
        return _load_auto(options, runner)
    built_in = REWARD_FUNCTIONS[name]
    if hasattr(built_in.module, "prepare"):
        built_in.module.prepare()
    if name == "random":
        options = {"seed": seed, **options}
    if name == "code":
        runner.prepare()
        options = {**options, "runner": runner}
    return RewardFunction.of(built_in.module.compute_score, options)


def _load_auto(options: Mapping[str, Any], runner: ProgramRunner) -> RewardFunction:
    """Load the function that scores each row by the built-in one that fits its data source.

    It raises RewardError where there is none. Each built-in one gets those of the options that it has.
    """
    given = {**options, "runner": runner}
    functions: dict[str, RewardFunction] = {}
    for name, built_in in REWARD_FUNCTIONS.items():
        function = built_in.module.compute_score
        names = inspect.signature(function).parameters.keys() & given.keys()
        functions[name] = RewardFunction.of(function, {option: given[option] for option in names})

    def auto(**row: Any) -> Any:
        name = function_of(row["data_source"])
        if name is None:
            raise RewardError(unknown_source(row["data_source"]))
        return functions[name].function(**functions[name].arguments(row))

    return RewardFunction.of(auto)


def load_user_function(
    path: str,
    name: str,
    options: Mapping[str, Any],
    *,
    key: str,
    called_with: Sequence[str] = CALLED_WITH,
    judge: JudgeAccess | None = None,
) -> RewardFunction:
    """Load a user's function and bind its options; `path` may carry the name ("file.py:name").

    It gets what `judge` offers of the arguments that it names and the options lack. One that names
    `completions` gets lists and the columns of the data by name (`function.py`). Raises ConfigError if the
    file, the name or a fitting signature is missing, or the file raises while it is imported.
    """
    last = split_path(path)[1]
    if last:
        if name not in (DEFAULT_NAMES[0], last):
            raise ConfigError(f"{key}: path says {last!r} and name says {name!r}; give the name once")
        function = load_object(path, key=key)
    else:
        module = load_module(path, key=key)
        if name == DEFAULT_NAMES[0] and not hasattr(module, name) and hasattr(module, DEFAULT_NAMES[1]):
            name = DEFAULT_NAMES[1]
        # where there is no such name, the message lists what the file does define
        function = getattr(module, name, None) or load_object(f"{path}:{name}", key=key)
    if not callable(function):
        raise ConfigError(f"{key}: {shown(path)} names a {type(function).__name__}, wanted a function")
    signature = signature_of(function)
    if signature is not None and judge is not None:
        options = {**judge.offered(signature.parameters.keys() - options.keys()), **options}
    if signature is not None and (fault := reward_fault(signature, options, called_with)):
        defined = getattr(function, "__name__", "function")
        raise ConfigError(defined_as(f"{key}: {shown(path)}", defined, signature, fault))
    all_rows = called_with == CALLED_WITH_LISTS
    if signature is not None and COMPLETIONS in signature.parameters:
        return RewardFunction.of_columns(function, options, all_rows=all_rows)
    if all_rows:
        return RewardFunction.of_lists(function, options)
    return RewardFunction.of(function, options)


def is_path(name: str) -> bool:
    """Whether `name` names a user's function, and not a built-in one."""
    return name.endswith(".py") or (":" in name and name not in REWARD_FUNCTIONS)


def split_path(path: str) -> tuple[str, str]:
    """The file or module and the function's name, which is empty where the path does not carry one."""
    location, _, last = path.rpartition(":")
    if location and "/" not in last and "\\" not in last:
        return location, last
    return path, ""
