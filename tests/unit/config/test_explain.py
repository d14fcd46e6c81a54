"""Derived numbers are those of a count by hand; the page of keys is fresh."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.explain import explain, num_training_steps
from hybridflow.config.load import load_config
from hybridflow.config.preference import PreferenceConfig, RewardTrainingConfig
from hybridflow.config.resolve import resolve
from hybridflow.config.show import to_yaml
from hybridflow.config.tree import keys_of

SCRIPT = Path(__file__).parents[3] / "scripts" / "config_docs.py"
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


def values(config: PPOConfig | SFTConfig, rows: int | None = None) -> dict[str, str]:
    lines = explain(config, rows)
    assert all(line.how for line in lines)
    return {line.label: line.value for line in lines}


def test_sizes_of_a_step() -> None:
    shown = values(ppo(), rows=200)
    assert shown["sequences per step"] == "256"
    assert shown["tokens per step, at most"] == f"{256 * 256:,}"
    assert shown["mini-batches per step"] == "4" and shown["optimizer steps per step"] == "8"
    assert shown["training steps"] == "9" and shown["optimizer steps in all"] == "72"


def test_rows_of_agents_are_as_long_as_a_conversation_may_be() -> None:
    longer = "actor_rollout_ref.rollout.max_model_len=1024"
    agents = "actor_rollout_ref.rollout.multi_turn.enable=true"
    label = "tokens per step, at most"
    assert values(ppo(longer), rows=200)[label] == f"{256 * 256:,}"
    assert values(ppo(agents), rows=200)[label] == f"{256 * 256:,}"
    talking = values(
        ppo(longer, agents, "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6"), rows=200
    )
    assert talking[label] == f"{256 * 1024:,}"
    assert talking["tokens of a whole conversation, at most"] == "1,024"
    assert talking["turns of the model in a conversation, at most"] == "6"


def test_training_steps_come_from_the_key_the_rows_or_the_task() -> None:
    assert num_training_steps(ppo(), None) is None
    assert num_training_steps(ppo("trainer.total_training_steps=5"), 200) == 5
    assert num_training_steps(ppo("data.task.name=arithmetic_chain", "data.task.size=640"), None) == 30
    assert num_training_steps(ppo("data.train_max_samples=128"), 1000) == 6


def test_rows_of_dynamic_sampling_remax_and_spin() -> None:
    shown = values(
        ppo(
            "algorithm.filter_groups.enable=true",
            "data.gen_batch_size=24",
            "algorithm.filter_groups.max_num_gen_batches=5",
        ),
        200,
    )
    assert shown["sequences per step"] == "256"
    assert shown["responses generated per step, at least"] == "288"  # 3 generation batches × 24 prompts × 4
    assert shown["responses generated per step, at most"] == "480"
    assert shown["training steps"] == "6"  # 3 epochs × (200 // 72)
    shown = values(ppo("algorithm.adv_estimator=remax", "data.gen_batch_size=24"), rows=200)
    assert (shown["sequences per step"], shown["responses generated per step"], shown["training steps"]) == (
        "256",
        "320",
        "9",
    )
    shown = values(ppo("algorithm.adv_estimator=spin"))
    assert (shown["sequences per step"], shown["responses generated per step"]) == ("320", "256")
    assert not any("generated" in label for label in values(ppo()))


def test_sft() -> None:
    shown = values(resolve(SFTConfig())[0], rows=1000)
    assert shown["training steps"] == "3" and shown["conversations per step"] == "256"


def test_yaml_tells_the_meaning_of_each_key() -> None:
    text = to_yaml(ppo())
    assert "train_batch_size: 64" in text and "# Prompts in one training step" in text
    assert to_yaml(resolve(PPOConfig())[0], only_changed=True) == "{}\n"


def docs_script() -> Any:
    spec = importlib.util.spec_from_file_location("config_docs", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig])
def test_each_key_says_what_it_is_in_sentences(root: type) -> None:
    for path, info in keys_of(root).items():
        assert len(info.meaning) > 15 and info.meaning.endswith("."), f"{path}: {info.meaning}"


def test_the_page_begins_with_the_ten_keys_and_their_command_loads() -> None:
    script = docs_script()
    page = script.render()
    assert len(script.FIRST_KEYS) == 10 and page.index("ten keys") < page.index("How keys are written")
    words = script.first_command().replace("\\\n", "").split()
    assert words[:4] == ["hybridflow", "train", "--recipe", "grpo"]
    loaded = load_config(PPOConfig, words[4:], recipe="grpo")
    assert set(script.FIRST_KEYS) <= loaded.given and not loaded.notes


def test_the_page_of_keys_is_fresh() -> None:
    script = docs_script()
    assert script.TARGET.read_text(encoding="utf-8") == script.render(), "run python scripts/config_docs.py"


def test_both_answers_of_a_comparison_count() -> None:
    shown = values(resolve(DPOConfig())[0], rows=1000)
    assert shown["conversations per step"] == "128" and shown["tokens per step, at most"] == f"{128 * 1024:,}"
    kto = resolve(DPOConfig(algorithm=PreferenceConfig(loss="kto")))[0]
    steps = [num_training_steps(kto, 1000, columns) for columns in (None, ["chosen"], ["label"])]
    assert steps == [2 * 1000 // 64, 2 * 1000 // 64, 1000 // 64]
    assert num_training_steps(resolve(DPOConfig())[0], 1000) == 1000 // 64
    process = RewardModelConfig(algorithm=RewardTrainingConfig(loss="process"))
    assert values(resolve(process)[0])["conversations per step"] == "64"
