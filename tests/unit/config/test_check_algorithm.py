"""Each estimator and loss runs with what it needs and is refused without; keys that nothing reads are
named.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from possible_run import problem

from hybridflow.config import PPOConfig
from hybridflow.config.algorithm_names import ESTIMATORS, POLICY_LOSSES
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


BAD_ALGORITHMS = [
    *(
        (
            [*of(name, *more), "actor_rollout_ref.rollout.n=1"],
            f"algorithm.adv_estimator={name} compares the responses of a prompt",
        )
        for name, more in {
            **dict.fromkeys(name for name, facts in ESTIMATORS.items() if facts.group and name != "gdpo"),
            "gdpo": ["algorithm.gdpo_reward_keys=[acc]"],
        }.items()
        for more in [more or []]
    ),
    (of("on_policy_distillation"), "needs a teacher, and distillation.teacher_model.path is not set"),
    (
        of("on_policy_distillation", "distillation.teacher_model.path=/no/teacher"),
        "distillation.teacher_model.path: there is no folder /no/teacher",
    ),
    (
        of(
            "on_policy_distillation",
            "distillation.teacher_model.path=org/t",
            "distillation.log_prob_max_token_len_per_gpu=9",
        ),
        "distillation.log_prob_max_token_len_per_gpu=9 tokens cannot hold",
    ),
    (of("gdpo"), "algorithm.gdpo_reward_keys is empty"),
    (
        of("gdpo", "algorithm.gdpo_reward_keys=[acc,format]", "algorithm.gdpo_reward_weights=[1]"),
        "algorithm.gdpo_reward_weights=[1.0] has 1 weights, and algorithm.gdpo_reward_keys=['acc', "
        "'format'] has 2 keys",
    ),
    (of("gdpo", "algorithm.gdpo_reward_keys=[acc,acc]"), "names a key twice"),
    (of("max_rl", "algorithm.use_kl_in_reward=true"), "algorithm.use_kl_in_reward=true lowers them below 0"),
    (
        of("max_rl", f"{OVERLONG}.enable=true", f"{OVERLONG}.len=9"),
        "overlong_buffer_cfg.enable=true lowers them below 0",
    ),
    (of("prime", f"{PROCESS}.enable=false"), f"reads process rewards, and {PROCESS}.enable=false"),
    (of("prime", f"{PROCESS}.model.path=/no/model"), f"{PROCESS}.model.path: there is no folder /no/model"),
    (
        of("prime", f"{PROCESS}.ppo_max_token_len_per_gpu=9"),
        f"{PROCESS}.ppo_max_token_len_per_gpu=9 tokens cannot hold",
    ),
    (of("prime", f"{PROCESS}.ppo_mini_batch_size=1000"), f"{PROCESS}.ppo_mini_batch_size=1000 prompts"),
    (of("prime", f"{PROCESS}.optim.betas=[1]"), f"{PROCESS}.optim.betas"),
    (
        of("prime", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9"),
        "ref.log_prob_max_token_len_per_gpu=9",
    ),
    (
        of("online_dpo", f"{LOSS}.loss_mode=vanilla"),
        "loss dpo goes with algorithm.adv_estimator=online_dpo or spin",
    ),
    (
        of("grpo", f"{LOSS}.loss_mode=dpo"),
        "adv_estimator=grpo with actor_rollout_ref.actor.policy_loss.loss_mode=dpo",
    ),
    (of("sppo", f"{LOSS}.loss_mode=dpo"), "loss sppo goes with algorithm.adv_estimator=sppo"),
    (of("rloo", f"{LOSS}.loss_mode=sppo"), "set both, or neither"),
    (of("spin", f"{LOSS}.dpo_label_smoothing=0.5"), "dpo_label_smoothing: got 0.5"),
    (
        of("spin", f"{LOSS}.dpo_loss=ipo", f"{LOSS}.dpo_label_smoothing=0.1"),
        "dpo_label_smoothing=0.1 has no meaning with",
    ),
    (of("online_dpo", "algorithm.use_pf_ppo=true"), "needs the two rows of a pair"),
    (
        [f"{LOSS}.loss_mode=gspo", "actor_rollout_ref.actor.clip_ratio=1.5"],
        "clip_ratio_low=1.5 lets the ratio fall below 0",
    ),
    ([f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_lb=6"], "clip_cov_lb=6.0 is not below clip_cov_ub=5.0"),
    (
        of("grpo", f"{GROUPS}.enable=true", f"{GROUPS}.min_mean=0.8", f"{GROUPS}.max_mean=0.2"),
        "min_mean=0.8 is more than",
    ),
    (of("grpo", f"{GROUPS}.enable=true", f"{GROUPS}.metric="), f"{GROUPS}.metric is empty"),
    ([f"{GROUPS}.enable=true"], "rollout.n=1 gives one response a prompt"),
    (
        of("grpo", f"{GROUPS}.enable=true", "data.gen_batch_size=8", f"{GROUPS}.max_num_gen_batches=3"),
        "max_num_gen_batches=3 × data.gen_batch_size=8 = 24 prompts can never fill "
        "data.train_batch_size=1024",
    ),
    (
        [f"{OVERLONG}.enable=true", f"{OVERLONG}.len=4096"],
        "overlong_buffer_cfg.len=4096 is more than reward.reward_kwargs.max_resp_len=512",
    ),
    (
        [f"{OVERLONG}.enable=true", "reward.reward_kwargs.max_resp_len=100", f"{OVERLONG}.len=101"],
        "len=101 is more than",
    ),
    ([f"{CORRECTION}.rollout_is=tokens"], "rollout_is: got"),
    *(
        ([f"{CORRECTION}.rollout_is_threshold='{bad}'"], f"rollout_is_threshold got {bad!r}")
        for bad in ("2_1", "1_2_3", "high", "0", "-1_2", "")
    ),
    *(
        ([f"{CORRECTION}.rollout_rs='{options}'", f"{CORRECTION}.rollout_rs_threshold='{thresholds}'"], says)
        for options, thresholds, says in [
            ("token_k4", "2", "has no option 'token_k4'"),
            ("seq_max_k1", "2", "has no option 'seq_max_k1'"),
            ("token_k1,", "2,2", "has no option ''"),
            (
                "token_k1,seq_max_k2",
                "0.5_2.0",
                "has 2 options, but rollout_rs_threshold=0.5_2.0 has 1 thresholds",
            ),
            ("token_k1", "0.5", "got '0.5' for token_k1: set 'lo_hi'"),
            ("token_k1", "2_0.5", "got '2_0.5' for token_k1: set 'lo_hi'"),
            ("seq_mean_k1", "0_2.0", "got '0_2.0' for seq_mean_k1: set 'lo_hi' with 0 < lo < hi"),
            ("seq_sum_k1", "much", "got 'much' for seq_sum_k1"),
            ("token_k3", "0.5_2.0", "got '0.5_2.0' for token_k3: set one number above 0"),
            ("token_k1,token_k2", "2,0", "got '0' for token_k2: set one number above 0"),
        ]
    ),
    ([f"{CORRECTION}.rollout_rs=token_k1"], "rollout_rs_threshold=None has 0 thresholds"),
    (of("optimal_token_baseline", f"{CORRECTION}.bypass_mode=true"), "needs Σπ² from it"),
    *(
        (
            of(
                name,
                f"{LOSS}.loss_mode={loss}",
                f"{CORRECTION}.bypass_mode=true",
                f"{CORRECTION}.rollout_is=token",
            ),
            f"loss_mode={loss} has none",
        )
        for name, loss in (("rloo", "gpg"), ("rloo", "dro"), ("sppo", "sppo"), ("spin", "dpo"))
    ),
]


@pytest.mark.parametrize(
    ("overrides", "says"), BAD_ALGORITHMS, ids=[" ".join(overrides) for overrides, _ in BAD_ALGORITHMS]
)
def test_an_algorithm_that_cannot_run_is_refused_with_the_way_out(
    base: list[str], overrides: list[str], says: str
) -> None:
    assert says in problem(base, *overrides)


NEEDS = {
    "gdpo": ["algorithm.gdpo_reward_keys=[acc,format]"],
    "on_policy_distillation": ["distillation.teacher_model.path=org/teacher"],
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_runs_with_what_it_needs(base: list[str], name: str) -> None:
    prepared = prepare_config(PPOConfig, [*base, *of(name, *NEEDS.get(name, []))])
    config = prepared.config
    assert config.critic.enable == (name == "gae") and config.reward.process_reward_model.enable == (
        name == "prime"
    )
    assert needs_reference(config) == (name in ("prime", "online_dpo", "spin"))
    assert not any("adv_estimator" in note for note in prepared.notes), prepared.notes


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_each_loss_has_the_aggregation_and_the_bounds_of_its_paper(base: list[str], name: str) -> None:
    estimator = {"dpo": "spin", "sppo": "sppo"}.get(name, "rloo")
    keys = [*base, f"algorithm.adv_estimator={estimator}", N4, f"{LOSS}.loss_mode={name}"]
    prepared, facts = prepare_config(PPOConfig, keys), POLICY_LOSSES[name]
    actor = prepared.config.actor_rollout_ref.actor
    assert actor.loss_agg_mode == facts.agg_mode and (actor.clip_low, actor.clip_high) == (
        facts.clip or (0.2, 0.2)
    )
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
    assert (
        process.model == config.actor_rollout_ref.model
        and process.ppo_mini_batch_size == 32
        and process.ppo_max_token_len_per_gpu == 999
    )
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
    assert (
        teacher.tokenizer_path == config.data.tokenizer and distillation.log_prob_max_token_len_per_gpu == 999
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (of("rloo", "algorithm.lam=0.9"), "algorithm.lam is read by gae only: algorithm.adv_estimator=rloo"),
        (of("rloo", "algorithm.lam_critic=0.9"), "algorithm.lam_critic is read by gae only"),
        (of("grpo", "algorithm.lam_length_alpha=0.05"), "algorithm.lam_length_alpha is read by gae only"),
        (of("rloo", "algorithm.gamma=0.9"), "algorithm.gamma is read by gae and reinforce_plus_plus only"),
        (of("rloo", "algorithm.norm_adv_by_std_in_grpo=false"), "is read by grpo and grpo_passk only"),
        (of("rloo", "algorithm.sppo.eta=2"), "algorithm.sppo.eta is read by sppo only"),
        (of("rloo", "algorithm.gdpo_reward_keys=[acc]"), "algorithm.gdpo_reward_keys is read by gdpo only"),
        (of("rloo", "data.demonstration_key=answer"), "data.demonstration_key is read by spin only"),
        (of("rloo", "algorithm.options={a: 1}"), "algorithm.options is read by estimators of your own only"),
        ([f"{LOSS}.tau_pos=2"], "policy_loss.tau_pos is read by sapo only"),
        ([f"{LOSS}.dpo_beta=2"], "policy_loss.dpo_beta is read by dpo only"),
        (
            [f"{LOSS}.loss_mode=sapo", "actor_rollout_ref.actor.clip_ratio=0.1"],
            "clip_ratio is read by vanilla, gspo, geo_mean",
        ),
        (
            [f"{LOSS}.loss_mode=gspo", "actor_rollout_ref.actor.clip_ratio_c=4"],
            "clip_ratio_c is read by vanilla, dppo_tv and dppo_kl only",
        ),
        (of("remax", "actor_rollout_ref.rollout.do_sample=false"), "remax finds nothing to learn from"),
        (
            of("spin", "algorithm.use_kl_in_reward=true"),
            "algorithm.use_kl_in_reward=true changes no advantage",
        ),
        (["algorithm.ref_update_freq=5"], "nothing in this run reads a reference"),
        (of("prime", "algorithm.ref_update_freq=5"), f"moves the reference that {PROCESS} is compared with"),
        (
            ["algorithm.kl_penalty=k3"],
            "algorithm.kl_penalty is read only with algorithm.use_kl_in_reward=true",
        ),
        (
            ["actor_rollout_ref.actor.kl_loss_type=k2"],
            "kl_loss_type is read only with actor_rollout_ref.actor.use_kl_loss=true",
        ),
        (
            of("grpo", "trainer.critic_warmup=5"),
            "trainer.critic_warmup=5 without a critic: the actor stands still for 5 steps",
        ),
        (
            ["data.gen_batch_size=64"],
            "data.gen_batch_size is read only with algorithm.filter_groups.enable=true",
        ),
        ([f"{GROUPS}.metric=score"], "algorithm.filter_groups is read only with"),
        (["algorithm.pf_ppo.weight_pow=1"], "algorithm.pf_ppo is read only with algorithm.use_pf_ppo=true"),
        (of("grpo", "algorithm.use_pf_ppo=true"), "advantages are computed over whole groups first"),
        ([f"{OVERLONG}.len=5"], f"reward.reward_kwargs is read only with {OVERLONG}.enable=true"),
        (
            [f"{OVERLONG}.enable=true", f"{OVERLONG}.len=9", "reward.reward_kwargs.max_resp_len=600"],
            "long enough for the whole overlong",
        ),
        ([f"{PROCESS}.enable=true"], "adv_estimator=gae does not read: prime does"),
        ([f"{PROCESS}.beta=1"], "runs without a process reward model"),
        (["distillation.teacher_model.path=org/t"], "adv_estimator=gae has no teacher"),
        ([f"{CORRECTION}.rollout_is_threshold=3"], "rollout_is_threshold is read only with"),
        ([f"{CORRECTION}.rollout_rs_threshold=3"], "rollout_rs_threshold is read only with"),
        (
            [f"{CORRECTION}.loss_type=reinforce"],
            "loss_type is read only with algorithm.rollout_correction.bypass_mode=true",
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
            "is not used by algorithm.rollout_correction.loss_type=ppo_clip",
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", "actor_rollout_ref.rollout.reuse_log_probs_within=1e-4"],
            "reuse_log_probs_within=0.0001 is not read",
        ),
        (
            [f"{CORRECTION}.rollout_is=token", "actor_rollout_ref.rollout.reuse_log_probs_within=1e-4"],
            "reuse_log_probs_within=0.0001 saves no pass",
        ),
        (
            [
                "actor_rollout_ref.actor.positive_lm_loss_coef=0.1",
                "reward.custom_reward_function.path=my.rewards",
            ],
            "whose reward returns acc = 1",
        ),
    ],
)
def test_notes_on_what_is_not_read(base: list[str], overrides: list[str], says: str) -> None:
    assert any(says in note for note in prepare_config(PPOConfig, [*base, *overrides]).notes)


@pytest.mark.parametrize(
    "overrides",
    [
        of("grpo", f"{GROUPS}.enable=true", "data.gen_batch_size=64", f"{GROUPS}.max_num_gen_batches=0"),
        [f"{OVERLONG}.enable=true", f"{OVERLONG}.len=64", "algorithm.overlong_filtering=true"],
        [
            f"{CORRECTION}.rollout_is=sequence",
            f"{CORRECTION}.rollout_is_threshold=0.5_5",
            f"{CORRECTION}.rollout_is_batch_normalize=true",
        ],
        [
            f"{CORRECTION}.rollout_rs='token_k1, seq_max_k3,seq_sum_k2'",
            f"{CORRECTION}.rollout_rs_threshold='0.999_1.001, 0.1,5'",
        ],
        [
            f"{CORRECTION}.rollout_rs=seq_mean_k1",
            f"{CORRECTION}.rollout_rs_threshold=1.001",
            f"{CORRECTION}.bypass_mode=true",
        ],
        [
            f"{CORRECTION}.bypass_mode=true",
            f"{CORRECTION}.loss_type=reinforce",
            f"{CORRECTION}.rollout_is=token",
            f"{LOSS}.loss_mode=reinforce",
        ],
        of("online_dpo", "algorithm.ref_update_freq=5", f"{LOSS}.dpo_label_smoothing=0.1"),
        [
            "algorithm.use_pf_ppo=true",
            "algorithm.pf_ppo.reweight_method=max_min",
            "algorithm.lam_critic=1.0",
            "algorithm.lam_length_alpha=0.05",
        ],
    ],
)
def test_what_runs_as_meant_has_no_note(base: list[str], overrides: list[str]) -> None:
    assert prepare_config(PPOConfig, [*base, *overrides]).notes == []
