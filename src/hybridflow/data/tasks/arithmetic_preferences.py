"""Pairs of worked answers to arithmetic chains, of which one has wrong steps.

"3 + 4 - 2 = ?"    chosen    "3 + 4 = 7 . 7 - 2 = 5 . #### 5"
                   rejected  "3 + 4 = 8 . 8 - 2 = 6 . #### 6"    a wrong result, from which it goes on
"""

from __future__ import annotations

import random
from itertools import accumulate
from operator import add, and_
from typing import Any

from hybridflow.data.tasks.arithmetic_chain import ArithmeticChain, question, worked_answer
from hybridflow.data.tasks.base import Split
from hybridflow.errors import ConfigError
from hybridflow.protocol.randomness import derive_seed

NAME = "arithmetic_preferences"
STEP_END = " . "
JUDGED = "{question} {response}"
"""What a judge of this task is asked."""
VERDICTS = ("0", "10")
CONVERSATIONS = ("right", "either", "verdict")


class ArithmeticPreferences(ArithmeticChain):
    """The questions of `ArithmeticChain` with a right and a wrong answer, as `chosen` and `rejected`; in the
    wrong one, `wrong_steps` steps have a wrong result, which is 0..`max_total`, too.

    A row also has one of the two as `completions`, its steps, and `labels`, true up to the first that is not
    a step of the right answer.
    The two answers change places in a share `swapped` of the training rows; 0.5 leaves nothing to learn.
    `conversation` says what `messages` are: the right answer, either of the two (that of `completions`), or
    the verdict of a judge who is asked about it, 10 or 0.
    """

    def __init__(
        self,
        *,
        wrong_steps: int = 1,
        swapped: float = 0.0,
        conversation: str = "right",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not 1 <= wrong_steps <= self.hops:
            raise ConfigError(
                f"data.task.options: got wrong_steps={wrong_steps}, wanted 1 to hops={self.hops}"
            )
        self.wrong_steps = wrong_steps
        if not 0 <= swapped <= 1:
            raise ConfigError(f"data.task.options: got swapped={swapped}, wanted a share from 0 to 1")
        if conversation not in CONVERSATIONS:
            raise ConfigError(
                f"data.task.options: got conversation={conversation}, wanted {', '.join(CONVERSATIONS)}"
            )
        self.swapped = swapped
        self.conversation = conversation

    def row_of(self, terms: list[int], split: Split, index: int) -> dict[str, Any]:
        """Return the row of a question."""
        stream = random.Random(derive_seed(self.seed, f"{NAME}/{split}", index))
        totals = list(accumulate(terms))[1:]
        off_by: list[int] = []
        wrong_steps: list[int] = []
        results = [-1]
        # a wrong result looks like a right one: what stands out would be learned in place of the sums
        while min(results) < 0 or max(results) > self.max_total:
            wrong_steps = stream.sample(range(self.hops), self.wrong_steps)
            off_by = [stream.choice([-2, -1, 1, 2]) if n in wrong_steps else 0 for n in range(self.hops)]
            results = list(map(add, totals, accumulate(off_by)))
        right = worked_answer(terms)
        wrong = worked_answer(terms, off_by)
        answers = [[{"role": "assistant", "content": text}] for text in (right, wrong)]
        if split == "train" and stream.random() < self.swapped:
            answers.reverse()
        shown = stream.choice([right, wrong])
        steps = shown.split(STEP_END)
        as_wanted = map(str.__eq__, steps, right.split(STEP_END))
        row = super().row_of(terms, split, index)
        if self.conversation != "right":
            asked, said = question(terms), shown
            if self.conversation == "verdict":
                asked, said = JUDGED.format(question=asked, response=shown), VERDICTS[shown == right]
            row["messages"] = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": said},
            ]
        return {
            **row,
            "data_source": NAME,
            "chosen": answers[0],
            "rejected": answers[1],
            "completions": steps,
            "labels": list(accumulate(as_wanted, and_)),
        }
