"""The learn table: results of cells in, rows with mean and spread over seeds, verdicts, and the page out."""

from __future__ import annotations

import math
from typing import Any

from learn_settings import (
    BAR,
    CONTROL,
    CONTROL_BAR,
    JUDGED_BY_PASS,
    NOTES,
    NUM_PASS_QUESTIONS,
    PASS_K,
    Settings,
)

HEAD = (
    "recipe",
    "sampled",
    "gain",
    "greedy",
    f"pass@{PASS_K}",
    "tokens",
    "steps",
    "seconds",
    "outside the budget",
    "",
)


def make_row(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over the seeds of one recipe's finished cells, gain with its standard error, and whether the bar
    is met.
    """
    row: dict[str, Any] = {"name": name, "seeds": [cell["seed"] for cell in cells]}
    for key in ("sampled", "greedy", "pass"):
        if all(key in cell["after"] for cell in cells):
            before, after = ([cell[when][key] for cell in cells] for when in ("before", "after"))
            gains = [b - a for a, b in zip(before, after, strict=True)]
            row[key] = {
                "before": _mean(before),
                "after": _mean(after),
                "gain": _mean(gains),
                "error": _error(gains),
                "gains": gains,
            }
    for key in ("tokens", "steps", "seconds"):
        row[key] = _mean([float(cell[key]) for cell in cells])
    row["outside"] = _outside(name, cells)
    row["judged_by"] = "pass" if name == JUDGED_BY_PASS else "sampled"
    gain = row[row["judged_by"]]["gain"]
    row["met"] = gain <= CONTROL_BAR if name == CONTROL else gain >= BAR
    return row


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The bars that were not met, as sentences."""
    found = []
    for row in [row for row in rows if not row["met"]]:
        what = f"pass@{PASS_K}" if row["judged_by"] == "pass" else "sampled accuracy"
        wanted = f"at most {CONTROL_BAR:+.2f}" if row["name"] == CONTROL else f"{BAR:+.2f}"
        found.append(
            f"{row['name']}: {what} changed by {row[row['judged_by']]['gain']:+.3f}, wanted {wanted}"
        )
    return found


def table_line(row: dict[str, Any]) -> str:
    """One line of the markdown table."""
    judged = row[row["judged_by"]]
    error = f" ± {judged['error']:.3f}" if judged["error"] is not None else ""
    cells = (
        f"`{row['name']}`",
        _change(row["sampled"]),
        f"{judged['gain']:+.3f}{error}" + (f" (pass@{PASS_K})" if row["judged_by"] == "pass" else ""),
        _change(row["greedy"]),
        _change(row["pass"]) if "pass" in row else "",
        f"{row['tokens'] / 1000:.0f} k",
        f"{row['steps']:.0f}",
        f"{row['seconds']:.0f}",
        row["outside"],
        "" if row["met"] else "**missed**",
    )
    return "| " + " | ".join(cells) + " |"


def table_head() -> str:
    """The first two lines of the markdown table."""
    return "| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD)


def page(rows: list[dict[str, Any]], facts: dict[str, str], settings: Settings, problems: list[str]) -> str:
    """The page benchmarks/results/learn.md."""
    parts = [
        "# They learn",
        f"{facts['date']} · `{facts['command']}` · {facts['machine']}",
        "Written by benchmarks/learn.py; do not edit. A model of 0.4 M parameters answers chains of three "
        "additions and subtractions. "
        "For each seed all recipes start from the same warm start, the demo's warm-up of that seed (greedy "
        "accuracy "
        f"{settings.warm_accuracy:.0%}), and may generate {settings.budget:,} tokens each; a run ends after "
        "the step in which they are "
        f"spent, after {settings.max_steps} steps at the latest. Accuracy is measured on 1,024 held-out "
        "questions before and after: "
        f"sampled at temperature 1, and greedy; pass@{PASS_K} on {NUM_PASS_QUESTIONS} of them. Figures are "
        "means over seeds, gains with "
        "their standard error; seconds are of training alone, on one thread, and grow where other work "
        "shares the machine.",
        f"Wanted: sampled accuracy up by {BAR:.2f}; the control, `{CONTROL}`, GRPO with random rewards, by "
        f"{CONTROL_BAR:.2f} at most. "
        f"`{JUDGED_BY_PASS}` is judged by pass@{PASS_K}, which is what it trains.",
        "\n".join([table_head(), *(table_line(row) for row in rows)]),
        "Training score by tokens generated, mean of the seeds and the range between them. The questions "
        "are those of training, of which "
        "the warm-up has seen a part, so curves start above the held-out accuracy; the score is what the "
        "recipe is paid for.",
        "![training score by tokens generated](learn.svg)",
        "All bars are met."
        if not problems
        else "Not as wanted:\n\n" + "\n".join(f"- {problem}" for problem in problems),
    ]
    return "\n\n".join(parts) + "\n"


def _outside(name: str, cells: list[dict[str, Any]]) -> str:
    """Describe what the recipe had besides the budget."""
    found = []
    if steps := cells[0]["critic_steps"]:
        found.append(
            f"{steps} steps of the critic alone "
            f"({_mean([float(cell['critic_tokens']) for cell in cells]) / 1000:.0f} k tokens)"
        )
    if cells[0]["teacher"]:
        teachers = [cell["teacher"] for cell in cells]
        found.append(
            "a teacher: the warm-up carried on to a greedy accuracy of "
            f"{_mean([t['greedy'] for t in teachers]):.2f} "
            f"({_mean([float(t['sft_steps']) for t in teachers]):.0f} SFT steps)"
        )
    return "; ".join([*found, *([NOTES[name]] if name in NOTES else [])])


def _change(values: dict[str, float]) -> str:
    return f"{values['before']:.3f} → {values['after']:.3f}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _error(values: list[float]) -> float | None:
    """Standard error of the mean; None of one value."""
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
