"""`hybridflow replay`: a step done again from a checkpoint and kept rows has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_trainer import build, ppo_config, tiny_model

from hybridflow.cli.main import main
from hybridflow.errors import DataError
from hybridflow.trainer.replay.kept_rows import KeptRows
from hybridflow.trainer.replay.replay import replay

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


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_metrics_and_weights_agree(recipe: str, tmp_path: Path) -> None:
    run = train(tmp_path, *RECIPES[recipe])
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    found = replay(run, 4)
    assert (found.began_after, found.steps) == (2, [3, 4])
    assert found.status == 0 and found.compared_weights and not found.differences and not found.notes
    assert found.num_metrics > 20
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_a_step_without_a_checkpoint_begins_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, *RECIPES["grpo"])
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
