"""Imports of verl in a user's files, where verl is not installed: each module stands for ours.

    from verl.tools.base_tool import BaseTool         hybridflow.tools.base_tool
    from verl import DataProto                        hybridflow
    from verl.utils.reward_score import gsm8k         hybridflow.rewards.functions.gsm8k, called as verl's are

A module of verl's name is a new one that takes its names from ours, so that ours keeps its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
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
        source = importlib.import_module(ours)
        if name == SCORES:
            module.__dict__["default_compute_score"] = partial(score_by_source, source)
            return
        public = {key: value for key, value in vars(source).items() if not key.startswith("__")}
        module.__dict__.update(public)
        module.__dict__["__getattr__"] = lambda key: getattr(source, key)
        if name.startswith(f"{SCORES}."):
            scored = scored_as_in_verl(name.rpartition(".")[2], source.compute_score)
            module.__dict__["compute_score"] = scored


def scored_as_in_verl(source: str, ours: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Return a reward function that is called as those of verl are, with a response and the truth first."""

    def compute_score(solution_str: str, ground_truth: Any, **options: Any) -> Any:
        """Return the score; of math_dapo with what else verl's says."""
        result = ours(source, solution_str, ground_truth, **options)
        return result if "pred" in result else result["score"]

    return compute_score


def score_by_source(
    functions: Any, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> Any:
    """Return the score by the function that a data source has; `functions`: the module that knows them.

    NotImplementedError, as in verl, for a data source without one.
    """
    name = functions.function_of(data_source)
    if name is None:
        raise NotImplementedError(functions.unknown_source(data_source))
    module = functions.REWARD_FUNCTIONS[name].module
    return scored_as_in_verl(data_source, module.compute_score)(solution_str, ground_truth)


def find_verl_here() -> None:
    """Let imports of verl find our modules from now on."""
    if not any(isinstance(finder, VerlNames) for finder in sys.meta_path):
        sys.meta_path.append(VerlNames())
