"""These tests need sglang: `make test-sglang` runs them in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "with_vllm"))
from vllm_models import EOS, save, tiny

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.sglang.engine import SGLangEngine, build_sglang_engine

HERE = importlib.util.find_spec("sglang") is not None
if HERE:  # pytest reads this file among all others too, and what it set would be theirs
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HERE:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="sglang is not installed here: make test-sglang"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model whose shape and tokenizer the engine knows; its weights are never read."""
    return save(tmp_path_factory.mktemp("sglang") / "model", tiny(0))


@pytest.fixture(scope="session")
def engine(folder: str) -> Iterator[SGLangEngine]:
    """With a server of its own and the weights of no model."""
    config = RolloutConfig(name="sglang", max_model_len=128, max_num_seqs=64)
    made = build_sglang_engine(config, ModelFacts(folder, torch.device("cpu"), "float32"), [EOS])
    yield made
    made.close()
