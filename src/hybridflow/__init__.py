"""hybridflow: reinforcement-learning post-training of language models.

Importing the package is fast: each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
