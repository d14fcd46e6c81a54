"""The stock of the working folders, made once for all processes of a session; the count of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doc_blocks import pages, read_blocks, summary
from doc_workplace import write_stock
from filelock import FileLock


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the folder with a tiny model, data and a finished run; read by all, changed by none."""
    base = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        base = base.parent
    folder = base / "stock"
    with FileLock(base / "stock.lock"):
        if not (base / "stock.done").exists():
            write_stock(folder)
            (base / "stock.done").touch()
    return folder


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many blocks of the documents were run, checked and skipped, and why."""
    terminalreporter.section("blocks of the documents")
    for line in summary([block for page in pages() for block in read_blocks(page)]):
        terminalreporter.write_line(line)
