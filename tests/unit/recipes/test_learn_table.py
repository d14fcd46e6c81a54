"""The learn table's arithmetic, its memory of what is done, and the pages of the algorithms."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]

import algorithm_docs  # noqa: E402
from learn import collect  # noqa: E402
from learn_settings import CONTROL, Cell, Settings, all_names, finished, result_path, write_json  # noqa: E402
from learn_table import make_row, missed, page, table_head, table_line  # noqa: E402

SETTINGS = Settings()


def result(name: str, seed: int, before: float, after: float, **more: Any) -> dict[str, Any]:
    measured = {"sampled": after, "greedy": after, "pass": 0.95}
    return {
        "name": name,
        "seed": seed,
        "digest": Cell(name, seed).digest(SETTINGS),
        "before": {"sampled": before, "greedy": before, "pass": 0.84},
        "after": measured,
        "tokens": 600_000,
        "steps": 40,
        "critic_steps": 0,
        "critic_tokens": 0,
        "teacher": None,
        "seconds": 80.0,
    } | more


def test_gain_and_its_standard_error() -> None:
    row = make_row(
        "grpo", [result("grpo", 0, 0.3, 0.5), result("grpo", 1, 0.4, 0.5), result("grpo", 2, 0.2, 0.5)]
    )
    assert row["sampled"]["gain"] == pytest.approx(0.2) and row["met"]
    assert row["sampled"]["error"] == pytest.approx(0.1 / 3**0.5)  # gains 0.2, 0.1, 0.3: deviation 0.1
    assert "0.300 → 0.500 | +0.200 ± 0.058" in table_line(row)
    assert table_line(row).count("|") == table_head().splitlines()[0].count("|")


@pytest.mark.parametrize(
    ("name", "after", "says"),
    [
        ("rloo", 0.39, "sampled accuracy changed by +0.090, wanted +0.10"),
        (CONTROL, 0.33, "sampled accuracy changed by +0.030, wanted at most +0.02"),
        ("rloo", 0.41, ""),
        (CONTROL, 0.0, ""),
        ("grpo_passk", 0.3, ""),  # by pass@8
    ],
)
def test_bars(name: str, after: float, says: str) -> None:
    problems = missed([make_row(name, [result(name, 0, 0.3, after)])])
    assert problems == ([f"{name}: {says}"] if says else [])


def test_pass_at_k_training_is_judged_by_pass_at_k() -> None:
    cell = result("grpo_passk", 0, 0.3, 0.9)
    cell["after"]["pass"] = 0.93
    assert missed([make_row("grpo_passk", [cell])]) == ["grpo_passk: pass@8 changed by +0.090, wanted +0.10"]


def test_a_finished_cell_is_known_again_until_its_settings_change(tmp_path: Path) -> None:
    cell = Cell("grpo", 0)
    assert not finished(tmp_path, cell, SETTINGS)
    write_json(result_path(tmp_path, cell), result("grpo", 0, 0.3, 0.5))
    assert finished(tmp_path, cell, SETTINGS) and not finished(tmp_path, cell, replace(SETTINGS, budget=1))
    assert Cell("grpo", 1).digest(SETTINGS) == cell.digest(SETTINGS) != Cell(CONTROL, 0).digest(SETTINGS)
    write_json(
        result_path(tmp_path, Cell("rloo", 0)), {"name": "rloo", "seed": 0, "failed": "failed: boom (log: x)"}
    )
    results, problems = collect(["grpo", "rloo", "remax"], [0], tmp_path, SETTINGS)
    assert list(results) == ["grpo"] and problems == ["rloo_0: failed: boom (log: x)", "remax_0: not run yet"]
    assert collect(["grpo"], [0], tmp_path, replace(SETTINGS, max_steps=1))[1] == [
        "grpo_0: its recipe or the settings have changed since it ran"
    ]


def test_the_page_names_what_was_outside_the_budget_and_what_is_missing() -> None:
    teacher = {"greedy": 0.91, "sft_steps": 300}
    rows = [
        make_row("on_policy_distillation", [result("on_policy_distillation", 0, 0.3, 0.6, teacher=teacher)]),
        make_row("ppo", [result("ppo", 0, 0.3, 0.6, critic_steps=2, critic_tokens=22_000)]),
    ]
    text = page(
        rows, {"date": "2026-01-01", "command": "c", "machine": "m"}, SETTINGS, ["rloo_0: not run yet"]
    )
    assert "greedy accuracy of 0.91 (300 SFT steps)" in text
    assert "2 steps of the critic alone (22 k tokens)" in text
    assert "- rloo_0: not run yet" in text and "437,000 tokens" in text


def test_every_recipe_is_in_the_table() -> None:
    assert set(all_names()) == {*algorithm_docs.algorithms(), CONTROL}


def test_the_pages_that_are_there_are_fresh() -> None:
    fresh, problems = algorithm_docs.render()
    assert not problems and fresh
    assert [path.name for path, text in fresh.items() if path.read_text(encoding="utf-8") != text] == []


def test_a_page_without_its_markers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tmp_path / "docs" / "algorithms"
    pages.mkdir(parents=True)
    monkeypatch.setattr(algorithm_docs, "PAGES", pages)
    monkeypatch.setattr(algorithm_docs, "ROOT", tmp_path)
    (pages / "rloo.md").write_text("# RLOO\n<!-- recipe -->\nold\n<!-- end -->\n")
    fresh, problems = algorithm_docs.render()
    assert problems == ["docs/algorithms/rloo.md: wanted one <!-- learned --> … <!-- end -->, found 0"]
    assert "adv_estimator: rloo" in fresh[pages / "rloo.md"] and "old" not in fresh[pages / "rloo.md"]
