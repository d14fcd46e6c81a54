"""The documents are true where a test can tell: links lead somewhere, the README's reward does its work."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from sources import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
"""The target of a Markdown link within the project; an address on the web has a colon."""
MAX_README_WORDS = 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_readme_is_read_in_a_few_minutes() -> None:
    readme = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    words = [word for word in readme.split() if re.search(r"\w", word)]  # no bars of tables, no rules
    assert len(words) <= MAX_README_WORDS, f"the README has {len(words)} words: move details into docs/"


def unindented(text: str) -> list[str]:
    """Return the lines of a text without the indentation that all of them share."""
    return textwrap.dedent(text).strip("\n").splitlines()


def test_the_programming_guide_shows_code_of_the_examples() -> None:
    guide = (ROOT / "docs" / "programming_guide.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) > 10
    folders = ("own_loop", "worker_groups")
    files = [file for folder in folders for file in (ROOT / "examples" / folder).glob("*.py")]
    sources = [file.read_text(encoding="utf-8").splitlines() for file in files]
    for block in blocks:
        wanted = unindented(block)
        assert any(
            unindented("\n".join(source[start : start + len(wanted)])) == wanted
            for source in sources
            for start in range(len(source))
        ), block


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("The answer is 15.", "15", 1.0),
        ("14", "4", 0.0),
        ("First 3, then 4", "4", 1.0),
        ("It costs 1,200 dollars.", "1200", 1.0),
        ("−3 is wrong, it is -2.50", "-2.5", 1.0),
        ("I do not know", "4", 0.0),
    ],
)
def test_the_readme_has_a_reward_that_compares_the_last_number(
    response: str, ground_truth: str, score: float
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(code) == 1
    names: dict[str, Any] = {}
    exec(code[0], names)
    assert names["compute_score"]("mine", response, ground_truth) == score
