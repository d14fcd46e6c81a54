"""Runs with draws, states or weights of their own go on after a resume to the same bits as without one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from tiny_trainer import metrics_of, ppo_config

from hybridflow.config.model import FSDPConfig
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.resume import say_changes

ALGORITHMS = {
    "remax": ["algorithm.adv_estimator=remax"],
    "pf_ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_pf_ppo=true",
        "algorithm.pf_ppo.reweight_method=max_random",
    ],
    "clip_cov": [
        "algorithm.adv_estimator=rloo",
        "actor_rollout_ref.actor.policy_loss={loss_mode: clip_cov, clip_cov_ratio: 0.2, clip_cov_lb: -9, "
        "clip_cov_ub: 9}",
    ],
    "spin": [
        "algorithm.adv_estimator=spin",
        "actor_rollout_ref.actor.policy_loss.loss_mode=dpo",
        "algorithm.ref_update_freq=1",
        "data.max_response_length=48",
    ],
    "vapo": [
        "algorithm.lam_critic=1.0",
        "algorithm.lam_length_alpha=0.5",
        "actor_rollout_ref.actor.positive_lm_loss_coef=0.1",
    ],
    "bypass": [
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction={bypass_mode: true, loss_type: reinforce, rollout_is: token, "
        "rollout_rs: token_k3, "
        "rollout_rs_threshold: 0.01}",
    ],
    "dynamic sampling": [
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=share",
        "data.gen_batch_size=3",
        "data.task.size=13",  # each step goes beyond an epoch of four generation batches
    ],
    "rounded": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.quantization=int8",
        "algorithm.rollout_correction.rollout_is=token",
    ],
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resumed_runs_are_equal_to_the_bit(name: str, model: Path, tmp_path: Path) -> None:
    settings = [*ALGORITHMS[name], "trainer.total_training_steps=3", "trainer.save_freq=1"]
    with build(ppo_config(model, tmp_path / "straight", *settings)) as trainer:
        trainer.fit()
    middle = tmp_path / "straight" / "global_step_2"
    settings += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path='{middle}'"]
    with build(ppo_config(model, tmp_path / "resumed", *settings)) as trainer:
        assert trainer.state.step == 2
        trainer.fit()
    straight = metrics_of(tmp_path / "straight")
    assert {1, 2, 3} <= set(straight) and straight[3]["actor/num_updates"] >= 1
    assert metrics_of(tmp_path / "resumed") == {3: straight[3]}


def test_a_resume_under_another_algorithm_says_so(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = ["algorithm.adv_estimator=grpo", "trainer.total_training_steps=1", "trainer.save_freq=1"]
    # the place of a model does not change what it learns
    elsewhere = "actor_rollout_ref.actor.fsdp_config.param_offload=true"
    for settings in (
        first,
        [*first, "trainer.total_training_steps=2", elsewhere],
        [*first, elsewhere, "algorithm.adv_estimator=rloo", "data.shuffle=false"],
    ):
        caplog.clear()
        with build(ppo_config(model, tmp_path / "run", *settings)) as trainer:
            trainer.fit()
        changed = [
            record.getMessage() for record in caplog.records if "another setting" in record.getMessage()
        ]
        assert bool(changed) == ("algorithm.adv_estimator=rloo" in settings)
    begins = "the run goes on with another setting than it had: "
    assert changed == [f"{begins}data.shuffle: True → False", f"{begins}algorithm.adv_estimator: grpo → rloo"]
    assert "(sampler was ShuffledSampler and is SequentialSampler, seed was 1 and is none)" in caplog.text


def test_another_layout_is_no_other_setting(caplog: pytest.LogCaptureFixture) -> None:
    names = [field.name for field in fields(FSDPConfig) if "parallel" in field.name]
    say_changes(1, [f"critic.fsdp_config.{name}: 1 → 2" for name in names])
    assert names and not caplog.records
