from __future__ import annotations

import pytest

from hybridflow.controller import Placement, ResourcePool
from hybridflow.errors import ConfigError


def test_colocated_roles_share_all_devices() -> None:
    placement = Placement.colocated(["actor", "rollout"], ["cuda:0", "cuda:1"])
    assert placement.pool("actor") is placement.pool("rollout")
    assert placement.pool("actor").world_size == 2
    assert placement.roles("global") == ["actor", "rollout"]
    placement.check(["cuda:0", "cuda:1", "cuda:2"])


def test_more_devices_than_there_are() -> None:
    placement = Placement(
        (ResourcePool("train", ("cuda:0", "cuda:1")), ResourcePool("rollout", ("cuda:2",))), {"actor": "train", "rollout": "rollout"}
    )
    with pytest.raises(ConfigError, match=r"ask for 3 devices \(train 2 \+ rollout 1\) but there are 1 \(cuda:0\).*n_gpus_per_node"):
        placement.check(["cuda:0"])
    with pytest.raises(ConfigError, match="name cuda:2, which is not there"):
        placement.check(["cuda:0", "cuda:1", "cuda:3"])


def test_local_backend_has_one_rank_a_role() -> None:
    Placement.colocated(["actor"], ["cpu"]).check_local()
    with pytest.raises(ConfigError, match=r"controller=local runs one rank a role.*n_gpus_per_node=1"):
        Placement.colocated(["actor"], ["cuda:0", "cuda:1"]).check_local()


def test_placements_that_contradict_themselves() -> None:
    with pytest.raises(ConfigError, match="no devices"):
        ResourcePool("empty", ())
    with pytest.raises(ConfigError, match="twice"):
        ResourcePool("double", ("cpu", "cpu"))
    one = ResourcePool("one", ("cuda:0",))
    with pytest.raises(ConfigError, match="pool 'two', which does not exist"):
        Placement((one,), {"actor": "two"})
    with pytest.raises(ConfigError, match="in two resource pools, 'one' and 'two'"):
        Placement((one, ResourcePool("two", ("cuda:0",))), {})
    with pytest.raises(ConfigError, match="share a name"):
        Placement((one, ResourcePool("one", ("cuda:1",))), {})
