"""The messages that the troubleshooting page quotes are those of the source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from doc_blocks import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.compile(r"\*\*`([^*]+?)`\*\*")
GAP = "\0"
"""What stands in a text of the source for a value that is filled in."""
SHORTEST = 8
"""Characters that a quotation has besides `…`, at least."""


@cache
def source_texts() -> list[str]:
    """Return every text of the source, with a gap for each value, and white space made single."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d+)?[sdrfg]", GAP, node.value))
    return [" ".join(text.split()) for text in found]


def quoted_messages() -> list[str]:
    """Return the messages in bold code of the page."""
    return [" ".join(text.split()) for text in QUOTED.findall(PAGE.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    parts = [part.strip() for part in message.split("…")]
    assert len("".join(parts)) >= SHORTEST, "too short to be found"
    pattern = re.compile(".*".join(map(re.escape, filter(None, parts))))
    assert any(pattern.search(text) for text in source_texts()), f"no text of the source reads: {message}"


def test_the_page_quotes_messages_of_each_kind() -> None:
    assert len(quoted_messages()) >= 50
