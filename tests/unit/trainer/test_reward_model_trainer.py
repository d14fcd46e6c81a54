"""Training of reward models: losses of real batches against their formulas, and what a run leaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build as build_ppo
from tiny_trainer import metrics_of, ppo_config
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hybridflow.config import RewardModelConfig
from hybridflow.config.load import prepare_config
from hybridflow.config.preference import RewardDataConfig
from hybridflow.data.preference import StepDataset
from hybridflow.errors import CheckpointError
from hybridflow.merger import merge
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.protocol import DataProto
from hybridflow.trainer.sft.build import build
from hybridflow.trainer.sft.kinds import reward_rows

HEADS = {"bradley_terry": AutoModelForSequenceClassification, "process": AutoModelForTokenClassification}


def reward_config(model: Path, run: Path, loss: str, *overrides: str) -> RewardModelConfig:
    settings = [
        f"model.path='{model}'",
        f"algorithm.loss={loss}",
        "data.step_separator=' . '",
        "data.task.name=arithmetic_preferences",
        "data.task.size=16",
        "data.task.val_size=6",
        "data.train_batch_size=4",
        "optim.lr=1e-2",
        "trainer.logger=[]",
        "trainer.num_threads=1",
        "trainer.total_training_steps=3",
        "trainer.test_freq=1",
        "trainer.save_freq=2",
        f"trainer.default_local_dir='{run}'",
    ]
    return prepare_config(RewardModelConfig, [*settings, *overrides]).config


def slow_loss(folder: Path, loss: str, rows: DataProto) -> float:
    """The loss by transformers' own classifier in float64, one row at a time."""
    classifier = HEADS[loss].from_pretrained(folder, dtype=torch.float64)
    classifier.config.pad_token_id = -1  # every token of a single row counts
    losses = []
    scores = []
    for number in range(len(rows)):
        row = rows.slice(number, number + 1).batch
        attended = row["attention_mask"][0]
        logits = classifier(row["input_ids"][0][attended][None]).logits.flatten()
        if loss == "bradley_terry":
            scores.append(logits[-1])
            continue
        width = row["loss_mask"].shape[1]
        ends = row["loss_mask"][0][attended[-width:]]
        right = row["step_labels"][0][attended[-width:]][ends] > 0
        at_ends = logits[-len(ends) :][ends]
        losses += [
            -logsigmoid(s) if good else -logsigmoid(-s) for s, good in zip(at_ends, right, strict=True)
        ]
    for chosen in range(0, len(scores), 2):
        losses.append(-logsigmoid(scores[chosen] - scores[chosen + 1]))
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("loss", HEADS)
def test_a_run_learns_resumes_and_leaves_a_classifier(loss: str, model: Path, tmp_path: Path) -> None:
    with build(reward_config(model, tmp_path / "a", loss)) as trainer:
        trainer.fit()
        group: Any = trainer.step.group
        rows = trainer.source.next(4).rows
        measured = group.evaluate(rows).to_floats()["val/loss"]
        for _ in range(40):
            group.update(rows)
        learned = group.evaluate(rows).to_floats()["val/accuracy"]
    exported = tmp_path / "a" / "global_step_3" / "actor" / "huggingface"
    assert measured == pytest.approx(slow_loss(exported, loss, rows), rel=1e-5)
    with build(reward_config(model, tmp_path / "b", loss)) as trainer:
        trainer.fit(after_step=lambda step, logged: step == 2)
    with build(reward_config(model, tmp_path / "b", loss)) as trainer:
        assert trainer.state.step == 2
        trainer.fit()
    lines = metrics_of(tmp_path / "a")
    assert metrics_of(tmp_path / "b") == lines
    assert lines[1]["train/loss"] == pytest.approx(0.6931472)
    assert learned > 0.9, "on rows seen often, of whose steps 0.81 are right"
    assert ("val/margin" in lines[3]) == (loss == "bradley_terry")


@pytest.mark.parametrize(("loss", "kind"), [("bradley_terry", "score"), ("process", "token_score")])
def test_each_checkpoint_has_the_folder_that_a_run_scores_by(
    loss: str, kind: str, model: Path, tmp_path: Path
) -> None:
    with build(reward_config(model, tmp_path / "rm", loss, "trainer.total_training_steps=1")) as trainer:
        trainer.fit()
    step = tmp_path / "rm/global_step_1"
    copied = shutil.copytree(
        step, tmp_path / "copy/global_step_1", ignore=shutil.ignore_patterns("huggingface")
    )
    (copied / "manifest.json").unlink()
    for folder in (step, copied, copied / "actor"):
        with pytest.raises(
            CheckpointError, match=r"holds a reward model.*global_step_1/actor/huggingface, if"
        ):
            merge(folder, tmp_path / "merged", base_model=str(model))
    keys = ("reward.custom_reward_function.path=null", "reward.reward_model.enable=true")
    keys += (f"reward.reward_model.kind={kind}", "reward.reward_model.step_separator=' . '")
    keys += (f"reward.reward_model.model.path='{step}/actor/huggingface'",)
    with build_ppo(ppo_config(model, tmp_path / "run", *keys)) as ppo:
        scores = ppo.source.next(1).rows.batch["token_level_scores"].sum(-1)
    assert scores.count_nonzero() == len(scores)


def test_the_margin_of_the_data_reaches_the_loss(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    line = '{"prompt": [{"role": "user", "content": "1"}], "chosen": "2", "rejected": "3", "margin": %s}\n'
    data.write_text(line % 0.0 + line % 2.0)
    keys = ("data.task.name=null", f"data.train_files='{data}'", "data.train_batch_size=2")
    with build(reward_config(model, tmp_path / "run", "bradley_terry", *keys)) as trainer:
        rows = trainer.source.next(1).rows
        group: Any = trainer.step.group
        wanted = -(logsigmoid(torch.tensor(0.0)) + logsigmoid(torch.tensor(-2.0))) / 2
        assert group.evaluate(rows).to_floats()["val/loss"] == pytest.approx(wanted.item())


def test_steps_are_scored_at_their_last_token() -> None:
    tokenizer = create_tiny_tokenizer()
    row = {
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "completions": ["1 + 1 = 3", "#### 3"],
        "labels": [True, False],
    }
    config = RewardDataConfig(step_separator=" . ")
    dataset = StepDataset([row], tokenizer, config)
    rows = reward_rows([dataset[0]], 0).batch
    ids = rows["input_ids"][0]
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids.tolist()) == text + "1 + 1 = 3 . #### 3"
    ends = rows["loss_mask"][0].nonzero().flatten()
    start = len(ids) - rows["loss_mask"].shape[1]
    parts = [tokenizer.decode(ids[: start + int(end) + 1].tolist())[len(text) :] for end in ends]
    assert parts == ["1 + 1 = 3 . ", "1 + 1 = 3 . #### 3"]
    assert rows["step_labels"][0][ends].tolist() == [1.0, 0.0]
    shorter = RewardDataConfig(step_separator=" . ", max_length=len(ids) - 1, truncation="right")
    assert StepDataset([row], tokenizer, shorter)[0].labels == [True], (
        "the label of a step that is cut is gone"
    )
