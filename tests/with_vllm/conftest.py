"""These tests need vllm: `make test-vllm` runs them in an environment of its own (scripts/setup_vllm.sh)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_models import build, save, tiny

from hybridflow.rollout.vllm.engine import VLLMEngine

HERE = importlib.util.find_spec("vllm") is not None
if HERE:  # pytest reads this file among all others too, and what it set would be theirs
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HERE:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed here: make test-vllm"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model whose shape and tokenizer the engines know; its weights are never read."""
    return save(tmp_path_factory.mktemp("vllm") / "model", tiny(0))


@pytest.fixture(scope="session", params=["in process", "server"])
def engine(request: pytest.FixtureRequest, folder: str) -> Iterator[VLLMEngine]:
    """With the weights of no model."""
    made = build(folder, server=request.param == "server")
    yield made
    made.close()
