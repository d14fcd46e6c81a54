"""Loops, roles and steps of one's own (examples/own_loop): the loop and the trainer agree to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_loop_run import EXAMPLES, STEPS, example, run
from tiny_trainer import build, ppo_config

from hybridflow.controller import Worker
from hybridflow.errors import ConfigError
from hybridflow.trainer.roles.worker_groups import worker_groups

SAME = (
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/grad_norm",
    "actor/lr",
    "critic/score/mean",
    "critic/rewards/mean",
)


def check_same(loop: dict[str, Any], trainer: dict[str, Any]) -> None:
    """Every number that both have is equal, and those of the algorithm are among them; so are the weights."""
    assert len(loop["steps"]) == len(trainer["steps"]) == STEPS
    for mine, theirs in zip(loop["steps"], trainer["steps"]):
        assert {*SAME} <= mine.keys() <= theirs.keys()
        assert {name: theirs[name] for name in mine} == mine
    first, *_, last = loop["steps"]
    assert first["actor/grad_norm"] != last["actor/grad_norm"] != 0.0
    assert loop["weights"] == trainer["weights"]


def test_the_loop_is_the_trainer_to_the_bit(model: Path, tmp_path: Path) -> None:
    check_same(run("loop", model, tmp_path / "loop"), run("trainer", model, tmp_path / "trainer"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_the_loop_is_the_trainer_on_two_processes(model: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    script = str(Path(__file__).with_name("own_loop_run.py"))
    patient = ("trainer.heartbeat_timeout=600", "trainer.startup_timeout=900")  # on a busy machine
    keys = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2", *patient)
    found = {}
    for kind in ("loop", "trainer"):
        out = tmp_path / f"{kind}.json"
        words = [sys.executable, script, kind, str(out), str(model), *keys]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found[kind] = json.loads(out.read_text())
        assert found[kind]["controller"] == "ray"
    check_same(found["loop"], found["trainer"])


def test_a_role_of_ones_own_shares_the_processes(model: Path, tmp_path: Path) -> None:
    batch = example("own_role").measured_batch(ppo_config(model, tmp_path / "run"))
    assert len(batch) == 8
    for row, share in enumerate(batch.batch["repeated"].tolist()):
        sampled = batch.batch["responses"][row][batch.batch["response_mask"][row]].tolist()
        assert share == pytest.approx(1 - len(set(sampled)) / len(sampled))


def test_a_role_of_ones_own_has_a_name_of_its_own(model: Path, tmp_path: Path) -> None:
    config = ppo_config(model, tmp_path / "run")
    with (
        pytest.raises(ConfigError, match="cannot be called critic"),
        worker_groups(config, None, 1, more={"critic": lambda info: Worker()}),  # type: ignore[arg-type]
    ):
        pass


def test_a_step_of_ones_own_takes_part_in_a_run(model: Path, tmp_path: Path) -> None:
    # long enough that rows end at different lengths on every machine: GRPO leaves out what all rows share
    keys = ["algorithm.adv_estimator=grpo", "trainer.total_training_steps=1", "data.max_response_length=64"]
    seen = {}
    for name, more in (("plain", []), ("brief", [f"trainer.step_class='{EXAMPLES}/own_step.py:BriefStep'"])):
        steps: list[dict[str, float]] = []
        with build(ppo_config(model, tmp_path / name, *keys, *more)) as trainer:
            trainer.fit(lambda step, logged, steps=steps: bool(steps.append(logged)))
        (seen[name],) = steps
    assert "training/price/mean" not in seen["plain"]
    price = seen["brief"]["training/price/mean"]
    assert price == pytest.approx(0.001 * seen["plain"]["response_length/mean"])
    assert seen["brief"]["critic/score/mean"] == pytest.approx(seen["plain"]["critic/score/mean"] - price)
    assert seen["brief"]["actor/pg_loss"] != seen["plain"]["actor/pg_loss"]


def test_a_step_must_be_a_step(model: Path, tmp_path: Path) -> None:
    config = ppo_config(model, tmp_path / "run", f"trainer.step_class='{EXAMPLES}/own_role.py:Repetition'")
    with (
        pytest.raises(ConfigError, match=r"trainer\.step_class: .*wanted a subclass of .*PPOStep"),
        build(config),
    ):
        pass
    with pytest.raises(ConfigError, match=r"trainer\.step_class: there is no file nowhere\.py"):
        ppo_config(model, tmp_path / "run", "trainer.step_class='nowhere.py:Step'")


def test_a_part_of_a_run_is_changed_from_python(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example("own_step").train(ppo_config(model, tmp_path / "run"))
    assert capsys.readouterr().out == "rows learned from: 8\n" * 2
