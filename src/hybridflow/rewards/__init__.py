"""The rewards room: responses in, scores out; imports neither torch nor ray.

    ScoreRequest ─► manager.py ─► pool.py ══processes══► call.py ─► the reward function
                        │     └─► `InProcessScorer` ────────┘
                        ▼
                  ScoredBatch: scores, extra columns, rows to drop, counters

`compose.py` turns `reward.*` into a RewardFunction (`function.py`): a built-in one or the user's by
`load.py`, or a sum of terms. `call.py` calls it, or a manager that scores a step in one call; `result.py`
checks what it returns, `pool.py` also holds back requests, `test_cases.py` and `run_programs.py` try
programs, `build.py` wires it all and keeps outcomes, `early_checks.py` and `dry_run.py` find mistakes before
a run.
"""

from hybridflow.rewards.manager import RewardManager, ScoredBatch
from hybridflow.rewards.result import ScoreRequest, ScoringOutcome

__all__ = ["RewardManager", "ScoreRequest", "ScoredBatch", "ScoringOutcome"]
