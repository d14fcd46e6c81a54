"""Preference losses: pure functions of numbers per response to one loss per pair (or row), [K]. Weighting and summing is the caller's.

dpo            log-ratios of both to the reference       label smoothing makes it cDPO
ipo            the same, aimed at a distance
"""

from __future__ import annotations

from hybridflow.algorithms.preference.dpo import dpo
from hybridflow.algorithms.preference.ipo import ipo

__all__ = ["dpo", "ipo"]
