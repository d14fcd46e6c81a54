"""The process of a solution that computes what the process of the tests asks for, one request after another.

File descriptor 3 is a socket to the process of the tests. A message is a line of JSON: first {code, imports,
operators}, then requests, each of which gets one answer. What the tests give comes as a pickle, for they are
trusted here; what goes out is data (`encoding.py`), or a number in place of an object that is none.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import sys
import traceback
import types
from typing import Any

from hybridflow.rewards.apart.encoding import encode, load

MUTABLE = (list, dict, set, bytearray)
MAX_PRINTED = 1 << 20
"""Bytes that a request's answer has of what was printed meanwhile."""


class Solution:
    """The names of a solution, and the objects that the tests know by a number."""

    def __init__(self) -> None:
        self.reading = os.fdopen(os.dup(3), "rb")
        self.writing = os.fdopen(os.dup(3), "wb")
        first = self.receive()
        self.operators: list[str] = first["operators"]
        self.objects: dict[int, Any] = {}
        self.printed = io.BytesIO()
        sys.stdout = io.TextIOWrapper(self.printed, "utf-8", "backslashreplace", write_through=True)
        try:
            self.names = load(first["code"], first["imports"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def receive(self) -> dict[str, Any]:
        """Return the next message of the tests; where they are done, the process ends."""
        line = self.reading.readline()
        if not line:
            os._exit(0)
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, message: dict[str, Any]) -> None:
        self.writing.write(json.dumps(message).encode() + b"\n")
        self.writing.flush()

    def answer(self, request: dict[str, Any]) -> None:
        """Compute the answer to a request, and send it."""
        try:
            reply = self.reply(request)
        except BaseException as error:
            reply = {"raised": self.of_error(error)}
        reply["printed"] = self.printed.getvalue()[:MAX_PRINTED].decode(errors="replace")
        self.printed.seek(0)
        self.printed.truncate()
        self.send(reply)

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        what = request["what"]
        positional, named = _Unpickler(self, request).load()
        if what == "name":
            (name,) = positional
            if name not in self.names:
                raise NameError(f"name {name!r} is not defined")
            return {"value": self.encoded(self.names[name])}
        target = self.objects[request["of"]]
        if what == "__call__":
            return self.called(target, positional, named, own=request["own"])
        if what == "data":
            value = target
        elif what == "await":
            import asyncio  # here, because it takes longer than most calls

            value = asyncio.run(target)
        elif what in ("getattr", "setattr"):
            value = {"getattr": getattr, "setattr": setattr}[what](target, *positional)
        else:
            value = getattr(type(target), what)(target, *positional)
            if value is NotImplemented:
                return {"refused": True}
        return {"value": self.encoded(value)}

    def called(self, target: Any, positional: Any, named: Any, *, own: bool) -> dict[str, Any]:
        """Call something. What the tests take for an object of the solution's class is not made data."""
        given = [each for each in (*positional, *named.values()) if type(each) in MUTABLE]
        before = [self.encoded(each) for each in given]
        value = target(*positional, **named)
        if own and type(value).__module__ == "solution":
            return {"value": self.of_object(value)}
        reply = {"value": self.encoded(value)}
        if value is None:
            after = [self.encoded(each) for each in given]
            reply["changed"] = [[new] if new != old else [] for new, old in zip(after, before)]
        return reply

    def encoded(self, value: Any) -> Any:
        return encode(value, self.of_object)

    def of_object(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": _ancestors(value)}
        self.objects[id(value)] = value
        kind = type(value)
        if kind is types.CoroutineType:
            return {"coroutine": id(value)}
        has = [name for name in self.operators if hasattr(kind, name)]
        return {"object": [id(value), kind.__module__, kind.__qualname__, has]}

    def of_error(self, error: BaseException) -> Any:
        fields: dict[str, Any] = {"ancestors": _ancestors(type(error)), "arguments": [], "text": ""}
        try:
            fields["arguments"] = [self.encoded(each) for each in error.args]
            fields["state"] = {str(name): self.encoded(each) for name, each in vars(error).items()}
            fields["text"] = str(error)
            json.dumps(fields)
        except BaseException:
            return {"ancestors": fields["ancestors"], "arguments": [], "state": {}, "text": ""}
        return fields


def _ancestors(kind: type) -> list[list[str]]:
    return [[each.__module__, each.__qualname__] for each in kind.__mro__]


class _Unpickler(pickle.Unpickler):
    """Reads what the tests give: objects of the solution, and functions and classes of the tests."""

    def __init__(self, solution: Solution, request: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(base64.b64decode(request["arguments"])))
        self.solution = solution
        self.classes = request["classes"]

    def persistent_load(self, what: tuple[str, int]) -> Any:
        kind, number = what
        if kind == "object":
            return self.solution.objects[number]
        function = _of_tests(self.solution, number)
        if kind == "iterator":
            return _Iterator(function)
        return function

    def find_class(self, module: str, name: str) -> Any:
        if module != "tests":
            return super().find_class(module, name)
        names = self.solution.names
        for each, text in self.classes.items():
            if each not in names:
                exec(compile(text, "tests.py", "exec", dont_inherit=True), names)
                names[each].__module__ = "tests"
        return names[name]


class _Iterator:
    """An iterator of the tests."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self.step()


def _of_tests(solution: Solution, number: int) -> Any:

    def function(*positional: Any, **named: Any) -> Any:
        arguments = [solution.encoded(each) for each in positional]
        by_name = {name: solution.encoded(each) for name, each in named.items()}
        solution.send({"callback": number, "arguments": arguments, "named": by_name})
        while True:  # the function may ask for more of the solution before it returns
            message = solution.receive()
            if "threw" in message:
                name, text = message["threw"]
                raise getattr(__import__("builtins"), name)(text)
            if "returned" in message:
                return _Unpickler(solution, message["returned"]).load()
            solution.answer(message)

    return function


def main() -> None:
    """Answer until the tests are done, which ends the process."""
    solution = Solution()
    while True:
        solution.answer(solution.receive())
