"""How roles are spread over the processes of their pools."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tiny_trainer import ppo_config

from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.controller import Placement
from hybridflow.trainer.roles.parallel_layout import dealt_by, meshes

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


def test_rows_of_a_prompt_go_to_one_rank_where_they_share_it_and_ranks_stay_even(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert [dealt_by(ActorConfig(ppo_mini_batch_size=9), parts) for parts in (1, 8)] == [
            [],
            [],
        ] and not caplog.messages
        shared = ActorConfig(ppo_mini_batch_size=9, use_prefix_grouper=True)
        assert [dealt_by(shared, parts) for parts in (1, 2, 3)] == [["group_ids"]] * 3 and not caplog.messages
        assert dealt_by(shared, 8) == [] and "ppo_mini_batch_size to a multiple of 8" in caplog.text
