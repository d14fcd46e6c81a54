"""hybridflow: reinforcement-learning post-training of language models.

Importing the package is fast: each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see
    from hybridflow.api import Callback, Run, StopTraining, dpo, reward_model, sft, train
    from hybridflow.config import PPOConfig, SFTConfig
    from hybridflow.environments import Environment, Step
    from hybridflow.errors import HybridFlowError
    from hybridflow.protocol import DataProto
    from hybridflow.tools import tool

__version__ = "0.1.0"

_HOMES = {
    "Callback": "hybridflow.api",
    "DataProto": "hybridflow.protocol",
    "Environment": "hybridflow.environments",
    "HybridFlowError": "hybridflow.errors",
    "PPOConfig": "hybridflow.config",
    "Run": "hybridflow.api",
    "SFTConfig": "hybridflow.config",
    "Step": "hybridflow.environments",
    "StopTraining": "hybridflow.api",
    "dpo": "hybridflow.api",
    "reward_model": "hybridflow.api",
    "sft": "hybridflow.api",
    "tool": "hybridflow.tools",
    "train": "hybridflow.api",
}

__all__ = [
    "Callback",
    "DataProto",
    "Environment",
    "HybridFlowError",
    "PPOConfig",
    "Run",
    "SFTConfig",
    "Step",
    "StopTraining",
    "__version__",
    "dpo",
    "reward_model",
    "sft",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
