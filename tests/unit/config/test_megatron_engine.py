"""strategy=megatron: who serves it, and what is refused where megatron-core does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config import DPOConfig, PPOConfig, SFTConfig
from hybridflow.config.checks.cluster import actor_layout, sft_layout_problems
from hybridflow.config.checks.model import model_problems
from hybridflow.config.checks.root import find_notes
from hybridflow.config.load import load_config
from hybridflow.config.megatron import megatron_problems, megatron_serves
from hybridflow.config.resolve import resolve

PPO = "actor_rollout_ref.actor.strategy=megatron"
SFT = "engine.strategy=megatron"
LEARNER = {PPOConfig: PPO, SFTConfig: SFT, DPOConfig: SFT}
CRITIC = ["critic.strategy=megatron", "algorithm.adv_estimator=gae"]
REF = "actor_rollout_ref.ref.fsdp_config"
PARTS = [
    f"actor_rollout_ref.actor.megatron.{name}pipeline_model_parallel_size=2" for name in ("", "virtual_")
]
"""Two parts on each of two stages of the actor, by verl's keys."""
KL = "actor_rollout_ref.actor.use_kl_loss=true"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.config.resolve.megatron_serves", lambda config, role: None)


def resolved(kind: type, *words: str) -> tuple[object, list[str]]:
    read = load_config(kind, [LEARNER[kind], *words])
    return resolve(read.config, read.given)


@pytest.mark.usefixtures("installed")
def test_megatron_core_serves_it() -> None:
    config, notes = resolved(PPOConfig, KL, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    assert config.actor_rollout_ref.rollout.exact is False
    assert any("megatron-core trains" in note for note in notes)
    assert not list(megatron_problems(config))
    ref = [f"{REF}.pipeline_parallel_size=2", f"{REF}.virtual_pipeline_parallel_size=2"]
    assert not list(megatron_problems(resolved(PPOConfig, KL, *PARTS, *ref)[0]))
    config, notes = resolved(SFTConfig, "engine.ulysses_sequence_parallel_size=2")
    assert config.engine.strategy == "megatron" and any("megatron-core trains" in note for note in notes)
    assert not list(megatron_problems(config))


@pytest.mark.usefixtures("installed")
def test_a_critic_has_its_own_engine() -> None:
    read = load_config(PPOConfig, [*CRITIC, "critic.ulysses_sequence_parallel_size=2"])
    config, notes = resolve(read.config, read.given)
    assert (config.actor_rollout_ref.actor.strategy, config.critic.strategy) == ("fsdp2", "megatron")
    assert config.actor_rollout_ref.rollout.exact == "auto"
    assert any(note.startswith("critic.strategy=megatron: megatron-core trains") for note in notes)
    assert not list(megatron_problems(config))
    read = load_config(PPOConfig, [*CRITIC, "critic.enable=false"])
    config, notes = resolve(read.config, read.given)
    assert not any("megatron" in note for note in notes) and not list(megatron_problems(config))


@pytest.mark.usefixtures("installed")
def test_roles_have_equal_sizes_where_they_share_processes() -> None:
    pools = ["trainer.resource_pools={a:[4],b:[2]}", KL, *CRITIC]
    sizes = ["actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"]
    apart = "trainer.placement={reference:b,critic:b}"
    assert not list(megatron_problems(resolved(PPOConfig, *pools, *sizes, apart)[0]))
    sizes.append("critic.ulysses_sequence_parallel_size=2")
    (said,) = megatron_problems(resolved(PPOConfig, *pools, *sizes, apart)[0])
    assert "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1" in said and "make them equal" in said


FSDP_ALONE = (
    "fsdp_size=2",
    "reshard_after_forward=false",
    "forward_prefetch=true",
    "mixed_precision.reduce_dtype=bfloat16",
)


@pytest.mark.usefixtures("installed")
def test_keys_of_fsdp_are_told_not_to_be_read() -> None:
    def notes(kind: type, *words: str) -> list[str]:
        read = load_config(kind, [LEARNER[kind], *words])
        return [
            note for note in find_notes(resolve(read.config, read.given)[0], read.given) if "read" in note
        ]

    for key in FSDP_ALONE:
        name = key.partition("=")[0]
        (note,) = notes(SFTConfig, f"engine.{key}")
        assert note.startswith(f"engine.{name} is not read with engine.strategy=megatron: megatron-core")
    sharding = [f"{role}.fsdp_config.fsdp_size=2" for role in ("actor_rollout_ref.ref", "critic")]
    of_actor, of_critic = notes(PPOConfig, KL, *CRITIC, *sharding)
    assert of_actor.startswith("actor_rollout_ref.ref.fsdp_config.fsdp_size is not read with actor_rollout")
    assert of_critic.startswith("critic.fsdp_config.fsdp_size is not read with critic.strategy=megatron")
    assert not notes(PPOConfig, KL, CRITIC[1], "critic.strategy=fsdp2", *sharding[1:])


@pytest.mark.usefixtures("installed")
def test_fsdp_size_cuts_nothing() -> None:
    sizes = ["expert_parallel_size=4", "fsdp_size=2"]
    words = ["trainer.n_gpus_per_node=4", *(f"actor_rollout_ref.actor.fsdp_config.{size}" for size in sizes)]
    assert not list(actor_layout(resolved(PPOConfig, *words)[0]))
    (said,) = actor_layout(load_config(PPOConfig, words).config)
    assert "expert_parallel_size=4 does not divide the 2 ranks" in said
    words = ["trainer.n_gpus_per_node=4", *(f"engine.{size}" for size in sizes)]
    assert not list(sft_layout_problems(resolved(SFTConfig, *words)[0]))


@pytest.mark.usefixtures("installed")
def test_experts_stay_whole_beside_slices(tmp_path: Path) -> None:
    """FSDP2 deals them to ranks of tensor parallelism only by expert_parallel_size; megatron-core has each
    rank keep them all.
    """
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 4}')
    roles = ("actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic.")
    words = [*CRITIC, KL, *(f"{role}fsdp_config.tensor_parallel_size=2" for role in roles)]
    words += [f"{block}.path='{tmp_path}'" for block in ("actor_rollout_ref.model", "critic.model")]

    def refused(*more: str) -> list[str]:
        config = resolved(PPOConfig, *words, "trainer.n_gpus_per_node=2", *more)[0]
        return [problem for problem in model_problems(config) if "which are not cut" in problem]

    assert not refused()
    (said,) = refused("critic.strategy=fsdp2")
    assert said.startswith("critic.model.path")
    config = resolved(SFTConfig, f"model.path='{tmp_path}'", "engine.tensor_parallel_size=2")[0]
    assert not any("which are not cut" in problem for problem in model_problems(config))


@pytest.mark.usefixtures("installed")
def test_a_family_that_megatron_core_does_not_train_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    words = [f"actor_rollout_ref.model.path='{tmp_path}'", "trainer.n_gpus_per_node=2"]
    (said,) = (each for each in model_problems(resolved(PPOConfig, *words)[0]) if "does not serve" in each)
    assert said.startswith("actor_rollout_ref.model.path=") and "'gemma3_text'" in said
    config = load_config(PPOConfig, words).config
    assert not any("does not serve" in each for each in model_problems(config))


def test_pytorch_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.config.megatron.find_spec", lambda name: object())
    for kind, key in ((PPOConfig, "actor_rollout_ref.actor.strategy"), (SFTConfig, "engine.strategy")):
        config, notes = resolved(kind)
        (note,) = [note for note in notes if "strategy=megatron" in note]
        assert note.startswith(key) and note.endswith("not Megatron-LM: one process divides nothing")
        assert megatron_serves(resolved(kind, "trainer.n_gpus_per_node=2")[0]) is None
    monkeypatch.setattr("hybridflow.config.megatron.find_spec", lambda name: None)
    config, notes = resolved(PPOConfig, "trainer.n_gpus_per_node=2")
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert config.actor_rollout_ref.rollout.exact == "auto"
    assert any(note.endswith("the package megatron-core is not installed") for note in notes)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        (PPOConfig, ["actor_rollout_ref.model.lora_rank=4"], "actor_rollout_ref.model.lora_rank=4"),
        (
            PPOConfig,
            ["actor_rollout_ref.actor.fsdp_config.param_offload=true"],
            "fsdp_config.param_offload=True",
        ),
        (PPOConfig, ["actor_rollout_ref.actor.optim.optimizer=Muon"], "actor.optim.optimizer=Muon"),
        (PPOConfig, ["actor_rollout_ref.rollout.exact=true"], "rollout.exact=true"),
        (PPOConfig, ["actor_rollout_ref.actor.router_replay.mode=R2"], "router_replay.mode=R2"),
        (PPOConfig, ["algorithm.ref_update_freq=2"], "algorithm.ref_update_freq=2"),
        (PPOConfig, ["actor_rollout_ref.actor.use_prefix_grouper=true"], "use_prefix_grouper=true"),
        (PPOConfig, ["actor_rollout_ref.actor.router_aux_loss_coef=0.1"], "router_aux_loss_coef=0.1"),
        (PPOConfig, [KL, "actor_rollout_ref.actor.kl_loss_type=full"], "kl_loss_type=full"),
        (PPOConfig, ["distillation.distillation_loss.loss_mode=reverse_kl"], "loss_mode=reverse_kl"),
        (PPOConfig, [KL, "actor_rollout_ref.ref.fsdp_config.tensor_parallel_size=2"], "make them equal"),
        (PPOConfig, [KL, "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2"], "make them equal"),
        (
            PPOConfig,
            [KL, f"{REF}.pipeline_parallel_size=2", *PARTS],
            f"{REF}.virtual_pipeline_parallel_size=1",
        ),
        (SFTConfig, ["model.dtype=float64"], "model.dtype=float64"),
        (PPOConfig, [*CRITIC, "critic.model.lora_rank=4"], "critic.model.lora_rank=4"),
        (PPOConfig, [*CRITIC, "critic.optim.optimizer=Muon"], "critic.optim.optimizer=Muon"),
        (PPOConfig, [*CRITIC, "critic.fsdp_config.offload_policy=true"], "fsdp_config.offload_policy=True"),
        (PPOConfig, [*CRITIC, "critic.fsdp_config.pipeline_parallel_size=2"], "make them equal"),
        (DPOConfig, [], "learns from no comparisons"),
    ],
)
def test_what_megatron_core_does_not_serve(kind: type, words: list[str], said: str) -> None:
    config, _ = resolved(kind, *words)
    problems = list(megatron_problems(config))
    assert any((said in problem and "fsdp2" in problem) or "equal" in problem for problem in problems), (
        problems
    )
    keys = (LEARNER[kind], "critic.strategy=megatron")
    assert all(problem.startswith(keys) for problem in problems)
