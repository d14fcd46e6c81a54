"""Whole runs whose rows wait in TransferQueue: the same numbers as with Ray's object store."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_resume import differences
from test_collectors import GRPO, OF_THE_WAY, PPO, collected, finished
from test_ledger_losses import arguments, check, end_of, run
from tiny_run import Inputs

from hybridflow.trainer.main_ppo import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group("other-ray")]


@pytest.mark.parametrize(("keys", "collectors"), [(PPO, 0), (GRPO, 2)], ids=["ppo", "grpo, collectors"])
def test_rows_in_the_queue_give_the_same_numbers(
    inputs: Inputs, tmp_path: Path, keys: tuple[str, ...], collectors: int
) -> None:
    finished(collected(inputs, tmp_path / "ray", collectors, *keys))
    queue = "transfer_queue.enable=true"  # as a verl user writes it
    output = finished(collected(inputs, tmp_path / "queue", collectors, *keys, queue))
    assert "rows are in TransferQueue (SimpleStorage)" in output, output
    assert not differences(tmp_path / "queue", tmp_path / "ray", OF_THE_WAY)


def test_a_process_that_is_lost_with_rows_in_the_queue(inputs: Inputs, tmp_path: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    assert main(arguments(inputs, undisturbed, "exact_async")) == 0
    keys = ("trainer.row_store=transferqueue", "trainer.max_restarts=1")
    done = run(inputs, tmp_path, "exact_async", [("published", 2, "train")], *keys)
    assert done.returncode == 0, end_of(done.output)
    assert done.output.count("rows are in TransferQueue") == 2, end_of(done.output)
    check(tmp_path / "run", "exact_async", undisturbed)
