"""`trainer.on_missing=fallback`: a script that was written for a cluster starts with what is here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.cluster import num_cpus
from hybridflow.config.load import prepare_config
from hybridflow.errors import ConfigError
from hybridflow.trainer import fallback as fallback_module
from hybridflow.trainer.fallback import fallback
from hybridflow.trainer.main import missing_here

STOCK = [
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=4",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "trainer.logger=[console,swanlab]",
    "actor_rollout_ref.model.use_liger=true",
    "trainer.device=cuda",
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=8",
]
"""Words of a script for a cluster, whose libraries the tests' environment lacks."""
CHANGED = {
    "actor_rollout_ref.rollout.name": "native",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": -1,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
    "trainer.logger": ["console"],
    "actor_rollout_ref.model.use_liger": False,
    "trainer.device": "auto",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
}
AS_WORDS = [
    f"{key}={value}".replace("=False", "=false").replace("['console']", "[console]")
    for key, value in CHANGED.items()
]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of a run on a machine without GPUs and without a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(fallback_module, "num_by_files", lambda kind: 0)
    monkeypatch.setattr(fallback_module, "no_accelerator", lambda: "there is none")
    rows = [{"data_source": "gsm8k", "prompt": "1 + 1 =", "reward_model": {"ground_truth": "2"}}] * 8
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return [
        f"data.train_files='{file}'",
        "data.train_batch_size=8",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.model.path=owner/model",
        *STOCK,
    ]


def prepare(words: list[str]) -> tuple[PPOConfig, list[str]]:
    loaded = prepare_config(PPOConfig, words, missing=missing_here, fallback=fallback)
    return loaded.config, loaded.notes


def test_the_refusal_names_the_switch_and_what_it_would_do(words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(words)
    (way_out,) = refused.value.__notes__
    assert way_out.startswith("add trainer.on_missing=fallback ")
    assert all(word in way_out for word in AS_WORDS)


def test_the_switch_starts_the_run_with_a_line_for_each_key(words: list[str]) -> None:
    config, notes = prepare([*words, "trainer.on_missing=fallback"])
    assert (config.trainer.controller, config.actor_rollout_ref.rollout.name) == ("local", "native")
    for word in AS_WORDS:
        (line,) = [note for note in notes if note.startswith(f"{word}: ")]
        assert line.endswith("(trainer.on_missing=fallback)")


def test_wrong_keys_do_not_hide_the_switch(words: list[str]) -> None:
    """With an unknown key, the switch is named where it is off, and has its effect where it is on."""
    with pytest.raises(ConfigError, match="sglang") as refused:
        prepare([*words, "trainer.no_such_key=1"])
    assert refused.value.__notes__[0].startswith("add trainer.on_missing=fallback ")
    with pytest.raises(ConfigError) as refused:
        prepare([*words, "trainer.no_such_key=1", "trainer.on_missing=fallback"])
    assert str(refused.value).startswith("unknown key trainer.no_such_key")
    assert not hasattr(refused.value, "__notes__")


def test_processes_for_gpus_become_one_on_a_cpu(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script for two GPUs trains in one process on a laptop, unless trainer.device=cpu says otherwise."""
    monkeypatch.setattr(fallback_module, "num_cpus", lambda: 8)
    spread = [
        *words[:5],
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ]
    config, _ = prepare([*spread, "trainer.on_missing=fallback"])
    assert config.trainer.n_gpus_per_node == 1
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
    with pytest.raises(ConfigError) as refused:
        prepare([*spread, "data.train_batch_size=-1"])
    assert not hasattr(refused.value, "__notes__")  # nothing that the run needs is missing
    meant = prepare_config(PPOConfig, [*spread, "trainer.device=cpu"], runs=False).config
    assert fallback(meant) == []


def test_what_is_here_stays(words: list[str]) -> None:
    """Where nothing is missing the switch changes nothing, and no refusal names it."""
    plain = [word for word in words if word not in STOCK]
    (plain_config, plain_notes), (config, notes) = (
        prepare(plain),
        prepare([*plain, "trainer.on_missing=fallback"]),
    )
    assert notes == plain_notes and config.actor_rollout_ref == plain_config.actor_rollout_ref
    with pytest.raises(ConfigError) as refused:
        prepare([*plain, "data.train_batch_size=-1"])
    assert not hasattr(refused.value, "__notes__")


def test_gpus_that_are_here_are_used(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback_module, "num_by_files", lambda kind: 2 * (kind == "npu"))
    monkeypatch.setattr(fallback_module, "no_accelerator", lambda: None)
    changes = {change.key: change.value for change in fallback(prepare_config(PPOConfig, words[:5]).config)}
    assert changes == {}
    config = prepare_config(PPOConfig, [*words[:5], "trainer.n_gpus_per_node=8"], runs=False).config
    (change,) = fallback(config)
    assert (change.key, change.value) == ("trainer.n_gpus_per_node", 2)
    assert change.reason == "8 processes want one NPU each, and this machine has 2"
    monkeypatch.setattr(fallback_module, "num_by_files", lambda kind: None)  # a plugin's, which have none
    assert fallback(config) == []


def test_a_cluster_that_was_named_is_believed(words: list[str]) -> None:
    named = [*words[:5], "trainer.nnodes=4", "ray_kwargs.ray_init.address=10.0.0.1:6379"]
    assert fallback(prepare_config(PPOConfig, named, runs=False).config) == []


def test_sft_too(words: list[str]) -> None:
    config = prepare_config(
        SFTConfig,
        [
            words[0],
            "model.path=owner/model",
            f"trainer.n_gpus_per_node={2 * num_cpus()}",
            "engine.ulysses_sequence_parallel_size=2",
        ],
        runs=False,
        needs_files=False,
    ).config
    changed = {change.key: change.value for change in fallback(config)}
    assert changed == {"trainer.n_gpus_per_node": 1, "engine.ulysses_sequence_parallel_size": 1}
