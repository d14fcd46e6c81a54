"""A reference of its own: another folder, other entries of its config.json or another dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_trainer import build, ppo_config, tiny_model

from hybridflow.errors import ModelError
from hybridflow.models.files.build import build_policy
from hybridflow.protocol.packing import pack

KL = "actor_rollout_ref.actor.use_kl_loss=true"
REF = "actor_rollout_ref.ref.model"


@pytest.mark.parametrize("lora", [False, True])
def test_log_probs_are_those_of_the_model_that_is_named(model: Path, tmp_path: Path, lora: bool) -> None:
    other = tiny_model(tmp_path / "other", hidden=48, layers=1, seed=3)
    override = {"rope_theta": 7e3}
    settings = [KL, f"{REF}.path='{other}'", f"+{REF}.override_config.rope_theta=7000.0"]
    if lora:
        settings.append("actor_rollout_ref.model.lora_rank=4")
    wanted = build_policy(other, device="cpu", override_config=override).eval()
    with build(ppo_config(model, tmp_path / "run", *settings)) as trainer:
        group = trainer.step.roles.reference
        assert group is not None
        batch = trainer.source.next(1).rows
        before = group.log_probs(batch).batch["ref_log_prob"]
        packed = pack(batch)
        with torch.no_grad():
            alone = packed.unpack(wanted(packed, temperature=group_temperature(trainer)).log_probs)
        assert torch.allclose(before, alone.float(), atol=1e-5)
        _, metrics = trainer.step(batch, 1)
        assert abs(metrics.to_floats()["actor/kl_loss"]) > 1e-3, "another model from the first step on"
        assert torch.equal(group.log_probs(batch).batch["ref_log_prob"], before)


def group_temperature(trainer: object) -> float:
    worker = trainer.step.roles.reference.backend.worker("reference")  # type: ignore[attr-defined]
    temperature: float = worker.spec.temperature
    return temperature


def test_without_a_path_it_is_the_actors_folder_and_adapters_off(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "a", KL, "actor_rollout_ref.model.lora_rank=4")) as trainer:
        roles = trainer.step.roles
        worker = roles.reference.backend.worker("reference")  # type: ignore[union-attr]
        assert worker.without_adapters
    settings = (KL, "actor_rollout_ref.model.lora_rank=4", f"{REF}.dtype=float64")
    with build(ppo_config(model, tmp_path / "b", *settings)) as trainer:
        worker = trainer.step.roles.reference.backend.worker("reference")  # type: ignore[union-attr]
        assert not worker.without_adapters and worker.engine.module.dtype == torch.float64


def test_other_tokens_are_refused(model: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", seed=3)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token in vocabulary if len(token) == 1][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    with (
        pytest.raises(ModelError, match=r"its tokenizer gives .* the id \d+, and the actor's \d+"),
        build(ppo_config(model, tmp_path / "run", KL, f"{REF}.path='{other}'")),
    ):
        pass
