"""Keys of expert parallelism that do not go together are refused before anything is allocated."""

from __future__ import annotations

from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config
from hybridflow.distributed.layout import ParallelLayout

FSDP = "actor_rollout_ref.actor.fsdp_config"
FOUR = ["trainer.n_gpus_per_node=4", "trainer.device=cpu", "data.task.name=arithmetic_chain"]


def test_ranks_of_experts_are_some_of_those_that_share_the_parameters() -> None:
    layout = ParallelLayout.from_keys(8, 4, experts=2)
    assert (layout.dp_replicate, layout.dp_shard, layout.ep, layout.data) == (2, 4, 2, 8)
    assert "experts 2" in str(layout)


def test_ranks_of_experts_may_be_those_of_tensor_parallelism() -> None:
    layout = ParallelLayout.from_keys(4, tensor=2, experts=4)
    assert (layout.dp_shard, layout.tp, layout.ep, layout.data) == (2, 2, 4, 2)
    assert layout.place(3) == "shard 2 of 2, experts 4 of 4, slice 2 of 2"


def test_megatrons_size_is_ours() -> None:
    keys = ["actor_rollout_ref.actor.megatron.expert_model_parallel_size=2", "critic.strategy=megatron"]
    more = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.ref.strategy=megatron"]
    config = load_config(PPOConfig, [*FOUR, "actor_rollout_ref.model.path=x", *keys, *more])[0]
    assert config.actor_rollout_ref.actor.fsdp_config.expert_parallel_size == 2
