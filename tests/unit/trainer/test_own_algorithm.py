"""The example of an estimator and a loss of one's own: a run takes both by path, and their numbers are the
ones used.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_trainer import ppo_config, tiny_model

from hybridflow.errors import ConfigError
from hybridflow.trainer.ppo.build import build

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_algorithm" / "my_algorithm.py"


def settings(*more: str) -> list[str]:
    return [
        f"algorithm.adv_estimator='{EXAMPLE}:median_baseline'",
        f"actor_rollout_ref.actor.policy_loss.loss_mode='{EXAMPLE}:quadratic_ratio'",
        *more,
    ]


def test_a_run_with_an_estimator_and_a_loss_of_ones_own(tmp_path: Path) -> None:
    options = ["algorithm.options={floor: 0.0}", "actor_rollout_ref.actor.policy_loss.options={width: 0.5}"]
    config = ppo_config(tiny_model(tmp_path / "model"), tmp_path / "run", *settings(*options))
    with build(config) as trainer:
        batch = trainer.source.next(1).rows
        batch, metrics = trainer.step(batch, 1)
    scores = batch.batch["token_level_scores"].sum(-1)
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        group = torch.tensor([other == uid for other in batch.non_tensor_batch["uid"]])
        expected = scores[row] - scores[group].median()
        assert batch.batch["advantages"][row, 0] == pytest.approx(float(expected), abs=1e-6)
    found = metrics.to_floats()
    assert found["actor/num_updates"] == 2 and "actor/ratio_far" in found and "actor/pg_clipfrac" not in found


def test_an_option_that_is_not_taken_is_refused(tmp_path: Path) -> None:
    wrong = settings("actor_rollout_ref.actor.policy_loss.options={widht: 0.5}")
    config = ppo_config(tiny_model(tmp_path / "model"), tmp_path / "run", *wrong)
    with pytest.raises(ConfigError, match=r"widht.*does not take.*width"), build(config):
        pass
    config = ppo_config(
        tiny_model(tmp_path / "model"), tmp_path / "run", *settings("algorithm.options={flor: 0.1}")
    )
    with pytest.raises(ConfigError, match=r"algorithm.options has flor.*does not take.*floor"), build(config):
        pass
