"""One Ray for the tests of this folder, and one backend for those that leave it whole: starting them takes
most of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.config.cluster import RayConfig, RayInitConfig
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.errors import HybridFlowError

sys.path.insert(0, str(Path(__file__).parents[1]))  # for house.py and the conformance suite


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """A Ray of this session's own, or the one that is there."""
    found = RayCluster.connect(RayConfig(ray_init=RayInitConfig(num_cpus=8)), device="cpu", wanted=3)
    yield found
    found.shutdown()


@pytest.fixture(scope="session")
def started(cluster: RayCluster) -> Iterator[list[RayBackend]]:
    """The backend of the session, once a test has asked for it."""
    backends: list[RayBackend] = []
    yield backends
    for backend in backends:
        backend.shutdown()


@pytest.fixture
def backend(cluster: RayCluster, started: list[RayBackend]) -> RayBackend:
    """Pool `train` of two ranks and pool `apart` of one, with new workers in the processes of the test
    before, if they live.
    """
    from ray_house import make_workers, start

    try:
        started[-1]._build(make_workers)
    except (IndexError, AssertionError, HybridFlowError):  # none yet, or the test before broke it
        roles = {"counter": "train", "other": "train", "critic": "apart", "rollout": "train apart"}
        started.append(start(cluster, {"train": 2, "apart": 1}, roles))
    return started[-1]
