"""The rewards room: responses in, scores out; imports neither torch nor ray.

    ScoreRequest ─► manager.py ─► pool.py ══pipes══► worker.py ─► call.py ─► the function (table.py,
    compose.py or the user's)
                        │     └─► in_process.py ───────────────────┘
                        ▼
                  ScoredBatch: scores, extra columns, rows to drop, counters

`load.py` turns `reward.*` into a function, `result.py` says what a function may return, `build.py` wires it,
`dry_run.py` scores a few rows before a run.
"""

from hybridflow.rewards.manager import RewardManager, ScoredBatch
from hybridflow.rewards.request import Outcome, ScoreRequest

__all__ = ["Outcome", "RewardManager", "ScoreRequest", "ScoredBatch"]
