"""`actor_rollout_ref.rollout.engine_kwargs` and `.server`: engines that have a process of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import key


@dataclass(frozen=True)
class EngineKwargsConfig:
    """Arguments that go to a generation engine unchanged."""

    vllm: dict[str, Any] = key({}, "Further arguments of vLLM's engine, by vLLM's own names.")
    sglang: dict[str, Any] = key({}, "Further arguments of SGLang's server, by SGLang's own names.")


@dataclass(frozen=True)
class RolloutServerConfig:
    """Servers of vLLM and SGLang that generate in processes of their own."""

    enable: bool | None = key(
        None,
        "vllm: start a server beside each process that generates; null: where there are several processes "
        "or `python` is set. sglang is always a server.",
    )
    address: str | list[str] | None = key(
        None,
        "Servers that run already, http://HOST:PORT, one for each process that generates; null: the run "
        "starts them.",
    )
    python: str | None = key(
        None,
        "Path of a python that has the engine and hybridflow, with which servers are started; null: this "
        "python.",
    )
    start_timeout: float = key(
        900.0, "Seconds that a server may take until it answers; then the run ends with an error.", above=0
    )
    push_timeout: float = key(
        600.0, "Seconds that one bucket of weights, or one call of a server's worker, may take.", above=0
    )
    transport: Literal["auto", "shared_memory", "cuda_ipc", "process_group"] = key(
        "auto",
        "How weights travel to a server; auto: shared_memory on the same machine, process_group to another "
        "machine.",
    )
