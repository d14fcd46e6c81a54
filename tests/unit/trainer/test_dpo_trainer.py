"""Preference optimisation: losses of real batches against float64, and runs that repeat and resume."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import metrics_of
from torch import Tensor, exp, log, sigmoid
from transformers import AutoModelForCausalLM

from hybridflow.config import DPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.data.preference import CHOSEN, MISMATCHED
from hybridflow.protocol import DataProto
from hybridflow.trainer.sft.build import build
from hybridflow.workers.comparison import ComparisonWorker

LOSSES = ("dpo", "ipo", "kto", "simpo", "orpo")


def dpo_config(model: Path, run: Path, *overrides: str) -> DPOConfig:
    settings = [
        f"model.path='{model}'",
        "data.task.name=arithmetic_preferences",
        "data.task.size=16",
        "data.task.val_size=6",
        "data.train_batch_size=4",
        "optim.lr=1e-2",
        "trainer.logger=[]",
        "trainer.num_threads=1",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir='{run}'",
    ]
    return prepare_config(DPOConfig, [*settings, *overrides]).config


def log_prob_sums(policy: Any, rows: DataProto) -> Tensor:
    """Sums over each row's answer, one row at a time and without padding."""
    sums = []
    for row in range(len(rows)):
        one = rows.slice(row, row + 1).batch
        ids = one["input_ids"][one["attention_mask"]][None]
        answer = int(one["loss_mask"].sum())
        log_probs = policy(ids).logits[0, :-1].log_softmax(-1)
        sums.append(log_probs.gather(1, ids[0, 1:, None])[-answer:].sum())
    return torch.stack(sums)


def slow_loss(name: str, sums: Tensor, ref: Tensor, lengths: Tensor, kinds: list[int]) -> Tensor:
    """The loss of a batch from its formula, pair by pair or answer by answer."""
    ratios = sums - ref
    if name == "kto":
        other = [ratio for ratio, kind in zip(ratios, kinds, strict=True) if kind == MISMATCHED]
        point = max(0.0, sum(float(ratio) for ratio in other) / len(other))
        own = [(ratio, kind) for ratio, kind in zip(ratios, kinds, strict=True) if kind != MISMATCHED]
        signs = [1 if kind == CHOSEN else -1 for _, kind in own]
        losses = [1 - sigmoid(0.1 * s * (r - point)) for s, (r, _) in zip(signs, own, strict=True)]
        return torch.stack(losses).mean()
    losses = []
    for c in range(0, len(sums), 2):
        means = [sums[row] / lengths[row] for row in (c, c + 1)]
        margin = ratios[c] - ratios[c + 1]
        odds = [mean - log(1 - exp(mean)) for mean in means]
        losses.append(
            {
                "dpo": -log(sigmoid(0.1 * margin)),
                "ipo": (margin - 5.0) ** 2,
                "simpo": -log(sigmoid(2.0 * (means[0] - means[1]) - 1.0)),
                "orpo": -means[0] - 0.1 * log(sigmoid(odds[0] - odds[1])),
            }[name]
        )
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_formula(name: str, model: Path, tmp_path: Path) -> None:
    """In the second step, when the policy has left the reference: packed pairs with shared prompts, against
    one row at a time in float64.
    """
    config = dpo_config(model, tmp_path / "run", f"algorithm.loss={name}")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with build(config) as trainer:
        group: Any = trainer.step.group
        group.update(trainer.source.next(1).rows)
        rows = trainer.source.next(2).rows
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        weights = {key.removeprefix("hf."): value.double() for key, value in group.weights().items()}
        policy.load_state_dict(weights, strict=False)
        with torch.no_grad():
            ref = log_prob_sums(reference, rows)
        lengths = rows.batch["loss_mask"].sum(-1)
        loss = slow_loss(name, log_prob_sums(policy, rows), ref, lengths, rows.batch["preference"].tolist())
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in policy.parameters() if p.grad is not None]).norm()
        metrics = group.update(rows).to_floats()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    if name in ("dpo", "ipo", "kto"):
        torch.testing.assert_close(rows.batch["ref_log_prob_sum"].double(), ref, rtol=1e-6, atol=1e-5)
    else:
        assert "ref_log_prob_sum" not in rows and not (tmp_path / "run" / "reference").exists()


def test_a_run_repeats_and_resumes_with_the_reference_of_its_start(model: Path, tmp_path: Path) -> None:
    keys = ("trainer.test_freq=1", "trainer.save_freq=2")
    with build(dpo_config(model, tmp_path / "a", *keys)) as trainer:
        trainer.fit()
    lines = metrics_of(tmp_path / "a")
    assert lines[1]["train/loss"] == pytest.approx(math.log(2)), "the policy is the reference"
    assert {"val/margin", "val/accuracy", "val/loss", "val/reward_chosen"} <= lines[3].keys()
    with build(dpo_config(model, tmp_path / "b", *keys)) as trainer:
        trainer.fit(after_step=lambda step, logged: step == 2)
    kept = DataProto.load_from_disk(tmp_path / "b" / "reference" / "train")
    with build(dpo_config(model, tmp_path / "b", *keys)) as trainer:
        assert trainer.state.step == 2
        trainer.fit()
    assert metrics_of(tmp_path / "b") == lines
    shutil.rmtree(tmp_path / "b" / "reference")  # computed anew: from the start's weights, to the bit
    with build(dpo_config(model, tmp_path / "b", *keys)):
        pass
    again = DataProto.load_from_disk(tmp_path / "b" / "reference" / "train")
    assert torch.equal(again.batch["ref_log_prob_sum"], kept.batch["ref_log_prob_sum"])
    assert again.meta_info == kept.meta_info


def test_log_probs_of_another_reference_are_never_taken(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sums(*overrides: str) -> Tensor:
        with build(dpo_config(model, tmp_path / "run", *overrides)) as trainer:
            return trainer.source.next(1).rows.batch["ref_log_prob_sum"]

    other = "model.override_config={rope_parameters:{rope_type:default,rope_theta:2.0}}"
    first = sums()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", _killed)
        with pytest.raises(KeyboardInterrupt):
            sums(other)
    assert torch.equal(sums(), first), "those that were written before the kill are of the other model"
    assert not torch.equal(sums(other), first), "other positions, and the same weights"


def _killed(path: Path, *_: Any, **__: Any) -> int:
    assert path.name == "meta.json" and path.with_name("tensors.safetensors").is_file()
    raise KeyboardInterrupt


def test_adapters_learn_and_the_reference_is_their_base(model: Path, tmp_path: Path) -> None:
    keys = ("model.lora_rank=4", "trainer.test_freq=3", "trainer.total_training_steps=3")
    with build(dpo_config(model, tmp_path / "lora", *keys)) as trainer:
        trainer.fit()
        group: Any = trainer.step.group
        rows = trainer.source.next(4).rows
        worker: ComparisonWorker = group.backend.worker("dpo")
        base = worker.log_prob_sums(rows, without_adapters=True).batch["ref_log_prob_sum"]
        torch.testing.assert_close(base, rows.batch["ref_log_prob_sum"], rtol=1e-5, atol=1e-5)
        own = worker.log_prob_sums(rows).batch["ref_log_prob_sum"]
        assert not torch.allclose(own, base, rtol=1e-5, atol=1e-5)
