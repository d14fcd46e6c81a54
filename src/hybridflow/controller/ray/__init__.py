"""Worker processes on this machine and others, through Ray. No other package of hybridflow imports Ray."""

from hybridflow.errors import ConfigError, install_extra

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"a run of more than one process needs ray, which is not installed ({error}): {install_extra('ray')}"
        ", or run as one process with trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.controller=local"
    ) from error
