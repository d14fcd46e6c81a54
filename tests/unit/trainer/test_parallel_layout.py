"""How roles are spread over the processes of their pools."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tiny_trainer import ppo_config

from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config
from hybridflow.controller import Placement
from hybridflow.trainer.roles.parallel_layout import dealt_by, may_share_prompts, meshes

ACTOR = "actor_rollout_ref.actor"
LORA = (
    "actor_rollout_ref.model.lora_rank=2",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
    "algorithm.use_kl_in_reward=true",
)


@pytest.mark.parametrize(
    ("where", "world", "parts"),
    [
        pytest.param(("trainer.nnodes=4",), 4, 1, id="with the actor, it is the actor's module"),
        pytest.param(
            ("trainer.resource_pools={a: [4], b: [2]}", "trainer.placement={reference: b}"),
            2,
            2,
            id="elsewhere, by its own",
        ),
    ],
)
def test_the_reference_of_a_lora_run(
    where: tuple[str, ...], world: int, parts: int, model: Path, tmp_path: Path
) -> None:
    config = ppo_config(model, tmp_path / "run", *LORA, *where)
    roles = ["actor", "rollout", "reference"]
    mesh = meshes(config, roles, Placement.from_config(config.trainer, roles))["reference"]
    assert (mesh.world_size, mesh.num_parts) == (world, parts)


def sharing(*keys: str) -> PPOConfig:
    """A config whose mini-batches have nine prompts of two responses; see `may_share_prompts`."""
    nine = ("data.train_batch_size=9", f"{ACTOR}.ppo_mini_batch_size=9", "actor_rollout_ref.rollout.n=2")
    return load_config(PPOConfig, [*nine, *keys]).config


def test_rows_of_a_prompt_go_to_one_rank_where_they_share_it_and_ranks_stay_even(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        for keys in ((), (f"{ACTOR}.use_prefix_grouper=false",)):
            undealt = sharing(*keys).actor_rollout_ref.actor
            assert [dealt_by(undealt, parts) for parts in (1, 8)] == [[], []] and not caplog.messages
        shared = sharing(f"{ACTOR}.use_prefix_grouper=true").actor_rollout_ref.actor
        assert [dealt_by(shared, parts) for parts in (1, 2, 3)] == [["group_ids"]] * 3 and not caplog.messages
        assert dealt_by(shared, 8) == [] and "ppo_mini_batch_size to a multiple of 8" in caplog.text


@pytest.mark.parametrize(
    "keys",
    [
        ("actor_rollout_ref.rollout.n=1",),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2",),
        ("actor_rollout_ref.ref.ulysses_sequence_parallel_size=2",),
        ("actor_rollout_ref.rollout.exact=true",),
        (f"{ACTOR}.strategy=megatron",),
        (f"{ACTOR}.use_prefix_grouper=false",),
        ("trainer.device=cuda",),
        (f"{ACTOR}.router_aux_loss_coef=0.01",),
    ],
)
def test_no_run_shares_prompts_by_itself_where_it_cannot_or_gains_nothing(keys: tuple[str, ...]) -> None:
    assert may_share_prompts(sharing()) and not may_share_prompts(sharing(*keys))
