"""`ray_kwargs.*`: how a run finds or starts its Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridflow.config.schema import group, key


@dataclass(frozen=True)
class RayInitConfig:
    address: str | None = key(
        None, "a running cluster, host:port or auto; null: RAY_ADDRESS, or a Ray of this run's own"
    )
    num_cpus: int | None = key(
        None, "CPUs that a Ray of this run's own offers; null: those of the machine", minimum=1
    )
    num_gpus: int | None = key(None, "GPUs that it offers; null: those of the machine", minimum=0)
    object_store_memory: int | None = key(
        None, "bytes of its object store; null: Ray's choice", minimum=78_643_200
    )
    include_dashboard: bool = key(False, "start its dashboard")
    dashboard_port: int | None = key(
        None, "port of its dashboard; null: Ray's choice", minimum=1, maximum=65_535
    )
    namespace: str | None = key(None, "Ray namespace; null: one of the run's own")
    runtime_env: dict[str, Any] = key({}, "Ray runtime environment of the workers, for example env_vars")


@dataclass(frozen=True)
class RayConfig:
    ray_init: RayInitConfig = group(RayInitConfig)
    timeline_json_file: str | None = key(None, "write Ray's timeline of the run there at its end; null: no")
