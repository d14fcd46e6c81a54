"""A run that ends in an error leaves its configuration, the error, its log, and a report that opens."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path

import pytest
from tiny_trainer import build, ppo_config, sft_config

from hybridflow.cli.main import main
from hybridflow.errors import ConfigError, Stopped, TrainingError
from hybridflow.observability.report import collect
from hybridflow.observability.run_log import LOG_FILE, MAX_LINES, RunLog
from hybridflow.trainer.sft.build import build as build_sft

BROKEN = """
from hybridflow.algorithms.policy_losses.vanilla import vanilla

def broken(log_prob, old_log_prob, advantages, response_mask, scale):
    raise ZeroDivisionError("by a loss of mine")

def later(inputs, done=[]):
    done.append(1)
    if len(done) > 3:
        raise ZeroDivisionError("by a loss of mine")
    return vanilla(inputs)
"""


def own(folder: Path, name: str) -> str:
    (folder / "mine.py").write_text(BROKEN)
    return f"actor_rollout_ref.actor.policy_loss.loss_mode={folder}/mine.py:{name}"


@pytest.mark.parametrize(("name", "done"), [("broken", 0), ("later", 1)])
def test_a_run_that_fails_can_be_looked_at(
    model: Path, tmp_path: Path, name: str, done: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hybridflow")
    run = tmp_path / "run"
    config = ppo_config(
        model, run, "algorithm.adv_estimator=grpo", "trainer.logger=[jsonl]", own(tmp_path, name)
    )
    with pytest.raises(ConfigError, match="by a loss of mine"), build(config) as trainer:
        trainer.fit()
    page = (run / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    failure = data["failure"]
    assert (failure["error"], failure["steps_done"]) == ("ConfigError", done)
    assert "by a loss of mine" in failure["message"] and "ZeroDivisionError" in failure["traceback"]
    assert "loss_mode: " in data["config"] and len(data["steps"]) == done
    assert "hybridflow.data.build: train: 64 prompts" in data["log"]
    (run / "report.html").unlink()
    assert main(["view", str(run)]) == 0 and (run / "report.html").is_file()
    # a start that goes well forgets the failure
    config = ppo_config(model, run, "algorithm.adv_estimator=grpo", "trainer.logger=[jsonl]")
    with build(config) as trainer:
        trainer.fit()
    assert collect(run)["failure"] is None and not (run / "failure.json").exists()


def test_a_supervised_run_and_a_signal(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="no way"), build_sft(sft_config(model, tmp_path / "run")):
        raise TrainingError("no way \ud800")
    assert collect(tmp_path / "run")["failure"]["message"] == "no way \ud800"
    with pytest.raises(Stopped), build_sft(sft_config(model, tmp_path / "stopped")):
        raise Stopped(signal.SIGTERM, "in step 1")
    assert collect(tmp_path / "stopped")["failure"] is None


def test_a_run_that_is_refused_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(
            file.read_bytes() if file.name != "model.safetensors" else b"nothing"
        )
    config = ppo_config(broken, tmp_path / "run")
    with pytest.raises(Exception, match="cannot load model"), build(config):
        pass
    assert not (tmp_path / "run").exists()


def test_a_log_waits_for_its_folder_and_goes_on_or_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("hybridflow.mine")
    # pytest's own record of the log holds no half of a surrogate pair: its processes could not exchange it
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger.setLevel(logging.INFO)
    for number, goes_on in enumerate((False, True, False)):
        with RunLog.attached() as log:
            logger.info("early %d", number)
            log.begin(tmp_path, goes_on=goes_on)
            logger.warning("late %d of %s", number, "\ud800")
        logger.warning("too late")
        lines = (tmp_path / LOG_FILE).read_text(encoding="utf-8").splitlines()
        assert len(lines) == (4 if goes_on else 2)
        assert lines[-2].endswith(f"INFO hybridflow.mine: early {number}")
        assert lines[-1].endswith(f"WARNING hybridflow.mine: late {number} of ?")
    with RunLog.attached() as log:
        for number in range(MAX_LINES + 9):
            logger.warning("%d", number)
        log.begin(tmp_path / "none", goes_on=False)  # there is no such folder
        log.begin(tmp_path, goes_on=False)
        logger.warning("after")
    assert (tmp_path / LOG_FILE).read_text(encoding="utf-8").splitlines()[-1].endswith("after")
