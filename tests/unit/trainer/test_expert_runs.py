"""Runs of a mixture of experts: both modes of router replay, the auxiliary loss, checkpoints and merging."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_trainer import build, ppo_config, tiny_model, trained_steps

from hybridflow.errors import ConfigError, ModelError
from hybridflow.merger import merge
from hybridflow.models.files.build import build_policy
from hybridflow.trainer.main_ppo import run

GRPO = ("algorithm.adv_estimator=grpo", "trainer.logger=[console]", "trainer.test_freq=-1")
R2 = ("actor_rollout_ref.actor.router_replay.mode=R2",)
R3 = (
    "actor_rollout_ref.actor.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
)
FAST = ("actor_rollout_ref.rollout.exact=false",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("experts"), experts=4)


@pytest.mark.parametrize("keys", [R3, (*R3, *FAST), R2], ids=["R3-exact", "R3-fast", "R2"])
def test_routes_reach_the_update(keys: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    # weights that stay: every replayed route is what the router would choose
    run(ppo_config(model, tmp_path / "run", *GRPO, *keys, "actor_rollout_ref.actor.optim.lr=0"))
    steps = trained_steps(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["actor/moe/flips"] == 0
        without = 0.0
        if keys[0] in R3:  # the last token of each of eight rows
            tokens = step["perf/total_num_tokens"]
            if "actor_rollout_ref.rollout.exact=false" in keys:  # each of four prompts once for its two rows
                tokens -= 4 * step["prompt_length/mean"]
            without = 8 / tokens
        assert step["actor/moe/without_route"] == pytest.approx(without)
        assert 0 < step["actor/moe/load_entropy"] <= 1 <= step["actor/moe/load_max"] <= 4
        assert step["actor/moe/idle_experts"] >= 0 and "actor/moe/balance_loss" not in step


def test_a_checkpoint_resumes_and_becomes_a_folder_of_the_family(model: Path, tmp_path: Path) -> None:
    keys = (*GRPO, *R3, "trainer.save_freq=1")
    run(ppo_config(model, tmp_path / "whole", *keys))
    run(ppo_config(model, tmp_path / "parts", *keys, "trainer.total_training_steps=1"))
    run(ppo_config(model, tmp_path / "parts", *keys))
    first, second = (tmp_path / name / "global_step_2" for name in ("whole", "parts"))
    policies = [
        build_policy(merge(folder, tmp_path / f"merged_{number}"), device="cpu")
        for number, folder in enumerate((first, second))
    ]
    start = build_policy(model, device="cpu").state_dict()
    for name, tensor in policies[0].state_dict().items():
        assert torch.equal(policies[1].state_dict()[name], tensor)
        assert not torch.equal(start[name], tensor) or "lm_head" in name, f"{name} has learned nothing"


def test_the_auxiliary_loss_makes_the_load_more_even(model: Path, tmp_path: Path) -> None:
    found = {}
    for coef in (0, 1):
        folder = tmp_path / str(coef)
        keys = (f"actor_rollout_ref.actor.router_aux_loss_coef={coef}", "trainer.total_training_steps=6")
        run(ppo_config(model, folder, *GRPO, *keys, "actor_rollout_ref.actor.optim.lr=3e-3"))
        found[coef] = trained_steps(folder)
    assert found[1][-1]["actor/moe/balance_loss"] < found[1][0]["actor/moe/balance_loss"]
    assert found[1][-1]["actor/moe/load_max"] < found[0][-1]["actor/moe/load_max"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (R3[:1], "set actor_rollout_ref.rollout.enable_rollout_routing_replay=true or "),
        (R3[1:], "generation records routes for R3"),
        ((*R2, R3[1]), "generation records routes for R3"),
        ((*R3, "actor_rollout_ref.rollout.name=vllm"), "its routes are not read"),
        ((*R2, "algorithm.rollout_correction.bypass_mode=true"), "bypass_mode=true: R2 records in the pass"),
        ((*R2, "actor_rollout_ref.rollout.reuse_log_probs_within=0.1"), "reuse_log_probs_within=null"),
        ((*R3, "actor_rollout_ref.actor.fsdp_config.use_torch_compile=true"), "use_torch_compile=false"),
        ((*R3, "trainer.num_collectors=1"), "num_collectors=0"),
        (("actor_rollout_ref.actor.router_replay.record_file=x",), "routes travel with the rows"),
    ],
)
def test_keys_that_do_not_go_together(
    keys: tuple[str, ...], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo_config(model, tmp_path / "run", *GRPO, *keys)


def test_keys_of_other_engines_are_these_keys(model: Path, tmp_path: Path) -> None:
    keys = ("actor_rollout_ref.actor.megatron.router_replay.mode=R3", R3[1])
    config = ppo_config(model, tmp_path / "run", *GRPO, *keys)
    assert config.actor_rollout_ref.actor.router_replay.mode == "R3"


def test_a_dense_model_has_no_routes(tmp_path: Path) -> None:
    dense = tiny_model(tmp_path / "dense")
    with (
        pytest.raises(ModelError, match="LlamaForCausalLM has no routers"),
        build(ppo_config(dense, tmp_path / "run", *GRPO, *R2)),
    ):
        pass
