"""`hybridflow replay`: a step done again from a checkpoint and kept rows has the same bits; `reverify`: the
run's own reward gives what is stored, and others change it as they should.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_trainer import build, ppo_config, tiny_model

from hybridflow.cli.main import main
from hybridflow.errors import ConfigError, DataError
from hybridflow.trainer.replay.kept_rows import KeptRows
from hybridflow.trainer.replay.replay import replay
from hybridflow.trainer.replay.reverify import reverify

RECIPES = {
    "grpo": ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"),
    "ppo": (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=50",
        "actor_rollout_ref.rollout.exact=false",
    ),
    "pf_ppo": ("algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true"),
    "pf_ppo with a buffer": (
        *("algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true", "algorithm.pf_ppo.max_age=2"),
        *("algorithm.rollout_correction.rollout_is=token", "trainer.schedule=one_step_off"),
    ),
}


def train(folder: Path, *overrides: str) -> Path:
    """Train four steps with a checkpoint of every second one."""
    run = folder / "run"
    keys = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.keep_rows=true")
    with build(ppo_config(tiny_model(folder / "tiny"), run, *keys, *overrides)) as trainer:
        trainer.fit()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GRPO, which is read by many tests and changed by none."""
    return train(tmp_path_factory.mktemp("runs"), *RECIPES["grpo"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_metrics_and_weights_agree(recipe: str, run: Path, tmp_path: Path) -> None:
    if recipe != "grpo":
        run = train(tmp_path, *RECIPES[recipe])
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    found = replay(run, 4)
    assert (found.began_after, found.steps) == (2, [3, 4])
    assert found.status == 0 and found.compared_weights and not found.differences and not found.notes
    assert found.num_metrics > 20
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_a_step_without_a_checkpoint_begins_at_the_start(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(run, tmp_path / "run"))
    capsys.readouterr()
    assert main(["replay", str(run), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    assert "began after step 0; steps done again: 1" in shown and "all bits agree" in shown
    assert "no checkpoint of step 1" in shown
    kept = KeptRows(run)
    step = kept.read(2)
    step.rows.batch["token_level_scores"][0] += 1.0
    kept.write(step)
    assert main(["replay", str(run), "--step", "2"]) == 1
    shown = capsys.readouterr().out
    assert "differs: metric critic/score/mean at step 2" in shown and "differs: weight actor/model" in shown
    (kept.folder / "step_2").rename(kept.folder / "gone")
    with pytest.raises(DataError, match=r"trainer\.keep_rows=true"):
        replay(run, 2)


def test_the_runs_own_judgement_is_what_is_stored(run: Path) -> None:
    for one in reverify(run, None, None, None):
        assert one.num_rows == 8 and one.changed_scores == 0
        assert one.scores[0] == one.scores[1] and one.advantages[0] == one.advantages[1] > 0
        assert one.losses is not None and one.losses[0] == one.losses[1]


def test_another_reward_and_estimator(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.py"
    file.write_text("def pays(data_source, solution_str, ground_truth, extra_info):\n    return 2.0\n")
    (flat,) = reverify(run, f"{file}:pays", None, 2)
    assert flat.step == 2 and flat.changed_scores == 8
    assert flat.scores[1] == 2.0 and flat.advantages[1] == 0.0 and flat.losses is not None
    assert flat.losses[1] == 0.0
    (rloo,) = reverify(run, None, "rloo", 1)
    scores = KeptRows(run).read(1).rows.batch["token_level_scores"].sum(-1).view(4, 2)
    sizes = (scores[:, 0] - scores[:, 1]).abs()  # of both rows of a group, by tokens
    assert rloo.changed_scores == 0 and 0 < rloo.advantages[1] <= float(sizes.max())
    assert torch.isfinite(torch.tensor(rloo.losses)).all()
    assert main(["reverify", str(run), "--reward", f"{file}:pays", "--step", "1"]) == 0
    assert "→ 2 " in capsys.readouterr().out


def test_an_estimator_whose_columns_are_missing_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"gae needs values"):
        reverify(run, None, "gae", 1)
