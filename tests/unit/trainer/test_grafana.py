"""The Grafana boards: what their script writes, by the schema of a board, about metrics that are there."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tiny_trainer import build, ppo_config, tiny_model

from hybridflow.observability.trackers import Trackers
from hybridflow.observability.trackers.base import BackgroundTracker
from hybridflow.rollout.server.service import ServerCounts

ROOT = Path(__file__).resolve().parents[3]
GRAFANA = ROOT / "docker" / "grafana"
SOURCE = {
    "type": "object",
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "hybridflow"}},
    "required": ["type", "uid"],
}
TARGET = {
    "type": "object",
    "properties": {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "expr": {"type": "string", "minLength": 1},
        "legendFormat": {"type": "string", "minLength": 1},
        "datasource": SOURCE,
    },
    "required": ["refId", "expr", "legendFormat", "datasource"],
}
PANEL = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["timeseries", "stat", "table", "heatmap", "gauge"]},
        "title": {"type": "string", "minLength": 1},
        "gridPos": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 23},
                "y": {"type": "integer", "minimum": 0},
                "w": {"type": "integer", "minimum": 1, "maximum": 24},
                "h": {"type": "integer", "minimum": 1},
            },
            "required": ["x", "y", "w", "h"],
        },
        "fieldConfig": {
            "type": "object",
            "properties": {
                "defaults": {"type": "object", "required": ["unit"]},
                "overrides": {"type": "array"},
            },
            "required": ["defaults", "overrides"],
        },
        "targets": {"type": "array", "items": TARGET, "minItems": 1},
        "datasource": SOURCE,
    },
    "required": ["id", "type", "title", "gridPos", "fieldConfig", "targets", "datasource"],
}
VARIABLE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "type": {"const": "query"}, "query": {"type": "string"}},
    "required": ["name", "type", "query", "datasource"],
}
BOARD = {
    "type": "object",
    "properties": {
        "uid": {"type": "string", "maxLength": 40},
        "title": {"type": "string", "minLength": 1},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {"type": "array", "items": PANEL, "minItems": 1},
        "templating": {
            "type": "object",
            "properties": {"list": {"type": "array", "items": VARIABLE}},
            "required": ["list"],
        },
        "time": {"type": "object", "required": ["from", "to"]},
    },
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time"],
}


def names_of(query: str) -> set[str]:
    """The metrics of a query: words that are no function, no label and no keyword."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\bby \([^)]*\)", " ", query)
    return set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\w)(?!\s*\()", bare)) - {"label_values"}


def boards() -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in (GRAFANA / "dashboards").glob("*.json")}


def queries(board: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*asked, *(re.sub(r", \w+\)", ")", each["query"]) for each in board["templating"]["list"])]


def samples(page: str) -> dict[str, set[str]]:
    """Labels by the names of the samples of a page."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """What a run, and a server after a request, show Prometheus."""
    folder = tmp_path_factory.mktemp("exported")
    keys = ("trainer.prometheus.enable=true", "trainer.prometheus.port=0", "algorithm.adv_estimator=grpo")
    with build(ppo_config(tiny_model(folder / "model"), folder / "run", *keys)) as trainer:
        trainer.fit()
        port = tracker_of(trainer.trackers).port
        run = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    metrics = ServerCounts("m")
    metrics.answers["/v1/completions", 200] += 1
    return {"run": samples(run), "server": samples(metrics.page(0, ()))}


def tracker_of(trackers: Trackers) -> Any:
    """The tracker of Prometheus, when it has taken all steps."""
    (found,) = [one for one in trackers.trackers if isinstance(one, BackgroundTracker)]
    taken: list[Any] = []
    found._put(taken.append)
    while not taken:
        assert found._thread.is_alive()
        found._thread.join(0.01)
    return taken[0]


def test_the_files_are_those_of_the_script() -> None:
    spec = importlib.util.spec_from_file_location("boards", ROOT / "scripts" / "grafana_boards.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in script.BOARDS:
        assert (GRAFANA / "dashboards" / f"{name}.json").read_text() == script.text_of(name), (
            "run python scripts/grafana_boards.py"
        )


@pytest.mark.parametrize("name", ["run", "server"])
def test_boards_fit_the_schema_and_their_panels_do_not_overlap(name: str) -> None:
    board = boards()[name]
    jsonschema.validate(board, BOARD)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize("name", ["run", "server"])
def test_every_query_is_about_metrics_and_labels_that_are_exported(
    name: str, exported: dict[str, dict[str, set[str]]]
) -> None:
    there = exported[name]
    asked = queries(boards()[name])
    assert len(asked) > 10
    for query in asked:
        (metric,) = names_of(query)
        assert metric in there, query
        labels = set(re.findall(r"(\w+)=~", query))
        assert labels <= there[metric], query


def test_names_are_found_in_queries() -> None:
    query = 'histogram_quantile(0.5, sum by (le) (rate(a:b_bucket{model=~"$model"}[5m])))'
    assert names_of(query) == {"a:b_bucket"} and names_of("x_y") == {"x_y"}


def test_datasource_and_folder_are_those_of_the_compose_file() -> None:
    provisioned = GRAFANA / "provisioning"
    (source,) = yaml.safe_load((provisioned / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioned / "dashboards" / "hybridflow.yaml").read_text())["providers"]
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert source["uid"] == "hybridflow" and source["url"] == "http://prometheus:9090"
    assert {"prometheus", "grafana"} <= set(services)
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())
    targets = [job["static_configs"][0]["targets"][0] for job in scraped["scrape_configs"]]
    assert [target.partition(":")[0] for target in targets] == ["head", "serve"]
