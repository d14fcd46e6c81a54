"""A run that generates by vLLM: its log-probs are those of training, after each update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
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
    (folder / "stderr.txt").write_text(done.stderr)
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


TOGETHER = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.max_model_len=256",
)
"""Two processes train, and share one vLLM of two workers."""


@pytest.mark.timeout(600)
def test_two_ranks_have_one_vllm_of_two_workers(model: Path, tmp_path: Path) -> None:
    """Each worker compares the digests of what is pushed to it, and none outlives the run."""
    pytest.importorskip("ray")
    began = time.time()
    check(train(model, tmp_path / "run", *TOGETHER))
    started = [
        each for each in psutil.process_iter(["name", "create_time"]) if each.info["create_time"] > began
    ]
    left = [each for each in started if str(each.info["name"]).startswith("VLLM::")]
    assert not psutil.wait_procs(left, timeout=60)[1]


@pytest.mark.timeout(1200)
def test_a_killed_worker_of_vllm_is_told_and_replaced(model: Path, tmp_path: Path) -> None:
    """The run goes on from its checkpoint, with the numbers of a run in which none is killed."""
    pytest.importorskip("ray")
    saving = (*TOGETHER, "trainer.save_freq=1", "trainer.max_restarts=1")
    plain = train(model, tmp_path / "plain", *saving)
    killed = tmp_path / "killed"
    with ThreadPoolExecutor() as pool:
        run = pool.submit(train, model, killed, *saving)
        while not (killed / "global_step_1").exists() and not run.done():
            time.sleep(0.05)
        workers = psutil.process_iter(["name"])
        next(each for each in workers if str(each.info["name"]).startswith("VLLM::Worker")).kill()
        mended = run.result()
    said = (killed / "stderr.txt").read_text()
    assert "vllm server http://127.0.0.1" in said and "restart 1 of 1" in said
    for name in ("actor/grad_norm", "training/rollout_log_probs_diff_max"):
        assert [line[name] for line in mended] == [line[name] for line in plain]


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
