"""The functions and classes in a user's source, read without running it.

"path/to/file.py:name", "package.module:name" ──define──► Definition: its signature, its methods, or its fault

A file of a user's own often imports torch, which takes seconds, and may do anything else. Only what the
source settles by itself is used. Of a name that is decorated, assigned, imported or made under a condition
nothing is known, nor of a method that a class from elsewhere may have.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal

Kind = Literal["function", "class", "unknown", "missing", "broken"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
OURS = "hybridflow"
"""The package whose decorators leave a function as it is."""
DYNAMIC = ("exec", "globals", "locals", "vars", "modules", "f_globals", "__getattr__")
"""Names by which a module may define what its source does not show: `modules` is that of sys."""
TOO_DEEP = (RecursionError, MemoryError)
"""What is raised for a source that is nested too deeply to be looked at; it may be good Python."""


@dataclass(frozen=True)
class Definition:
    """An object that a user's source defines, as far as it is known."""

    kind: Kind
    """`unknown`: nothing is known; `missing`: the source has no such name; `broken`: it is no Python."""
    signature: Signature | None = None
    """How it is called, a class too; None where that is not known."""
    is_async: bool = False
    methods: Mapping[str, Definition] = field(default_factory=dict)
    """Of a class: its own methods, and those of its bases as far as they are known."""
    is_whole: bool = False
    """Whether a class has no other method than these."""
    says: str = ""
    """What is wrong with a source that is broken; the names that one has which lacks this one."""

    def method(self, name: str) -> Definition:
        """Return what is known of a method of a class."""
        if name in self.methods:
            return self.methods[name]
        return Definition("missing" if self.is_whole else "unknown")


UNKNOWN = Definition("unknown")
IN_MEMORY = "hybridflow_objects"
"""Name of the module that exists during a program's run only, and has its functions and classes."""


def in_memory(spec: str) -> bool:
    """Whether a name is that of an object which no other process could import."""
    return spec.startswith(f"{IN_MEMORY}:")


def shown(spec: str) -> str:
    """Return a name as messages give it: the object's own where it is one of the program."""
    return spec.removeprefix(f"{IN_MEMORY}:")


def define(spec: str) -> Definition:
    """Return what is known of the object that `path/to/file.py:name` or `package.module:name` names.

    Nothing is imported. Of a module that is loaded already, the object itself is asked.
    """
    location, _, name = spec.rpartition(":")
    loaded = sys.modules.get(location)
    if loaded is not None:
        return definition_of(getattr(loaded, name, None))
    path = source_file(location)
    if path is None:
        return UNKNOWN
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        place = f" (at {path}:{getattr(error, 'lineno', None) or 1})"
        return Definition("broken", says=f"{type(error).__name__}: {getattr(error, 'msg', error)}{place}")
    except (OSError, *TOO_DEEP):
        return UNKNOWN
    return _Source(tree).define(name)


def source_file(location: str) -> Path | None:
    """Return the Python file of a path or of a module's dotted name; None where it is not found."""
    if location.endswith(".py"):
        path = Path(location).expanduser()
        return path if path.is_file() else None
    places: list[str] | None = None
    path = Path()
    parts = location.split(".")
    for number in range(len(parts)):
        try:  # unlike importlib.util.find_spec, it imports no package on the way
            found = PathFinder.find_spec(parts[number], places)  # whose parents it would look for by dots
        except (ImportError, ValueError):
            return None
        if found is None:
            return None
        places = list(found.submodule_search_locations or ())
        path = Path(found.origin or "")
    return path if path.suffix == ".py" and path.is_file() else None


def marked_functions(location: str, marks: Sequence[str]) -> Iterator[tuple[str, Signature]]:
    """Give each function of a file or module that one of our decorators marks, by name, with its signature.

    One that is given a `schema` says itself what its arguments are, and is left out.
    """
    path = source_file(location)
    try:
        source = None if path is None else _Source(ast.parse(path.read_bytes()))
    except (SyntaxError, ValueError, OSError, *TOO_DEEP):  # importing it says so
        return
    if source is None:
        return
    for name in source.bound:
        found = source.define(name)
        node = source.only(name)
        if found.kind != "function" or found.signature is None or not isinstance(node, Function):
            continue
        names = [_called_name(decorator) for decorator in node.decorator_list]
        words = [word.arg for each in node.decorator_list for word in getattr(each, "keywords", [])]
        if set(names) & set(marks) and "schema" not in words and None not in words:
            yield name, found.signature


def _called_name(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.id if isinstance(decorator, ast.Name) else ""


class _Source:
    """One parsed module."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.bound: dict[str, list[ast.AST]] = {}
        for name, node in _bindings(tree.body):
            self.bound.setdefault(name, []).append(node)
        nodes = list(ast.walk(tree))
        self.is_dynamic = any(
            (isinstance(node, ast.Name) and node.id in DYNAMIC)
            or (isinstance(node, Function) and node.name in DYNAMIC)
            or (isinstance(node, ast.Attribute) and node.attr in DYNAMIC)
            or (isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names))
            for node in nodes
        )
        self.changed = {name for node in nodes for name in _changed_names(node)}

    def define(self, name: str) -> Definition:
        """Return what is known of the object with this name, which has no dots where anything is known."""
        if "." in name or self.is_dynamic or name in self.changed:
            return UNKNOWN
        if name not in self.bound:
            names = sorted(known for known in self.bound if not known.startswith("_"))
            return Definition("missing", says=", ".join(names) or "nothing")
        node = self.only(name)
        if isinstance(node, Function):
            return self._function(node)
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        return UNKNOWN

    def only(self, name: str) -> ast.AST | None:
        """Return the statement that alone binds a name at the top of the module."""
        bindings = self.bound.get(name, [])
        return bindings[0] if len(bindings) == 1 and bindings[0] in self.tree.body else None

    def _function(self, node: Function) -> Definition:
        if not all(self._is_ours(decorator) for decorator in node.decorator_list):
            return UNKNOWN
        try:
            signature = _signature(node.args)
        except ValueError:  # an argument twice, of which importing it says so
            return UNKNOWN
        return Definition("function", signature, isinstance(node, ast.AsyncFunctionDef))

    def _class(self, node: ast.ClassDef) -> Definition:
        if node.decorator_list or node.keywords:
            return UNKNOWN
        methods: dict[str, Definition] = {}
        for name, statement in _bindings(node.body):
            known = name not in methods and statement in node.body
            methods[name] = UNKNOWN
            if known and isinstance(statement, Function):
                methods[name] = self._function(statement)
        base = Definition("class", Signature(), is_whole=True)
        if node.bases:
            base = self._base(node)
        for name, method in base.methods.items():
            methods.setdefault(name, method)
        signature = base.signature
        if {"__new__", "__init__"} & methods.keys():
            signature = None
        if "__new__" not in methods and methods.get("__init__", UNKNOWN).signature is not None:
            signature = without_self(methods["__init__"].signature)
        return Definition("class", signature, methods=methods, is_whole=base.is_whole)

    def _base(self, node: ast.ClassDef) -> Definition:
        """Return what is known of the base of a class; of several, which one has a method is not known."""
        base = node.bases[0]
        if len(node.bases) > 1 or not isinstance(base, ast.Name):
            return UNKNOWN
        if base.id == "object" and base.id not in self.bound:
            return Definition("class", Signature(), is_whole=True)
        other = self.only(base.id)
        if isinstance(other, ast.ClassDef) and other.lineno < node.lineno and base.id not in self.changed:
            known = self._class(other)
            if "__init_subclass__" not in known.methods:  # which may give a class more
                return known
        return UNKNOWN

    def _is_ours(self, decorator: ast.expr) -> bool:
        """Return whether a decorator is one of this package, by the import that gives it its name."""
        while isinstance(decorator, ast.Call):
            decorator = decorator.func
        if not isinstance(decorator, ast.Name):
            return False
        return any(
            isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == OURS
            for node in self.bound.get(decorator.id, [])
        )


def without_self(signature: Signature | None) -> Signature | None:
    """Return the signature of a method as an object has it; None where it is not known."""
    if signature is None or not signature.parameters:
        return None
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class _Written:
    """The default or the type of an argument, as it is written."""

    def __init__(self, node: ast.expr) -> None:
        self.node = node

    def __repr__(self) -> str:
        return ast.unparse(self.node)


def _signature(arguments: ast.arguments) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    kinds: list[Any] = [Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    found = [
        _parameter(argument, kind, default)
        for argument, kind, default in zip(positional, kinds, defaults, strict=True)
    ]
    if arguments.vararg is not None:
        found.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(argument, Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg is not None:
        found.append(_parameter(arguments.kwarg, Parameter.VAR_KEYWORD))
    return Signature(found)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> Parameter:
    written: dict[str, Any] = {}
    if default is not None:
        written["default"] = _Written(default)
    if argument.annotation is not None:
        written["annotation"] = _Written(argument.annotation)
    return Parameter(argument.arg, kind, **written)


def _changed_names(node: ast.AST) -> list[str]:
    """Return the names that a part of a module gives other objects, or whose objects it gives attributes."""
    if isinstance(node, ast.Global):
        return node.names
    changed: ast.AST | None = None
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
        changed = node.value
    elif isinstance(node, ast.Call) and _called_name(node) in ("setattr", "delattr") and node.args:
        changed = node.args[0]
    return [changed.id] if isinstance(changed, ast.Name) else []


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Give each name that statements bind, with the statement, not those inside of functions and classes."""
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
            waiting += node.decorator_list
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id, node
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name, node
        if not isinstance(node, ast.Lambda):
            waiting += reversed(list(ast.iter_child_nodes(node)))


def definition_of(found: Any) -> Definition:
    """Return what is known of an object that is loaded already: a class has no other methods than these."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # it cannot be called, or is written in C
        signature = None
    if not isinstance(found, type):
        kind: Kind = "function" if callable(found) else "unknown"
        is_async = inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found)
        return Definition(kind, signature, is_async)
    methods = {}
    for name in dir(found):
        method = inspect.getattr_static(found, name)
        methods[name] = UNKNOWN
        if inspect.isfunction(method):
            methods[name] = definition_of(method)
    return Definition("class", signature, methods=methods, is_whole=True)
