"""Runs whose rollout multiplies by rounded weights: what is measured, corrected and refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tiny_trainer import ppo_config, tiny_model, trained_steps

from hybridflow.config.evaluation import prepare_evaluation
from hybridflow.config.show import to_yaml
from hybridflow.errors import ConfigError
from hybridflow.trainer.main_ppo import run

ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
GRPO = ("algorithm.adv_estimator=grpo", "trainer.test_freq=-1")
INT8 = f"{ROLLOUT}.quantization=int8"
TOKEN = f"{CORRECTION}.rollout_is=token"
ONE_UPDATE = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
BYPASS = f"{CORRECTION}.bypass_mode=true"


def test_the_gap_is_measured_and_corrected(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gaps = {}
    for kind in ("int8", "fp8", "float16"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            run(ppo_config(model, tmp_path / kind, *GRPO, f"{ROLLOUT}.quantization={kind}", TOKEN))
        assert f"rollout.quantization={kind} rounds the weights" in caplog.text
        steps = trained_steps(tmp_path / kind)
        assert len(steps) == 2
        for step in steps:
            # the pass for old log-probs stays, and weights are of its ratio to the rollout
            assert "training/old_log_probs_from_rollout" not in step
            assert step["rollout_corr/rollout_is_min"] < 1 < step["rollout_corr/rollout_is_max"]
            assert step["rollout_corr/k3_kl"] > 0 and step["rollout_corr/corrected"] == 1
        gaps[kind] = steps[0]["training/rollout_probs_diff_mean"]
    assert 0 < gaps["float16"] < gaps["int8"] < gaps["fp8"] < 0.05


def test_the_policy_of_the_rollout_may_be_the_old_one(model: Path, tmp_path: Path) -> None:
    run(ppo_config(model, tmp_path / "bypass", *GRPO, INT8, BYPASS, ONE_UPDATE))
    first = trained_steps(tmp_path / "bypass")[0]
    # one update of a step, and its ratio is not one: it is that of the whole weights to the rounded ones
    assert abs(first["actor/ppo_kl"]) > 0


def test_experts_and_their_routes(tmp_path: Path) -> None:
    sparse = tiny_model(tmp_path / "sparse", experts=4)
    replay = (
        "actor_rollout_ref.actor.router_replay.mode=R3",
        f"{ROLLOUT}.enable_rollout_routing_replay=true",
        "actor_rollout_ref.actor.optim.lr=0",
    )
    run(ppo_config(sparse, tmp_path / "run", *GRPO, INT8, TOKEN, *replay))
    steps = trained_steps(tmp_path / "run")
    assert all("actor/moe/flips" in step and step["rollout_corr/k3_kl"] > 0 for step in steps)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            (INT8,),
            r"int8 samples tokens from rounded weights, and nothing corrects.*rollout_is=token",
        ),
        ((f"{ROLLOUT}.quantization=int4", TOKEN), r"quantization=int4 .* which rounds to int8, fp8, float16"),
        ((INT8, TOKEN, f"{ROLLOUT}.exact=true"), r"int8 with .*exact=true.* set .*exact=auto"),
        ((f"{ROLLOUT}.quantization=float16", TOKEN, "trainer.device=cuda"), "float16 is for CPUs"),
        ((INT8, TOKEN, f"{ROLLOUT}.name=hf"), "name=hf, which cannot do it: .*native, vllm"),
        (
            (INT8, BYPASS, "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"),
            "leaves the correction to the ratio of the loss",
        ),
    ],
)
def test_keys_that_do_not_go_together(
    keys: tuple[str, ...], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo_config(model, tmp_path / "run", *GRPO, *keys)


def test_an_evaluation_answers_with_rounded_weights_and_needs_no_correction(
    model: Path, tmp_path: Path
) -> None:
    trained = ppo_config(model, tmp_path / "run", INT8, TOKEN)
    recipe = tmp_path / "config.yaml"
    recipe.write_text(to_yaml(trained))
    config, _ = prepare_evaluation([], recipe)
    assert config.actor_rollout_ref.rollout.quantization == "int8"
    with pytest.raises(ConfigError, match="quantization=int4"):
        prepare_evaluation([f"{ROLLOUT}.quantization=int4"], recipe)


def test_a_run_that_only_validates_needs_no_correction(model: Path, tmp_path: Path) -> None:
    ppo_config(model, tmp_path / "run", INT8, "trainer.val_only=true")
