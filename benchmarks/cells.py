"""Jobs of the learning benchmarks: a script of this folder in a process of one thread, with a log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

DEADLINE = 3600
"""Seconds that one job may take before it is ended."""


def run_job(script: str, words: Sequence[str], log: Path) -> str:
    """Run a script with these words; return why it failed, with the last line of its log, or nothing."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        try:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).with_name(script)), *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=DEADLINE,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"failed: not done after {DEADLINE} s (log: {log})"
    if not done.returncode:
        return ""
    lines = log.read_text().strip().splitlines() or ["no output"]
    return f"failed: {lines[-1][:200]} (log: {log})"
