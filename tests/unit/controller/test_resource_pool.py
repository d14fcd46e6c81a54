from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig
from hybridflow.controller import Placement, RankInfo, ResourcePool
from hybridflow.errors import ConfigError

ROLES = ["actor", "rollout", "critic"]


def trainer(**keys: Any) -> TrainerConfig:
    return replace(TrainerConfig(), **keys)


def test_without_keys_all_roles_share_all_devices() -> None:
    placement = Placement.from_config(trainer(nnodes=2, n_gpus_per_node=3), ROLES)
    assert placement.pools == (ResourcePool("global", (3, 3)),)
    assert placement.roles("global") == ROLES and placement.num_devices == 6
    assert placement.infos("global", 4) == {role: RankInfo(role, 4, 6) for role in ROLES}
    assert placement.are_colocated("actor", "critic")


def test_a_supervised_run_has_one_pool() -> None:
    placement = Placement.from_config(SFTTrainerConfig(nnodes=1, n_gpus_per_node=2), ["sft"])
    assert placement == Placement.colocated(["sft"], [2])


def test_roles_not_named_live_in_the_first_pool() -> None:
    keys = trainer(resource_pools={"train": [2, 1], "values": [1]}, placement={"critic": "values"})
    placement = Placement.from_config(keys, ROLES)
    assert placement.pools_of("actor") == (ResourcePool("train", (2, 1)),)
    assert placement.roles("train") == ["actor", "rollout"] and placement.roles("values") == ["critic"]
    assert placement.are_colocated("actor", "rollout") and not placement.are_colocated("actor", "critic")
    assert placement.infos("values", 0) == {"critic": RankInfo("critic", 0, 1)}


def test_collectors_have_a_pool_without_devices() -> None:
    placement = Placement.from_config(trainer(nnodes=1, num_collectors=3), [*ROLES, "collector"])
    assert placement.num_devices == 1 and [pool.name for pool in placement.device_pools] == ["global"]
    assert placement.ranks("collector") == [("collectors", rank) for rank in range(3)]
    assert not placement.are_colocated("collector", "actor")


def test_the_rollout_may_span_pools_and_counts_its_ranks_through() -> None:
    keys = trainer(resource_pools={"train": [2], "more": [1, 1]}, placement={"rollout": ["train", "more"]})
    placement = Placement.from_config(keys, ROLES)
    assert placement.ranks("rollout") == [("train", 0), ("train", 1), ("more", 0), ("more", 1)]
    assert placement.infos("more", 1) == {"rollout": RankInfo("rollout", 3, 4)}
    assert placement.infos("train", 1)["rollout"] == RankInfo("rollout", 1, 4)
    assert placement.infos("train", 1)["actor"] == RankInfo("actor", 1, 2)
    assert placement.are_colocated("actor", "rollout")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"placement": {"critik": "values"}},
            r"placement\.critik names a role.*actor, rollout, critic; did you mean critic\?",
        ),
        (
            {"placement": {"reference": "values"}},
            r"placement\.reference names a role that this run does not have",
        ),
        (
            {"placement": {"critic": ["train", "values"]}},
            r"'critic' is placed on 2 pools.*only the rollout.*trainer\.placement\.critic",
        ),
        ({"placement": {"rollout": ["train", "train"]}}, r"names a pool twice"),
        (
            {"placement": {}},
            r"no role lives on resource pool values.*trainer\.placement.*take it out of "
            r"trainer\.resource_pools",
        ),
    ],
)
def test_placements_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    sound: dict[str, Any] = {
        "resource_pools": {"train": [2], "values": [1]},
        "placement": {"critic": "values"},
    }
    Placement.from_config(trainer(**sound), ROLES)
    with pytest.raises(ConfigError, match=message):
        Placement.from_config(trainer(**{**sound, **keys}), ROLES)


def test_a_placement_on_the_only_pool_and_on_none() -> None:
    Placement.from_config(trainer(placement={"critic": "global"}), ROLES)
    with pytest.raises(AssertionError, match=r"'critic' is placed on \('train',\)"):
        Placement.from_config(trainer(placement={"critic": "train"}), ROLES)
    with pytest.raises(AssertionError, match="share a name"):
        Placement((ResourcePool("one", (1,)), ResourcePool("one", (1,))), {"actor": ("one",)})
