"""One entry of the glossary of metrics, and the placeholders that its name may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", ""]
Feed = Literal["line", "report", "health", "reward watch"]

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
