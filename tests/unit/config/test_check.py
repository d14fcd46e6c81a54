"""A run that cannot work is refused before anything is built; verl's quickstart is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from possible_run import problem, write_model_folder

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config


def test_the_quickstart_of_verls_documentation_loads(tmp_path: Path, base: list[str]) -> None:
    prepared = prepare_config(
        PPOConfig,
        [
            f"data.train_files={tmp_path}/train.parquet",
            f"data.val_files={tmp_path}/test.parquet",
            "data.train_batch_size=256",
            "data.max_prompt_length=512",
            "data.max_response_length=512",
            f"actor_rollout_ref.model.path={tmp_path}/model",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.name=native",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
            "critic.optim.lr=1e-5",
            f"critic.model.path={tmp_path}/model",
            "critic.ppo_micro_batch_size_per_gpu=4",
            "algorithm.kl_ctrl.kl_coef=0.001",
            "trainer.logger=console",
            "trainer.val_before_train=False",
            "trainer.n_gpus_per_node=1",
            "trainer.nnodes=1",
            "trainer.save_freq=10",
            "trainer.test_freq=10",
            "trainer.total_epochs=15",
            f"trainer.default_local_dir={tmp_path}/run",
        ],
    )
    config = prepared.config
    assert (
        config.critic.enable
        and config.critic.model.path == f"{tmp_path}/model"
        and config.critic.optim.lr == 1e-5
    )
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4 and config.trainer.logger == [
        "console"
    ]
    assert len(prepared.notes) == 1, prepared.notes  # kl_ctrl is read only with a KL in the reward


def test_derived_values(base: list[str]) -> None:
    config = prepare_config(
        PPOConfig, [*base, "data.max_response_length=64", "trainer.seed=9", "data.train_batch_size=32"]
    ).config
    actor, rollout, ref = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.actor_rollout_ref.ref,
    )
    assert (
        actor.loss_scale_factor == 64.0
        and actor.loss_agg_mode == "token-mean"
        and actor.ppo_mini_batch_size == 32
    )
    assert rollout.log_prob_max_token_len_per_gpu == ref.log_prob_max_token_len_per_gpu == 16384
    assert (
        config.data.seed == 9
        and config.data.tokenizer == config.actor_rollout_ref.model.path == config.critic.model.path
    )
    critic = config.critic
    assert (critic.enable, critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle) == (
        True,
        32,
        1,
        True,
    )
    assert critic.forward_max_token_len_per_gpu == 32768
    assert actor.strategy == "fsdp2" and config.trainer.controller == "local"
    assert isinstance(config.data.train_files, list) and config.trainer.logger == ["console", "tensorboard"]


def test_the_critic_is_the_actors_model_unless_told_otherwise(base: list[str], tmp_path: Path) -> None:
    overrides = [
        *base,
        "actor_rollout_ref.model.override_config={a: 1}",
        "actor_rollout_ref.model.dtype=float64",
    ]
    same = prepare_config(PPOConfig, overrides).config.critic.model
    assert same.override_config == {"a": 1} and same.dtype == "float64"
    write_model_folder(tmp_path / "other")
    other = prepare_config(
        PPOConfig, [*overrides, f"critic.model.path={tmp_path}/other", "critic.model.dtype=float32"]
    ).config.critic.model
    assert other.override_config == {} and other.dtype == "float32"


def test_mini_batch_at_its_default_shrinks_but_a_given_one_does_not(base: list[str]) -> None:
    prepared = prepare_config(PPOConfig, [*base, "data.train_batch_size=16"])
    assert prepared.config.actor_rollout_ref.actor.ppo_mini_batch_size == 16
    assert any("is more than data.train_batch_size" in note for note in prepared.notes)
    message = problem(base, "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=256")
    assert "ppo_mini_batch_size=256 prompts is more than data.train_batch_size=16: set it to 16" in message


GRPO = "algorithm.adv_estimator=grpo"
BAD = [
    ([GRPO], "actor_rollout_ref.rollout.n=1 gives one: set actor_rollout_ref.rollout.n to 2 or more"),
    (
        [
            "data.train_batch_size=100",
            "actor_rollout_ref.actor.ppo_mini_batch_size=96",
            "actor_rollout_ref.rollout.n=8",
        ],
        "data.train_batch_size=100 × actor_rollout_ref.rollout.n=8 = 800 sequences cannot be split into "
        "actor_rollout_ref.actor.ppo_mini_batch_size=96 prompts: use a divisor of 100, for example 50",
    ),
    (
        ["critic.ppo_mini_batch_size=300"],
        "critic.ppo_mini_batch_size=300 prompts cannot|critic.ppo_mini_batch_size=300",
    ),
    (["algorithm.adv_estimator=grop"], "algorithm.adv_estimator=grop: there are gae, grpo"),
    (["algorithm.adv_estimator=no_such.py:f"], "algorithm.adv_estimator: there is no file no_such.py"),
    (["algorithm.adv_estimator=file.py:"], "wanted path/to/file.py:name"),
    (
        ["actor_rollout_ref.actor.policy_loss.loss_mode=ppo"],
        "policy_loss.loss_mode=ppo: there are vanilla, gspo",
    ),
    (
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512"],
        "ppo_max_token_len_per_gpu=512 tokens cannot hold one row of data.max_prompt",
    ),
    (["critic.forward_max_token_len_per_gpu=9"], "critic.forward_max_token_len_per_gpu=9"),
    (
        ["actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=9"],
        "rollout.log_prob_max_token_len_per_gpu=9",
    ),
    (
        ["algorithm.use_kl_in_reward=true", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9"],
        "ref.log_prob_max_token_len_per_gpu=9",
    ),
    (
        ["actor_rollout_ref.rollout.max_num_batched_tokens=9"],
        "max_num_batched_tokens=9 cannot hold one prompt",
    ),
    (["critic.enable=false"], "needs the critic"),
    (["algorithm.kl_penalty=k4"], "algorithm.kl_penalty=k4: there is no such estimator; there are kl, k1"),
    (["algorithm.kl_penalty=k3+"], "has no gradient"),
    (
        ["algorithm.kl_penalty=full"],
        "kl_penalty=full: the KL over the whole vocabulary is",
    ),
    (["actor_rollout_ref.actor.kl_loss_type=full+"], "kl_loss_type=full+: the KL over the whole"),
    (
        [
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.kl_loss_type=full",
            "trainer.resource_pools={a: [1], b: [1]}",
            "trainer.placement={reference: b}",
        ],
        "computes the reference in the actor's processes, and trainer.placement puts it on b",
    ),
    (["actor_rollout_ref.actor.clip_ratio_low=1.5"], "fall below 0"),
    (
        ["actor_rollout_ref.rollout.val_kwargs.do_sample=true"],
        "val_kwargs.temperature=0: set a temperature above 0",
    ),
    (
        ["actor_rollout_ref.rollout.do_sample=false", "actor_rollout_ref.rollout.temperature=0.7"],
        "do_sample=false with",
    ),
    (["actor_rollout_ref.actor.optim.betas=[0.9]"], "betas=[0.9]: wanted two numbers"),
    (["critic.optim.betas=[0.9,1.0]"], "critic.optim.betas"),
    (["trainer.n_gpus_per_node=8", "trainer.controller=local"], "ask for 8: set trainer.controller=ray"),
    (["trainer.resource_pools={a: [1]}", "trainer.controller=local"], "trainer.resource_pools ask for 1"),
    (
        ["trainer.num_collectors=2", "trainer.controller=local"],
        "set trainer.controller=ray, or num_collectors=0",
    ),
    (["trainer.num_collectors=2"], "trainer.num_collectors=2 without Ray"),
    (
        ["trainer.row_store=transferqueue"],
        "trainer.row_store=transferqueue without Ray, whose processes the package needs",
    ),
    (
        ["trainer.num_collectors=2", "trainer.controller=ray", "trainer.resource_pools={collectors: [1]}"],
        "trainer.resource_pools.collectors has the name",
    ),
    (
        ["trainer.num_collectors=2", "trainer.controller=ray", "reward.manager=batch"],
        "trainer.num_collectors=2 with reward.manager=batch",
    ),
    (
        [
            "trainer.num_collectors=2",
            "trainer.controller=ray",
            "actor_rollout_ref.rollout.agent.endpoint_port=9",
        ],
        "several processes cannot listen at one port",
    ),
    (["trainer.resource_pools={a: [one]}"], "wanted"),
    (["trainer.resource_pools={a: [0]}"], "a pool has at least one device"),
    (
        ["trainer.resource_pools={a: [1]}", "trainer.placement={critic: b}"],
        "'b', which does not exist (there are a)",
    ),
    (["trainer.placement={critic: b}"], "there are none: set trainer.resource_pools"),
    (
        ["trainer.resource_pools={a: [1]}", "trainer.placement={critic: []}"],
        "leaves the critic without devices",
    ),
    (
        ["trainer.resource_pools={a: [1]}", "trainer.placement={critics: a}"],
        "trainer.placement.critics is no role",
    ),
    (
        ["trainer.nnodes=3", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
        "does not divide the 3 processes",
    ),
    (
        [
            f"actor_rollout_ref.actor.{key}"
            for key in ("use_prefix_grouper=true", "ulysses_sequence_parallel_size=2")
        ]
        + ["trainer.nnodes=2"],
        "ranks that share rows hold each prompt",
    ),
    (
        ["actor_rollout_ref.rollout.exact=true", "actor_rollout_ref.actor.use_prefix_grouper=true"],
        "exact=true with actor_rollout_ref.actor.use_prefix_grouper=true",
    ),
    (
        ["actor_rollout_ref.rollout.exact=true", "algorithm.rollout_correction.bypass_mode=true"],
        "exact=true with algorithm.rollout_correction.bypass_mode=true",
    ),
    (["trainer.nnodes=2", "actor_rollout_ref.rollout.exact=true"], "exact=true with an actor on 2 processes"),
    (
        ["trainer.nnodes=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=3"],
        "fsdp_size=3 does not divide the 4 ranks",
    ),
    (
        ["trainer.nnodes=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"],
        "does not divide the 2 processes that generate",
    ),
    (["trainer.nnodes=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=0"], "fsdp_size=0"),
    (
        [
            "trainer.nnodes=2",
            "critic.fsdp_config.tensor_parallel_size=2",
            "critic.ulysses_sequence_parallel_size=2",
        ],
        "critic.ulysses_sequence_parallel_size=4 does not divide the 2 processes of its pool",
    ),
    (
        [
            "trainer.nnodes=2",
            "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
            "actor_rollout_ref.model.lora_rank=8",
        ],
        "adapters are not split",
    ),
    (
        ["actor_rollout_ref.actor.fsdp_config.context_parallel=ring"],
        "context_parallel=ring, but no ranks share rows: set",
    ),
    (["actor_rollout_ref.ref.model.lora_rank=8"], "ref.model.lora_rank: the reference does not train"),
    (
        ["actor_rollout_ref.ref.model.dtype=float64", "algorithm.ref_update_freq=2"],
        "ref_update_freq=2 would replace the weights of actor_rollout_ref.ref.model",
    ),
    (
        ["actor_rollout_ref.ref.model.path=/no/model", "actor_rollout_ref.actor.use_kl_loss=true"],
        "there is no folder /no/model",
    ),
    (
        ["actor_rollout_ref.model.lora_rank=8", "algorithm.ref_update_freq=2"],
        "no weights of its own to renew",
    ),
    (
        [
            "trainer.resource_pools={a: [2], b: [1]}",
            "trainer.placement={reference: b}",
            "algorithm.use_kl_in_reward=true",
            "algorithm.ref_update_freq=2",
        ],
        "the actor has 2 processes with fsdp_size=-1, tensor_parallel_size=1 and the reference 1 processes",
    ),
    (["distillation.teacher_model.lora_rank=8"], "the teacher does not train"),
    (["actor_rollout_ref.rollout.stop=['Q:','']"], "rollout.stop=['Q:', ''] holds an empty text"),
    (
        ["actor_rollout_ref.rollout.stop_token_ids=[3,-1]"],
        "rollout.stop_token_ids=[3, -1]: token ids are 0 or more",
    ),
    (["actor_rollout_ref.rollout.min_p=1.5"], "min_p"),
    (["actor_rollout_ref.rollout.repetition_penalty=0"], "repetition_penalty"),
    (["trainer.logger=[console,wandbb]"], "trainer.logger: got"),
    (["trainer.logger=wandbb"], "trainer.logger=wandbb: there is no such tracker; there are console"),
    (["trainer.resume_mode=resume_path"], "without trainer.resume_from_path"),
    (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/such"], "there is no folder /no/such"),
    (["trainer.resume_from_path=/no/such"], "set trainer.resume_mode=resume_path"),
    (
        ["trainer.default_local_dir=/dev/null/run"],
        "trainer.default_local_dir=/dev/null/run cannot be written",
    ),
    (["trainer.rollout_data_dir=/dev/null/run"], "trainer.rollout_data_dir=/dev/null/run cannot be written"),
    (["trainer.val_only=true", "data.val_files=[]"], "val_only=true without validation data"),
    (["trainer.critic_warmup=5", "trainer.total_training_steps=5"], "leaves no step"),
    (
        ["actor_rollout_ref.actor.optim.lr_wsd_decay_steps=3"],
        "lr_scheduler_type=wsd, and it is constant",
    ),
    (["actor_rollout_ref.actor.optim.momentum=1.0"], "momentum=1.0: wanted a number from 0 to below 1"),
    (["data.train_files=[]"], "no training data"),
    (["data.train_files=/no/such.parquet"], "data.train_files: there is no file /no/such.parquet"),
    (["data.val_files=[/no/such.parquet]"], "data.val_files: there is no file /no/such.parquet"),
    (["data.train_files='$HOME/a.parquet'"], "for the shell to fill in"),
    (["data.task.name=arithmetic_chain"], "are both set: leave one out"),
    (
        ["data.train_files=[]", "data.task.name=arithmetic_chain", "data.val_files=s3://b/v.parquet"],
        "data.val_files=['s3://b/v.parquet'] and",
    ),
    (
        ["data.train_files=[]", "data.task.name=chess"],
        "data.task.name=chess: there is arithmetic_chain, arithmetic_preferences, one_liners, red_squares, ",
    ),
    (["actor_rollout_ref.model.path=null"], "actor_rollout_ref.model.path is not set"),
    (["actor_rollout_ref.model.path=/no/model"], "there is no folder /no/model"),
    (["critic.model.path=./no_model"], "critic.model.path: there is no folder ./no_model"),
    (["reward.custom_reward_function.path=/no/reward.py"], "there is no file /no/reward.py"),
    (["data.custom_cls.path=a.py"], "without a name: set data.custom_cls.name"),
    (["data.sampler.class_path=/no/a.py:S"], "data.sampler.class_path: there is no file /no/a.py"),
    (["reward.terms=[{weight: 1}]"], "reward.terms[0]"),
    (
        ["reward.terms=[{name: math}]", "reward.function=gsm8k"],
        "reward.function=gsm8k each choose the reward",
    ),
    (
        ["reward.terms=[{name: math}]", "reward.custom_reward_function.reward_kwargs={a: 1}"],
        "write the options into the term",
    ),
]


@pytest.mark.parametrize(("overrides", "says"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_what_cannot_run_is_refused_with_the_way_out(
    base: list[str], overrides: list[str], says: str
) -> None:
    message = problem(base, *overrides)
    assert any(part in message for part in says.split("|")), message


CORRECTION = "algorithm.rollout_correction"
FSDP = "actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [
                *("trainer.n_gpus_per_node=4", f"{FSDP}.tensor_parallel_size=3", f"{FSDP}.fsdp_size=3"),
                "actor_rollout_ref.model.lora_rank=4",
            ],
            [
                "tensor_parallel_size=3 does not divide the 4 processes",
                "adapters are not split",
                "fsdp_size=3 does not divide the 4 ranks",
            ],
        ),
        (
            [
                *("trainer.n_gpus_per_node=4", f"{FSDP}.pipeline_parallel_size=3"),
                *(f"{FSDP}.expert_parallel_size=3", f"{FSDP}.tensor_parallel_size=8", f"{FSDP}.fsdp_size=0"),
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=3",
            ],
            [
                "pipeline_parallel_size=3 does not divide the 4 processes",
                "tensor_parallel_size=8 does not divide the 4 processes",
                "actor.ulysses_sequence_parallel_size=3 does not divide the 4 processes",
                "fsdp_size=0 does not divide",
                "expert_parallel_size=3 does not divide the 4 ranks",
            ],
        ),
        (
            ["trainer.n_gpus_per_node=4", f"{FSDP}.fsdp_size=3", f"{FSDP}.expert_parallel_size=8"],
            ["fsdp_size=3 does not divide the 4 ranks", "expert_parallel_size=8 does not divide the 4 ranks"],
        ),
        (
            ["trainer.schedule=one_step_off", "trainer.async.run_ahead=3", "trainer.async.max_staleness=7"],
            ["run_ahead=3 with trainer.schedule=one_step_off", "leave trainer.async.max_staleness out"],
        ),
        (
            [
                *("actor_rollout_ref.rollout.quantization=int4", "actor_rollout_ref.rollout.exact=true"),
                "actor_rollout_ref.rollout.enable_torch_compile=true",
            ],
            ["which rounds to", "rounded weights give other log-probs", "compiled steps know whole weights"],
        ),
        (
            [
                f"{CORRECTION}.rollout_rs='tokens,seqs,token_k1,token_k2'",
                f"{CORRECTION}.rollout_rs_threshold='1,1,-1,-2'",
            ],
            ["no option 'tokens'", "no option 'seqs'", "got '-1' for token_k1", "got '-2' for token_k2"],
        ),
        (
            ["actor_rollout_ref.model.path=null", "actor_rollout_ref.model.tokenizer_path=/no/tokenizer"],
            ["model.path is not set", "model.tokenizer_path: there is no folder /no/tokenizer"],
        ),
        (["data.train_files=/no/rows.csv"], ["there is no file /no/rows.csv", "wanted a file that ends in"]),
        (["algorithm.adv_estimator=/no/a.py:"], ["wanted path/to/file.py:name", "there is no file /no/a.py"]),
    ],
)
def test_no_problem_hides_another(base: list[str], overrides: list[str], says: list[str]) -> None:
    message = problem(base, *overrides)
    assert [line for line in says if line not in message] == [], message


def test_a_size_that_does_not_fit_blames_no_other(base: list[str]) -> None:
    message = problem(base, "trainer.n_gpus_per_node=4", f"{FSDP}.tensor_parallel_size=3")
    assert "problems" not in message and "tensor_parallel_size=3" in message
    message = problem(base, "trainer.nnodes=4", f"{FSDP}.fsdp_size=2", f"{FSDP}.pipeline_parallel_size=3")
    assert "problems" not in message and "pipeline_parallel_size=3" in message


def test_a_users_own_data_class_reads_what_it_likes(tmp_path: Path, base: list[str]) -> None:
    (tmp_path / "mine.py").write_text("class Mine: __init__ = print")
    (tmp_path / "rows.csv").write_text("")
    own = [
        f"data.custom_cls.path={tmp_path}/mine.py:Mine",
        f"data.train_files=[{tmp_path}/rows.csv,{tmp_path}/model]",
    ]
    prepare_config(PPOConfig, [*base, *own])
    prepare_config(PPOConfig, [*base, *own, "data.train_files=openai/gsm8k"])
    for missing in ("/no/such.csv", "such.parquet"):
        assert f"data.train_files: there is no {missing}" in problem(
            base, *own, f"data.train_files={missing}"
        )


def test_all_problems_at_once(base: list[str]) -> None:
    message = problem(
        base,
        GRPO,
        "trainer.nnodes=2",
        "trainer.controller=local",
        "actor_rollout_ref.actor.optim.betas=[2,2]",
    )
    assert message.startswith("3 problems") and message.count("\n  - ") == 3


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.train_files=[]", "model.path=org/name"], "no training data"),
        (["data.max_length=9000"], "cannot hold one conversation"),
        (["model.path=null"], "model.path is not set"),
        (["data.prompt_key=messages", "data.response_key=messages"], "different columns"),
    ],
)
def test_sft_runs_are_checked_too(tmp_path: Path, overrides: list[str], says: str) -> None:
    base = [
        "data.task.name=arithmetic_chain",
        "model.path=org/name",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    assert prepare_config(SFTConfig, base).config.data.tokenizer == "org/name"
    base = base[1:] if "data.train_files=[]" in overrides else base
    assert says in problem(base, *overrides, root=SFTConfig)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=true"], "charged twice"),
        (["algorithm.kl_ctrl.kl_coef=0.1"], "no KL penalty in this run"),
        (["trainer.test_freq=5", "data.val_files=[]"], "nothing is validated"),
        ([GRPO, "actor_rollout_ref.rollout.n=4", "critic.optim.lr=1"], "runs without a critic"),
        (["actor_rollout_ref.actor.loss_scale_factor=3"], "seq-mean-token-sum-norm"),
        (["actor_rollout_ref.rollout.top_p=0.9"], "top_p=0.9, top_k=-1 leave tokens out of sampling"),
        (["actor_rollout_ref.rollout.top_k=20"], "whole distribution at the temperature alone"),
        (
            ["actor_rollout_ref.rollout.min_p=0.1"],
            "top_p=1.0, top_k=-1, min_p=0.1 leave tokens out of sampling",
        ),
        (
            ["actor_rollout_ref.rollout.repetition_penalty=1.1"],
            "repetition_penalty=1.1 changes which tokens are chosen; the log-probs kept",
        ),
        (["critic.model.tokenizer_path=org/other"], "critic.model.tokenizer_path is not used"),
    ],
)
def test_notes_on_what_may_surprise(base: list[str], overrides: list[str], says: str) -> None:
    assert any(says in note for note in prepare_config(PPOConfig, [*base, *overrides]).notes)


def test_checking_makes_no_folder(base: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    prepare_config(PPOConfig, [*base, f"trainer.rollout_data_dir={tmp_path}/samples"])
    assert sorted(tmp_path.rglob("*")) == before


def test_several_processes_need_ray_and_one_does_not(base: list[str]) -> None:
    assert prepare_config(PPOConfig, base).config.trainer.controller == "local"
    assert prepare_config(PPOConfig, [*base, "trainer.n_gpus_per_node=2"]).config.trainer.controller == "ray"
    pools = [
        *base,
        "trainer.resource_pools={train: [1], generate: [1]}",
        "trainer.placement={rollout: [generate]}",
    ]
    config = prepare_config(PPOConfig, pools).config
    assert config.trainer.controller == "ray" and config.trainer.placement == {"rollout": ["generate"]}
    assert config.actor_rollout_ref.ref.ulysses_sequence_parallel_size == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["trainer.resource_pools={a: [1]}", "trainer.nnodes=1"],
            "trainer.resource_pools says which devices there are",
        ),
        (
            ["actor_rollout_ref.actor.fsdp_config.offload_policy=true"],
            "with one process there is nothing to shard",
        ),
        (["trainer.max_restarts=2"], "a restart begins at step 1 again"),
    ],
)
def test_cluster_settings_that_mean_less_than_they_seem_are_said(
    base: list[str], overrides: list[str], says: str
) -> None:
    assert any(says in note for note in prepare_config(PPOConfig, [*base, *overrides]).notes)
