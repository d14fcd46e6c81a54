"""Checksums of weights: when they are computed again, and the message where two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

Take = Callable[[str, Callable[[], Tensor]], Tensor]
"""(name of a tensor, function that computes its checksum) -> its checksum."""
TURNS = 16


def anew(name: str, compute: Callable[[], Tensor]) -> Tensor:
    """Compute a checksum each time it is asked for."""
    return compute()


class Remembered:
    """Remembered checksums of tensors that nothing should write, such as the base under adapters.

    At each push one of `TURNS` parts of them is computed again, so that a frozen tensor that was written by
    mistake is found within as many pushes. Tensors in `written` are computed each time.
    """

    def __init__(self) -> None:
        self._known: dict[str, Tensor] = {}
        self._places: dict[str, int] = {}

    def at(self, push: int, written: Collection[str]) -> Take:
        """Return the function that gives checksums at push number `push`."""

        def take(name: str, compute: Callable[[], Tensor]) -> Tensor:
            if name in written:
                self._known.pop(name, None)
                return compute()
            place = self._places.setdefault(name, len(self._places))
            if name not in self._known or (push - place) % TURNS == 0:
                self._known[name] = compute()
            return self._known[name]

        return take


def first_difference(sent: Tensor, arrived: Tensor) -> int:
    """Return the index of the first of n checksums, [n] int64, that differs; n where all are equal."""
    wrong = (sent != arrived).nonzero()
    return int(min(wrong, default=len(sent)))


def explain_difference(name: str, sent: Tensor, arrived: Tensor, *, version: int) -> str:
    """Return the message for a weight that arrived otherwise than sent, on this rank or another."""
    here = f"is {int(arrived) % 2**64:016x}"
    if int(sent) == int(arrived):
        here = "differs on another rank"
    return (
        f"weights of version {version} did not arrive as the trainer holds them: the first that differs is "
        f"{name}, whose checksum there is {int(sent) % 2**64:016x} and here {here}. Nothing was generated "
        "with them"
    )
