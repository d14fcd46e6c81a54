"""Commands under a Ray of their own, and runs of other processes that log the same numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ranks import Command

OF_EACH_PROCESS = ("rollout/decode_steps", "rollout/max_rows")
"""Metrics of how the work was done: two processes take their steps side by side, each with half of the rows.
"""
OWN_POOL = ("trainer.resource_pools={train: [1], generate: [1]}", "trainer.placement={rollout: generate}")
"""A process that trains, and one that generates."""


def under_ray(
    log: Path,
    arguments: Sequence[str],
    *,
    cpus: int = 2,
    module: str = "hybridflow.trainer.main_ppo",
    variables: Mapping[str, str] | None = None,
) -> Command:
    """Start a command in a process of its own, since this one may be in another test's Ray; it finds the
    modules of this folder.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(variables or {})}
    patient = ("trainer.heartbeat_timeout=600", "trainer.startup_timeout=900")  # on a busy machine
    words = [*arguments, f"ray_kwargs.ray_init.num_cpus={cpus}", *patient]
    return Command(module, words, log, environment=environment)


def assert_alike(
    wanted: Mapping[int, Mapping[str, float]],
    got: Mapping[int, Mapping[str, float]],
    *,
    without: tuple[str, ...] = (),
    rel: float = 1e-4,
) -> None:
    """Hold the metrics of two runs together, but for those whose names begin with `without`."""
    assert sorted(got) == sorted(wanted)
    for step, metrics in wanted.items():
        assert sorted(got[step]) == sorted(metrics)
        for name, value in metrics.items():
            if not name.startswith(without):
                assert got[step][name] == pytest.approx(value, rel=rel, abs=1e-5), (step, name)
