"""A run that generates by vLLM: its log-probs are those of training, after each update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.models.tiny import create_tiny_model
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.vllm.settings import engine_arguments, start_server

STEPS = 3
LORA = "actor_rollout_ref.model.lora_rank=4"
SERVER = "actor_rollout_ref.rollout.server"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(tmp_path_factory.mktemp("training") / "model", seed=0)


@pytest.fixture
def address(model: Path) -> Iterator[str]:
    """Of a server that somebody else started."""
    arguments = engine_arguments(
        RolloutConfig(name="vllm", max_model_len=256), ModelFacts(str(model), torch.device("cpu"), "float32")
    )
    where, process = start_server(arguments, python=None, timeout=300)
    yield where.url
    process.stop()


def train(model: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    """The metrics of each step of a short run in a process of its own."""
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.top_p=0.95",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "reward.function=random",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[jsonl]",
        *more,
    ]
    command = [sys.executable, "-m", "hybridflow.cli.main", "train", "--recipe", "tiny/grpo", *overrides]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "training/rollout_log_probs_diff_max" in line]


def check(steps: list[dict[str, float]]) -> None:
    """Each step learned, and what was generated after it was generated with what it learned: with old weights
    they would differ.
    """
    assert len(steps) == STEPS and max(line["training/rollout_log_probs_diff_max"] for line in steps) < 1e-4
    assert all(line["actor/grad_norm"] > 0 for line in steps)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more",
    [(), (LORA,), (LORA, "actor_rollout_ref.rollout.lora_as_adapters=true"), (f"{SERVER}.enable=true",)],
    ids=["whole", "lora", "adapters", "server"],
)
def test_rollout_and_training_agree_in_each_step(model: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    check(train(model, tmp_path / "run", *more))


@pytest.mark.timeout(600)
def test_a_server_that_somebody_else_started(model: Path, tmp_path: Path, address: str) -> None:
    check(train(model, tmp_path / "run", f"{SERVER}.address={address}"))
    # it goes on, with the weights of another run
    check(train(model, tmp_path / "again", f"{SERVER}.address={address}"))


@pytest.mark.timeout(600)
def test_vllm_in_a_process_of_its_own_under_ray(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    check(
        train(
            model,
            tmp_path / "run",
            "trainer.resource_pools={train: [1], generate: [1]}",
            "trainer.placement={rollout: generate}",
        )
    )
