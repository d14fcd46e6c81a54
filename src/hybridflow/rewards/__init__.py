"""The rewards room: responses in, scores out; imports neither torch nor ray.

    ScoreRequest ─► manager.py ─► pool.py ══processes═══► worker.py ─► call.py ─► the reward function
                        │     └─► in_process.py ────────────────────────┘
                        ▼
                  ScoredBatch: scores, extra columns, rows to drop, counters

`compose.py` turns `reward.*` into a RewardFunction (`function.py`): a built-in one of `table.py`, the user's
by `load.py`, or a sum of terms. `call.py` calls it, or a manager that scores a step in one call; `result.py`
checks what it returns, `pool.py` also holds back requests, `cache.py` keeps outcomes, `test_cases.py` and
`run_programs.py` try programs, `build.py` wires it all, `early_checks.py` and `dry_run.py` find mistakes
before a run.
"""

from hybridflow.rewards.manager import RewardManager, ScoredBatch
from hybridflow.rewards.request import Outcome, ScoreRequest

__all__ = ["Outcome", "RewardManager", "ScoreRequest", "ScoredBatch"]
