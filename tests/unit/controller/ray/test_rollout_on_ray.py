"""Generation as the driver sees it, with a replica in each of two processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.errors import WorkerLost
from hybridflow.workers.rollout_group import RolloutGroup

UNIT = Path(__file__).parents[2]
for room in ("rollout", "workers"):
    sys.path.insert(0, str(UNIT / room))

from ray_house import start  # noqa: E402
from rollout_scenes import SCENES, factories, group_on, request  # noqa: E402

# one Ray for all tests that need one
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def rollouts(cluster: RayCluster) -> Iterator[RayBackend]:
    backend = start(cluster, {"shared": 2}, {"rollout": "shared"}, factories, rooms=("rollout", "workers"))
    yield backend
    backend.shutdown()


@pytest.mark.parametrize("scene", SCENES)
def test_in_processes_of_their_own(rollouts: RayBackend, scene: Callable[[RolloutGroup], None]) -> None:
    group = group_on(rollouts)
    scene(group)
    assert len(group.replicas) == 2


def test_outputs_come_while_others_are_generated(rollouts: RayBackend) -> None:
    """The short response of each replica is heard of long before the long ones end."""
    heard: list[tuple[int, float]] = []
    group = group_on(rollouts)
    requests = [request(number, length) for number, length in enumerate((3000, 3, 3000, 3))]
    group.generate(requests, finished=lambda output: heard.append((output.request_id, time.monotonic())))
    order = [number for number, _ in heard]
    assert sorted(order[:2]) == [1, 3] and sorted(order[2:]) == [0, 2]
    assert heard[1][1] - heard[0][1] < heard[2][1] - heard[1][1], "they did not come all at once"


def test_a_process_that_dies_while_it_generates_is_named(rollouts: RayBackend) -> None:
    """The last of this file, as the processes are of no use after it."""
    group = group_on(rollouts)

    def kill(_: object) -> None:
        ray.kill(rollouts._processes["shared", 1].actor)

    with pytest.raises(WorkerLost, match="rollout rank 1 is lost"):
        group.generate([request(1, 2), request(2, 200_000), request(3, 200_000)], finished=kill)
