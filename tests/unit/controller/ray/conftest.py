"""One Ray for the tests of this folder, and one backend for those that leave it whole: starting them takes most of the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.config.cluster import RayConfig, RayInitConfig
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import Cluster

sys.path.insert(0, str(Path(__file__).parents[1]))  # for house.py and the conformance suite


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Ray of this session's own, or the one that is there."""
    found = Cluster.connect(RayConfig(ray_init=RayInitConfig(num_cpus=8)), device="cpu", wanted=3)
    yield found
    found.shutdown()


@pytest.fixture(scope="session")
def processes(cluster: Cluster) -> Iterator[RayBackend]:
    """Processes for the whole session: pool `train` of two ranks, pool `apart` of one."""
    from ray_house import start

    backend = start(cluster, {"train": 2, "apart": 1}, {"counter": "train", "other": "train", "critic": "apart", "rollout": "train apart"})
    yield backend
    backend.shutdown()


@pytest.fixture
def backend(processes: RayBackend) -> RayBackend:
    """The processes of the session with workers built anew, in the place of a backend of the test's own."""
    from ray_house import make_workers

    processes._build(make_workers)
    return processes
