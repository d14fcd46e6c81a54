"""`hybridflow diff`: equal runs are equal; a planted change is the first difference, with its place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_trainer import build, ppo_config

from hybridflow.checkpoint.manifest import read_manifest, write_manifest
from hybridflow.cli.main import main
from hybridflow.trainer.replay.diff import diff_runs
from hybridflow.trainer.replay.kept_rows import KeptRows
from hybridflow.trainer.run_folder import RunFolder

PLANTED_REWARD = """
import os


def compute_score(data_source, solution_str, ground_truth, extra_info):
    left = int(os.environ.get("PLANT", "0"))
    os.environ["PLANT"] = str(left - 1)
    planted = 0.5 if left == 1 else 0.0
    return 0.1 * sum(c.isdigit() for c in solution_str) + 0.01 * len(solution_str) + planted
"""
ROWS_A_STEP = 8


def train(model: Path, run: Path, *overrides: str) -> Path:
    """Train three steps with kept rows and a checkpoint of each."""
    reward = run.parent / "planted.py"
    reward.write_text(PLANTED_REWARD)
    keys = (
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=3",
        "trainer.keep_rows=true",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        f"reward.custom_reward_function.path='{reward}'",
    )
    with build(ppo_config(model, run, *keys, *overrides)) as trainer:
        trainer.fit()
    return run


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is read by all tests."""
    os.environ.pop("PLANT", None)
    return train(model, tmp_path_factory.mktemp("runs") / "first")


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "copy"))


def test_a_run_equals_its_repetition(model: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = train(model, run.parent / "again")
    assert main(["diff", str(run), str(again)]) == 0
    shown = capsys.readouterr().out
    assert "equal" in shown and "3 steps with rows, 3 metric lines, 3 checkpoints" in shown
    assert "note:" not in shown


def test_a_changed_reward_of_one_row_of_step_3(
    model: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANT", str(2 * ROWS_A_STEP + 4))
    planted = train(model, run.parent / "planted")
    capsys.readouterr()
    assert main(["diff", str(run), str(planted), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    first = found["differences"][0]
    assert (first["kind"], first["name"], first["step"]) == ("reward", "token_level_scores", 3)
    rows = [KeptRows(folder).read(3).rows for folder in (run, planted)]
    scores = [one.batch["token_level_scores"].sum(-1) for one in rows]
    (row,) = (scores[0] != scores[1]).nonzero().flatten().tolist()
    assert first["row"] == row and first["row_id"] == int(rows[0].batch["row_id"][row])
    assert first["second"] - first["first"] == pytest.approx(0.5)
    kinds = [one["kind"] for one in found["differences"]]
    assert kinds[:3] == ["reward", "penalised reward", "advantage"] and "weight" in kinds


@pytest.mark.parametrize("told", [True, False])
def test_a_flipped_bit_of_a_weight(run: Path, tmp_path: Path, told: bool) -> None:
    """Also where the manifest was written anew, so that no digest tells it."""
    changed = copied(run, tmp_path)
    folder = changed / "global_step_2"
    file = next((folder / "actor").glob("model_world_size_1_rank_0*"))
    tensors = load_file(file)
    name = sorted(tensors)[1]
    bits = tensors[name].view(-1).view(torch.int32)
    bits[5] ^= 1
    save_file(tensors, file, {"format": "pt"})
    if told:
        manifest = read_manifest(folder)
        (folder / "manifest.json").unlink()
        write_manifest(folder, step=2, sequence=manifest.sequence, roles=manifest.roles, known={})
    found = diff_runs(run, changed)
    assert len(found.differences) == 1 and found.status == 1
    (first,) = found.differences
    assert (first.kind, first.name, first.step) == ("weight", f"actor/model/{name}", 2)
    place = first.position
    assert isinstance(place, tuple) and tensors[name][place].item() == first.second != first.first
    assert any("damaged" in note for note in found.notes) == (not told)


def test_a_changed_key_comes_before_what_it_changes(model: Path, run: Path) -> None:
    other = train(model, run.parent / "faster", "actor_rollout_ref.actor.optim.lr=2e-2")
    found = diff_runs(run, other)
    first, second = found.differences[:2]
    assert (first.kind, first.name) == ("config", "actor_rollout_ref.actor.optim.lr")
    assert (first.first, first.second) == (0.01, 0.02)
    assert second.step == 1 and second.kind == "metric"  # the rows of the first step are the same


def test_a_changed_token(run: Path, tmp_path: Path) -> None:
    changed = copied(run, tmp_path)
    kept = KeptRows(changed)
    step = kept.read(2)
    was = int(step.rows.batch["responses"][3, 1])
    step.rows.batch["responses"][3, 1] = was + 1
    kept.write(step)
    found = diff_runs(run, changed)
    (first,) = found.differences
    assert (first.kind, first.step, first.row, first.position) == ("token", 2, 3, 1)
    assert (first.first, first.second) == (was, was + 1)


def test_what_cannot_be_compared_is_said(run: Path, tmp_path: Path) -> None:
    bare = copied(run, tmp_path)
    shutil.rmtree(bare / "rows")
    found = diff_runs(run, bare)
    assert found.status == 0
    assert any("has no rows of steps 1, 2, 3: set trainer.keep_rows=true" in note for note in found.notes)


def test_a_folder_that_is_no_run_is_status_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(run), str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 60_000, "- " * 60_000, "? " * 60_000, "{a: " * 500 + "1" + "}" * 500])
def test_a_configuration_that_is_nested_too_deeply_ends_no_process(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert main(["diff", str(run), str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert RunFolder(tmp_path).write_config("seed: 1\n") == []
    assert RunFolder(tmp_path).write_config("seed: 2\n") == ["seed: 1 → 2"]
