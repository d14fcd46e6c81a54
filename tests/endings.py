"""Processes that end in their own time, and what comes to hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaps has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
