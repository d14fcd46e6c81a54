"""Loading of reward functions: a name or a path with options in, a function with its options bound out.

"gsm8k"                       a built-in function
"path/to/file.py:name"        a user's function; also "package.module:name"
"path/to/file.py"             a user's compute_score or compute_reward
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hybridflow.config.own_code import (
    ALSO_CALLED,
    CALLED_WITH,
    CALLED_WITH_LISTS,
    COMPLETIONS,
    DEFAULT_NAMES,
    MESSAGES,
    TOKENS,
    defined_as,
    reward_fault,
    reward_names,
)
from hybridflow.config.source_code import shown
from hybridflow.data.plugin import load_module, load_object
from hybridflow.errors import ConfigError
from hybridflow.rewards import table
from hybridflow.rewards.columns import with_columns, with_columns_of_one
from hybridflow.rewards.run_programs import Runner
from hybridflow.rewards.table import RewardFunction

PROMPT = "raw_prompt"
"""The row's messages or text, for functions of lists by column (`columns.py`)."""
WHERE_NAMED = (TOKENS, MESSAGES, PROMPT)


def load_builtin(
    name: str, options: dict[str, Any], seed: int, runner: Runner, *, key: str
) -> RewardFunction:
    """Load a built-in function and bind its options, and what runs programs.

    Raises ConfigError for an unknown name or option, or where programs cannot run here; RewardError if what
    it needs is not installed.
    """
    function = table.find(name, key=key)
    table.check_options(name, options, key=key)
    table.prepare(name)
    if name == "random":
        options = {"seed": seed, **options}
    if name == "code":
        runner.prepare()
    if name in ("code", "auto"):
        options = {**options, "runner": runner}
    return _bound(function, options)


def load_user_function(
    path: str, name: str, options: dict[str, Any], *, key: str, called_with: Sequence[str] = CALLED_WITH
) -> RewardFunction:
    """Load a user's function and bind its options; `path` may carry the name ("file.py:name").

    One that names `completions` gets lists and the columns of the data by name (`columns.py`).
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
    signature = _signature(function)
    if signature is not None and (fault := reward_fault(signature, options, called_with)):
        defined = getattr(function, "__name__", "function")
        raise ConfigError(defined_as(f"{key}: {shown(path)}", defined, signature, fault))
    if takes(function, COMPLETIONS):
        shape = with_columns if called_with == CALLED_WITH_LISTS else with_columns_of_one
        return _bound(shape(function, is_coroutine=is_async(function)), options)
    if called_with == CALLED_WITH and signature is not None:
        function = _by_name(function, reward_names(signature))
    return _bound(function, options)


def is_path(name: str) -> bool:
    """Whether `name` names a user's function, and not a built-in one."""
    return name.endswith(".py") or (":" in name and name not in table.REWARD_FUNCTIONS)


def split_path(path: str) -> tuple[str, str]:
    """The file or module and the function's name, which is empty where the path does not carry one."""
    location, _, last = path.rpartition(":")
    if location and "/" not in last and "\\" not in last:
        return location, last
    return path, ""


def _bound(function: RewardFunction, options: dict[str, Any]) -> RewardFunction:
    if not options:
        return function
    return partial(function, **options)


def _signature(function: RewardFunction) -> inspect.Signature | None:
    """Return the signature of a function; None for one that is written in C and has none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _by_name(function: RewardFunction, names: Mapping[str, str]) -> RewardFunction:
    """Return a function that is called with all arguments and passes on those in `names`."""
    if set(CALLED_WITH) <= set(names) and not set(names) & set(ALSO_CALLED):
        return function

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        given = {name: arguments[argument] for name, argument in names.items()}
        taken = (*CALLED_WITH, *names.values())
        options = {name: value for name, value in arguments.items() if name not in taken}
        return function(**given, **options)

    @functools.wraps(function)
    async def call_async(**arguments: Any) -> Any:
        return await call(**arguments)

    if is_async(function):
        return call_async
    return call


def is_async(function: RewardFunction) -> bool:
    """Whether a call of a function, a partial or an object with __call__ gives a coroutine."""
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def takes(function: RewardFunction, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    signature = _signature(function)
    return signature is not None and name in signature.parameters
