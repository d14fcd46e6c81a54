"""Loading of reward functions: a name or a path with options in, a RewardFunction out.

"gsm8k"                       a built-in function
"path/to/file.py:name"        a user's function; also "package.module:name"
"path/to/file.py"             a user's compute_score or compute_reward
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.config.own_code import (
    CALLED_WITH,
    CALLED_WITH_LISTS,
    COMPLETIONS,
    DEFAULT_NAMES,
    defined_as,
    reward_fault,
)
from hybridflow.config.source_code import shown
from hybridflow.data.plugin import load_module, load_object
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.function import RewardFunction, signature_of
from hybridflow.rewards.run_programs import Runner
from hybridflow.rewards.table import (
    REWARD_FUNCTIONS,
    check_name,
    check_options,
    function_of,
    unknown_source,
)


def load_builtin(
    name: str, options: Mapping[str, Any], seed: int, runner: Runner, *, key: str
) -> RewardFunction:
    """Load a built-in function and bind its options, and what runs programs.

    Raises ConfigError for an unknown name or option, or where programs cannot run here; RewardError if what
    it needs is not installed.
    """
    check_name(name, key=key)
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


def _load_auto(options: Mapping[str, Any], runner: Runner) -> RewardFunction:
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
) -> RewardFunction:
    """Load a user's function and bind its options; `path` may carry the name ("file.py:name").

    One that names `completions` gets lists and the columns of the data by name (`function.py`).
    Raises ConfigError if the file, the name or a fitting signature is missing, or the file raises while it is
    imported.
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
