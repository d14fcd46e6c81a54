"""The metrics of a test's runs are in the glossary: every metrics.jsonl under a folder is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.observability.glossary import find
from hybridflow.observability.trackers.jsonl import read_metrics

OF_TESTS = {
    "actor/ratio_far",
    "agent/length",
    "training/price/mean",
}
"""Metrics of losses, steps and agents that tests or examples bring themselves."""
FOR_NAMES_OF_THE_USER = "agent/{name}"
"""The entry that stands for all names of user's agents: the library's own metrics need one of their own."""


def names_under(folder: Path) -> set[str]:
    """Return the names of all metrics that runs below a folder have logged."""
    files = folder.rglob("metrics.jsonl")
    return {name for file in files for line in read_metrics(file).values() for name in line}


def unknown(names: set[str]) -> Iterator[str]:
    """Yield the names that have no entry in the glossary, or only one for names of the user's own."""
    for name in sorted(names - OF_TESTS):
        entry = find(name)
        if entry is None or entry.name == FOR_NAMES_OF_THE_USER:
            yield name


def check_metrics(request: pytest.FixtureRequest) -> None:
    """Fail where a run in the folder of a test, if it has one, has logged an unknown metric."""
    folder = getattr(request.node, "funcargs", {}).get("tmp_path")
    if folder is not None:
        names = list(unknown(names_under(folder)))
        assert not names, f"add these metrics to hybridflow/observability/glossary.yaml: {names}"
