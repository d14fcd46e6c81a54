"""The glossary of metrics: what each name means, its unit, the direction in which it is better, who reads it.

name of a metric ──find──► MetricEntry, a line of glossary.yaml; scripts/metric_docs.py ──► docs/metrics.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

Better = Literal["higher", "lower", ""]
Feed = Literal["line", "report", "health", "reward watch"]

FILE = Path(__file__).with_suffix(".yaml")
OF_VALIDATION = "val-aux/"
"""Prefix of the names of agents' metrics in validation."""
PLACEHOLDERS: dict[str, tuple[str, str]] = {
    "role": ("actor|critic|process_reward|train", "actor, critic or process_reward; train outside of PPO"),
    "stat": ("mean|max|min", "mean, max or min"),
    "cause": ("[a-z]+", "infrastructure, environment, data, deadline or cancelled"),
    "kind": (r"[\w.]+", "timeout, or the name of the exception"),
    "section": ("[a-z_]+", "a part of the step; they are listed at the end"),
    "source": (".+", "data_source of the rows"),
    "variable": ("[^/]+", "reward, acc, or another number that the reward function returns"),
    "n": (r"\d+", "number of responses to a prompt"),
    "k": (r"\d+", "number of responses of which the best, the worst or the majority's is taken"),
    "age": (r"-?\d+", "number of training steps between the weights that sampled and those that train"),
    "name": ("[^/]+", "a name that the user's own code gives"),
}
"""For each placeholder, a regular expression of what may stand in its place, and a text for people."""


@dataclass(frozen=True)
class MetricEntry:
    """One metric, or all metrics of one pattern."""

    name: str
    """The name, with placeholders in braces."""
    meaning: str
    unit: str
    """Unit of the value; `1` for a number without one, such as a ratio."""
    better: Better = ""
    """Direction in which a run gets better, where there is one."""
    feeds: tuple[Feed, ...] = ()
    """What reads it beside the trackers: the line of a step on the console, cards and tiles of the report,
    rules of health, the watch over rewards.
    """


@cache
def glossary() -> dict[str, tuple[MetricEntry, ...]]:
    """Return the entries by their heading; of several that fit a name the first counts."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = yaml.load(FILE.read_text(encoding="utf-8"), loader)
    return {
        heading: tuple(
            MetricEntry(name, *facts[:3], *(tuple(feeds) for feeds in facts[3:]))
            for name, facts in entries.items()
        )
        for heading, entries in found.items()
    }


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
    """Return the regular expression of the metrics that an entry's name covers."""
    parts = re.split(r"\{(\w+)\}", name)
    literals = map(re.escape, parts[0::2])
    places = [f"(?:{PLACEHOLDERS[placeholder][0]})" for placeholder in parts[1::2]]
    return "".join(text for pair in zip(literals, [*places, ""]) for text in pair)


@cache
def _index() -> tuple[dict[str, MetricEntry], list[tuple[re.Pattern[str], MetricEntry]]]:
    """Return the entries by their whole name, and those with placeholders by their pattern."""
    exact = {}
    patterns = []
    for entries in glossary().values():
        for entry in entries:
            if "{" in entry.name:
                patterns.append((re.compile(pattern_of(entry.name)), entry))
            else:
                exact[entry.name] = entry
    return exact, patterns
