"""The value of a key that could not be read: whatever asks for it is not looked at, and all else is.

A value of a wrong type, or a key whose name is nearly that of another, leaves open what the user means. What
follows from such a key is left open too, so no line blames a default that the user did not choose.
"""

from __future__ import annotations

from typing import Any, NoReturn


class WrongKeyRead(Exception):
    """Something depends on a key that has no usable value."""


class Wrong:
    """Stands for the value of a wrong key: any use of it raises WrongKeyRead."""

    def __getattr__(self, name: str) -> NoReturn:
        raise WrongKeyRead

    def __copy__(self) -> Wrong:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrong:
        return self


def _raises(self: Wrong, *arguments: object) -> NoReturn:
    raise WrongKeyRead


for _name in (
    *("bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "iter", "len", "contains", "getitem", "call"),
    *("str", "repr", "format", "int", "float", "index", "fspath", "neg", "add", "radd", "sub", "rsub"),
    *("mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "or", "ror"),
):
    setattr(Wrong, f"__{_name}__", _raises)

WRONG = Wrong()
