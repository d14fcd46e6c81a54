"""Numbers of tensors (`bit_sum`): which are computed anew, and what is said where two are not the same."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

Take = Callable[[str, Callable[[], Tensor]], Tensor]
"""(name of a tensor, how its number is computed) -> its number."""


def anew(name: str, compute: Callable[[], Tensor]) -> Tensor:
    """The rule that computes each number when it is asked for."""
    return compute()


class Remembered:
    """Numbers of tensors that nothing should write, such as the base under adapters: remembered, and yet held
    to.

    At each push one of `turns` parts of them is computed again, so a frozen tensor that was written all the
    same is found within as many pushes. Tensors in `written` are computed each time.
    """

    def __init__(self, *, turns: int = 16) -> None:
        self.turns = turns
        self._known: dict[str, Tensor] = {}
        self._places: dict[str, int] = {}

    def at(self, push: int, written: Collection[str]) -> Take:
        """The rule for push number `push`."""

        def take(name: str, compute: Callable[[], Tensor]) -> Tensor:
            if name in written:
                self._known.pop(name, None)
                return compute()
            place = self._places.setdefault(name, len(self._places))
            if name not in self._known or (push - place) % self.turns == 0:
                self._known[name] = compute()
            return self._known[name]

        return take


def first_difference(sent: Tensor, arrived: Tensor) -> int:
    """Index of the first number [n] int64 that is not the same in both; n where all are."""
    wrong = (sent != arrived).nonzero()
    return int(wrong[0]) if len(wrong) else len(sent)


def explain_difference(name: str, sent: Tensor, arrived: Tensor, *, version: int) -> str:
    """What an error says of a weight whose number on this rank may be another than the trainer's (it is on
    some rank).
    """
    here = "differs on another rank" if int(sent) == int(arrived) else f"is {int(arrived) % 2**64:016x}"
    return (
        f"weights of version {version} did not arrive as the trainer holds them: the first that differs is "
        f"{name}, whose checksum there is "
        f"{int(sent) % 2**64:016x} and here {here}. Nothing was generated with them"
    )
