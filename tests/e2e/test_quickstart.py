"""Commands from a shell to a finished run folder: verl's quickstart, recipes, supervised fine-tuning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tiny_run import Inputs, metrics_of, small_run, write_jsonl

from hybridflow.cli.main import main as hybridflow
from hybridflow.trainer.main_ppo import main as main_ppo
from ranks import Command

TRAINING_METRICS = {
    *(
        f"critic/{what}/{part}"
        for what in ("score", "rewards", "advantages", "returns", "values")
        for part in ("mean", "max", "min")
    ),
    *(f"{what}/{part}" for what in ("response_length", "prompt_length") for part in ("mean", "max", "min")),
    *(
        f"actor/{name}"
        for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")
    ),
    *(
        f"critic/{name}"
        for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "grad_norm", "lr")
    ),
    *(
        f"timing_s/{name}"
        for name in (
            "gen",
            "reward",
            "old_log_prob",
            "values",
            "adv",
            "update_critic",
            "update_actor",
            "step",
        )
    ),
    *(
        "response_length/clip_ratio",
        "training/rollout_probs_diff_max",
        "training/global_step",
        "training/epoch",
    ),
    *("perf/throughput", "perf/total_num_tokens", "perf/time_per_step"),
}
"""What verl logs of a PPO step, under verl's names."""


def test_quickstart_of_verl(inputs: Inputs, tmp_path: Path) -> None:
    """The command of verl's documentation with another module name, paths and engine, and made short."""
    command = [
        f"data.train_files={inputs.train}",
        f"data.val_files={inputs.val}",
        "data.train_batch_size=4",  # 256
        "data.max_prompt_length=512",
        "data.max_response_length=16",  # 512
        f"actor_rollout_ref.model.path={inputs.model}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",  # 64
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.name=native",  # vllm
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-5",
        f"critic.model.path={inputs.model}",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=console",
        "trainer.val_before_train=False",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=10",
        "trainer.test_freq=10",
        "trainer.total_epochs=15",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path}",
    ]
    run = Command(
        "hybridflow.trainer.main_ppo",
        command,
        tmp_path.with_suffix(".log"),
        environment=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        done = run.wait()
    finally:
        run.kill()
    assert done.returncode == 0 and "Traceback" not in done.output, done.output
    assert "step 3/3" in done.output and "validation at step 3" in done.output
    metrics = metrics_of(tmp_path, with_timings=True)
    assert sorted(metrics) == [1, 2, 3]
    for step in (1, 2, 3):
        assert not TRAINING_METRICS - set(metrics[step]), step
        assert metrics[step]["training/rollout_log_probs_diff_max"] < 1e-4
    assert 0.0 <= metrics[3]["val-core/openai/gsm8k/acc/mean@1"] <= 1.0
    assert not any(name.startswith("val-") for step in (1, 2) for name in metrics[step])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert {path.name for path in (tmp_path / "global_step_3").iterdir()} == {
        "actor",
        "critic",
        "data",
        "trainer",
        "manifest.json",
    }
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["data"]["max_prompt_length"] == 512


def test_the_module_of_the_quickstart_is_a_command() -> None:
    words = [sys.executable, "-m", "hybridflow.trainer.main_ppo", "data.train_batchsize=4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 1 and "did you mean data.train_batch_size" in done.stderr, done.stderr


def test_grpo_recipe_with_kl_in_the_loss(inputs: Inputs, tmp_path: Path) -> None:
    out = tmp_path / "run"
    keys = small_run(
        inputs,
        out,
        f"data.val_files={inputs.val}",
        "actor_rollout_ref.rollout.n=4",
        "trainer.save_freq=2",
        steps=2,
    )
    assert hybridflow(["train", "--recipe", "grpo", *keys]) == 0
    metrics = metrics_of(out, with_timings=True)
    assert sorted(metrics) == [0, 1, 2]
    assert metrics[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-3) and metrics[2]["actor/kl_loss"] > 0
    assert metrics[1]["actor/kl_coef"] == 0.001
    assert "timing_s/ref" in metrics[1] and "critic/vf_loss" not in metrics[1]
    assert {path.name for path in (out / "global_step_2").iterdir()} == {
        "actor",
        "data",
        "trainer",
        "manifest.json",
    }


def test_grpo_learns_what_it_is_paid_for(inputs: Inputs, tmp_path: Path) -> None:
    keys = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
    )
    assert main_ppo(small_run(inputs, tmp_path, *keys, steps=12)) == 0
    scores = [line["critic/score/mean"] for line in metrics_of(tmp_path).values()]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.15, scores


def test_adaptive_kl_in_the_reward(inputs: Inputs, tmp_path: Path) -> None:
    control = ("type=adaptive", "kl_coef=0.5", "horizon=20", "target_kl=0.05")
    keys = ("algorithm.use_kl_in_reward=true", *(f"algorithm.kl_ctrl.{key}" for key in control))
    assert main_ppo(small_run(inputs, tmp_path, *keys, steps=3)) == 0
    metrics = metrics_of(tmp_path)
    coefficients = [metrics[step]["actor/reward_kl_penalty_coeff"] for step in (1, 2, 3)]
    assert coefficients[0] == 0.5
    # Ziegler et al. 2019, error clipped at 0.2
    for before, after, line in zip(coefficients, coefficients[1:], metrics.values()):
        error = min(max(line["actor/reward_kl_penalty"] / 0.05 - 1.0, -0.2), 0.2)
        assert after == pytest.approx(before * (1.0 + error * 8 / 20))
    assert metrics[2]["critic/rewards/mean"] != metrics[2]["critic/score/mean"]


def test_only_validation(inputs: Inputs, tmp_path: Path) -> None:
    assert main_ppo(small_run(inputs, tmp_path, f"data.val_files={inputs.val}", "trainer.val_only=true")) == 0
    assert list(metrics_of(tmp_path)) == [0]
    assert not list(tmp_path.glob("global_step_*"))


def test_supervised_run_resumes_to_the_bit(inputs: Inputs, tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i} + 1 = ?"},
                {"role": "assistant", "content": f"#### {i + 1}"},
            ]
        }
        for i in range(9)
    ]
    keys = [
        f"data.train_files={write_jsonl(tmp_path / 'train.jsonl', rows)}",
        f"data.val_files={tmp_path / 'train.jsonl'}",
        "data.train_batch_size=4",
        f"model.path={inputs.model}",
        "optim.lr=1e-2",
        "optim.lr_scheduler_type=cosine",
        "trainer.total_training_steps=5",
        "trainer.save_freq=3",
        "trainer.logger=[]",
    ]
    whole = tmp_path / "whole"
    rest = tmp_path / "rest"
    assert hybridflow(["sft", *keys, f"trainer.default_local_dir={whole}"]) == 0
    where = [
        f"trainer.default_local_dir={rest}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={whole / 'global_step_3'}",
    ]
    assert hybridflow(["sft", *keys, *where]) == 0
    losses = metrics_of(whole)
    assert losses[5]["train/loss"] < losses[1]["train/loss"] and losses[5]["val/loss"] > 0
    assert metrics_of(rest) == {step: losses[step] for step in (4, 5)}
    one, other = (
        load_file(run / "global_step_5/actor/huggingface/model.safetensors") for run in (whole, rest)
    )
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_export_of_a_checkpoint_starts_another_run(inputs: Inputs, tmp_path: Path) -> None:
    first = tmp_path / "first"
    merged = tmp_path / "merged"
    assert main_ppo(small_run(inputs, first, "trainer.save_freq=1", steps=1)) == 0
    assert hybridflow(["merge", str(first / "global_step_1"), str(merged)]) == 0
    assert (
        main_ppo(small_run(inputs, tmp_path / "second", f"actor_rollout_ref.model.path={merged}", steps=1))
        == 0
    )
