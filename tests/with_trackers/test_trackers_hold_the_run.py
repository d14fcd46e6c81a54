"""A run that is killed and goes on, with every tracker on; then each library's own storage is read.

`make test-trackers` runs this in an environment that has all the libraries (scripts/setup_trackers.sh).
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_weave import FakeWeave, fake_weave
from readers import PROJECT, READERS, Stored

from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.trackers import TRACKERS, build_trackers
from hybridflow.observability.trackers.build import IN_PROCESS
from hybridflow.observability.trackers.jsonl import read_metrics

HERE = Path(__file__).parent
LIBRARIES = [name for name in TRACKERS if name not in IN_PROCESS]
STEPS = 6
SAMPLED = 2
"""Validation samples that are shown every second step."""
FLOAT32 = {"tensorboard"}
"""Libraries that keep values in single precision."""
ENDS = {
    "tensorboard": {"finished": "run finished", "failed": "run failed", "interrupted": "run interrupted"},
    "wandb": {"finished": "0", "failed": "1", "interrupted": "255"},
    "mlflow": {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"},
    "swanlab": {
        "finished": "RUN_STATE_FINISHED",
        "failed": "RUN_STATE_CRASHED",
        "interrupted": "RUN_STATE_ABORTED",
    },
    "trackio": {"finished": "run finished", "failed": "run failed", "interrupted": "run interrupted"},
    "clearml": {"finished": "run finished", "failed": "run failed", "interrupted": "run interrupted"},
}
OFFLINE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "CLEARML_OFFLINE_MODE": "1"}

pytestmark = [
    pytest.mark.skipif(
        not all(find_spec(name) for name in LIBRARIES),
        reason="wants every tracker's library: make test-trackers",
    ),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]


class Ran(NamedTuple):
    folder: Path
    weave: FakeWeave


def environment(server: FakeWeave, folder: Path) -> dict[str, str]:
    trackio = {"TRACKIO_DIR": str(folder.parent / "trackio"), "KILLED_ONCE": str(folder.parent / "killed")}
    return {**os.environ, **server.environment(), **OFFLINE, **trackio, "OMP_NUM_THREADS": "1"}


def train(model: Path, folder: Path, server: FakeWeave) -> subprocess.CompletedProcess[str]:
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        f"trainer.logger=[{','.join(LIBRARIES)}]",
        "trainer.experiment_name=tracked",
        f"reward.custom_reward_function.path={HERE / 'kill_once.py'}",
        "reward.function=auto",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.task.val_size=4",
        "data.max_response_length=8",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
        f"trainer.log_val_generations={SAMPLED}",
    ]
    command = [sys.executable, "-m", "hybridflow.cli.main", "train", "--recipe", "tiny/grpo", *overrides]
    return subprocess.run(
        command, env=environment(server, folder), capture_output=True, text=True, timeout=900, check=False
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """A run of six steps that was killed in the fourth and went on after the second."""
    base = tmp_path_factory.mktemp("tracked")
    model = create_tiny_model(base / "model", seed=0)
    with fake_weave() as server:
        killed = train(model, base / "run", server)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
        ended = train(model, base / "run", server)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert "resumed after step 2" in ended.stderr and "failed" not in ended.stderr, ended.stderr[-3000:]
        yield Ran(base / "run", server)


def read(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    monkeypatch.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))
    if name == "trackio":
        import trackio.sqlite_storage
        import trackio.utils

        for module in (trackio.utils, trackio.sqlite_storage):  # it reads the variable when it is imported
            monkeypatch.setattr(module, "TRACKIO_DIR", folder.parent / "trackio")
    return READERS[name](folder)


@pytest.mark.parametrize("name", READERS)
def test_the_library_holds_every_value_of_every_step(
    name: str, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read_metrics(ran.folder / "metrics.jsonl")
    assert list(wanted) == list(range(1, STEPS + 1))
    held = read(name, ran.folder, monkeypatch).metrics
    for step, line in wanted.items():
        for metric, value in line.items():
            if name == "clearml" and not math.isfinite(value):
                assert metric not in held[step]
                continue
            assert metric in held[step], (step, metric)
            tolerance = 1e-6 if name in FLOAT32 else 0.0
            assert held[step][metric] == pytest.approx(value, rel=tolerance, abs=0, nan_ok=True), (
                step,
                metric,
            )


@pytest.mark.parametrize("name", READERS)
def test_the_library_holds_samples_configuration_one_run_and_its_end(
    name: str, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = read(name, ran.folder, monkeypatch)
    shown = [
        json.loads(line) for line in (ran.folder / "validation" / f"{STEPS}.jsonl").read_text().splitlines()
    ][:SAMPLED]
    assert shown
    for row in shown:
        question = re.search(r"\d[\d +-]+= \?", row["prompt"])
        assert question is not None and question[0] in stored.samples
        assert str(row["score"]) in stored.samples
    assert len(stored.runs) == 1, stored.runs
    assert "ppo_mini_batch_size" in stored.config
    assert ENDS[name]["finished"] in stored.outcome


def test_weaves_server_was_sent_every_step_and_sample(ran: Ran) -> None:
    wanted = read_metrics(ran.folder / "metrics.jsonl")
    calls = {
        kind: [call for call in ran.weave.calls if f"hybridflow.{kind}:" in call["op_name"]]
        for kind in ("start", "step", "sample", "end")
    }
    assert len({call["thread_id"] for call in ran.weave.calls}) == 1
    last = {}
    for call in calls["step"]:
        last.setdefault(call["inputs"]["step"], {}).update(call["output"])
    assert {step: {name: line[name] for name in wanted[step]} for step, line in last.items()} == wanted
    assert [call["inputs"]["resume_step"] for call in calls["start"]] == [None, 2]
    assert len([call for call in calls["sample"] if call["inputs"]["step"] == STEPS]) == SAMPLED
    assert [call["output"]["outcome"] for call in calls["end"]] == ["finished"]


END = """
import sys
from hybridflow.observability.trackers import build_trackers
from hybridflow.errors import Stopped

name, folder, outcome = sys.argv[1:]
with build_trackers([name], folder, "demo", "ends", {"a": 1}) as trackers:
    trackers.log({"a": 1.0}, 1)
    raise Stopped(15, "in step 1") if outcome == "interrupted" else RuntimeError("boom")
"""


@pytest.mark.parametrize("outcome", ["failed", "interrupted"])
@pytest.mark.parametrize("name", READERS)
def test_the_library_knows_how_a_run_ended(
    name: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_weave() as server:
        command = [sys.executable, "-c", END, name, str(tmp_path / "run"), outcome]
        done = subprocess.run(
            command,
            env=environment(server, tmp_path / "run"),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode != 0 and ("boom" in done.stderr or "Stopped" in done.stderr), done.stderr
    assert ENDS[name][outcome] in read(name, tmp_path / "run", monkeypatch).outcome, done.stderr


def test_a_proxy_of_wandb_reaches_wandb_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for variable, value in OFFLINE.items():
        monkeypatch.setenv(variable, value)
    proxy = "http://user:secret@127.0.0.1:9"
    config = {"trainer": {"wandb_proxy": proxy}}
    with build_trackers(["wandb"], tmp_path, PROJECT, "proxied", config, wandb_proxy=proxy) as trackers:
        trackers.log({"a": 1.0}, 1)
        assert wandb.run is not None
        assert wandb.run.settings.https_proxy == proxy and wandb.run.settings.http_proxy == proxy
        assert "secret" not in str(dict(wandb.run.config))
    assert not {name for name in os.environ if "proxy" in name.lower() and proxy in os.environ[name]}
