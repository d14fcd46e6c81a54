"""Pictures with squares of several colours: how many of them are red?

    4 × 4 places, some of them with a square ──draw──► picture of 16 × 16 pixels, and "red ?" ──► "3"

Every answer is about as frequent. A hash of the colours decides the split of a picture: splits share none.
With `shuffled`, the control, each picture of training comes with the answer of another.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from PIL import Image

from hybridflow.data.tasks.base import Split
from hybridflow.errors import ConfigError
from hybridflow.protocol.randomness import derive_seed

NAME = "red_squares"
QUESTION = "<image>red ?"
COLOURS = {0: (255, 255, 255), 1: (220, 30, 30), 2: (30, 60, 220), 3: (30, 160, 60), 4: (240, 200, 40)}
"""Colours of a place: 0 is the empty one, 1 is red."""
RED = 1
VALIDATION_SHARE = 8
"""One picture in this many is held out."""


class RedSquares:
    """Pictures of `side` × `side` places with 0 to `most` red squares, and others beside them."""

    def __init__(
        self, *, seed: int = 0, side: int = 4, pixels: int = 4, most: int = 6, shuffled: bool = False
    ) -> None:
        if side < 1 or pixels < 1 or not 1 <= most <= min(9, side * side):
            raise ConfigError(
                f"data.task.options: got side={side}, pixels={pixels} and most={most}, wanted at least 1 of "
                "each, and most at most 9 and at most side × side"
            )
        self.seed = seed
        self.side = side
        self.pixels = pixels
        self.most = most
        self.shuffled = shuffled

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]:
        """Make `size` rows of one split; the first rows are the same for every size."""
        return [self._row(split, index) for index in range(size)]

    def _row(self, split: Split, index: int) -> dict[str, Any]:
        colours = self._draw(split, index, "picture")
        counted = colours
        if self.shuffled and split == "train":
            counted = self._draw(split, index, "answer")
        count = str(counted.count(RED))
        user = {"role": "user", "content": QUESTION}
        return {
            "data_source": NAME,
            "prompt": [user],
            "messages": [user, {"role": "assistant", "content": count}],
            "images": [{"bytes": self.draw(colours)}],
            "ability": "counting",
            "reward_model": {"style": "rule", "ground_truth": count},
            "extra_info": {"index": index, "split": split},
        }

    def draw(self, colours: Sequence[int]) -> bytes:
        """Return the picture of places with these colours, row by row, as PNG."""
        picture = Image.new("RGB", (self.side, self.side))
        picture.putdata([COLOURS[colour] for colour in colours])
        edge = self.side * self.pixels
        file = io.BytesIO()
        picture.resize((edge, edge), Image.Resampling.NEAREST).save(file, "PNG")
        return file.getvalue()

    def _draw(self, split: Split, index: int, use: str) -> list[int]:
        """Return the colours of a picture that belongs to `split`."""
        stream = random.Random(derive_seed(self.seed, f"{NAME}/{split}/{use}", index))
        while True:
            colours = [stream.choice((0, 0, 2, 3, 4)) for _ in range(self.side**2)]
            for place in stream.sample(range(len(colours)), stream.randint(0, self.most)):
                colours[place] = RED
            if split_of(colours) == split:
                return colours


def split_of(colours: Sequence[int]) -> Split:
    """Return the split that a picture belongs to, by its colours alone."""
    number = int.from_bytes(blake2b(bytes(colours), digest_size=8).digest(), "little")
    if number % VALIDATION_SHARE == 0:
        return "validation"
    return "train"
