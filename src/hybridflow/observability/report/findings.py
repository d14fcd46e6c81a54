"""What the rules of advice find in the metrics of a run, computed anew from its file.

metrics by step ──Findings──► one entry a rule: since when, how often, whether it holds now, keys to set
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hybridflow.observability.advice import History, find_advice


class Findings:
    """Follows the rules through a run whose newest step may still get further metrics."""

    def __init__(self) -> None:
        self._history = History()
        self._found: dict[str, dict[str, Any]] = {}
        self._done: int | None = None
        """Newest step that the rules have seen for good."""

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
        """Return what the rules find in all steps, that which holds now first.

        An entry has `rule`, `message`, `keys`, `hint`, `first`, `last`, `steps` (their number) and `now`. The
        steps before the newest one are those of the last call.
        """
        steps = [step for step in sorted(metrics) if self._done is None or step > self._done]
        if not steps:
            return []
        for step in steps[:-1]:
            _look(self._history, self._found, metrics[step], step)
            self._done = step
        found = copy.deepcopy(self._found)
        _look(copy.deepcopy(self._history), found, metrics[steps[-1]], steps[-1])
        entries = [{**entry, "now": entry["last"] == steps[-1]} for entry in found.values()]
        return sorted(entries, key=lambda entry: (not entry["now"], entry["hint"], -entry["last"]))


def _look(
    history: History, found: dict[str, dict[str, Any]], metrics: Mapping[str, float], step: int
) -> None:
    history.add({name: value for name, value in metrics.items() if isinstance(value, (int, float))})
    alarms, hints = find_advice(history)
    for advice in alarms + hints:
        entry = found.setdefault(advice.rule, {"rule": advice.rule, "first": step, "steps": 0})
        entry["message"] = advice.message
        entry["keys"] = list(advice.keys)
        entry["hint"] = bool(hints)
        entry["last"] = step
        entry["steps"] += 1
