"""The GPU benchmarks: they refuse where there is no GPU, and their dry runs go through."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import gpu_curve
import pytest
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


def test_a_result_goes_where_it_is_asked_for_of_a_dry_run_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(side_by_side, "RESULTS", tmp_path / "committed")
    monkeypatch.setattr(
        sys, "argv", ["gpu_step.py", "--tiny", "--device", "cpu", "--into", str(tmp_path / "in")]
    )
    importlib.import_module("gpu_step").main()
    assert not (tmp_path / "committed").exists() and (tmp_path / "in" / "gpu_step.md").is_file()
    result = json.loads((tmp_path / "in" / "gpu_step.json").read_text())
    (case,) = result["cases"]
    floors = case["floors"]
    assert floors["update_actor"] == 3 * floors["ref"] and 0 < floors["values"] < floors["ref"]
    assert 0 < floors["gen"] < case["parts"]["timing_s/gen"]


def test_the_curve_says_which_model_it_is_of_and_what_was_gained() -> None:
    steps = [{"step": step, "score": step / 8, "seconds": 2.0} for step in range(1, 7)]
    page = gpu_curve.page_of({"model": "one", "before": 0.42, "after": 0.61, "steps": steps})
    assert "The model: one." in page and "| 1–4 | 0.31 | 2.0 |" in page and "| 5–6 | 0.69 | 2.0 |" in page
    assert "+0.19, wanted +0.2: **missed**" in page
