"""The stock of the working folders, made once for all processes of a session; the count of blocks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import pages, read_blocks, summary
from doc_workplace import environment, write_stock
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


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a process that forks for each command, one for each process of the session."""
    folder = Path(
        tempfile.mkdtemp(prefix="docs")
    )  # short: the address of a socket has at most 107 characters
    address = folder / "zygote"
    words = [sys.executable, str(Path(__file__).with_name("doc_zygote.py")), "serve", str(address)]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(words, env=environment(folder), stdout=log, stderr=log)
    for _ in range(6000):  # ten minutes
        if address.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    assert address.exists(), (folder / "log").read_text()
    yield str(address)
    process.terminate()
    process.wait()
    shutil.rmtree(folder)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many blocks of the documents were run, checked and skipped, and why."""
    terminalreporter.section("blocks of the documents")
    for line in summary([block for page in pages() for block in read_blocks(page)]):
        terminalreporter.write_line(line)
