"""One suite for all engines. HYBRIDFLOW_CONFORMANCE names those that are tested (default: native,hf,openai),
so that it can run where another engine is installed:

    HYBRIDFLOW_CONFORMANCE=vllm python -m pytest tests/conformance

HYBRIDFLOW_CONFORMANCE_DEVICE=cuda lets native, hf, vllm and sglang compute there, in float32; what they are
compared with stays on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from subjects import Subject, build, create_folder

NAMES = os.environ.get("HYBRIDFLOW_CONFORMANCE", "native,hf,openai").split(",")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all engines generate with."""
    return create_folder(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="session", params=NAMES)
def subject(request: pytest.FixtureRequest, folder: Path) -> Iterator[Subject]:
    """Each engine in turn, built once."""
    built = build(request.param, folder)
    yield built
    built.close()
