"""Procedural tasks, which make questions without files: a name and a seed in, rows of one split out.

The rows have the schema of `data.prompts`. A user's task is `path.py:factory`: `factory(seed: int,
**options)` gives an object with `rows(split, size)`.
"""

from __future__ import annotations

from hybridflow.config.data import TaskConfig
from hybridflow.data.plugin import load_function
from hybridflow.data.tasks.arithmetic_chain import ArithmeticChain, ArithmeticPreferences
from hybridflow.data.tasks.base import EnvironmentTask, Split, Task
from hybridflow.data.tasks.one_liners import OneLiners
from hybridflow.data.tasks.reasoning_gym import ReasoningGymTask
from hybridflow.data.tasks.red_squares import RedSquares
from hybridflow.errors import ConfigError

__all__ = ["ArithmeticChain", "ReasoningGymTask", "RedSquares", "Split", "Task", "build_task"]


def build_task(config: TaskConfig) -> Task:
    """Build the task that `data.task` names.

    Raises ConfigError for an unknown name or options that the task does not take.
    """
    name = config.name
    assert name is not None, "no task is asked for"
    try:
        if name == "arithmetic_chain":
            return ArithmeticChain(seed=config.seed, **config.options)
        if name == "one_liners":
            return OneLiners(seed=config.seed, **config.options)
        if name == "arithmetic_preferences":
            return ArithmeticPreferences(seed=config.seed, **config.options)
        if name == "red_squares":
            return RedSquares(seed=config.seed, **config.options)
        if name.startswith("environment:"):
            return EnvironmentTask(name.removeprefix("environment:"), seed=config.seed, **config.options)
        if name.startswith("reasoning_gym:"):
            return ReasoningGymTask(
                name.removeprefix("reasoning_gym:"),
                seed=config.seed,
                options=config.options,
                val_size=config.val_size,
            )
        if ":" not in name:
            raise ConfigError(
                f"data.task.name: got {name!r}, wanted arithmetic_chain, arithmetic_preferences, one_liners, "
                "red_squares, reasoning_gym:NAME, environment:NAME or path/to/file.py:factory"
            )
        factory = load_function(name, key="data.task.name")
        task: Task = factory(seed=config.seed, **config.options)
    except TypeError as error:
        raise ConfigError(
            f"data.task.options={config.options} do not fit the task {name}: {error}"
        ) from error
    if not callable(getattr(task, "rows", None)):
        raise ConfigError(
            f"data.task.name: {name} gave {type(task).__name__}, wanted an object with rows(split, size)"
        )
    return task
