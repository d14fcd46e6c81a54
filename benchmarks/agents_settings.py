"""The cells of the agents page: a task, a seed, and how long its warm-up is. Light: imports no torch.

Cell(task, seed) ──digest──► is the result on disk still the result of this?
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from learn_settings import RESULTS, ROOT

from hybridflow.config.recipes import read_recipe

OUT = RESULTS / "agents"
WORK = ROOT / "agents"
SFT = "tiny/agent_sft"
WELL_FORMED = 0.2
"""Share of the demonstrations that are right in form."""


@dataclass(frozen=True)
class Task:
    """What is learned, from which warm-up."""

    environment: str
    """Environment, and recipe of the folder `tiny`."""
    warm_steps: int
    """SFT steps of the warm-up: until copying is learned, where that is needed."""
    overrides: tuple[str, ...] = ()
    """Further keys of the run."""


CONTROL = "calculator_random"
TASKS = {
    "calculator": Task("calculator", 300),
    CONTROL: Task("calculator", 300, ("data.environment_options.answers=random",)),
    "guess": Task("guess", 400),
    "search": Task("search", 150),
}


@dataclass(frozen=True)
class Cell:
    """One seed of a task."""

    name: str
    seed: int

    @property
    def task(self) -> Task:
        """What it learns."""
        return TASKS[self.name]

    @property
    def recipe(self) -> str:
        """The recipe that runs."""
        return f"tiny/{self.task.environment}"

    @property
    def label(self) -> str:
        """Stem of its files."""
        return f"{self.name}_{self.seed}"

    @property
    def result(self) -> Path:
        """File of the run's result."""
        return OUT / f"{self.label}.json"

    @cached_property
    def warm(self) -> Path:
        """Folder of the warm start, which the control shares; `warm.json` in it is written last.

        Recipes are read once: one that is edited during a run moves no folder.
        """
        return WORK / f"{self.task.environment}_{self.seed}_{_digest(self._warm_up())}"

    @cached_property
    def digest(self) -> str:
        """Changes where a recipe or the task does."""
        return _digest([self._warm_up(), asdict(self.task)])

    def _warm_up(self) -> list[Any]:
        return [read_recipe(self.recipe), read_recipe(SFT), self.task.warm_steps, WELL_FORMED]

    def found(self) -> dict[str, Any] | None:
        """Return the result on disk, if it is still that of this cell."""
        if not self.result.is_file():
            return None
        found: dict[str, Any] = json.loads(self.result.read_text())
        return found if found["digest"] == self.digest else None


def _digest(content: Any) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
