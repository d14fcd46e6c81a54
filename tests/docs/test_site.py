"""The documentation site builds without a warning and asks no other host for anything (`make docs`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT

LOADED = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=[\"']?https?:|<link\b[^>]*\bhref=[\"']?https?:"
)
"""What a browser fetches by itself; the target of a link is fetched when the reader follows it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


@pytest.mark.slow
def test_the_site_has_every_page(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    built = [page.with_name("index.md") if page.name == "README.md" else page for page in pages]
    outside = ("overview.html", "ARCHITECTURE.html", "benchmarks/results/learn.html", "ten_keys.html")
    assert not [page for page in built if not (site / page.with_suffix(".html")).is_file()]
    assert not [page for page in outside if not (site / page).is_file()]


@pytest.mark.slow
def test_pages_ask_no_other_host(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert pages
    assert not [page for page in pages if LOADED.search(page.read_text(encoding="utf-8"))]
