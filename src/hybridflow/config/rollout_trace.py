"""`actor_rollout_ref.rollout.trace.*`: traces of trajectories, for viewers of traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.schema import key

TraceBackend = Literal["otel", "mlflow", "weave", "trackio"]


@dataclass(frozen=True)
class RolloutTraceConfig:
    """One trace for each trajectory: generation, turns, tools, environment and reward, with their times."""

    backend: TraceBackend | None = key(
        None,
        "Where traces go: otel (a collector of OpenTelemetry, by OTLP over HTTP), mlflow, weave or trackio, "
        "each by the extra of its name; null: there are none.",
    )
    token2text: bool = key(False, "Traces have the texts of prompts, responses, tool calls and answers.")
    max_samples_per_step_per_worker: int | None = key(
        None,
        "Prompts of a step, and of a validation, whose trajectories each process traces: the first ones in "
        "the order of the data; null: all.",
        minimum=1,
    )
    endpoint: str | None = key(
        None,
        "otel: address that takes traces, such as http://HOST:4318/v1/traces; null: as "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says, else this machine's port "
        "4318.",
    )
