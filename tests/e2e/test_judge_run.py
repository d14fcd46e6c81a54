"""A generative reward model gives the same scores in the driver's process, under Ray beside the other roles,
and in a pool of its own, also when a replica of it is killed; no process stays.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit" / "trainer"))

from judge_scene import TEXTS, judged_config, judging

from hybridflow.controller.ray.backend import RayBackend

UNDER_RAY = ("trainer.controller=ray", "ray_kwargs.ray_init.num_cpus=3")
APART = (
    "trainer.resource_pools={main: [1], judges: [2]}",
    "trainer.placement={judge: judges}",
    *UNDER_RAY[1:],
)


@pytest.mark.xdist_group("other-ray")
def test_the_scores_are_the_same_wherever_the_judge_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backends: list[RayBackend] = []
    made = RayBackend.__init__

    def note(self: RayBackend, *args: object, **kwargs: object) -> None:
        backends.append(self)
        made(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(RayBackend, "__init__", note)
    with judging(judged_config(tmp_path), tmp_path) as scores:
        local = scores()
    assert len({*local.scores}) > 2 and len(local.scores) == len(TEXTS)
    with judging(judged_config(tmp_path, *UNDER_RAY), tmp_path) as scores:
        beside = scores()
    assert len(backends) == 1
    backends.clear()
    with judging(judged_config(tmp_path, *APART), tmp_path) as scores:
        apart = scores()
        pids = [process.pid for backend in backends for process in backend._processes.values()]
        assert len(backends) == 3 and len({*pids}) == 3  # the others and two replicas
        os.kill(pids[1], signal.SIGKILL)
        killed = scores()
        until = time.monotonic() + 600.0  # it is named below where it never comes
        while "judge-0 of the judge was started again" not in caplog.text and time.monotonic() < until:
            time.sleep(0.1)
        assert "judge-0 of the judge was started again" in caplog.text
        os.kill(pids[2], signal.SIGKILL)  # so that the new one answers
        replaced = scores()
        pids += [process.pid for process in backends[3]._processes.values()]
    for found in (beside, apart, killed, replaced):
        assert found.scores == local.scores and found.extras["said"] == local.extras["said"]
        assert found.metrics["reward/num_errors"] == 0.0
    assert not [pid for pid in pids if pid and psutil.pid_exists(pid)]
