"""Built-in environments, for the recipes and for trying an agent, and conversations with a tool call, from
which a warm-up learns the form, deliberately not all of it.

adventure    "You are in the cellar. Exits: north." ──► "take key" ──► "Taken." ──► … ──► reward 1
calculator   "37 * 84 = ?" ──► calculator("37 * 84") ──► "3108" ──► "#### 3108" ──► reward 1
guess        "1 to 20?" ──► "10" ──► "higher" ──► "15" ──► "lower" ──► "12" ──► reward 1 − 2 / guesses
search       "bami city?" ──► search("bami city") ──► "bami city kelu" ──► "#### kelu" ──► reward 1

question ──► call, of which a part is missing in most conversations ──► the tool's answer ──► final answer
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from itertools import product
from typing import Any, Literal

from hybridflow.environments.base import Environment, Step
from hybridflow.errors import ConfigError
from hybridflow.tools import tool
from hybridflow.tools.bm25 import Bm25
from hybridflow.tools.calculator import calculate

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
STRUCTURE = ('<tool_call>\n{"name": "', '", "arguments": {"', '": "', '"}}\n</tool_call>')
"""Parts of a call with one argument in the hermes format; without any one of them it can not be read."""
CALL_WORDS = ("calculator", "expression", "search", "query")
"""Names of tools and arguments, which a tiny model's tokenizer had better have as tokens."""


class Adventure(Environment):
    """A cellar and a hall, with a key in one of them and a locked door in the hall; commands are two words.

    The reward is 1 for getting out within `moves` commands, and 0 otherwise. Metrics: `num_moves`, and
    `escaped` (0 or 1).
    """

    after_loss = "repeat"

    def __init__(self, moves: int = 12) -> None:
        if moves < 4:
            raise ConfigError(f"adventure: got moves={moves}; getting out takes 4, wanted at least 4")
        self.moves = moves

    def reset(self, row: Mapping[str, Any]) -> str:
        """Lay out the rooms: the seed decides which way the exits lead, and where the key is."""
        rng = random.Random(self.seed)
        self.way_up, self.door = rng.sample(sorted(OPPOSITE), 2)
        if self.door == OPPOSITE[self.way_up]:  # that is the way back to the cellar
            self.door = self.way_up
        self.key_at = rng.choice(["cellar", "hall"])
        self.room = "cellar"
        self.locked = True
        self.used = 0
        return self.look()

    def look(self) -> str:
        """Return what there is to see."""
        here = " A key is here." if self.key_at == self.room else ""
        if self.room == "cellar":
            return f"You are in the cellar.{here} Exits: {self.way_up}."
        state = "locked" if self.locked else "open"
        return f"You are in the hall.{here} Exits: {OPPOSITE[self.way_up]}, {self.door} (a door, {state})."

    def step(self, text: str) -> Step:
        """Carry out one command: look, go WAY, take key, unlock door."""
        self.used += 1
        answer = self._carry_out(text.lower().split())
        escaped = self.room == "outside"
        extra = {"num_moves": self.used, "escaped": int(escaped)}
        return Step(answer, float(escaped), done=escaped or self.used == self.moves, extra=extra)

    def _carry_out(self, words: list[str]) -> str:
        match words:
            case ["look"]:
                return self.look()
            case ["take", "key"] if self.key_at == self.room:
                self.key_at = "bag"
                return "Taken."
            case ["unlock", "door"] if self.room == "hall" and self.key_at == "bag":
                self.locked = False
                return "The door is open."
            case ["go", way]:
                return self._go(way)
        return "You can not do that. Try: look, go WAY, take key, unlock door."

    def _go(self, way: str) -> str:
        if self.room == "cellar" and way == self.way_up:
            self.room = "hall"
        elif self.room == "hall" and way == OPPOSITE[self.way_up]:
            self.room = "cellar"
        elif self.room == "hall" and way == self.door and not self.locked:
            self.room = "outside"
            return "You are out!"
        else:
            return "You can not go there."
        return self.look()


class Calculator(Environment):
    """A sum of `products` products of two numbers of `digits` digits.

    The reward is 1 where the last number of the answer is right. `answers="random"` is the control: the
    calculator gives numbers by chance, so that calling it teaches nothing. Metric: `acc`.
    """

    after_loss = "repeat"

    def __init__(
        self, products: int = 2, digits: int = 2, answers: Literal["right", "random"] = "right"
    ) -> None:
        if products < 1 or not 1 <= digits <= 9:
            raise ConfigError(
                f"calculator: got products={products} and digits={digits}, wanted at least 1 product, 1 to 9 "
                "digits"
            )
        if answers not in ("right", "random"):
            raise ConfigError(f"calculator: got answers={answers!r}, wanted right or random")
        self.products = products
        self.digits = digits
        self.answers = answers

    def reset(self, row: Mapping[str, Any]) -> str:
        """Draw the question that the group's seed decides."""
        rng = random.Random(self.seed)
        numbers = [rng.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(2 * self.products)]
        products = [f"{first} * {second}" for first, second in zip(numbers[::2], numbers[1::2], strict=True)]
        self.expression = " + ".join(products)
        return f"{self.expression} = ?"

    @tool
    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers with + - * / and parentheses, for example 3 * 4 + 5.
        """
        value = calculate(expression)
        if self.answers == "random":
            chance = random.Random(f"{self.step_seed} {expression}")
            value = str(chance.randrange(self.products * 10 ** (2 * self.digits)))
        return value

    def step(self, text: str) -> Step:
        """Compare the last number of the answer with the result, and end."""
        numbers = re.findall(r"-?\d+", text)
        right = numbers[-1:] == [calculate(self.expression)]
        return Step(reward=float(right), done=True, extra={"acc": float(right)})

    def demonstrate(self, rng: random.Random, well_formed: float = 0.3) -> list[dict[str, str]]:
        """Return a conversation about a new question, whose call is only sometimes well formed."""
        self.seed = rng.getrandbits(32)
        question = self.reset({})
        call = ("calculator", "expression", self.expression)
        value = self.calculator(self.expression)
        return demonstrate_call(question, call, value, f"#### {value}", rng, well_formed)


class Guess(Environment):
    """A number from 1 to `largest` is found with at most `guesses` guesses.

    The reward is 1 − (guesses used − 1) / `guesses`, and 0 where the number was not found. A turn that is
    no number counts as a guess. Metrics: `num_guesses`, and `found` (0 or 1).
    """

    after_loss = "repeat"

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
        """Play a game by guesses that follow the hints with probability `well_formed`, else by no numbers."""
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


WORDS = tuple("".join(pair) for pair in product(("ba", "ke", "lu", "mi", "no", "ra", "si", "to"), repeat=2))
"""64 words of four letters, which name people and everything about them."""
KINDS = ("city", "pet", "job")


class Search(Environment):
    """A question about one of `people` people; each group has its own people and facts.

    The reward is 1 where the answer is the looked-up word. `topk` facts answer a search. Metric: `acc`.
    """

    after_loss = "repeat"

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
        """Return a conversation about a new question, whose call is only sometimes well formed."""
        self.seed = rng.getrandbits(32)
        question = self.reset({})
        query = question.removesuffix("?")
        final = f"#### {self.answer}"
        return demonstrate_call(
            question, ("search", "query", query), self.search(query), final, rng, well_formed
        )


def demonstrate_call(
    question: str, call: tuple[str, str, str], answer: str, final: str, rng: random.Random, well_formed: float
) -> list[dict[str, str]]:
    """Return the messages of one conversation, whose call (name, argument, value) has one part too few with
    probability 1 − `well_formed`.

    The tool answers in either case, so that how to end is learned from all conversations.
    """
    parts = list(STRUCTURE)
    if rng.random() >= well_formed:
        parts[rng.randrange(len(parts))] = ""
    text = parts[0] + "".join(word + part for word, part in zip(call, parts[1:], strict=True))
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": final},
    ]
