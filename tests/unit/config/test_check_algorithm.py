"""Each estimator and loss runs with what it needs, and is refused without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from possible_run import problem

from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES
from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.config.needs import needs_reference
from hybridflow.config.show import to_yaml

CORRECTION, GROUPS, LOSS = (
    "algorithm.rollout_correction",
    "algorithm.filter_groups",
    "actor_rollout_ref.actor.policy_loss",
)
PROCESS, OVERLONG = "reward.process_reward_model", "reward.reward_kwargs.overlong_buffer_cfg"
N4 = "actor_rollout_ref.rollout.n=4"


def of(name: str, *more: str) -> list[str]:
    """An estimator with the loss that goes with it, four responses a prompt."""
    loss = {"online_dpo": "dpo", "spin": "dpo", "sppo": "sppo"}.get(name)
    return [f"algorithm.adv_estimator={name}", N4, *([f"{LOSS}.loss_mode={loss}"] if loss else []), *more]


@pytest.mark.parametrize("name", [name for name, facts in ESTIMATORS.items() if facts.group])
def test_an_estimator_that_compares_responses_wants_several(base: list[str], name: str) -> None:
    keys = ["algorithm.gdpo_reward_keys=[acc]"] if name == "gdpo" else []
    message = problem(base, *of(name, *keys), "actor_rollout_ref.rollout.n=1")
    assert f"algorithm.adv_estimator={name} compares the responses of a prompt" in message


NEEDS = {
    "gdpo": ["algorithm.gdpo_reward_keys=[acc,format]"],
    "on_policy_distillation": ["distillation.teacher_model.path=org/teacher"],
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_runs_with_what_it_needs(base: list[str], name: str) -> None:
    prepared = prepare_config(PPOConfig, [*base, *of(name, *NEEDS.get(name, []))])
    config = prepared.config
    assert config.critic.enable == (name == "gae")
    assert config.reward.process_reward_model.enable == (name == "prime")
    assert needs_reference(config) == (name in ("prime", "online_dpo", "spin"))
    assert not any("adv_estimator" in note for note in prepared.notes), prepared.notes


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_each_loss_has_the_aggregation_and_the_bounds_of_its_paper(base: list[str], name: str) -> None:
    estimator = {"dpo": "spin", "sppo": "sppo"}.get(name, "rloo")
    keys = [*base, f"algorithm.adv_estimator={estimator}", N4, f"{LOSS}.loss_mode={name}"]
    prepared, facts = prepare_config(PPOConfig, keys), POLICY_LOSSES[name]
    actor = prepared.config.actor_rollout_ref.actor
    assert actor.loss_agg_mode == facts.agg_mode
    assert (actor.clip_low, actor.clip_high) == (facts.clip or (0.2, 0.2))
    assert any("clip_ratio_low=" in note and name in note for note in prepared.notes) == (
        facts.clip is not None
    )
    own = prepare_config(
        PPOConfig,
        [
            *keys,
            "actor_rollout_ref.actor.clip_ratio_high=0.5",
            "actor_rollout_ref.actor.loss_agg_mode=token-sum",
        ],
    )
    actor = own.config.actor_rollout_ref.actor
    low = facts.clip[0] if facts.clip else 0.2  # a side that is left out keeps the loss's own bound
    assert (actor.clip_low, actor.clip_high, actor.loss_agg_mode) == (low, 0.5, "token-sum")
    assert any("the paper of" in note for note in own.notes) == (facts.clip is not None)


def test_what_is_shown_as_changed_gives_the_same_bounds_again(base: list[str], tmp_path: Path) -> None:
    for own in (
        [],
        ["actor_rollout_ref.actor.clip_ratio=0.2"],
        ["actor_rollout_ref.actor.clip_ratio_high=0.3"],
    ):
        config = prepare_config(PPOConfig, [*base, f"{LOSS}.loss_mode=gspo", *own]).config
        (tmp_path / "changed.yaml").write_text(to_yaml(config, only_changed=True))
        assert prepare_config(PPOConfig, recipe=tmp_path / "changed.yaml").config == config


def test_of_a_users_own_functions_nothing_is_assumed(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from elsewhere import f")
    mine = f"{tmp_path}/mine.py:f"
    for keys in (
        [f"algorithm.adv_estimator={mine}", f"{LOSS}.loss_mode=dpo"],
        ["algorithm.adv_estimator=spin", f"{LOSS}.loss_mode={mine}"],
        [
            f"algorithm.adv_estimator={mine}",
            f"{LOSS}.loss_mode={mine}",
            "algorithm.options={a: 1}",
            f"{LOSS}.dro_beta=3",
            "algorithm.lam=0.5",
        ],
        [
            f"algorithm.adv_estimator={mine}",
            "distillation.teacher_model.path=org/teacher",
            f"{PROCESS}.enable=true",
        ],
        [
            f"{LOSS}.loss_mode={mine}",
            "distillation.teacher_model.path=org/teacher",
            f"{PROCESS}.beta=1",
            "algorithm.ref_update_freq=3",
        ],
    ):
        prepared = prepare_config(PPOConfig, [*base, *keys])
        assert len(prepared.notes) == 0, prepared.notes
    assert (
        prepare_config(
            PPOConfig, [*base, f"{LOSS}.loss_mode={mine}"]
        ).config.actor_rollout_ref.actor.loss_agg_mode
        is None
    )


def test_process_reward_model_and_teacher_follow_the_actor(base: list[str], tmp_path: Path) -> None:
    model = [
        "actor_rollout_ref.model.override_config={a: 1}",
        "actor_rollout_ref.model.dtype=float64",
        "data.max_response_length=64",
    ]
    more = [*model, "data.train_batch_size=32", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=999"]
    config = prepare_config(PPOConfig, [*base, *of("prime"), *more]).config
    process = config.reward.process_reward_model
    assert process.model == config.actor_rollout_ref.model
    assert process.ppo_mini_batch_size == 32
    assert process.ppo_max_token_len_per_gpu == 999
    assert config.data.gen_batch_size == 32 and config.reward.reward_kwargs.max_resp_len == 64
    own = [
        f"{PROCESS}.model.path=org/other",
        f"{PROCESS}.model.dtype=float32",
        f"{PROCESS}.ppo_mini_batch_size=16",
    ]
    process = prepare_config(PPOConfig, [*base, *of("prime"), *more, *own]).config.reward.process_reward_model
    assert (process.model.path, process.model.dtype, process.model.override_config) == (
        "org/other",
        "float32",
        {},
    )
    assert process.ppo_mini_batch_size == 16
    distillation = prepare_config(
        PPOConfig, [*base, *of("on_policy_distillation", *NEEDS["on_policy_distillation"]), *more]
    ).config.distillation
    teacher = distillation.teacher_model
    assert (teacher.path, teacher.dtype, teacher.override_config) == ("org/teacher", "float64", {})
    assert teacher.tokenizer_path == config.data.tokenizer
    assert distillation.log_prob_max_token_len_per_gpu == 999
