"""Runs of each kind log metrics of the glossary only; conftest.py looks at those of all other tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_trainer import build, ppo_config

from known_metrics import names_under, unknown

KINDS = {
    "ppo": (["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"], "critic/vf_loss"),
    "grpo": (
        [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "algorithm.rollout_correction.rollout_is=token",
            "actor_rollout_ref.rollout.exact=false",
            "actor_rollout_ref.rollout.val_kwargs.n=4",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        ],
        "rollout_corr/rollout_is_mean",
    ),
    "dapo": (
        [
            "algorithm.adv_estimator=grpo",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=score",
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
            "reward.reward_kwargs.overlong_buffer_cfg.len=4",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
        ],
        "training/filtered_groups_ratio",
    ),
    "prime": (["algorithm.adv_estimator=prime"], "process_reward/loss"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_logs_known_metrics(kind: str, model: Path, tmp_path: Path) -> None:
    keys, own = KINDS[kind]
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        trainer.fit()
    names = names_under(tmp_path)
    assert own in names and len(names) > 50
    assert not list(unknown(names))


def test_names_of_a_users_agent_are_no_excuse() -> None:
    assert list(unknown({"actor/pg_loss", "agent/mine", "nobody/knows"})) == ["agent/mine", "nobody/knows"]
