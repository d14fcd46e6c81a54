"""The rewards room: responses in, scores out; imports neither torch nor ray.

    ScoreRequest ─► manager.py ─► pool.py ══processes═══► worker.py ─► call.py ─► the reward function
                        │     └─► in_process.py ────────────────────────┘
                        ▼
                  ScoredBatch: scores, extra columns, rows to drop, counters

`load.py` and `resolve.py` turn `reward.*` into a function (a built-in one of `table.py`, a sum of
`compose.py`, or the user's), `result.py` checks what a function returns, `managers.py` score a step in one
call, `pool.py` also holds back requests, `cache.py` keeps outcomes, `test_cases.py` and `run_programs.py` try
programs, `build.py` wires it all, `early_checks.py`, `dry_run.py` find mistakes before a run.
"""

from hybridflow.rewards.manager import RewardManager, ScoredBatch
from hybridflow.rewards.request import Outcome, ScoreRequest

__all__ = ["Outcome", "RewardManager", "ScoreRequest", "ScoredBatch"]
