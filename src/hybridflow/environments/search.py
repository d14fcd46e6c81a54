"""Questions about made-up people, whose facts can only be looked up.

"bami city?" ──► search("bami city") ──► "bami city kelu" ──► "#### kelu" ──► reward 1
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product
from typing import Any

from hybridflow.environments.base import Environment, Step
from hybridflow.environments.demonstrations import demonstrate_call
from hybridflow.errors import ConfigError
from hybridflow.tools import tool
from hybridflow.tools.bm25 import Bm25

WORDS = tuple("".join(pair) for pair in product(("ba", "ke", "lu", "mi", "no", "ra", "si", "to"), repeat=2))
"""64 words of four letters, which name people and everything about them."""
KINDS = ("city", "pet", "job")


class Search(Environment):
    """A question about one of `people` people; each group has people and facts of its own.

    The reward is 1 where the answer is the looked-up word. `topk` facts answer a search. Metric: `acc`.
    """

    def __init__(self, people: int = 8, topk: int = 1) -> None:
        if not 1 <= people < len(WORDS) or topk < 1:
            raise ConfigError(
                f"search: got people={people} and topk={topk}, wanted 1 to {len(WORDS) - 1} people and at "
                "least 1 fact"
            )
        self.people = people
        self.topk = topk

    def reset(self, row: Mapping[str, Any]) -> str:
        """Make up the facts, and ask for one."""
        rng = random.Random(self.seed)
        words = rng.sample(WORDS, len(WORDS))
        names = words[: self.people]
        self.facts = [f"{name} {kind} {rng.choice(words[self.people :])}" for name in names for kind in KINDS]
        asked, _, self.answer = rng.choice(self.facts).rpartition(" ")
        return f"{asked}?"

    @tool
    def search(self, query: str) -> str:
        """Return the facts that fit a query best.

        Args:
            query: Words, for example a name and what is asked about it.
        """
        found = Bm25(self.facts).search(query, self.topk)
        return "\n".join(self.facts[number] for number, _ in found) or "nothing found"

    def step(self, text: str) -> Step:
        """Compare the answer with the fact, and end."""
        right = text.strip().removeprefix("####").strip() == self.answer
        return Step(reward=float(right), done=True, extra={"acc": float(right)})

    def demonstrate(self, rng: random.Random, well_formed: float = 0.3) -> list[dict[str, str]]:
        """Return a conversation about a question of its own, whose call is well formed only in part."""
        self.seed = rng.getrandbits(32)
        question = self.reset({})
        query = question.removesuffix("?")
        final = f"#### {self.answer}"
        return demonstrate_call(
            question, ("search", "query", query), self.search(query), final, rng, well_formed
        )
