"""`hybridflow tinker` before it serves: keys that no client would send, and addresses that need one."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.cli.tinker import KEY_VARIABLE


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("key", "words", "told"),
    [
        ("plain", [], "does not begin with 'tml-'"),
        ("tml-\u00fc", [], "set HYBRIDFLOW_TINKER_KEY to plain ASCII"),
        (
            "tml-short",
            ["--host", "0.0.0.0"],
            "of at least 16 characters: set HYBRIDFLOW_TINKER_KEY",
        ),
        (None, ["--host", "0.0.0.0"], "needs a token of at least 16 characters"),
        (None, ["--port", "0", "--device", "cpu"], "no folder"),
        (None, ["--max-runs", "0"], "--max-runs 0: wanted at least 1"),
        (None, ["--max-num-seqs", "0"], "--max-num-seqs 0: wanted at least 1"),
        (None, ["--max-tokens-per-pass", "-1"], "--max-tokens-per-pass -1: wanted at least 1"),
        (None, ["--port", "70000"], "--port 70000: wanted 1 to 65535"),
        (None, ["--port", "0", "--device", "tpux"], "--device: got 'tpux'"),
        ("tml-a-key", ["--port", "0", "--device", "cpu", "--folder", "key"], "--folder key is no folder"),
    ],
)
def test_what_cannot_be_is_said_before_the_model_is_loaded(
    key: str | None,
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if key is not None:
        (tmp_path / "key").write_text(f"{key}\n", encoding="utf-8")
        words = ["--api-key-file", "key", *words]
    assert main(["tinker", "/no/such/model", *words]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("name", "text"), [("sessions.json", '{"sess'), ("runs/x/run.json", "{}")])
def test_a_broken_file_is_named_before_the_model_is_loaded(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    words = ["--port", "0", "--device", "cpu", "--folder", str(tmp_path)]
    assert main(["tinker", "/no/such/model", *words]) == 1
    told = capsys.readouterr().err
    assert f"{file}, which is broken" in told and "put a copy of it back" in told


def test_a_key_may_come_from_the_environment_and_its_file_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "plain")
    assert main(["tinker", "/no/such/model"]) == 1
    assert f"change --api-key-file or {KEY_VARIABLE}" in capsys.readouterr().err
    assert main(["tinker", "/no/such/model", "--api-key-file", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["tinker", "model"]) == 1
    assert "needs fastapi and uvicorn, which is not installed" in capsys.readouterr().err
