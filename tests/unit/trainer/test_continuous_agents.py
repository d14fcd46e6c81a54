"""Agents under a continuous schedule: one bound on all that is played, and a stop that loses no group."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_agent_loop_training import keys as agent_keys
from test_agent_training import config as world_config
from test_continuous import COLOCATED, GROUPS, GRPO, STEPS, Run
from tiny_trainer import build, ppo_config

from hybridflow.agent.runner import Runner
from hybridflow.errors import Stopped
from hybridflow.processes.hosts import Hosts
from hybridflow.trainer.schedules.ledger_state import GroupPhase


def test_the_bound_on_trajectories_holds_for_all_groups_together(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing = peak = 0
    once = Runner._once

    async def counted(self: Runner, *args: Any) -> Any:
        nonlocal playing, peak
        playing += 1
        peak = max(peak, playing)
        try:
            return await once(self, *args)
        finally:
            playing -= 1

    monkeypatch.setattr(Runner, "_once", counted)
    bound = "actor_rollout_ref.rollout.agent.max_concurrent=2"
    folder = tmp_path / "a"
    folder.mkdir()
    Run(model, folder, *GRPO, *COLOCATED, *agent_keys(tmp_path), bound, steps=2).train()
    assert peak == 2


def test_a_validation_has_processes_of_its_own_while_training_episodes_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: dict[int, set[int]] = {}  # the event loops of each pool of processes
    kept: list[Any] = []
    run = Hosts.run

    async def noted(self: Hosts, *args: Any) -> Any:
        kept.append((self, asyncio.get_running_loop()))  # so that no other one gets its id
        loops.setdefault(id(self), set()).add(id(asyncio.get_running_loop()))
        return await run(self, *args)

    monkeypatch.setattr(Hosts, "run", noted)
    keys = ("actor_rollout_ref.rollout.agent.num_workers=1", "trainer.val_before_train=true")
    with build(world_config(model, tmp_path / "run", "Echo", *COLOCATED, *keys)) as trainer:
        trainer.fit()
    assert sorted(map(len, loops.values())) == [1, 2], "training has one, and each validation"
    assert not set.intersection(*loops.values())


def test_a_stop_while_the_engines_are_served_loses_no_group(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    run = Run(model, folder, *GRPO, *COLOCATED, *agent_keys(tmp_path))
    with build(ppo_config(run.model, run.folder, *run.keys)) as trainer:
        source = trainer.source
        fill = source._is_filled  # type: ignore[attr-defined]

        def stop(step: int) -> bool:
            here = threading.current_thread() is threading.main_thread()
            if step == 2 and here and source._num_playing:  # type: ignore[attr-defined]
                raise Stopped(15, "in step 3")
            return bool(fill(step))

        source._is_filled = stop  # type: ignore[attr-defined]
        with pytest.raises(Stopped):
            trainer.fit()
    run.train()
    with run.ledger() as ledger:
        state = ledger.state
    phases = Counter(state.phase(index) for index in range(state.num_admitted))
    assert phases == {GroupPhase.TRAINED: GROUPS * STEPS} and not state.causes
    assert all(len(set(batch.non_tensor_batch["uid"])) == GROUPS for batch in run.batches.values())


def test_a_run_goes_on_from_remote_checkpoints_alone(model: Path, tmp_path: Path) -> None:
    run = Run(
        model, tmp_path / "a", *GRPO, *COLOCATED, f"trainer.remote_checkpoint_dir=file://{tmp_path}/far"
    )
    run.train(last=2)
    shutil.rmtree(run.folder)
    run.train()
    with run.ledger() as ledger:
        assert ledger.state.trained_per_step == [GROUPS] * STEPS
