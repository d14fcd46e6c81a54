"""Write the Grafana boards of a run and of the server, docker/grafana/dashboards/*.json, from tables.

A panel is a title, a unit of Grafana's and queries by their legends. `tests/unit/trainer/test_grafana.py`
holds each query against what a run and a server export, and scripts/check_prometheus.py against a real
Prometheus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docker" / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "hybridflow"}
RUN = '{experiment=~"$experiment"}'
MODEL = '{model=~"$model"}'
MODEL_NAME = '{model_name=~"$model"}'
OF_RUN = "{{experiment}}"
ANSWERS = "hybridflow_http_answers_total"
CANCELLED = "hybridflow_requests_cancelled_total"
WIDTH = 8
HEIGHT = 8
ACROSS = 24

Panel = tuple[str, str, dict[str, str]]
"""Title, unit, and queries by legend."""


def newest(*names: str) -> dict[str, str]:
    """Queries of the newest values of metrics of a run, by their legends."""
    return {f"{OF_RUN} {name}": f"hybridflow_{name}{RUN}" for name in names}


def rates(*names: str) -> dict[str, str]:
    """Queries of how fast counters of a run rise, a second."""
    return {f"{OF_RUN} {name}": f"rate(vllm:{name}_total{RUN}[$__rate_interval])" for name in names}


def quantiles(histogram: str) -> dict[str, str]:
    """Queries of the middle and the slow end of a histogram of the server."""
    rate = f"sum by (le) (rate({histogram}_bucket{MODEL}[$__rate_interval]))"
    return {f"p{100 * part:g}": f"histogram_quantile({part}, {rate})" for part in (0.5, 0.95)}


RUN_PANELS: list[Panel] = [
    ("Score", "short", newest("critic_score_mean", "critic_score_min", "critic_score_max")),
    ("Response length", "short", newest("response_length_mean", "response_length_max")),
    ("Responses cut at a limit", "percentunit", newest("response_length_clip_ratio")),
    ("Entropy", "short", newest("actor_entropy")),
    ("KL of an update", "short", newest("actor_ppo_kl")),
    ("Share of clipped tokens", "percentunit", newest("actor_pg_clipfrac", "actor_pg_clipfrac_lower")),
    ("Policy loss", "short", newest("actor_pg_loss")),
    ("Gradient norm", "short", newest("actor_grad_norm")),
    ("Learning rate", "sci", newest("actor_lr")),
    ("Groups with equal scores", "percentunit", newest("training_zero_variance_groups")),
    (
        "Generation against training, log-probs",
        "short",
        newest("training_rollout_probs_diff_max", "training_rollout_probs_diff_mean"),
    ),
    ("Rewards that failed", "short", newest("reward_num_errors", "reward_num_timeouts")),
    ("Step", "short", newest("training_global_step")),
    (
        "Seconds of a step",
        "s",
        newest("timing_s_step", "timing_s_gen", "timing_s_update_actor"),
    ),
    ("Tokens a second and device", "short", newest("perf_throughput")),
    ("Generation, tokens a second", "short", newest("perf_rollout_tokens_per_second")),
    ("Tokens of all steps", "short", rates("generation_tokens", "prompt_tokens")),
    ("Requests and preemptions", "short", rates("request_success", "num_preemptions")),
    ("Prompt tokens found in the cache", "percentunit", newest("rollout_prefix_hit_ratio")),
    ("Peak memory", "bytes", newest("perf_peak_memory")),
    ("Response length in validation", "short", newest("val_aux_response_length_mean")),
]
SERVER_PANELS: list[Panel] = [
    (
        "Requests",
        "short",
        {
            "running": f"vllm:num_requests_running{MODEL_NAME}",
            "waiting": f"vllm:num_requests_waiting{MODEL_NAME}",
        },
    ),
    (
        "Tokens a second",
        "short",
        {
            "sampled": f"rate(vllm:generation_tokens_total{MODEL_NAME}[$__rate_interval])",
            "of prompts": f"rate(vllm:prompt_tokens_total{MODEL_NAME}[$__rate_interval])",
        },
    ),
    (
        "Answers a second by status",
        "reqps",
        {"{{path}} {{status}}": f"sum by (path, status) (rate({ANSWERS}{MODEL}[$__rate_interval]))"},
    ),
    ("Time of a request", "s", quantiles("hybridflow_request_seconds")),
    ("Time to the first token", "s", quantiles("hybridflow_first_token_seconds")),
    (
        "Responses",
        "short",
        {
            "open": f"hybridflow_responses_open{MODEL}",
            "in engines": f"hybridflow_responses_in_engines{MODEL}",
        },
    ),
    (
        "Clients that went away",
        "short",
        {"cancelled": f"increase(hybridflow_requests_cancelled_total{MODEL}[5m])"},
    ),
    ("Engines that serve", "short", {"alive": f"hybridflow_replicas_alive{MODEL}"}),
]
VARIABLES = {
    "run": ("experiment", "label_values(hybridflow_training_global_step, experiment)"),
    "server": ("model", "label_values(hybridflow_replicas_alive, model)"),
}
BOARDS = {"run": ("hybridflow: runs", RUN_PANELS), "server": ("hybridflow: server", SERVER_PANELS)}


def board(name: str) -> dict[str, Any]:
    """Return the board of this name, as Grafana reads it."""
    title, panels = BOARDS[name]
    variable, query = VARIABLES[name]
    return {
        "uid": f"hybridflow-{name}",
        "title": title,
        "tags": ["hybridflow"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": variable,
                    "label": variable,
                    "type": "query",
                    "datasource": SOURCE,
                    "query": query,
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, ACROSS // WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for place, (legend, query) in enumerate(queries.items())
        ],
    }


def text_of(name: str) -> str:
    """Return the file of a board."""
    return json.dumps(board(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in BOARDS:
        (FOLDER / f"{each}.json").write_text(text_of(each), encoding="utf-8")
