"""The page of models and memory is what its script writes from the estimator of `config --explain`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from doc_blocks import ROOT


@pytest.mark.slow
def test_the_tables_are_fresh() -> None:
    script = ROOT / "scripts" / "memory_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stderr
