"""Mistakes that need neither torch nor a model are found before either is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.config.trainer import TrainerConfig
from hybridflow.errors import ConfigError
from hybridflow.observability.trackers.build import check_trackers
from hybridflow.trainer.run_folder import RunFolder

SCRIPT = """
import contextlib, io, sys
from hybridflow.cli.main import main

sys.modules["wandb"] = None  # as if it were not installed
model, run, file = sys.argv[1:]
task = ["data.task.name=arithmetic_chain", "trainer.device=cpu"]
keys = ["train", "actor_rollout_ref.model.path=" + model, *task]
wanted = {
    "trainer.logger=[console,wandb]": "trainer.logger lists 'wandb', and wandb is not installed",
    "trainer.default_local_dir=" + file + "/run": file + " is a file, and a folder is wanted there",
    "data.environment=" + file + ".py:Guess": "got Guess.reset(self), wanted def reset(self, row)",
    "actor_rollout_ref.rollout.agent.command=[no-such-agent]": "no command 'no-such-agent'",
    "trainer.default_local_dir=/proc/run": "trainer.default_local_dir=/proc/run cannot be written",
}
for key, words in wanted.items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main([*keys, "trainer.default_local_dir=" + run, key])
    assert status == 1 and words in said.getvalue(), (key, said.getvalue())
    assert "torch" not in sys.modules, key
for words, wanted in (
    (["data.val_files=none.parquet"], "data.val_files: there is no file none.parquet"),
    (["data.val_file=x"], "data.val_file"),
    ([], "there is nothing to answer"),
):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(["eval", model, "--out", run, *words]) == 1
    assert wanted in said.getvalue() and "torch" not in sys.modules, said.getvalue()
"""


@pytest.mark.timeout(600)
def test_missing_trackers_and_folders_that_cannot_be_written_are_found_without_torch(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    (tmp_path / "checkpoints.py").write_text(
        "class Guess:\n    def reset(self): ...\n    def step(self, text): ...\n"
    )
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (model / name).touch()  # there as far as a look tells
    arguments = [str(tmp_path / name) for name in ("model", "run", "checkpoints")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run").exists(), "a look leaves no folder"


AT_ONCE = {
    "import hybridflow": "torch hybridflow.api",
    "from hybridflow.cli.main import main, parser; parser()": "torch fastapi uvicorn pydantic",
    "main(['try', 'search'])": "torch transformers numpy",
    "from hybridflow import train": "torch",
    "import hybridflow.explain.algorithm, hybridflow.cli.doctor": "transformers",
}
"""What is run, and what must not have been imported after it; later lines may import more."""


@pytest.mark.timeout(600)
def test_what_starts_at_once_imports_nothing_heavy() -> None:
    lines = ["import sys"]
    for code, heavy in AT_ONCE.items():
        lines += [code, f"assert not {set(heavy.split())} & set(sys.modules), {code!r}"]
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=True, stdin=subprocess.DEVNULL, timeout=600
    )


def test_the_default_trackers_may_lack_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    check_trackers(TrainerConfig())
    with pytest.raises(ConfigError, match="tensorboard is not installed"):
        check_trackers(TrainerConfig(logger=["tensorboard"]))


def test_a_folder_that_another_run_holds_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.held(), pytest.raises(ConfigError, match="another run is writing into"):
        RunFolder(tmp_path / "run").check_writable()
    assert not folder.path.exists()
