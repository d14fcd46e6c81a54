"""Supervised fine-tuning: which tokens are learned, and a run that can be repeated and taken up again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_trainer import build as build_ppo
from tiny_trainer import metrics_of, ppo_config, sft_config
from transformers import AutoModelForCausalLM

from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config.data import SFTDataConfig
from hybridflow.data.sft import SFTDataset, SFTRow
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.protocol.packing import pack
from hybridflow.trainer.sft.build import build
from hybridflow.trainer.sft.step import conversation_rows


def test_all_before_the_first_token_to_learn_is_the_prompt() -> None:
    rows = conversation_rows(
        [SFTRow([5, 6, 7, 8], [0, 0, 1, 1], 0), SFTRow([9, 10, 11, 12, 13], [0, 1, 0, 0, 1], 1)], pad_id=0
    )
    assert rows.batch["prompts"].tolist() == [[5, 6], [0, 9]]
    assert rows.batch["responses"].tolist() == [[7, 8, 0, 0], [10, 11, 12, 13]]
    for name in ("response_mask", "loss_mask"):
        assert rows.batch[name].int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 1]]
    assert pack(rows).lengths == (4, 5)


def test_a_row_cut_inside_an_answer_keeps_its_first_token_as_the_prompt() -> None:
    """`data.truncation=left` may leave a row that starts with a token to learn, which nothing predicts."""
    rows = conversation_rows([SFTRow([5, 6, 7], [1, 1, 1], 0), SFTRow([8, 9, 10], [1, 0, 1], 1)], pad_id=0)
    assert rows.batch["prompts"].tolist() == [[0, 5], [8, 9]]
    assert rows.batch["loss_mask"].sum(-1).tolist() == [2, 1] and pack(rows).lengths == (3, 3)


def test_only_the_assistants_words_are_learned_in_several_turns() -> None:
    tokenizer = create_tiny_tokenizer()
    turns = [("user", "1 + 1"), ("assistant", "2"), ("user", "and 3"), ("assistant", "5 ok")]
    messages = [{"role": role, "content": content} for role, content in turns]
    dataset = SFTDataset([{"messages": messages}], tokenizer, SFTDataConfig())
    rows = conversation_rows([dataset[0]], pad_id=int(tokenizer.pad_token_id))
    learned = rows.batch["responses"][rows.batch["loss_mask"]].tolist()
    assert tokenizer.decode(learned) == "2<|im_end|>5 ok<|im_end|>"
    assert tokenizer.decode(rows.batch["input_ids"][0].tolist()) == tokenizer.apply_chat_template(
        messages, tokenize=False
    )


def test_a_run_learns_repeats_and_resumes(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        with build(sft_config(model, tmp_path / name, "trainer.test_freq=1")) as trainer:
            trainer.fit()
            assert trainer.state.step == 3
    lines = metrics_of(tmp_path / "a")
    assert lines == metrics_of(tmp_path / "b")
    assert lines[3]["val/loss"] < lines[1]["val/loss"] and lines[3]["train/num_skipped_steps"] == 0.0
    with build(sft_config(model, tmp_path / "c", "trainer.test_freq=1", "trainer.save_freq=2")) as trainer:
        trainer.fit(after_step=lambda step, logged: step == 2)
    with build(sft_config(model, tmp_path / "c", "trainer.test_freq=1")) as trainer:
        assert trainer.state.step == 2
        assert trainer.fit() == {"val/loss": lines[3]["val/loss"]}
    assert metrics_of(tmp_path / "c") == lines


@pytest.mark.parametrize(("every", "steps"), [(-1, [3]), (2, [2, 3]), (5, [3])])
def test_when_a_run_validates(every: int, steps: list[int], model: Path, tmp_path: Path) -> None:
    with build(sft_config(model, tmp_path / "run", f"trainer.test_freq={every}")) as trainer:
        trainer.fit()
    assert [step for step, line in metrics_of(tmp_path / "run").items() if "val/loss" in line] == steps


def test_what_a_checkpoint_holds_and_a_resume_reads(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build(
        sft_config(
            model, tmp_path / "run", "trainer.total_training_steps=1", "checkpoint.save_contents=[model]"
        )
    ) as trainer:
        trainer.fit()
    path = tmp_path / "run" / "global_step_1"
    assert CheckpointStore(tmp_path / "run").load(path).engines == {"actor": {"model"}}
    folder = path / "actor" / "huggingface"
    assert (folder / "config.json").is_file() and not list(folder.glob("*.safetensors"))
    with (
        caplog.at_level(logging.WARNING),
        build(sft_config(model, tmp_path / "run", "trainer.total_training_steps=1")) as trainer,
    ):
        assert trainer.fit() == {} and trainer.state.step == 1, "nothing is left to do"
    assert (
        "no optimizer and no scheduler" in caplog.text
        and "the run is complete: 1 of 1 steps are done" in caplog.text
    )


def test_a_checkpoint_of_another_run_is_refused(model: Path, tmp_path: Path) -> None:
    with build(sft_config(model, tmp_path / "run", "trainer.total_training_steps=1")) as trainer:
        trainer.fit()
    with (
        pytest.raises(CheckpointError, match=r"trainer\.seed=1, this one has 7"),
        build(sft_config(model, tmp_path / "run", "trainer.seed=7")),
    ):
        pass
    with (
        pytest.raises(CheckpointError, match="of kind sft, this one is of kind ppo"),
        build_ppo(ppo_config(model, tmp_path / "run")),
    ):
        pass


def test_a_run_folder_has_one_run_at_a_time(model: Path, tmp_path: Path) -> None:
    config = sft_config(model, tmp_path / "run")
    with build(config), pytest.raises(ConfigError, match="another run is writing into"), build(config):
        pass
    with build(config) as trainer:
        assert trainer.state.step == 0, "it is free again"


def test_a_checkpoint_has_the_model_as_a_folder_of_its_own(model: Path, tmp_path: Path) -> None:
    with build(sft_config(model, tmp_path / "run", "trainer.total_training_steps=1")) as trainer:
        trainer.fit()
        weights = {name: tensor.clone() for name, tensor in trainer.step.group.weights().items()}
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "global_step_1" / "actor" / "huggingface"
    )
    assert all(torch.equal(tensor, weights[f"hf.{name}"]) for name, tensor in exported.state_dict().items())
