"""Rows that a run keeps of each step: all columns as trained, and what the step was given."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, ppo_config

from hybridflow.errors import DataError
from hybridflow.protocol import DataProto
from hybridflow.trainer.replay.kept_rows import KeptRows
from hybridflow.trainer.source import TrainBatch

KEEP = ("trainer.keep_rows=true", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.exact=false")


def rows_of_two(**columns: Any) -> DataProto:
    """Two rows of two prompt and three response tokens."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    tensors = {
        "prompts": torch.tensor([[1, 2], [0, 3]]),
        "responses": torch.tensor([[4, 5, 6], [7, 0, 0]]),
        "response_mask": mask,
        "loss_mask": mask.clone(),
    }
    return DataProto.from_dict(tensors, {"uid": ["a", "b"], **columns})


def test_a_run_keeps_every_step_with_all_columns(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "run", *KEEP)) as trainer:
        seen: dict[int, DataProto] = {}
        inner = trainer.step

        def step(batch: DataProto, number: int) -> Any:
            seen[number] = batch.select()
            return inner(batch, number)

        trainer.step = step  # type: ignore[assignment]
        trainer.fit()
    kept = KeptRows(tmp_path / "run")
    assert kept.steps() == [1, 2]
    for number in kept.steps():
        found = kept.read(number)
        assert {"old_log_probs", "entropys", "advantages", "token_level_scores"} <= set(found.rows.names())
        assert {"policy_version", "row_id", "uid", "solution_str", "ground_truth"} <= set(found.rows.names())
        given = found.given()
        assert set(given.names()) == set(seen[number].names())
        for name in map(str, given.batch.keys()):
            assert torch.equal(given.batch[name], seen[number].batch[name]), name
        assert given.non_tensor_batch["solution_str"].tolist() == [
            *seen[number].non_tensor_batch["solution_str"]
        ]


def test_the_given_mask_comes_back_where_the_step_has_narrowed_it(tmp_path: Path) -> None:
    rows = rows_of_two()
    kept = KeptRows(tmp_path)
    with kept.keeping(TrainBatch(rows, epoch=3), 1):
        rows.narrow_loss_mask(torch.tensor([[True, False, True], [True, True, True]]))
        rows |= DataProto.from_dict({"advantages": torch.ones(2, 3)})
    found = kept.read(1)
    assert found.epoch == 3
    assert found.rows.batch["loss_mask"].tolist() == [[True, False, True], [True, False, False]]
    assert found.given().batch["loss_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert "advantages" not in found.given()


def test_nothing_is_written_of_a_step_that_fails(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path)
    with pytest.raises(ZeroDivisionError), kept.keeping(TrainBatch(rows_of_two(), epoch=0), 1):
        raise ZeroDivisionError
    assert kept.steps() == []


def test_a_step_done_again_replaces_its_rows_and_later_ones_go(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path)
    for number in (1, 2, 3):
        with kept.keeping(TrainBatch(rows_of_two(), epoch=0), number):
            pass
    (kept.folder / ".tmp_step_4_77").mkdir()
    kept.drop_after(1)
    assert [path.name for path in kept.folder.iterdir()] == ["step_1"]
    with kept.keeping(TrainBatch(rows_of_two(), epoch=5), 1):
        pass
    assert kept.read(1).epoch == 5


def test_a_column_that_json_cannot_hold_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptRows(tmp_path)
    rows = rows_of_two(when=[datetime.date(2024, 1, 1)] * 2, text=["\ud800", "ü"])
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            with kept.keeping(TrainBatch(rows, epoch=0), number):
                pass
    assert len(caplog.records) == 1 and "'when'" in caplog.text
    found = kept.read(2).rows
    assert "when" not in found and found.non_tensor_batch["text"].tolist() == ["\ud800", "ü"]


def test_a_step_without_rows_is_kept_too(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path)
    with kept.keeping(TrainBatch(DataProto.from_dict(), epoch=0), 1):
        pass
    assert len(kept.read(1).given()) == 0


def test_missing_rows_are_told_with_the_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"steps none.*trainer\.keep_rows=true"):
        KeptRows(tmp_path).read(1)
