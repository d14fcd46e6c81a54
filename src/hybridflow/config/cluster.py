"""`ray_kwargs.*`: how a run finds or starts its Ray; and its environment, as far as known without Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hybridflow.config.schema import group, key

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the entry point of a submitted job


@dataclass(frozen=True)
class RayInitConfig:
    """The Ray cluster of a run."""

    address: str | None = key(
        None,
        "Running Ray cluster to join, host:port or auto; null: RAY_ADDRESS if it is set, else a Ray of this "
        "run's own.",
    )
    num_cpus: int | None = key(
        None, "CPUs that a Ray of this run's own offers; null: all of the machine.", minimum=1
    )
    num_gpus: int | None = key(
        None, "GPUs that a Ray of this run's own offers; null: all of the machine.", minimum=0
    )
    object_store_memory: int | None = key(
        None, "Bytes of shared memory for Ray's object store; null: Ray chooses.", minimum=78_643_200
    )
    include_dashboard: bool = key(False, "Start Ray's dashboard.")
    dashboard_port: int | None = key(
        None, "Port of Ray's dashboard; null: Ray chooses.", minimum=1, maximum=65_535
    )
    namespace: str | None = key(None, "Ray namespace of the run's actors; null: a new one for each run.")
    runtime_env: dict[str, Any] = key(
        {}, "Ray's runtime environment of the workers, for example {env_vars: {A: b}}."
    )


@dataclass(frozen=True)
class RayConfig:
    """Ray's cluster and its timeline."""

    ray_init: RayInitConfig = group(RayInitConfig)
    timeline_json_file: str | None = key(
        None, "File into which Ray's timeline of the run is written at its end; null: none."
    )


def choose_address(key: str | None) -> str | None:
    """Return the address of the Ray to join, or None where the run starts its own.

    The key comes first, then RAY_ADDRESS, then the cluster of the submitted job that this process belongs to.
    """
    address = key or os.environ.get("RAY_ADDRESS")
    if not address and JOB_VARIABLE in os.environ:
        return "auto"
    if address in ("", "local"):
        return None
    return address


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
