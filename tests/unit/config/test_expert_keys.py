"""Keys of expert parallelism that do not go together are refused before anything is allocated."""

from __future__ import annotations

import pytest

from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config, prepare_config
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.errors import ConfigError

FSDP = "actor_rollout_ref.actor.fsdp_config"
FOUR = ["trainer.n_gpus_per_node=4", "trainer.device=cpu", "data.task.name=arithmetic_chain"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["expert_parallel_size=3"], r"expert_parallel_size=3 does not divide the 4 ranks"),
        (["expert_parallel_size=4", "fsdp_size=2"], r"does not divide the 2 ranks"),
        (["expert_parallel_size=4", "tensor_parallel_size=2", "fsdp_size=1"], r"does not divide the 2 ranks"),
        (["expert_parallel_size=4", "pipeline_parallel_size=2"], r"does not divide the 2 ranks"),
        (["expert_parallel_size=2", "use_torch_compile=true"], r"cannot be compiled"),
    ],
)
def test_sizes_that_do_not_go_together(keys: list[str], message: str) -> None:
    given = [*FOUR, "actor_rollout_ref.model.path=x", *(f"{FSDP}.{key}" for key in keys)]
    with pytest.raises(ConfigError, match=message):
        prepare_config(PPOConfig, given)


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
