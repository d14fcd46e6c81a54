"""Runs over several Ray nodes, of which workers and whole nodes are killed in mid-step: they end with the
cause, or go on.

The killed node is never the head, where the driver is. All node processes live on this machine, so a node
takes all of its own with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from losing_run import LosingRun, Loss, Outcome
from tiny_run import Inputs, metrics_of, small_run

from hybridflow.checkpoint.layout import step_folders
from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.controller.ray.session import HEALTH_CHECKS
from ray_nodes import RayNodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("other-ray")]

STEPS = 4
END_SECONDS = 120.0  # seconds on a quiet machine; far from the minutes after which a run would give up
PATIENCE = 600.0  # a busy machine
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two, of a CPU each, to begin with."""
    started = RayNodes([1, 1], health={f"RAY_{name}": str(value) for name, value in HEALTH_CHECKS.items()})
    yield started
    started.stop()


@pytest.fixture
def begun(nodes: RayNodes, inputs: Inputs) -> Iterator[Callable[..., LosingRun]]:
    """Starts a run over the nodes, which ends with the test."""
    runs: list[LosingRun] = []

    def begin(
        out: Path, *overrides: str, losses: Sequence[Loss] = (), num_nodes: int = 2, steps: int = STEPS
    ) -> LosingRun:
        keys = [
            f"ray_kwargs.ray_init.address={nodes.address}",
            f"trainer.nnodes={num_nodes}",
            "trainer.save_freq=1",
        ]
        keys += ["algorithm.adv_estimator=grpo", *overrides]
        runs.append(LosingRun(out.with_suffix(".run"), losses, small_run(inputs, out, *keys, steps=steps)))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run goes that loses nothing, for the others to be like."""
    return tmp_path_factory.mktemp("runs") / "undisturbed"


def test_a_run_spans_two_nodes_then_three(
    nodes: RayNodes, begun: Callable[..., LosingRun], undisturbed: Path, tmp_path: Path
) -> None:
    two = begun(undisturbed).outcome(PATIENCE)
    assert two.status == 0, two.log
    assert re.search("2 worker processes on (node0, node1|node1, node0) started", two.log), two.log
    nodes.add(1)
    three = begun(tmp_path / "three", num_nodes=3, steps=1).outcome(PATIENCE)
    assert three.status == 0 and "3 worker processes on" in three.log, three.log
    alike = metrics_of(undisturbed)[1]
    first = metrics_of(tmp_path / "three")[1]
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/rewards/mean", "response_length/mean"):
        assert first[name] == pytest.approx(alike[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("what", ["worker", "node"])
def test_without_restarts_a_loss_ends_the_run(
    nodes: RayNodes, begun: Callable[..., LosingRun], tmp_path: Path, what: str
) -> None:
    loss = Loss(1, "actor.update_mini_batch", nodes.folder if what == "node" else "")
    run = begun(tmp_path / "run", losses=[loss], steps=2).outcome(PATIENCE)
    assert run.status == 1, run.log
    ((killed, lost),) = run.losses()
    print(
        f"{what} killed: noticed after {lost['at'] - killed['at']:.1f} s, the run ended after "
        f"{run.ended_after:.1f} s"
    )
    (said,) = re.findall(r"^WorkerLost: .*", run.log, re.MULTILINE)
    where = f"during actor.update_mini_batch (pool global, node {killed['node']}, process {killed['pid']})"
    assert said.startswith(f"WorkerLost: actor rank {killed['rank']} is lost {where}: ")
    assert ("its node is gone" if what == "node" else "as after signal 9 (if it ran out of memory") in said
    assert "Traceback" not in run.log
    assert run.ended_after < END_SECONDS


def test_with_restarts_the_run_goes_on_as_if_nothing_had_been(
    nodes: RayNodes, begun: Callable[..., LosingRun], undisturbed: Path, tmp_path: Path
) -> None:
    """A worker is lost, then a node of which another takes the place, while ranks begin to save; then one for
    which there is none.
    """
    losses = [
        Loss(3, "actor.update_mini_batch"),
        Loss(3, "actor.start_save", nodes.folder),
        Loss(4, "rollout.resume", nodes.folder),
    ]
    nodes.add(1)  # in the place of the one that the test before has killed: now there are three again
    out = tmp_path / "run"
    run = begun(
        out, "trainer.max_restarts=3", "actor_rollout_ref.actor.checkpoint.async_save=true", losses=losses
    )
    run.until_said("restart 3 of 3.*waiting up to .* s for devices", PATIENCE)
    nodes.add(1)
    done = run.outcome(PATIENCE)
    assert done.status == 0, done.log
    print("noticed after", [round(lost["at"] - killed["at"], 1) for killed, lost in done.losses()], "s")
    assert all(lost["at"] - killed["at"] < END_SECONDS for killed, lost in done.losses())
    assert (
        "restart 3 of 3: the workers are built anew and the run goes on from its newest checkpoint"
        in done.log
    )
    resumed = [int(step) for step in re.findall(r"resumed after step (\d)", done.log)]
    assert len(resumed) == 3, resumed
    assert resumed[0] in (1, 2), resumed
    assert resumed[1] in (1, 2), resumed
    assert resumed[2] in (2, 3), resumed
    got = metrics_of(out)
    wanted = metrics_of(undisturbed)
    assert sorted(got) == list(range(1, STEPS + 1)) and got == wanted  # to the bit
    assert len(step_folders(out)) == STEPS and not list(out.glob(".tmp_*"))
    for folder in step_folders(out):
        saved = read_manifest(folder)
        assert saved.damage(folder) is None
        assert saved.files == read_manifest(undisturbed / folder.name).files, folder.name
