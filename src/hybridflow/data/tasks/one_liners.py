"""Functions of one line from a description, checked by test cases that the model does not see.

    "plus 3 times 12"  ──answer──►  "def f(x): return (x + 3) * 12"

A hash of its description decides the split of a question, as for arithmetic chains.
"""

from __future__ import annotations

import json
import random
from typing import Any

from hybridflow.data.tasks.arithmetic_chain import split_of
from hybridflow.data.tasks.base import Split
from hybridflow.errors import ConfigError
from hybridflow.protocol.randomness import derive_seed

NAME = "one_liners"
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
BEGIN = "def f(x): return "
NUM_CASES = 4

Terms = list[tuple[str, int]]
"""Operations in the order in which they are applied to x: a word of OPERATORS, and a number."""


class OneLiners:
    """Two operations with numbers 2..`max_number`. Of the answers, a share `right` is right; in each
    other one number is drawn again, and may be the same, so that a warm-up teaches the form and not the whole
    task.

    With `shuffled`, the test cases of training questions are those of other questions: the control.
    """

    def __init__(
        self, *, seed: int = 0, max_number: int = 15, right: float = 1.0, shuffled: bool = False
    ) -> None:
        if max_number < 2 or not 0.0 <= right <= 1.0:
            raise ConfigError(
                f"data.task.options: got max_number={max_number} and right={right}, wanted at least 2, and a "
                "share from 0 to 1"
            )
        self.seed = seed
        self.max_number = max_number
        self.right = right
        self.shuffled = shuffled

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]:
        """Make `size` rows of one split; questions may repeat."""
        return [self._row(split, index) for index in range(size)]

    def _row(self, split: Split, index: int) -> dict[str, Any]:
        stream = random.Random(derive_seed(self.seed, f"{NAME}/{split}", index))
        terms = self._draw(stream)
        while split_of(question(terms)) != split:
            terms = self._draw(stream)
        shown = list(terms)
        if stream.random() >= self.right:
            place = stream.randrange(len(shown))
            shown[place] = (shown[place][0], stream.randint(2, self.max_number))
        checked = terms
        if self.shuffled and split == "train":
            checked = self._draw(stream)
        user = {"role": "user", "content": question(terms)}
        return {
            "data_source": "code",
            "prompt": [user],
            "messages": [user, {"role": "assistant", "content": BEGIN + expression(shown)}],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": test_cases(checked, stream)},
            "extra_info": {"index": index, "split": split},
        }

    def _draw(self, stream: random.Random) -> Terms:
        return [(stream.choice(list(OPERATORS)), stream.randint(2, self.max_number)) for _ in range(2)]


def question(terms: Terms) -> str:
    """Return the description: "plus 3 times 12"."""
    return " ".join(f"{word} {number}" for word, number in terms)


def expression(terms: Terms) -> str:
    """Return the Python expression of a description: "(x + 3) * 12"."""
    text = "x"
    for word, number in terms:
        if word == "times" and " " in text:
            text = f"({text})"
        text = f"{text} {OPERATORS[word]} {number}"
    return text


def test_cases(terms: Terms, stream: random.Random) -> str:
    """Return calls of f and what they return, as JSON in the form of the reward `code`."""
    inputs = stream.sample(range(-20, 21), NUM_CASES)
    outputs = []
    for value in inputs:
        for word, number in terms:
            value = {"plus": value + number, "minus": value - number, "times": value * number}[word]
        outputs.append(value)
    return json.dumps({"fn_name": "f", "inputs": [[value] for value in inputs], "outputs": outputs})
