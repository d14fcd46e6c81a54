"""These tests need megatron-core: `make test-megatron` runs them in an environment of its own
(scripts/setup_megatron.sh).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# tiny models and rows, and the inputs of short runs
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("unit/engines", "e2e")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="megatron-core is not installed: make test-megatron"))
