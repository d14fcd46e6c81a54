"""Serving without an end and weights in flight, with two replicas in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster

UNIT = Path(__file__).parents[2]
for room in ("rollout", "workers"):
    sys.path.insert(0, str(UNIT / room))

from ray_house import start  # noqa: E402
from serving_scenes import SCENES, Groups, factories  # noqa: E402

# one Ray for all tests that need one
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def serving(cluster: RayCluster) -> Iterator[RayBackend]:
    """Two replicas; with one, the same scenes run in a process without Ray."""
    pools = {"actor": "train", "rollout": "gen"}
    sizes = {"train": 1, "gen": 2}
    made = start(cluster, sizes, pools, factories, rooms=("rollout", "workers"))
    yield made
    made.shutdown()


@pytest.mark.parametrize("scene", SCENES)
def test_in_processes_of_their_own(serving: RayBackend, scene: Callable[[Groups], None]) -> None:
    serving._build(factories)
    scene(Groups(serving))
