"""Why a run is slow: the waits of its steps, the key that shortens each, and the seconds that would save.

run folder ──RunTimes──► RULES ──► Wait, … ──► `hybridflow why`, the page of the run
"""

from hybridflow.trainer.why.findings import TriedWait, as_data, found_in, held, waits_written
from hybridflow.trainer.why.rules import RULES, Wait, waits_of
from hybridflow.trainer.why.run_times import RunTimes

__all__ = [
    "RULES",
    "RunTimes",
    "TriedWait",
    "Wait",
    "as_data",
    "found_in",
    "held",
    "waits_of",
    "waits_written",
]
