"""hybridflow: reinforcement-learning post-training of language models.

Importing the package is fast: each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "DataProto": "hybridflow.protocol",
    "PPOConfig": "hybridflow.config",
    "SFTConfig": "hybridflow.config",
    "HybridFlowError": "hybridflow.errors",
}

__all__ = ["DataProto", "HybridFlowError", "PPOConfig", "SFTConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
