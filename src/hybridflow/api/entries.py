"""The functions that a program calls: each runs what the command of the same name runs.

Functions and classes of the program get names under which a configuration loads them:

    function of a module ──► "package.module:name"            worker processes import it
    cell of a notebook, script, lambda, closure ──► "hybridflow_objects:name", an entry of a module in memory
                                                              called in this process, as it is
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType
from typing import Any

from hybridflow.api.callbacks import Callbacks
from hybridflow.api.launch import Dataset, Model, Overrides, RunArguments, launch, only_run
from hybridflow.api.result import Run
from hybridflow.config.own_code import DEFAULT_NAMES
from hybridflow.config.source_code import IN_MEMORY, in_memory, shown
from hybridflow.errors import ConfigError
from hybridflow.rewards.compose import options_of
from hybridflow.rewards.load import load_user_function

Reward = str | Callable[..., Any] | Mapping[str, Any]
"""A built-in name, "path/to/file.py:name", a function, or a term of `reward.terms`."""

REWARD_WORKERS = "reward.num_workers"
AGENT_WORKERS = "actor_rollout_ref.rollout.agent.num_workers"


def train(
    recipe: str | os.PathLike[str] | None = "grpo",
    *,
    model: Model | None = None,
    tokenizer: Any = None,
    reward: Reward | Sequence[Reward | tuple[Reward, float]] | None = None,
    environment: str | type | None = None,
    environment_options: Mapping[str, Any] | None = None,
    dataset: Dataset | None = None,
    val_dataset: Dataset | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] | None = None,
    callbacks: Callbacks = (),
    overrides: Overrides = (),
    progress: bool = True,
) -> Run:
    """Train by reinforcement learning, as `hybridflow train` does with the same keys.

    recipe: name of a recipe, or path of a YAML file; None: the defaults
    model: Hugging Face folder, hub name, or loaded model, which is saved into the run folder first
    tokenizer: tokenizer of a loaded model; else a folder or hub name in place of the model's own
    reward: function, built-in name or "path/to/file.py:name"; a list is summed, with pairs (reward, weight)
    environment: class or name of what the model talks to; `environment_options` are its keyword arguments
    dataset, val_dataset: list of dicts or texts, datasets.Dataset, pandas DataFrame, or paths of files
    output_dir: run folder (trainer.default_local_dir)
    resume: True: from the newest checkpoint of the run folder, False: start over, or a global_step_N folder
    callbacks: objects with methods of Callback, or functions of (step, metrics); a list, or one alone
    overrides: keys of docs/configuration.md, as a dict or as words "key=value"; they win over all others
    progress: show what the run is doing

    The trained model is saved at the end unless a recipe or override sets trainer.save_freq. A reward or an
    environment that no file has (a cell, a closure) is called in this process. Returns the run, also where a
    callback has ended it. Raises a HybridFlowError for what the command would refuse.
    """
    common = (model, tokenizer, dataset, val_dataset, output_dir, resume, callbacks, overrides, progress)
    with only_run(), named_objects() as objects:
        values, specs = _reward_values(reward, objects)
        talks_to = _environment_values(environment, environment_options, objects)

        def check(config: Any) -> None:
            require_here(specs, REWARD_WORKERS, config.reward.num_workers)
            workers = config.actor_rollout_ref.rollout.agent.num_workers
            require_here([str(config.data.environment)], AGENT_WORKERS, workers)

        call = RunArguments("train", recipe, *common, values={**values, **talks_to}, check=check)
        return launch(call)


def sft(
    recipe: str | os.PathLike[str] | None = None,
    *,
    model: Model | None = None,
    tokenizer: Any = None,
    dataset: Dataset | None = None,
    val_dataset: Dataset | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] | None = None,
    callbacks: Callbacks = (),
    overrides: Overrides = (),
    progress: bool = True,
) -> Run:
    """Fine-tune on conversations, as `hybridflow sft` does; the arguments are those of `train`.

    Rows have `messages`, or `prompt` and `response`.
    """
    common = (model, tokenizer, dataset, val_dataset, output_dir, resume, callbacks, overrides, progress)
    with only_run():
        return launch(RunArguments("sft", recipe, *common))


def dpo(
    recipe: str | os.PathLike[str] | None = "dpo",
    *,
    model: Model | None = None,
    tokenizer: Any = None,
    dataset: Dataset | None = None,
    val_dataset: Dataset | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] | None = None,
    callbacks: Callbacks = (),
    overrides: Overrides = (),
    progress: bool = True,
) -> Run:
    """Learn from pairs of answers, as `hybridflow dpo` does; the arguments are those of `train`.

    Rows have `chosen` and `rejected`, with a `prompt` where these are answers alone.
    """
    common = (model, tokenizer, dataset, val_dataset, output_dir, resume, callbacks, overrides, progress)
    with only_run():
        return launch(RunArguments("dpo", recipe, *common))


def reward_model(
    recipe: str | os.PathLike[str] | None = "reward_model",
    *,
    model: Model | None = None,
    tokenizer: Any = None,
    dataset: Dataset | None = None,
    val_dataset: Dataset | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] | None = None,
    callbacks: Callbacks = (),
    overrides: Overrides = (),
    progress: bool = True,
) -> Run:
    """Train a reward model, as `hybridflow reward-model` does; the arguments are those of `train`.

    Rows have `chosen` and `rejected`, or steps with labels.
    """
    common = (model, tokenizer, dataset, val_dataset, output_dir, resume, callbacks, overrides, progress)
    with only_run():
        return launch(RunArguments("reward-model", recipe, *common))


def _reward_values(reward: Any, objects: Objects) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that choose the reward, and the functions among it by their names."""
    if reward is None:
        return {}, []
    if isinstance(reward, Mapping):
        reward = [reward]
    if isinstance(reward, list | tuple):
        if not reward:
            raise ConfigError("reward is an empty list: give functions or names, or leave reward out")
        terms = [_term(each, objects) for each in reward]
        values: dict[str, Any] = {"reward.terms": terms}
        specs = [str(term["name"]) for term in terms]
    else:
        specs = [_reward_spec(reward, objects)]
        values = {"reward.terms": [], "reward.custom_reward_function.path": None, "reward.function": specs[0]}
    if any(in_memory(spec) for spec in specs):
        values[REWARD_WORKERS] = 0
    return values, specs


def _term(given: Any, objects: Objects) -> dict[str, Any]:
    """Return an entry of `reward.terms`: of a reward, of a pair with its weight, or of an entry."""
    if isinstance(given, Mapping):
        return {**given, "name": _reward_spec(given.get("name"), objects, options_of(given))}
    if isinstance(given, tuple):
        if len(given) != 2 or isinstance(given[1], bool) or not isinstance(given[1], int | float):
            raise ConfigError(f"reward: got {given!r}, wanted a pair of a reward and its weight")
        return {"name": _reward_spec(given[0], objects), "weight": given[1]}
    return {"name": _reward_spec(given, objects)}


def _reward_spec(reward: Any, objects: Objects, options: Mapping[str, Any] | None = None) -> str:
    """Return the name of a reward.

    Raises ConfigError for what cannot be called as a reward function is, with its `options`.
    """
    if isinstance(reward, str):
        return reward
    if callable(getattr(reward, "reset", None)) and callable(getattr(reward, "step", None)):
        raise ConfigError("reward: got an environment, which gives rewards itself: pass it as environment=")
    if not callable(reward):
        raise ConfigError(
            f"reward: got {type(reward).__name__}, wanted a function, a built-in name such as 'gsm8k', or "
            "'path/to/file.py:name'"
        )
    spec = objects.spec(reward)
    load_user_function(spec, DEFAULT_NAMES[0], dict(options or {}), key="reward")
    return spec


def _environment_values(
    environment: str | type | None, options: Mapping[str, Any] | None, objects: Objects
) -> dict[str, Any]:
    """Return the keys of an environment."""
    values: dict[str, Any] = {}
    if options is not None:
        values["data.environment_options"] = dict(options)
    if environment is None:
        return values
    spec = environment
    if not isinstance(environment, str):
        if not isinstance(environment, type):
            raise ConfigError(
                f"environment: got an object of {type(environment).__name__}, wanted the class, because each "
                "trajectory has an environment of its own; environment_options= are its arguments"
            )
        spec = objects.spec(environment)
        if in_memory(spec):
            values[AGENT_WORKERS] = 0
    return {**values, "data.environment": spec}


class Objects:
    """The objects of a run."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def spec(self, found: Any) -> str:
        """Return "module:name" for a function, a class or a callable object."""
        name = getattr(found, "__qualname__", type(found).__name__)
        home = getattr(found, "__module__", None)
        if home is not None and _is_importable(found, home, name):
            return f"{home}:{name}"
        name = re.sub(r"\W", "_", name.rpartition(".")[2])
        while getattr(self._module, name, found) is not found:
            name += "_"  # two functions of one name
        setattr(self._module, name, found)
        return f"{IN_MEMORY}:{name}"


def require_here(specs: Sequence[str], key: str, num_workers: int) -> None:
    """Raise ConfigError where a key asks for processes, and they could not import the objects."""
    names = [shown(spec) for spec in specs if in_memory(spec)]
    if names and num_workers:
        raise ConfigError(
            f"{key}={num_workers}: {', '.join(names)} is defined in a notebook, in a script or inside a "
            f"function, and worker processes cannot import it. Leave {key} out, and it is called in this "
            "process; or move it into a file and give it as 'path/to/file.py:name'"
        )


def _is_importable(found: Any, module: str, name: str) -> bool:
    """Whether a fresh process that imports the module finds this object under its name."""
    if module == "__main__" or not getattr(sys.modules.get(module), "__file__", None):
        return False
    package = module.partition(".")[0]
    if not any(finder.find_spec(package, None) for finder in sys.meta_path):
        return False  # a file that the program has loaded by its path
    try:
        return attrgetter(name)(sys.modules[module]) is found
    except AttributeError:  # a lambda, or a function inside a function
        return False


@contextmanager
def named_objects() -> Iterator[Objects]:
    """Give names to objects that are valid inside the context."""
    module = ModuleType(IN_MEMORY, "Functions and classes of the program that called hybridflow.")
    sys.modules[IN_MEMORY] = module
    try:
        yield Objects(module)
    finally:
        del sys.modules[IN_MEMORY]
