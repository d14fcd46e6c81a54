"""A push that hangs, an engine that stops answering and a replica that dies end within their deadline, with
an error that names what was waited for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.errors import WorkerError, WorkerLost
from hybridflow.rollout.client import ReplicaLost

UNIT = Path(__file__).parents[2]
for room in ("rollout", "workers"):
    sys.path.insert(0, str(UNIT / room))

from ray_house import start  # noqa: E402
from serving_scenes import (  # noqa: E402
    Groups,
    factories,
    hanging_factories,
    request,
    serving_all_the_time,
    standing_factories,
    submit,
)

# one Ray for all tests that need one
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("ray")]


def backend(cluster: RayCluster, size: int, make: Any, **settings: float) -> RayBackend:
    pools = {"actor": "train", "rollout": "gen"}
    return start(cluster, {"train": 1, "gen": size}, pools, make, rooms=("rollout", "workers"), **settings)


def test_an_engine_that_stops_answering_ends_serving_and_the_update(cluster: RayCluster) -> None:
    made = backend(cluster, 1, standing_factories, call_timeout=6.0)
    groups = Groups(made)
    try:
        with groups.rollout.opened(), serving_all_the_time(groups.rollout) as failures:
            answers = submit(groups.rollout, [request(1)])
            with pytest.raises(ReplicaLost, match=r"no token for 6 s \(trainer\.worker_timeout\)"):
                answers[1].result(60)
            with pytest.raises(WorkerError, match=r"rollout\.update_weights has not finished"):
                groups.rollout.update_from(groups.actor, 3)
        (failure,) = failures
        where, left = failure.__notes__
        assert "in _new_session" in where and left == "1 requests had no answer of rollout-0"
    finally:
        made.shutdown()


def test_a_push_that_hangs_ends_within_its_deadline(cluster: RayCluster) -> None:
    made = backend(cluster, 1, hanging_factories, call_timeout=6.0)
    groups = Groups(made)
    try:
        with groups.rollout.opened(), serving_all_the_time(groups.rollout) as failures:
            answers = submit(groups.rollout, [request(1, 50)])
            with pytest.raises(
                WorkerError, match=r"rollout\.update_weights.*trainer\.worker_timeout"
            ) as caught:
                groups.rollout.update_from(groups.actor, 7)
            assert "while rollout-0 took weights of version 7" in caught.value.__notes__
            with pytest.raises(ReplicaLost):
                answers[1].result(60)
        assert len(failures) == 1, "who serves is told too"
    finally:
        made.shutdown()


def test_a_replica_that_dies_ends_serving_and_the_update(cluster: RayCluster) -> None:
    made = backend(cluster, 2, factories)
    groups = Groups(made)
    try:
        with groups.rollout.opened(), serving_all_the_time(groups.rollout) as failures:
            answers = submit(groups.rollout, [request(1), request(3)])
            ray.kill(made._processes["gen", 1].actor)
            for answer in answers.values():
                with pytest.raises(ReplicaLost, match="generation has ended: WorkerLost"):
                    answer.result(60)
            with pytest.raises(WorkerLost, match="rollout rank 1 is lost"):
                groups.rollout.update_from(groups.actor, 1)
        (failure,) = failures
        assert isinstance(failure, WorkerLost)
        assert "2 requests had no answer of rollout-0, rollout-1" in failure.__notes__
    finally:
        made.shutdown()
