"""Chains of additions and subtractions of small numbers, to be worked out step by step.

    "3 + 4 - 2 + 5 = ?"  ──worked answer──►  "3 + 4 = 7 . 7 - 2 = 5 . 5 + 5 = 10 . #### 10"

A hash of its text decides the split of a question: splits share none, whatever the seeds and sizes.

For preferences there are pairs of worked answers, of which one has wrong steps.

"3 + 4 - 2 = ?"    chosen    "3 + 4 = 7 . 7 - 2 = 5 . #### 5"
                   rejected  "3 + 4 = 8 . 8 - 2 = 6 . #### 6"    a wrong result, from which it goes on
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from operator import add, and_
from typing import Any

from hybridflow.data.tasks.base import Split
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.randomness import derive_seed

NAME = "arithmetic_chain"
VALIDATION_SHARE = 8
"""One question in this many is held out."""

_ATTEMPTS = 1000
PREFERENCES = "arithmetic_preferences"
STEP_END = " . "
JUDGED = "{question} {response}"
"""What a judge of this task is asked."""
VERDICTS = ("0", "10")
CONVERSATIONS = ("right", "either", "verdict")


class ArithmeticChain:
    """`hops` operations on whole numbers 0..`max_number`; no result is negative, or above `max_total`.

    Validation questions are all different; training questions are drawn independently and may repeat.
    """

    def __init__(
        self, *, seed: int = 0, hops: int = 3, max_number: int = 9, max_total: int | None = None
    ) -> None:
        if hops < 1 or max_number < 1:
            raise ConfigError(
                f"data.task.options: got hops={hops} and max_number={max_number}, wanted at least 1 of each"
            )
        if max_total is not None and max_total < max_number:
            raise ConfigError(
                f"data.task.options: max_total={max_total} is less than max_number={max_number}"
            )
        self.seed = seed
        self.hops = hops
        self.max_number = max_number
        self.max_total = max_total or max_number * (hops + 1)  # the largest sum there can be

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]:
        """Make `size` rows of one split; the first rows are the same for every size.

        Raises DataError where the split has fewer different questions than are asked for.
        """
        seen: set[str] = set()
        rows = []
        for index in range(size):
            terms = self._draw(split, index, seen)
            if terms is None:
                raise DataError(
                    f"arithmetic_chain with hops={self.hops}, max_number={self.max_number} has about {index} "
                    f"different {split} questions, {size} were asked for: lower data.task.val_size or raise "
                    "hops"
                )
            if split == "validation":
                seen.add(question(terms))
            rows.append(self.row_of(terms, split, index))
        return rows

    def row_of(self, terms: list[int], split: Split, index: int) -> dict[str, Any]:
        """Return the row of a question."""
        user = {"role": "user", "content": question(terms)}
        return {
            "data_source": NAME,
            "prompt": [user],
            "messages": [user, {"role": "assistant", "content": worked_answer(terms)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(sum(terms))},
            "extra_info": {"index": index, "split": split},
        }

    def _draw(self, split: Split, index: int, taken: set[str]) -> list[int] | None:
        """Signed terms of a question of `split` that is not in `taken`; None where many draws find none."""
        stream = random.Random(derive_seed(self.seed, f"{NAME}/{split}", index))
        for _ in range(_ATTEMPTS):
            terms = [stream.randint(0, self.max_number)]
            for _ in range(self.hops):
                value = sum(terms)
                minus = stream.random() < 0.5
                number = stream.randint(0, min(self.max_number, value if minus else self.max_total - value))
                terms.append(-number if minus and number else number)
            text = question(terms)
            if split_of(text) == split and text not in taken:
                return terms
        return None


def question(terms: list[int]) -> str:
    """Return the text of a question: `[3, 4, -2, 5]` is "3 + 4 - 2 + 5 = ?"."""
    return " ".join([str(terms[0]), *(f"{sign(term)} {abs(term)}" for term in terms[1:]), "= ?"])


def sign(term: int) -> str:
    """Return the operator that a term is written with."""
    if term < 0:
        return "-"
    return "+"


def worked_answer(terms: list[int], off_by: Sequence[int] = ()) -> str:
    """Return the steps and the result: "3 + 4 = 7 . 7 - 2 = 5 . 5 + 5 = 10 . #### 10".

    With `off_by`, the result of each step is so much too high, and the next step goes on from there.
    """
    steps = ""
    value = terms[0]
    for term, off in zip(terms[1:], off_by or [0] * len(terms[1:]), strict=True):
        result = value + term + off
        steps += f"{value} {sign(term)} {abs(term)} = {result} . "
        value = result
    return f"{steps}#### {value}"


def split_of(text: str) -> Split:
    """Return the split that a question belongs to, by its text alone."""
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    return "validation" if number % VALIDATION_SHARE == 0 else "train"


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
        stream = random.Random(derive_seed(self.seed, f"{PREFERENCES}/{split}", index))
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
            "data_source": PREFERENCES,
            "chosen": answers[0],
            "rejected": answers[1],
            "completions": steps,
            "labels": list(accumulate(as_wanted, and_)),
        }
