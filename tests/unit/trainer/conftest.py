"""For all tests of this folder: what their runs log is in the glossary of metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from known_metrics import check_metrics


@pytest.fixture(autouse=True)
def metrics_are_known(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look at the metrics of each run in the test's own folder."""
    yield
    check_metrics(request)
