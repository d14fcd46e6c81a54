"""Preference losses: pure functions from numbers per response to one loss per pair, or per response, [K].

The caller weighs them.

dpo             log-ratios of both to the reference         label smoothing makes it cDPO
ipo             the same, aimed at a distance
kto             log-ratio of one response with a label      `kto_reference_point` is what it is compared with
simpo, orpo     log-probs and lengths of both               no reference
bradley_terry   scores of both                              for a reward model
"""

from __future__ import annotations

from hybridflow.algorithms.preference.bradley_terry import bradley_terry
from hybridflow.algorithms.preference.dpo import dpo
from hybridflow.algorithms.preference.ipo import ipo
from hybridflow.algorithms.preference.kto import kto, kto_reference_point
from hybridflow.algorithms.preference.orpo import orpo
from hybridflow.algorithms.preference.simpo import simpo

__all__ = ["bradley_terry", "dpo", "ipo", "kto", "kto_reference_point", "orpo", "simpo"]
