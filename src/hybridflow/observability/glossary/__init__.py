"""The glossary of metrics: what each name means, its unit, the direction in which it is better, who reads it.

name of a metric ──find──► MetricEntry; `scripts/metric_docs.py` writes docs/metrics.md from GLOSSARY
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

from hybridflow.observability.glossary.entry import PLACEHOLDERS, MetricEntry
from hybridflow.observability.glossary.learning import LEARNING
from hybridflow.observability.glossary.surroundings import SURROUNDINGS

GLOSSARY: dict[str, tuple[MetricEntry, ...]] = {**LEARNING, **SURROUNDINGS}
"""Entries by the heading under which they stand; of several that fit a name the first counts."""

OF_VALIDATION = "val-aux/"
"""Stands before the names of agents' metrics in validation."""

__all__ = ["GLOSSARY", "OF_VALIDATION", "PLACEHOLDERS", "MetricEntry", "find", "pattern_of"]


@lru_cache(maxsize=4096)
def find(name: str) -> MetricEntry | None:
    """Return the entry of a metric, or None for a name that is not in the glossary."""
    if name.startswith(f"{OF_VALIDATION}agent/"):
        name = name.removeprefix(OF_VALIDATION)
    exact, patterns = _index()
    if name in exact:
        return exact[name]
    return next((entry for pattern, entry in patterns if pattern.fullmatch(name)), None)


def pattern_of(name: str) -> str:
    """Return the regular expression of the metrics that an entry's name stands for."""
    parts = re.split(r"\{(\w+)\}", name)
    literals = map(re.escape, parts[0::2])
    places = [f"(?:{PLACEHOLDERS[placeholder][0]})" for placeholder in parts[1::2]]
    return "".join(text for pair in zip(literals, [*places, ""]) for text in pair)


@cache
def _index() -> tuple[dict[str, MetricEntry], list[tuple[re.Pattern[str], MetricEntry]]]:
    """Return the entries by their whole name, and those with placeholders by their pattern."""
    exact = {}
    patterns = []
    for entries in GLOSSARY.values():
        for entry in entries:
            if "{" in entry.name:
                patterns.append((re.compile(pattern_of(entry.name)), entry))
            else:
                exact[entry.name] = entry
    return exact, patterns
