"""One tiny model and its data for all tests of this folder; what their runs log is in the glossary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_run import Inputs, write_inputs

from known_metrics import check_metrics


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Read by all, changed by none."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def metrics_are_known(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look at the metrics of each run in the test's own folder."""
    yield
    check_metrics(request)
