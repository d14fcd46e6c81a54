"""The task of the race: letters, answers of log-normal length, and a reward that takes its time.

    "7 c"  ──a good answer──►  "cccccccccccc": only the letter that is asked for, as many as the class 7 has

The class of a question says how long its answer is: twenty classes, with the quantiles of a log-normal
distribution as their lengths. A warm-up teaches the lengths, and each letter in part; the score is the
share of right letters, so training makes answers better and not shorter. The seconds of a reward are
log-normal too, and belong to the question's index, so all schedules meet the same ones.
"""

from __future__ import annotations

import asyncio
import math
import random
import string
from statistics import NormalDist
from typing import Any

from hybridflow.data.tasks.base import Split
from hybridflow.protocol.randomness import derive_seed

CLASSES = 20
MEDIAN_LENGTH = 12.0
SPREAD_OF_LENGTHS = 1.0
MAX_RESPONSE = 112
RIGHT = 0.35
"""Share of right letters in what the warm-up reads."""
LETTERS = string.ascii_lowercase[:12]
MEDIAN_SECONDS = 0.15
SPREAD_OF_SECONDS = 0.8
MOST_SECONDS = 2.0
LENGTHS = [
    round(MEDIAN_LENGTH * math.exp(SPREAD_OF_LENGTHS * NormalDist().inv_cdf((number + 0.5) / CLASSES)))
    for number in range(CLASSES)
]
"""Letters of the answers of each class."""


class Letters:
    """Questions whose class and letter are drawn by their index."""

    def __init__(self, *, seed: int = 0, **_: Any) -> None:
        self.seed = seed

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]:
        """Make `size` rows of one split, each with an answer that is right in part."""
        return [self._row(split, index) for index in range(size)]

    def _row(self, split: Split, index: int) -> dict[str, Any]:
        draw = random.Random(derive_seed(self.seed, f"letters/{split}", index))
        number = draw.randrange(CLASSES)
        letter = draw.choice(LETTERS)
        answer = [letter if draw.random() < RIGHT else draw.choice(LETTERS) for _ in range(LENGTHS[number])]
        user = {"role": "user", "content": f"{string.ascii_uppercase[number]} {letter}"}
        return {
            "data_source": "letters",
            "prompt": [user],
            "messages": [user, {"role": "assistant", "content": "".join(answer)}],
            "reward_model": {"style": "rule", "ground_truth": letter},
            "extra_info": {"index": index, "split": split},
        }


def seconds_of(index: int) -> float:
    """Return the seconds that the reward of a question's answers takes."""
    draw = random.Random(derive_seed(0, "seconds of a reward", index))
    return min(MOST_SECONDS, draw.lognormvariate(math.log(MEDIAN_SECONDS), SPREAD_OF_SECONDS))


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Return the share of right letters, after a sleep; validation does not sleep."""
    if extra_info["split"] == "train":
        await asyncio.sleep(seconds_of(extra_info["index"]))
    return solution_str.count(ground_truth) / max(1, len(solution_str))
