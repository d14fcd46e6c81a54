"""A run that cannot work is refused before anything is built; verl's quickstart is not."""

from __future__ import annotations

from pathlib import Path

from possible_run import problem, write_model_folder

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.config.preference import DPOConfig, RewardModelConfig


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
    assert config.critic.enable
    assert config.critic.model.path == f"{tmp_path}/model"
    assert config.critic.optim.lr == 1e-5
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert config.trainer.logger == ["console"]
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
    assert actor.loss_scale_factor == 64.0
    assert actor.loss_agg_mode == "token-mean"
    assert actor.ppo_mini_batch_size == 32
    assert rollout.log_prob_max_token_len_per_gpu == ref.log_prob_max_token_len_per_gpu == 16384
    assert config.data.seed == 9
    assert config.data.tokenizer == config.actor_rollout_ref.model.path == config.critic.model.path
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


FSDP = "actor_rollout_ref.actor.fsdp_config"


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


def test_the_tokenizer_of_a_supervised_run_is_the_models(tmp_path: Path) -> None:
    keys = ["data.task.name=arithmetic_chain", "model.path=org/name", f"trainer.default_local_dir={tmp_path}"]
    assert prepare_config(SFTConfig, keys).config.data.tokenizer == "org/name"


def test_plain_texts_have_no_answers_to_compare(tmp_path: Path) -> None:
    base = [
        f"model.path={write_model_folder(tmp_path / 'model')}",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    words = [*base, f"data.train_files={tmp_path}/a.jsonl", "data.text_key=text"]
    for root in (DPOConfig, RewardModelConfig):
        assert "data.text_key=text: a plain text has no answer to compare" in problem(words, root=root)
    assert prepare_config(SFTConfig, words).config.data.text_key == "text"
