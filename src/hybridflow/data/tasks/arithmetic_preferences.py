"""Pairs of worked answers to arithmetic chains, of which one has wrong steps.

"3 + 4 - 2 = ?"    chosen    "3 + 4 = 7 . 7 - 2 = 5 . #### 5"
                   rejected  "3 + 4 = 8 . 8 - 2 = 6 . #### 6"    a wrong result, from which it goes on
"""

from __future__ import annotations

import random
from itertools import accumulate
from operator import add
from typing import Any

from hybridflow.data.tasks.arithmetic_chain import ArithmeticChain, worked_answer
from hybridflow.data.tasks.base import Split
from hybridflow.errors import ConfigError
from hybridflow.protocol.randomness import derive_seed

NAME = "arithmetic_preferences"
STEP_END = " . "


class ArithmeticPreferences(ArithmeticChain):
    """The questions of `ArithmeticChain` with a right and a wrong answer, as `chosen` and `rejected`; in the
    wrong one, `wrong_steps` steps have a wrong result.

    A row also has one of the two as `completions`, its steps, and `labels`, true up to the first wrong step.
    The two answers change places in a share `swapped` of the training rows; 0.5 leaves nothing to learn.
    """

    def __init__(self, *, wrong_steps: int = 1, swapped: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        if not 1 <= wrong_steps <= self.hops:
            raise ConfigError(
                f"data.task.options: got wrong_steps={wrong_steps}, wanted 1 to hops={self.hops}"
            )
        self.wrong_steps = wrong_steps
        if not 0 <= swapped <= 1:
            raise ConfigError(f"data.task.options: got swapped={swapped}, wanted a share from 0 to 1")
        self.swapped = swapped

    def row_of(self, terms: list[int], split: Split, index: int) -> dict[str, Any]:
        """Return the row of a question."""
        stream = random.Random(derive_seed(self.seed, f"{NAME}/{split}", index))
        wrong_steps = stream.sample(range(self.hops), self.wrong_steps)
        off_by = [-self.max_total - 1] * self.hops
        totals = list(accumulate(terms))[1:]
        while min(map(add, totals, accumulate(off_by))) < 0:  # no result is negative
            off_by = [stream.choice([-2, -1, 1, 2]) if n in wrong_steps else 0 for n in range(self.hops)]
        place = min(wrong_steps)
        right = worked_answer(terms)
        wrong = worked_answer(terms, off_by)
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
