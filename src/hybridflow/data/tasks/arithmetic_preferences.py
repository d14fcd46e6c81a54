"""Pairs of worked answers to arithmetic chains, of which one has a wrong step.

"3 + 4 - 2 = ?"    chosen    "3 + 4 = 7 . 7 - 2 = 5 . #### 5"
                   rejected  "3 + 4 = 8 . 8 - 2 = 6 . #### 6"    right but for one result
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

from hybridflow.data.tasks.arithmetic_chain import ArithmeticChain, worked_answer
from hybridflow.data.tasks.base import Split
from hybridflow.errors import ConfigError
from hybridflow.protocol.randomness import derive_seed

NAME = "arithmetic_preferences"
STEP_END = " . "


class ArithmeticPreferences(ArithmeticChain):
    """The questions of `ArithmeticChain` with a right and a wrong answer, as `chosen` and `rejected`.

    A row also has a process answer: `completions`, its steps, and `labels`, true up to the wrong step. The
    two answers change places in a share `swapped` of the training rows; 0.5 leaves nothing to learn.
    """

    def __init__(self, *, swapped: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        if not 0 <= swapped <= 1:
            raise ConfigError(f"data.task.options: got swapped={swapped}, wanted a share from 0 to 1")
        self.swapped = swapped

    def row_of(self, terms: list[int], split: Split, index: int) -> dict[str, Any]:
        """Return the row of a question."""
        stream = random.Random(derive_seed(self.seed, f"{NAME}/{split}", index))
        place = stream.randrange(self.hops)
        off_by = stream.choice([-2, -1, 1, 2])
        if min(accumulate(terms)) + off_by < 0:  # no result is negative
            off_by = -off_by
        right = worked_answer(terms)
        wrong = worked_answer(terms, wrong_step=place, off_by=off_by)
        answers = [[{"role": "assistant", "content": text}] for text in (right, wrong)]
        if split == "train" and stream.random() < self.swapped:
            answers.reverse()
        shown = stream.choice([right, wrong])
        steps = shown.split(STEP_END)
        if shown == right:
            place = len(steps)
        return {
            **super().row_of(terms, split, index),
            "data_source": NAME,
            "chosen": answers[0],
            "rejected": answers[1],
            "completions": steps,
            "labels": [number < place for number in range(len(steps))],
        }
