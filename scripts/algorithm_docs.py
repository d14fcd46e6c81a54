"""Update the generated parts of the hand-written pages docs/algorithms/NAME.md; with --check only test them.

    python scripts/algorithm_docs.py [--check] [--new NAME]

src/hybridflow/recipes/NAME.yaml, benchmarks/results/learn.json ──► between the markers of each page; the
index in README.md
hybridflow.algorithms.catalog ──► the formulas in README.md
benchmarks/results/learn/NAME_SEED.json ──► docs/algorithms/curves/NAME.svg

`<!-- recipe -->` … `<!-- end -->` holds the YAML, `<!-- learned -->` … `<!-- end -->` the figures and the
curve. --new writes a page's skeleton.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "algorithms"
RECIPES = ROOT / "src" / "hybridflow" / "recipes"
RESULTS = ROOT / "benchmarks" / "results"
SAME_PAGE = {
    "grpo_bypass": "rollout_correction",
    "grpo_rollout_correction": "rollout_correction",
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus",
    "dppo_kl": "dppo",
    "dppo_tv": "dppo",
}
"""Recipes that share a page; every other has one of its own name."""
TEMPLATE = """\
# NAME

What it is for: the problem it solves, and when to take it rather than GRPO. Paper: arXiv ID.

## What it computes

The equation, in the notation of [the index](README.md), and the file that holds it.

## Keys

| key | default | here |
|---|---|---|

## Recipe

<!-- recipe -->
<!-- end -->

## What it gave here

<!-- learned -->
<!-- end -->

## What was left out

Against the paper, and why.
"""


def main(arguments: list[str]) -> int:
    """Return exit status 0, or 1 where --check finds a page stale, missing or without its markers."""
    if "--new" in arguments:
        name = arguments[arguments.index("--new") + 1]
        _write(PAGES / f"{name}.md", TEMPLATE.replace("NAME", name))
    fresh, problems = render()
    if "--check" in arguments:
        stale = [
            str(path.relative_to(ROOT))
            for path, text in fresh.items()
            if path.read_text(encoding="utf-8") != text
        ]
        problems += [f"{path} is not fresh: run python scripts/algorithm_docs.py" for path in stale]
        problems += [f"there is no docs/algorithms/{page}.md" for page in missing()]
        sys.stderr.write("".join(f"{problem}\n" for problem in problems))
        return 1 if problems else 0
    for path, text in fresh.items():
        _write(path, text)
    draw()
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


def algorithms() -> list[str]:
    """Return the recipes of algorithms: those with a twin for the tiny task, which agents have not."""
    names = {path.stem for path in RECIPES.glob("*.yaml") if (RECIPES / "tiny" / path.name).is_file()}
    return sorted(names - {"dpo", "reward_model"})


def pages() -> dict[str, list[str]]:
    """Return the recipes of each page."""
    found: dict[str, list[str]] = {}
    for recipe in algorithms():
        found.setdefault(SAME_PAGE.get(recipe, recipe), []).append(recipe)
    return found


def missing() -> list[str]:
    """Return the names of pages that nobody has written."""
    return [page for page in pages() if not (PAGES / f"{page}.md").is_file()]


def render() -> tuple[dict[Path, str], list[str]]:
    """Return the text that each existing page should have, and a list of what is wrong."""
    rows = _rows()
    fresh = {}
    problems = []
    for page, recipes in pages().items():
        path = PAGES / f"{page}.md"
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        for marker, content in (("recipe", _recipes(recipes)), ("learned", _learned(recipes, rows))):
            text, number = _between(text, marker, content)
            if number != 1:
                problems.append(
                    f"{path.relative_to(ROOT)}: wanted one <!-- {marker} --> … <!-- end -->, found {number}"
                )
        fresh[path] = text
    index = PAGES / "README.md"
    if index.is_file():
        text = index.read_text(encoding="utf-8")
        for marker, content in (("index", _index(rows)), ("formulas", _formulas())):
            text, number = _between(text, marker, content)
            if number != 1:
                problems.append(
                    f"{index.relative_to(ROOT)}: wanted one <!-- {marker} --> … <!-- end -->, found {number}"
                )
        fresh[index] = text
    return fresh, problems


def draw() -> None:
    """Draw the curve of each recipe that has results."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from learn_plot import plot_one

    for name in [*(recipe for recipes in pages().values() for recipe in recipes), "grpo_random"]:
        cells = [
            json.loads(path.read_text()) for path in sorted((RESULTS / "learn").glob(f"{name}_[0-9]*.json"))
        ]
        if curves := [cell["curves"] for cell in cells if "failed" not in cell]:
            plot_one(PAGES / "curves" / f"{name}.svg", curves)


def _between(text: str, marker: str, content: str) -> tuple[str, int]:
    """Return the text with `content` between the markers, and the number of such places."""
    return re.subn(
        rf"(<!-- {marker} -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{content}{found[2]}",
        text,
        flags=re.DOTALL,
    )


def _recipes(names: list[str]) -> str:
    blocks = []
    for name in names:
        blocks.append(f"```yaml\n{(RECIPES / f'{name}.yaml').read_text(encoding='utf-8').strip()}\n```\n")
        tiny = RECIPES / "tiny" / f"{name}.yaml"
        own = [
            line
            for line in tiny.read_text(encoding="utf-8").splitlines()
            if not line.startswith(("#", "trainer: {experiment_name"))
        ]
        blocks.append(f"On the tiny task (`--recipe tiny/{name}`):\n\n```yaml\n" + "\n".join(own) + "\n```\n")
    return "\n" + "\n".join(blocks) + "\n"


def _learned(names: list[str], rows: dict[str, dict[str, Any]]) -> str:
    """Return the figures and the curve of each recipe, with GRPO's beside them."""
    if not any(name in rows for name in names):
        return "\nNo results yet: `make learn` makes them.\n\n"
    shown = [name for name in [*names, *(["grpo"] if "grpo" not in names else [])] if name in rows]
    head = (
        "recipe",
        "sampled accuracy",
        "gain, ± standard error",
        "greedy accuracy",
        "tokens",
        "seconds",
        "besides",
    )
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in shown:
        row = rows[name]
        judged = row[row["judged_by"]]
        sampled = row["sampled"]
        greedy = row["greedy"]
        error = "" if judged["error"] is None else f" ± {judged['error']:.3f}"
        lines.append(
            f"| `{name}` | {sampled['before']:.3f} → {sampled['after']:.3f} "
            f"| {judged['gain']:+.3f}{error}{' (pass@8)' if row['judged_by'] == 'pass' else ''} "
            f"| {greedy['before']:.3f} → {greedy['after']:.3f} | {row['tokens'] / 1000:.0f} k | "
            f"{row['seconds']:.0f} | {row['outside']} |"
        )
    seeds = len(rows[shown[0]]["seeds"])
    about = (
        f"Means over {seeds} seed{'s' if seeds > 1 else ''}; how it is measured: [the learn "
        "table](../../benchmarks/results/learn.md)."
    )
    curves = [
        f"![training score of {name} by tokens generated](curves/{name}.svg)"
        for name in names
        if name in rows
    ]
    return "\n" + "\n".join(lines) + f"\n\n{about}\n\n" + "\n\n".join(curves) + "\n\n"


def _index(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| recipe | what | gain here |", "|---|---|---|"]
    for page, recipes in pages().items():
        for recipe in recipes:
            shown = f"[{recipe}]({page}.md)" if (PAGES / f"{page}.md").is_file() else f"`{recipe}`"
            gain = f"{rows[recipe][rows[recipe]['judged_by']]['gain']:+.2f}" if recipe in rows else ""
            lines.append(f"| {shown} | {_header(recipe)} | {gain} |")
    return "\n" + "\n".join(lines) + "\n\n"


def _formulas() -> str:
    """Return every estimator and loss of the catalog with its formula and its papers."""
    lines = ["| name | formula | papers |", "|---|---|---|"]
    for names in (ESTIMATORS, POLICY_LOSSES):
        for name, facts in names.items():
            said = facts.described
            file = said.module.removeprefix("hybridflow.algorithms.").replace(".", "/")
            papers = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in said.papers)
            formula = said.formula.replace("|", "\\|")
            lines.append(f"| `{name}`, `{file}.py` | {formula} | {papers} |")
    return "\n" + "\n".join(lines) + "\n\n"


def _header(recipe: str) -> str:
    """Return the comment that opens a recipe, up to its command, as one line."""
    lines = (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    until = next(number for number, line in enumerate(lines) if line.startswith("# hybridflow "))
    return " ".join(line.removeprefix("# ") for line in lines[:until]).replace("|", "\\|")


def _rows() -> dict[str, dict[str, Any]]:
    path = RESULTS / "learn.json"
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.is_file() else {}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
