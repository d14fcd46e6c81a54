"""Runs with the base in NF4: they generate with what they train, go on from checkpoints to the bit, are
merged as what was trained, and learn.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tiny_trainer import actor_module, build, metrics_of, ppo_config, sft_config, tiny_model
from transformers import AutoModelForCausalLM

from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.merger import merge
from hybridflow.merger.merge import compare
from hybridflow.models.adapters.adapter_folder import base_quantization
from hybridflow.models.adapters.lora import is_adapter, quantized_layers
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.probe import probe_log_probs
from hybridflow.models.policy import PolicyModel
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.resume import check_resume
from hybridflow.trainer.sft.build import build as build_sft

MODEL = "actor_rollout_ref.model"
NF4 = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.quantization=nf4")
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true", "trainer.test_freq=-1")
EXACT = ("actor_rollout_ref.rollout.exact=true",)
CRITIC = (
    "algorithm.adv_estimator=gae",
    *("critic.model.lora_rank=4", "critic.model.quantization=nf4", "trainer.test_freq=-1"),
)
MOVED = (
    f"{MODEL}.lora_dropout=0.1",
    f"{MODEL}.enable_activation_offload=true",
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    f"{MODEL}.dtype=bfloat16",
)
APART = "training/rollout_log_probs_diff_max"


@pytest.mark.parametrize("keys", [(*GRPO, *EXACT), CRITIC, (*GRPO, *MOVED)], ids=["exact", "critic", "moved"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    model: Path, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    settings = [*NF4, *keys, "trainer.total_training_steps=3", "trainer.save_freq=1"]
    with build(ppo_config(model, tmp_path / "straight", *settings)) as trainer:
        assert len(quantized_layers(actor_module(trainer))) == 14
        trainer.fit()
    middle = tmp_path / "straight" / "global_step_2"
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path='{middle}'"]
    with build(ppo_config(model, tmp_path / "resumed", *settings, *resumed)) as trainer:
        trainer.fit()
    straight = metrics_of(tmp_path / "straight")
    assert metrics_of(tmp_path / "resumed") == {3: straight[3]}
    files = [read_manifest(tmp_path / run / "global_step_3").files for run in ("straight", "resumed")]
    actors = [{name: each for name, each in some.items() if "actor/model" in name} for some in files]
    assert actors[0] and actors[0] == actors[1]
    if keys[-1:] == EXACT:
        assert all(line[APART] == 0.0 for line in straight.values()), "generation has training's log-probs"
        assert all(line["training/old_log_probs_from_rollout"] == 1.0 for line in straight.values())


def test_a_checkpoint_is_merged_into_what_was_trained(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = (
        *NF4,
        *GRPO,
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
    )
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        trainer.fit()
        live = actor_module(trainer)
        wanted = probe_log_probs(live)
    step = tmp_path / "run" / "global_step_2"
    target = merge(step, tmp_path / "merged", dtype="float32")
    assert "log-probs of a probe batch within" in compare(step, target)
    for folder in (target, step / "actor" / "huggingface"):
        read = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert float((probe_log_probs(PolicyModel(read)) - wanted).abs().max()) < 1e-4
    base = probe_log_probs(build_policy(model, device="cpu"))
    assert float((base - wanted).abs().max()) > 1e-2
    with caplog.at_level(logging.WARNING):
        kept = merge(step, tmp_path / "kept", lora="keep")
    assert "the run computed with its base in nf4" in caplog.text
    assert "base_quantization" not in (kept / "adapter_config.json").read_text()
    own = step / "actor" / "huggingface" / "lora_adapter"
    assert "base_quantization" not in (own / "adapter_config.json").read_text(), "peft would warn of it"
    assert base_quantization(own) == "nf4" and base_quantization(kept) is None
    state = [name for name, each in live.state_dict().items() if is_adapter(name)]
    assert compare(step, kept) == f"{len(state)} tensors, all equal bit for bit"
    plain = ppo_config(model, tmp_path / "run", *NF4[:2], *GRPO)
    with pytest.raises(CheckpointError, match=r"model\.quantization: nf4 → None"):
        check_resume(plain)


def test_supervised_fine_tuning_learns(model: Path, tmp_path: Path) -> None:
    keys = ["model.lora_rank=8", "model.quantization=nf4", "trainer.total_training_steps=12"]
    with build_sft(sft_config(model, tmp_path / "run", *keys)) as trainer:
        trainer.fit()
    losses = [line["train/loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl").values()]
    assert len(losses) == 12 and max(losses[-3:]) < losses[0] - 0.1, losses


def test_experts_are_refused_by_their_folder(tmp_path: Path) -> None:
    sparse = tiny_model(tmp_path / "sparse", experts=4)
    with pytest.raises(ConfigError, match="has 4 experts, and only dense models of text are held in 4 bits"):
        ppo_config(sparse, tmp_path / "run", *NF4, *GRPO)
