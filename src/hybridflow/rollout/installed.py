"""Check that the package of an engine is installed, before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import ConfigError, install_extra


def advice(name: str) -> str:
    """Return the advice for an environment in which vllm or sglang cannot be imported."""
    return (
        f"{install_extra(name)} on CUDA, run scripts/setup_{name}.sh on a CPU, or set "
        "actor_rollout_ref.rollout.server.python or rollout.server.address"
    )


def check_installed(config: RolloutConfig) -> None:
    """ConfigError where the engine of `rollout.name` would run in this environment and is not installed."""
    elsewhere = config.server.python is not None or config.server.address is not None
    if config.name in ("vllm", "sglang") and not elsewhere and find_spec(config.name) is None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={config.name} needs {config.name}, which is not installed here: "
            f"{advice(config.name)}; or use native"
        )
