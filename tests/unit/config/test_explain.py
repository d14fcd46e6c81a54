"""Derived numbers are those of a count by hand; the page of keys is fresh."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.explain import ModelNumbers, explain, format_bytes, num_training_steps
from hybridflow.config.load import load_config
from hybridflow.config.resolve import resolve
from hybridflow.config.show import to_yaml

SCRIPT = Path(__file__).parents[3] / "scripts" / "config_docs.py"
MODEL = ModelNumbers(
    num_parameters=1_000_000, num_layers=2, hidden_size=128, intermediate_size=512, num_kv_heads=2, head_dim=32, vocab_size=64
)
OVERRIDES = [
    "data.train_batch_size=64",
    "data.max_prompt_length=100",
    "data.max_response_length=156",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
    "trainer.total_epochs=3",
]


def ppo(*overrides: str) -> PPOConfig:
    loaded = load_config(PPOConfig, [*OVERRIDES, *overrides])
    return resolve(loaded.config, loaded.given)[0]


def values(config: PPOConfig | SFTConfig, rows: int | None = None, model: ModelNumbers | None = None) -> dict[str, str]:
    lines = explain(config, rows, model)
    assert all(line.how for line in lines)
    return {line.label: line.value for line in lines}


def test_sizes_of_a_step() -> None:
    shown = values(ppo(), rows=200)
    assert shown["sequences per step"] == "256"
    assert shown["tokens per step, at most"] == f"{256 * 256:,}"
    assert shown["mini-batches per step"] == "4" and shown["optimizer steps per step"] == "8"
    assert shown["training steps"] == "9" and shown["optimizer steps in all"] == "72"
    assert shown["actor micro-batches per mini-batch, at most"] == "16"  # 16 × 4 rows, 1024 // 256 = 4 rows at a time
    assert values(ppo("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"))["actor micro-batches per mini-batch, at most"] == "32"


def test_training_steps_come_from_the_key_the_rows_or_the_task() -> None:
    assert num_training_steps(ppo(), None) is None
    assert num_training_steps(ppo("trainer.total_training_steps=5"), 200) == 5
    assert num_training_steps(ppo("data.task.name=arithmetic_chain", "data.task.size=640"), None) == 30
    assert num_training_steps(ppo("data.train_max_samples=128"), 1000) == 6


def test_memory_by_phase() -> None:
    shown = values(ppo("algorithm.adv_estimator=grpo"), model=MODEL)
    assert shown["memory, actor: weights"] == format_bytes(4e6) and "memory, actor: float32 masters" not in shown
    assert shown["memory, actor: Adam moments"] == format_bytes(8e6)
    assert shown["memory, KV cache, at most"] == format_bytes(256 * 256 * 2 * 2 * 2 * 32 * 4)
    assert not any("critic" in label or "reference" in label for label in shown)
    half = ModelNumbers(**{**MODEL.__dict__, "bytes_per_parameter": 2})
    shown = values(ppo("algorithm.use_kl_in_reward=true"), model=half)
    assert shown["memory, critic: float32 masters"] == format_bytes(4e6)
    assert shown["memory, reference: weights"] == format_bytes(2e6)
    assert "memory while generating" in shown and "memory while updating" in shown


def test_rows_of_dynamic_sampling_remax_and_spin() -> None:
    shown = values(
        ppo("algorithm.filter_groups.enable=true", "data.gen_batch_size=24", "algorithm.filter_groups.max_num_gen_batches=5"), 200
    )
    assert shown["sequences per step"] == "256"
    assert shown["responses generated per step, at least"] == "288"  # 3 generation batches × 24 prompts × 4
    assert shown["responses generated per step, at most"] == "480"
    assert shown["training steps"] == "6"  # 3 epochs × (200 // 72)
    shown = values(ppo("algorithm.adv_estimator=remax", "data.gen_batch_size=24"), rows=200)
    assert (shown["sequences per step"], shown["responses generated per step"], shown["training steps"]) == ("256", "320", "9")
    shown = values(ppo("algorithm.adv_estimator=spin"))
    assert (shown["sequences per step"], shown["responses generated per step"]) == ("320", "256")
    assert shown["actor micro-batches per mini-batch, at most"] == "20"  # 16 × 5 rows, 4 at a time
    assert not any("generated" in label for label in values(ppo()))


def test_memory_of_teacher_and_process_reward_model() -> None:
    shown = values(ppo("algorithm.adv_estimator=on_policy_distillation"), model=MODEL)
    assert shown["memory, teacher: weights"] == format_bytes(4e6) and "memory, reference: weights" not in shown
    shown = values(ppo("algorithm.adv_estimator=prime"), model=MODEL)
    assert shown["memory, process reward model: Adam moments"] == format_bytes(8e6)
    assert shown["memory, reference: weights"] == format_bytes(4e6) and "memory, teacher: weights" not in shown
    assert shown["process reward model micro-batches per mini-batch, at most"] == "64"  # 64 × 4 rows, 4 at a time


def test_sft() -> None:
    shown = values(resolve(SFTConfig())[0], rows=1000, model=MODEL)
    assert shown["training steps"] == "3" and shown["conversations per step"] == "256"
    assert shown["SFT micro-batches per mini-batch, at most"] == "32"


def test_yaml_tells_the_meaning_of_each_key() -> None:
    text = to_yaml(ppo())
    assert "train_batch_size: 64" in text and "# prompts per training step" in text
    assert to_yaml(resolve(PPOConfig())[0], only_changed=True) == "{}\n"


def test_the_page_of_keys_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("config_docs", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TARGET.read_text(encoding="utf-8") == script.render(), "run python scripts/config_docs.py"
