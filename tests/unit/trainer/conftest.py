"""For all tests of this folder: one tiny model, and what their runs log is in the glossary of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_trainer import tiny_model

from known_metrics import check_metrics


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that runs of many tests begin with; a test that changes its files makes its own."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def metrics_are_known(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look at the metrics of each run in the test's own folder."""
    yield
    check_metrics(request)
