"""The process of the tests: statements and asserts in their order, with the interpreter's own built-ins.

Nothing of the solution runs here. A name that the tests do not define is the solution's: a call of it,
or any other access, goes over file descriptor 3 to the process of the solution (`solution.py`),
and a value comes back as data. What is no data is a `Handle` here. It forwards accesses, but never equals
a plain value: a comparison with one is made here, and is false.

The request on standard input is {solution, imports, modules, steps, names, of_solution, classes, mark}; each
step is {code, case, asserts}. A line for each case, the mark and 1 or 0, says whether it has passed; one with
`asserts` has not, unless it has called `__asserts__`.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import ctypes
import importlib
import io
import json
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hybridflow.rewards.apart.decoding import PLAIN, decode, dict_of

PR_SET_DUMPABLE = 4
MAX_LINE = 1 << 26
BARE = "__len__ __iter__ __next__ __reversed__ __getitem__ __setitem__ __delitem__ __enter__"
BARE += " __instancecheck__ __subclasscheck__"
"""Operators that compare nothing: what they return is data, or an object again."""
OF_NUMBERS = "__bool__ __int__ __float__ __index__ __complex__ __abs__ __neg__ __pos__ __invert__ __round__"
OF_NUMBERS += " __floor__ __ceil__ __trunc__"
BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
ORDER = ("__lt__", "__le__", "__gt__", "__ge__")
OPERANDS = ("built", "derived", "mixed")
"""Standings of what may be compared with another object by the solution's own operators."""
OF_FUNCTIONS = ("__name__", "__qualname__", "__annotations__", "__dict__", "__wrapped__")
COMPARING = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint", "equals")
"""Methods of values that compare themselves with what they are given: of what a call has returned, they get
objects of the solution only.
"""
STOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
"""What would end an iteration of the tests in which the solution is called, as if all had gone well."""


@dataclass
class ObjectFacts:
    """Facts about an object of the solution.

    `standing` is `built` for what the tests have made by calling a class, whose name has a capital;
    `derived` for what an operator of such objects returns; `mixed` where its other operand was a plain
    value; `comparing` for some methods of values; and `returned` for all else.
    """

    number: int
    module: str
    kind: str
    standing: str = "returned"
    name: str = ""
    made_by: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
    """The class and the arguments of what is built."""


class Handle:
    """An object in the process of the solution."""

    __slots__ = ("_facts_of_handle",)
    _facts_of_handle: ObjectFacts

    def __init__(self, facts: ObjectFacts) -> None:
        object.__setattr__(self, "_facts_of_handle", facts)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return peer.class_of(self._facts_of_handle)

    def __getattr__(self, name: str) -> Any:
        facts = self._facts_of_handle
        if name.startswith("__") and name not in OF_FUNCTIONS:
            raise AttributeError(name)
        value = peer.ask("getattr", facts, (name,))
        if name in COMPARING and facts.standing == "returned" and is_handle(value):
            return peer.with_standing(value, "comparing")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        peer.ask("setattr", self._facts_of_handle, (name, value))

    def __str__(self) -> str:
        return str(peer.ask("__str__", self._facts_of_handle))

    def __repr__(self) -> str:
        return str(peer.ask("__repr__", self._facts_of_handle))

    def __format__(self, form: str) -> str:
        return str(peer.ask("__format__", self._facts_of_handle, (form,)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an object of the solution cannot be copied by the tests")

    def __hash__(self) -> int:
        return self._facts_of_handle.number

    def __eq__(self, other: object) -> bool:
        facts = self._facts_of_handle
        if is_handle(other):
            if facts.number == other._facts_of_handle.number:  # type: ignore[attr-defined]
                return True
            return _may_ask(self, other) and _is_equal(self, other) and _tells_apart(self, other)
        if facts.standing not in OPERANDS:
            return False
        value = peer.ask("data", facts)  # the class may extend a built-in one
        return not is_handle(value) and bool(value == other)

    def __ne__(self, other: object) -> bool:
        if is_handle(other) and _may_ask(self, other):
            return not _is_equal(self, other)
        return not self == other


def is_handle(value: object) -> bool:
    return issubclass(type(value), Handle)  # its __class__ says something else


def _may_ask(one: Any, other: Any) -> bool:
    return any(each._facts_of_handle.standing in OPERANDS for each in (one, other))


def _is_equal(one: Any, other: Any) -> bool:
    return peer.ask("__eq__", one._facts_of_handle, (other,)) is True


def _tells_apart(one: Any, other: Any) -> bool:
    """Return whether the solution's own == also says no: to the same object built of other arguments."""
    for fixed, built in ((one, other), (other, one)):
        if built._facts_of_handle.made_by is None:
            continue
        kind, positional, named = built._facts_of_handle.made_by
        for place in [*range(len(positional)), *named]:
            for changed in _changed(named[place] if isinstance(place, str) else positional[place]):
                arguments = list(positional)
                by_name = dict(named)
                if isinstance(place, str):
                    by_name[place] = changed
                else:
                    arguments[place] = changed
                try:
                    if not _is_equal(fixed, kind(*arguments, **by_name)):
                        return True
                except Exception:  # the class may refuse what was made up
                    continue
    return False


def _changed(value: Any) -> Iterator[Any]:
    kind = type(value)
    if kind is bool:
        yield not value
    elif kind in (int, float):
        yield from (value + 1, value + 1_000_003, -value - 1_000_003)
    elif kind is str:
        yield from (value + "x", "x" + value[:-1])
    elif kind in (list, tuple):
        yield kind((*value, 1))
        yield value[1:]
    elif kind is dict:
        yield {**value, "x": 1}


def _contains(self: Any, item: Any) -> bool:
    facts = self._facts_of_handle
    if facts.standing not in OPERANDS:
        return any(each is item or each == item for each in self)
    if peer.ask("__contains__", facts, (item,)) is not True:
        return False
    # what has everything in it has nothing
    return any(peer.ask("__contains__", facts, (each,)) is False for each in _changed(item))


def _call(self: Any, *positional: Any, **named: Any) -> Any:
    facts = self._facts_of_handle
    if facts.standing == "comparing" and not all(map(is_handle, positional)):
        raise TypeError("a plain value was wanted, whose method this is")
    is_class = facts.name[:1].isupper()
    value = peer.ask("__call__", facts, positional, named, own=is_class)
    if is_class and is_handle(value):
        return peer.with_standing(value, "built", (self, positional, named))
    return value


def _exit(self: Any, *error: Any) -> None:
    """End a `with`. What the solution returns suppresses no error of the tests."""
    peer.ask("__exit__", self._facts_of_handle, (*error[:2], None))


def _of_number(name: str) -> Callable[..., Any]:
    def operator(self: Any, *operands: Any) -> Any:
        facts = self._facts_of_handle
        if facts.standing == "mixed":  # it may be the difference to what is expected
            raise TypeError(f"{name} of what the solution's operators make of a plain value")
        return peer.ask(name, facts, operands)

    return operator


def _bare(name: str) -> Callable[..., Any]:
    def operator(self: Any, *operands: Any) -> Any:
        return peer.ask(name, self._facts_of_handle, operands)

    return operator


def _binary(name: str) -> Callable[..., Any]:
    def operator(self: Any, other: Any) -> Any:
        facts = self._facts_of_handle
        if is_handle(other):
            if not _may_ask(self, other):
                return NotImplemented
            mixed = "mixed" in (facts.standing, other._facts_of_handle.standing)
            value = peer.ask(name, facts, (other,))
        else:
            if facts.standing not in ("built", "mixed"):
                return NotImplemented
            mixed = True
            value = peer.ask(name, facts, (other,))
            if not is_handle(value) and value is not NotImplemented:
                raise TypeError(f"{name} with a plain value made another one")
        if is_handle(value):
            return peer.with_standing(value, "mixed" if mixed else "derived")
        return value

    return operator


def _order(name: str) -> Callable[..., Any]:
    def operator(self: Any, other: Any) -> Any:
        if not is_handle(other) or not _may_ask(self, other):
            return NotImplemented
        return peer.ask(name, self._facts_of_handle, (other,))

    return operator


OPERATORS = {name: _bare(name) for name in BARE.split()}
OPERATORS |= {name: _of_number(name) for name in OF_NUMBERS.split()}
for _word in BINARY.split():
    OPERATORS |= {name: _binary(name) for name in (f"__{_word}__", f"__r{_word}__")}
OPERATORS |= {name: _order(name) for name in ORDER}
OPERATORS |= {"__contains__": _contains, "__call__": _call, "__exit__": _exit}


peer: Peer


_BUILT_IN = {"function": types.FunctionType, "generator": types.GeneratorType, "type": type}


class Peer:
    """The process of the solution, as the tests see it."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.reading = os.fdopen(os.dup(3), "rb")
        self.writing = os.fdopen(os.dup(3), "wb")
        self.lock = threading.RLock()
        self.functions: list[Callable[..., Any]] = []
        self.handles: dict[tuple[int, str, str], Handle] = {}
        self.types: dict[Any, type] = {}
        self.classes: dict[tuple[str, str], type] = {}
        self.builders: dict[str, Callable[[Any], Any]] = {
            **PLAIN,
            **_BUILDERS,
            "object": self._object,
            "exception": self.exception,
            "coroutine": self._coroutine,
        }

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.writing.write(json.dumps(message).encode() + b"\n")
            self.writing.flush()
        except OSError:
            os._exit(1)

    def ask(
        self, what: str, facts: ObjectFacts | None, positional: Any = (), named: Any = (), **more: Any
    ) -> Any:
        """Return the answer of the solution to a request, or raise its exception.

        Where the solution has ended this process ends too: no test takes that for an exception.
        """
        with self.lock:
            named = dict(named)
            message = {"what": what, **more, **self.pickled((positional, named))}
            if facts:
                message["of"] = facts.number
            self.send(message)
            while True:
                line = self.reading.readline(MAX_LINE)
                if not line.endswith(b"\n"):
                    os._exit(1)
                reply = json.loads(line)
                if "callback" not in reply:
                    break
                self.send(self._called_back(reply))
        sys.stdout.write(reply["printed"])
        if "raised" in reply:
            error = self.error(reply["raised"])
            if isinstance(error, STOPS) and what != "__next__":
                error = RuntimeError(f"the solution raised {type(error).__name__}")
            raise error
        if reply.get("refused"):
            return NotImplemented
        given = [each for each in (*positional, *named.values()) if type(each) in _ASSIGN]
        for mine, changed in zip(given, reply.get("changed", ())):
            for data in changed:
                _ASSIGN[type(mine)](mine, decode(data, self.builders))
        value = decode(reply["value"], self.builders)
        if what == "name" and is_handle(value):
            return self.with_standing(value, "returned", name=positional[0])
        return value

    def _called_back(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self.functions[request["callback"]]
            positional = decode(request["arguments"], self.builders)
            named = {name: decode(each, self.builders) for name, each in request["named"].items()}
            return {"returned": self.pickled(function(*positional, **named))}
        except BaseException as error:
            known = [each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins"]
            return {"threw": [known[0], str(error)]}

    def pickled(self, value: Any) -> dict[str, Any]:
        """Return a value as the process of the solution reads it."""
        out = io.BytesIO()
        pickler = _TestPickler(out, self)
        pickler.dump(value)
        return {"arguments": base64.b64encode(out.getvalue()).decode(), "classes": pickler.classes}

    def number_of(self, function: Callable[..., Any]) -> int:
        if function not in self.functions:
            self.functions.append(function)
        return self.functions.index(function)

    def with_standing(self, handle: Any, standing: str, made_by: Any = None, name: str = "") -> Handle:
        """Return the handle of the same object under another standing or name; a pair has one handle."""
        facts = handle._facts_of_handle
        key = (facts.number, standing, name)
        if key not in self.handles:
            changed = ObjectFacts(facts.number, facts.module, facts.kind, standing, name, made_by)
            self.handles[key] = type(handle)(changed)
        return self.handles[key]

    def _object(self, fields: list[Any]) -> Handle:
        number, module, kind, has = fields
        known = (module, kind, *sorted(set(has) & set(OPERATORS)))
        if known not in self.types:
            own = {name: OPERATORS[name] for name in known[2:]}
            self.types[known] = type(str(kind), (Handle,), {**own, "__slots__": (), "__module__": module})
        key = (int(number), "returned", "")
        if key not in self.handles:
            self.handles[key] = self.types[known](ObjectFacts(int(number), module, kind))
        return self.handles[key]

    def _coroutine(self, number: int) -> Any:
        async def wait() -> Any:
            return self.ask("await", ObjectFacts(number, "builtins", "coroutine"))

        return wait()

    def class_of(self, facts: ObjectFacts) -> type:
        """Return the class that stands here for the class of an object."""
        if facts.module == "builtins" and facts.kind in _BUILT_IN:
            return _BUILT_IN[facts.kind]
        mine = self.names.get(facts.kind)
        if facts.module == "tests" and isinstance(mine, type):
            return mine
        return self._made(facts.module, facts.kind, object, {})

    def _made(self, module: str, name: str, base: type, body: dict[str, Any]) -> type:
        key = (module, name)
        if key not in self.classes:
            self.classes[key] = type(str(name), (base,), {**body, "__module__": str(module)})
        return self.classes[key]

    def exception(self, ancestors: list[list[str]]) -> type[BaseException]:
        """Return the class here for a class of exceptions there, by its name and those of its bases."""
        (module, name), *further = ancestors
        known: Any = None
        if module == "builtins":
            known = getattr(builtins, name, None)
        elif module == "tests":
            known = self.names.get(name)
        elif module in sys.modules:
            known = getattr(sys.modules[module], name, None)
        if not (isinstance(known, type) and issubclass(known, BaseException)):
            text = {"__str__": lambda error: error.text_of_solution, "text_of_solution": ""}
            known = self._made(module, name, self.exception(further), text)
        kind: type[BaseException] = known
        return kind

    def error(self, fields: dict[str, Any]) -> BaseException:
        kind = self.exception(fields["ancestors"])
        error: BaseException = kind.__new__(kind, *decode(fields["arguments"], self.builders))
        for name, value in fields["state"].items():
            if not name.startswith("__"):
                setattr(error, name, decode(value, self.builders))
        error.text_of_solution = str(fields["text"])  # type: ignore[attr-defined]
        return error


class _TestPickler(pickle.Pickler):
    """Writes what the tests give: their functions, and iterators, stay here and have a number."""

    def __init__(self, out: io.BytesIO, peer: Peer) -> None:
        super().__init__(out, protocol=5)
        self.peer = peer
        self.classes: dict[str, str] = {}

    def persistent_id(self, value: Any) -> Any:
        if is_handle(value):
            return ("object", value._facts_of_handle.number)
        kind = type(value)
        mine = kind in (types.FunctionType, types.MethodType) and value.__module__ == "tests"
        if mine or (kind is types.BuiltinMethodType and not isinstance(value.__self__, types.ModuleType)):
            return ("function", self.peer.number_of(value))
        if kind is types.GeneratorType:
            return ("iterator", self.peer.number_of(value.__next__))
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and not is_handle(value) and value.__module__ == "tests":
            for each in reversed(value.__mro__):
                if each.__module__ == "tests":
                    self.classes[each.__name__] = self.peer.names.class_texts[each.__name__]
        return NotImplemented


class Names(dict[str, Any]):
    """The names of the tests; others are those of the solution, but for the built-in ones."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self.known: dict[str, list[str]] = request["names"]
        self.not_built_in: list[str] = request["of_solution"]
        self.class_texts: dict[str, str] = request["classes"]

    def __missing__(self, name: str) -> Any:
        if name in self.known:
            module, *attribute = self.known.pop(name)
            with contextlib.suppress(ImportError):
                self[name] = importlib.import_module(module)
                for each in attribute:
                    self[name] = getattr(self[name], each)
                return self[name]
        if hasattr(builtins, name) and name not in self.not_built_in:
            raise KeyError(name)
        return peer.ask("name", None, (name,))


def _numpy(fields: list[Any]) -> Any:
    kind, items = fields
    try:
        import numpy
    except ImportError:
        return items
    return numpy.array(items, dtype=kind)[()]


def _of_module(module: str, name: str, method: str = "") -> Callable[[Any], Any]:
    def build(content: Any) -> Any:
        kind = getattr(importlib.import_module(module), name)
        if method:
            return getattr(kind, method)(content)
        return kind(*content) if isinstance(content, list) else kind(content)

    return build


def _namedtuple(fields: list[Any]) -> Any:
    name, of, items = fields
    collections = importlib.import_module("collections")
    return collections.namedtuple(name, of)(*items)


_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "numpy": _numpy,
    "namedtuple": _namedtuple,
    "Decimal": _of_module("decimal", "Decimal"),
    "Fraction": _of_module("fractions", "Fraction"),
    "timedelta": _of_module("datetime", "timedelta"),
    **{name: _of_module("datetime", name, "fromisoformat") for name in ("date", "time", "datetime")},
    "deque": _of_module("collections", "deque"),
    "range": lambda bounds: range(*bounds),
    "Counter": lambda pairs: _of_module("collections", "Counter")(dict_of(pairs)),
    "OrderedDict": lambda pairs: _of_module("collections", "OrderedDict")(dict_of(pairs)),
    "defaultdict": lambda pairs: _of_module("collections", "defaultdict")([None, dict_of(pairs)]),
}


def _assign_items(mine: Any, value: Any) -> None:
    mine.clear()
    mine.update(value)


def _assign_all(mine: Any, value: Any) -> None:
    mine[:] = value


_ASSIGN: dict[type, Callable[[Any, Any], None]] = {
    list: _assign_all,
    bytearray: _assign_all,
    dict: _assign_items,
    set: _assign_items,
}


def main() -> None:
    """Run the tests, print which cases have passed, and end the process."""
    global peer
    # another process of this user may neither trace this one nor read its memory
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    names = Names(request)
    module = types.ModuleType("tests")
    module.__getattr__ = names.get  # type: ignore[method-assign]
    sys.modules["tests"] = module
    sys.path = [each for each in sys.path if each not in ("", os.getcwd(), os.path.dirname(sys.argv[0]))]
    for name in request["modules"]:  # before the solution can change a file of theirs
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    peer = Peer(names)
    first = {"code": request["solution"], "imports": request["imports"], "operators": list(OPERATORS)}
    peer.send(first)
    reached: list[bool] = []
    names["__asserts__"] = lambda: reached.append(True)
    for step in request["steps"]:
        reached.clear()
        try:
            exec(compile(step["code"], "tests.py", "exec", dont_inherit=True, optimize=0), names)
            passed = bool(reached) or not step["asserts"]
        except BaseException:
            if not step["case"]:
                raise
            passed = False
        if step["case"]:
            out.write(f"\n{request['mark']}{int(passed)}\n")
            out.flush()
    os._exit(0)
