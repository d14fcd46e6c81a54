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
