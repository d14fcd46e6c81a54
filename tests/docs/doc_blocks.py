"""The code blocks of the documents, and the marks that say what becomes of them in the tests.

A mark is an HTML comment, which the reader does not see, on lines of its own above a block:

    <!-- docs-test: parse-only: needs a GPU -->     a bash block: its commands are checked, and not run
    <!-- docs-test: run -->                         a python block: run as a program
    <!-- docs-test: skip: pseudo-code -->           nothing is done
    <!-- docs-test: file: my_reward.py -->          the block is written to this file before later blocks run
    <!-- docs-test: before: rm -rf my-model -->     bash that runs first, beside a mark of the others or alone

Without a mark a bash block is run, and a python block is compiled. A block that begins with a comment of
a file name (`# guess.py`) is that file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)
MARK = re.compile(r"^ *<!-- docs-test: (?P<mode>[a-z-]+)(?:: (?P<rest>.*?))? -->$")
FILE = re.compile(r"^# (?P<name>[\w/.-]+\.(?:py|yaml|json|sh))\n")
WORDS = (
    "train|sft|dpo|reward-model|config|explain|doctor|demo|merge|import-gguf|serve|eval|generate|try|"
    "reward-test|view"
)
COMMAND = re.compile(
    rf"^ *(?:[A-Z_]+=\S+ +)*(?:\S*/)?(?:hybridflow (?:{WORDS})(?= )|python -m hybridflow\.\S+).*",
    re.MULTILINE,
)
"""A line that is a command of ours."""
INLINE = re.compile(r"(?<!`)`(hybridflow [a-z][^`\n]*)`(?!`)")
NEEDS_REASON = ("parse-only", "skip")
MODES = {"bash": ("run", "parse-only", "skip"), "python": ("compile", "run", "skip"), "": ("shown",)}
PARSED = ("json", "yaml")


@dataclass(frozen=True)
class Block:
    """A code block; `line` is the one of its fence."""

    page: Path
    line: int
    language: str
    text: str
    mode: str
    reason: str = ""
    file: str = ""
    before: str = ""

    @property
    def place(self) -> str:
        """Page and line, as an editor opens them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return the pages whose blocks are tested."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order. Raises AssertionError for a mark that says nothing."""
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, match) for match in FENCE.finditer(text)]


def _block(page: Path, text: str, match: re.Match[str]) -> Block:
    language = match["language"]
    line = text.count("\n", 0, match.start()) + 1
    where = f"{page.relative_to(ROOT)}:{line}"
    body = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
    mode = {"bash": "run", "python": "compile"}.get(language, "parse" if language in PARSED else "shown")
    reason = file = before = ""
    if named := FILE.match(body):
        file = named["name"]
    for mark in _marks_above(text[: match.start()]):
        rest = mark["rest"] or ""
        if mark["mode"] == "file":
            file = rest
        elif mark["mode"] == "before":
            before = rest
        else:
            mode = mark["mode"]
            reason = rest
            assert mode in MODES.get(language, ()), f"{where}: `{mode}` is no mark of a {language} block"
            assert reason or mode not in NEEDS_REASON, f"{where}: `{mode}` wants a reason"
    return Block(page, line, language, body, mode, reason, file, before)


def _marks_above(text: str) -> list[re.Match[str]]:
    marks = []
    for line in reversed(text.splitlines()):
        match = MARK.match(line)
        if match is None and line.strip():
            break
        if match is not None:
            marks.append(match)
    return marks


def commands_outside(page: Path) -> list[str]:
    """Return the commands of ours that stand on lines of their own outside of bash blocks."""
    text = page.read_text(encoding="utf-8")
    bash = [block for block in FENCE.finditer(text) if block["language"] == "bash"]
    for match in reversed(bash):
        text = text[: match.start()] + text[match.end() :]
    return [found.group().strip() for found in COMMAND.finditer(text)]


def inline_commands(page: Path) -> list[str]:
    """Return the commands of ours that the sentences of a page quote."""
    return INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def summary(blocks: Iterable[Block]) -> Sequence[str]:
    """Return lines that count the blocks by what is done with them, and by the reasons for not running."""
    done = Counter((block.language or "no language", block.mode) for block in blocks)
    reasons = Counter((block.mode, block.reason) for block in blocks if block.mode in NEEDS_REASON)
    lines = [f"{number:4} {language} blocks: {mode}" for (language, mode), number in sorted(done.items())]
    return lines + [f"{number:4} {mode}: {reason}" for (mode, reason), number in sorted(reasons.items())]
