"""Check that the package of an engine is installed, before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import ConfigError, install_extra

VLLM_MISSING = (
    f"{install_extra('vllm')} on CUDA, run scripts/setup_vllm.sh on a CPU, or set "
    "actor_rollout_ref.rollout.server.python or "
    "rollout.server.address"
)
"""Advice for an environment in which vllm cannot be imported."""
SGLANG_MISSING = VLLM_MISSING.replace("vllm", "sglang")


def check_installed(config: RolloutConfig) -> None:
    """ConfigError where the engine of `rollout.name` would run in this environment and is not installed."""
    missing = {"vllm": VLLM_MISSING, "sglang": SGLANG_MISSING}.get(config.name)
    if (
        missing
        and config.server.python is None
        and config.server.address is None
        and find_spec(config.name) is None
    ):
        named = (
            f"actor_rollout_ref.rollout.name={config.name} needs {config.name}, which is not installed here"
        )
        raise ConfigError(f"{named}: {missing}; or use native")
