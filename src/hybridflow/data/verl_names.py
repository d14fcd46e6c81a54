"""Imports of verl in a user's files, where verl is not installed: each module stands for ours.

    from verl.tools.base_tool import BaseTool         hybridflow.tools.base_tool
    from verl import DataProto                        hybridflow
    from verl.utils.reward_score import gsm8k         hybridflow.rewards.functions.gsm8k, called as verl's are

A module of verl's name is a new one that takes its names from ours, so that ours keeps its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

VERL = "verl"
SCORES = "verl.utils.reward_score"
HOMES = {
    VERL: "hybridflow",
    "verl.experimental.agent_loop": "hybridflow.agent.agent_loop",
    "verl.experimental.agent_loop.agent_loop": "hybridflow.agent.agent_loop",
    "verl.utils.dataset.dynamicgen_dataset": "hybridflow.data.growing",
    SCORES: "hybridflow.rewards.load",
    f"{SCORES}.math_reward": "hybridflow.rewards.functions.math",
    f"{SCORES}.geo3k": "hybridflow.rewards.functions.geometry3k",
    f"{SCORES}.search_r1_like_qa_em": "hybridflow.rewards.functions.search_r1",
}
"""Modules whose names differ by more than that of the package."""


def home_of(name: str) -> str | None:
    """Return our module in the place of one of verl's, or None where there is none."""
    if name.startswith(f"{SCORES}."):
        ours = HOMES.get(name, name.replace(SCORES, "hybridflow.rewards.functions"))
    else:
        ours = HOMES.get(name, name.replace(VERL, "hybridflow", 1))
    try:
        return ours if importlib.util.find_spec(ours) is not None else None
    except ModuleNotFoundError:  # of a package above it
        return None


class VerlNames(MetaPathFinder, Loader):
    """Finds modules of verl; the last finder, so that a verl that is installed comes first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that stands for ours; ModuleNotFoundError where there is none."""
        if name.partition(".")[0] != VERL:
            return None
        above = sys.modules.get(VERL)
        if name != VERL and not isinstance(getattr(above, "__loader__", None), VerlNames):
            return None  # verl is installed, and has no such module
        inner = any(each.startswith(f"{name}.") for each in HOMES)
        if home_of(name) is None and not inner:
            raise ModuleNotFoundError(
                f"{name}: verl is not installed, and hybridflow has no module in the place of this one; its "
                "page on coming from verl has what there is",
                name=name,
            )
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module what ours has."""
        name = module.__name__
        ours = home_of(name)
        if ours is None:
            return
        logger.info("%s stands for %s, as verl is not installed", ours, name)
        if name == SCORES:
            module.__dict__["default_compute_score"] = default_compute_score
            return
        source = importlib.import_module(ours)
        public = {key: value for key, value in vars(source).items() if not key.startswith("__")}
        module.__dict__.update(public)
        module.__dict__["__getattr__"] = partial(_named, name, source)
        if name.startswith(f"{SCORES}."):
            module.__dict__["compute_score"] = partial(compute_score, ours, name.rpartition(".")[2])


def _named(name: str, source: ModuleType, key: str) -> Any:
    """Return what our module makes when it is asked for it."""
    try:
        return getattr(source, key)
    except AttributeError:
        raise AttributeError(f"module {name!r} (here {source.__name__}) has no {key!r}") from None


def compute_score(
    home: str,
    source: str,
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> Any:
    """Return what our function in the module `home` gives, called as those of verl are; of math_dapo all that
    it says. TypeError for an option that ours does not have.
    """
    ours = importlib.import_module(home).compute_score
    known = inspect.signature(ours).parameters
    asked = {"method": (method, "strict"), "format_score": (format_score, 0.0)}
    options = {name: value for name, (value, plain) in asked.items() if value != plain}
    if strange := sorted(set(options) - set(known)):
        raise TypeError(f"{home}.compute_score has no option {', '.join(strange)}: leave it out")
    result = ours(source, solution_str, ground_truth, **options)
    if result["acc"]:
        result["score"] *= score
    return result if "pred" in result else result["score"]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **options: Any
) -> Any:
    """Return the score by the function that a data source has.

    NotImplementedError, as in verl, for a data source without one; TypeError for an option that is set, such
    as the address of a sandbox, which is a key of the run here.
    """
    if given := sorted(name for name, value in options.items() if value is not None):
        raise TypeError(f"default_compute_score: {', '.join(given)} is a key of the run here: leave it out")
    functions = importlib.import_module(HOMES[SCORES])
    name = functions.function_of(data_source)
    if name is None:
        raise NotImplementedError(functions.unknown_source(data_source))
    home = functions.REWARD_FUNCTIONS[name].module.__name__
    return compute_score(home, data_source, solution_str, ground_truth)


def find_verl_here() -> None:
    """Let imports of verl find our modules from now on."""
    if not any(isinstance(finder, VerlNames) for finder in sys.meta_path):
        sys.meta_path.append(VerlNames())
