"""Guess the number: "higher" and "lower" lead to it, and the reward falls with every guess.

"1 to 20?" ──► "10" ──► "higher" ──► "15" ──► "lower" ──► "12" ──► reward 1 − 2 / guesses
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from hybridflow.environments.base import Environment, Step
from hybridflow.errors import ConfigError


class Guess(Environment):
    """A number from 1 to `largest` is found with at most `guesses` guesses.

    The reward is 1 − (guesses used − 1) / `guesses`, and 0 where the number was not found. A turn that is
    no number counts as a guess. Metrics: `num_guesses`, and `found` (0 or 1).
    """

    def __init__(self, largest: int = 20, guesses: int = 8) -> None:
        if largest < 1 or guesses < 1:
            raise ConfigError(f"guess: got largest={largest} and guesses={guesses}, wanted at least 1")
        self.largest = largest
        self.guesses = guesses

    def reset(self, row: Mapping[str, Any]) -> str:
        """Think of a number, which the group shares."""
        self.number = random.Random(self.seed).randint(1, self.largest)
        self.used = 0
        return f"1 to {self.largest}?"

    def step(self, text: str) -> Step:
        """Compare a guess with the number."""
        self.used += 1
        found = re.fullmatch(r"\s*(\d{1,9})\s*", text)
        if found and int(found[1]) == self.number:
            reward = 1 - (self.used - 1) / self.guesses
            return Step("right", reward, done=True, extra={"num_guesses": self.used, "found": 1})
        hint = "a number"
        if found:
            hint = "higher" if int(found[1]) < self.number else "lower"
        done = self.used == self.guesses
        return Step(hint, done=done, extra={"num_guesses": self.used, "found": 0})

    def demonstrate(self, rng: random.Random, well_formed: float = 0.3) -> list[dict[str, str]]:
        """Play a game: by guesses that heed the hints with probability `well_formed`, else by no numbers."""
        self.seed = rng.getrandbits(32)
        messages = [{"role": "user", "content": self.reset({})}]
        knows_how = rng.random() < well_formed
        low = 1
        high = self.largest
        while True:
            guess = rng.randint(low, high)
            text = str(guess)
            if not knows_how:
                text = rng.choice(["what", f"{guess}?", f"{guess} {guess}"])
            messages.append({"role": "assistant", "content": text})
            answer = self.step(text)
            if answer.done:
                return messages
            if answer.observation == "higher":
                low = guess + 1
            elif answer.observation == "lower":
                high = guess - 1
            messages.append({"role": "user", "content": str(answer.observation)})
