"""A text adventure of two rooms: find the key, open the door, get out.

"You are in the cellar. A key is here. Exits: north." ──► "take key" ──► "Taken." ──► … ──► reward 1
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from hybridflow.environments.base import Environment, Step
from hybridflow.errors import ConfigError

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


class Adventure(Environment):
    """A cellar and a hall, with a key in one of them and a locked door in the hall; commands are two words.

    The reward is 1 for getting out within `moves` commands, and 0 otherwise. Metrics: `num_moves`, and
    `escaped` (0 or 1).
    """

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
