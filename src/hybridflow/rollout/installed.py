"""Whether what an engine needs is in this environment, said before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import ConfigError, install_extra

VLLM_MISSING = (
    f"{install_extra('vllm')} on CUDA, run scripts/setup_vllm.sh on a CPU, or set actor_rollout_ref.rollout.server.python or "
    "rollout.server.address"
)
"""What to do where vllm cannot be imported."""


def check_installed(config: RolloutConfig) -> None:
    """ConfigError where the engine of `rollout.name` would run in this environment and is not installed."""
    if config.name == "vllm" and config.server.python is None and config.server.address is None and find_spec("vllm") is None:
        raise ConfigError(f"actor_rollout_ref.rollout.name=vllm needs vllm, which is not installed here: {VLLM_MISSING}; or use native")
