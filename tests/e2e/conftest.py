"""One tiny model and its data for all tests of this folder."""

from __future__ import annotations

import pytest
from tiny_run import Inputs, write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Read by all, changed by none."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))
