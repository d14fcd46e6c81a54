"""The GPU benchmarks: they refuse where there is no GPU, and their dry runs go through."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import side_by_side


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    def written(*_: Any) -> None:
        raise AssertionError("a dry run was written")

    monkeypatch.setattr(side_by_side, "write", written)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    importlib.import_module(name).main()


def test_where_there_is_no_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="--tiny --device cpu"):
        run(monkeypatch, "gpu_update")
    with pytest.raises(SystemExit, match="only --tiny"):
        run(monkeypatch, "gpu_generation", "--device", "cpu")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gpu_generation", "| tiny | 3 |"),
        ("gpu_update", "| tiny | life |"),
        ("gpu_step", "| tiny | update_critic |"),
    ],
)
def test_a_dry_run_goes_through_and_writes_nothing(
    name: str, row: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, name, "--tiny", "--device", "cpu")
    printed = capsys.readouterr().out
    assert row in printed and "not written" in printed
