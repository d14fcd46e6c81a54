"""A reward that kills its process once, in the fourth step, and then never again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

FATAL_CALL = 57
"""Of 16 calls a step and 4 a validation, which follows every second step: the fifth of step 4."""
_calls = 0


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    global _calls
    _calls += 1
    killed = Path(os.environ["KILLED_ONCE"])
    if _calls == FATAL_CALL and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(solution_str) % 5)
