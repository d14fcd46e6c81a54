"""Loads objects from a user's code: "path/to/file.py:name" or "package.module:name" in, the object out.

A user's reward, estimator, policy loss, dataset, sampler or task is named in this form everywhere.
A file is imported once per content: the same path gives the same module and classes in one process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridflow.config.own_code import call_fault, defined_as
from hybridflow.config.source_code import Definition, define, definition_of, shown
from hybridflow.data.verl_names import find_verl_here, home_of
from hybridflow.errors import ConfigError, HybridFlowError

logger = logging.getLogger(__name__)

T = TypeVar("T")

PLUGIN = "hybridflow_plugin_"
"""How the name of a module begins that was loaded from a file."""
WANTED = "wanted path/to/file.py:name or package.module:name"


def load_object(spec: str, *, key: str) -> Any:
    """Return the object that `spec` names; `key` is the configuration key to name in messages.

    Raises ConfigError if the file or module does not exist, raises while it is imported, or has no such name.
    """
    location, colon, name = spec.rpartition(":")
    if not colon or not location or not name or "/" in name or "\\" in name or name.endswith(".py"):
        raise ConfigError(f"{key}: got {spec!r}, {WANTED}")
    module = load_module(location, key=key)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
            raise ConfigError(f"{key}: {location} has no name {name!r}; it defines: {names}")
        found = getattr(found, part)
    return found


def load_function(spec: str, *, key: str) -> Callable[..., Any]:
    """Return a user's function or class with its signature.

    What it raises when called becomes a ConfigError that names it and holds the traceback.
    """
    function = load_object(spec, key=key)
    if not callable(function):
        raise ConfigError(f"{key}: {spec} names a {type(function).__name__}, wanted a function")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with blaming(f"{key}: {shown(spec)}"):
            return function(*args, **kwargs)

    if not hasattr(function, "__name__"):  # a functools.partial, or an object with __call__
        call.__name__ = spec.rpartition(":")[2]
    return call


def check_signature(
    function: Callable[..., Any],
    wanted: str,
    arguments: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    whose: str,
) -> None:
    """Raise ConfigError where a user's function cannot take that many arguments and these `options`.

    `wanted` shows how it is written.
    """
    signature = inspect.signature(function)
    if fault := call_fault(signature, arguments, options):
        raise ConfigError(defined_as(whose, function.__qualname__, signature, fault, wanted))


async def awaited(awaitable: Awaitable[T]) -> T:
    """Return the result of an awaitable, as a coroutine, which is all that `asyncio.run` takes."""
    return await awaitable


@contextmanager
def blaming(whose: str) -> Iterator[None]:
    """Run a user's code: what it raises becomes a ConfigError that names it and holds the traceback."""
    try:
        yield
    except HybridFlowError:
        raise
    except Exception as error:  # a user's code: anything may come out of it
        raise ConfigError(f"{whose} raised\n{''.join(traceback.format_exception(error)).strip()}") from error


def load_module(location: str, *, key: str) -> ModuleType:
    """Import a Python file (a path that ends in .py) or a module by its dotted name.

    Raises ConfigError if it does not exist or raises while it is imported.
    """
    check_location(location, key=key)
    find_verl_here()
    if location.endswith(".py"):
        return _load_file(Path(location).expanduser(), key)
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if error.name and (location == error.name or location.startswith(error.name + ".")):
            raise ConfigError(
                f"{key}: no module named {error.name!r}; for a file, write its path with .py at the end"
            ) from error
        raise ConfigError(f"{key}: importing {location} failed: {_last_line(error)}") from error
    except Exception as error:  # a user's module: anything may come out of it
        raise ConfigError(f"{key}: importing {location} failed: {_last_line(error)}") from error


def load_class(name: str, *, key: str, methods: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Any:
    """Return the class named as "package.module.Class", verl's form, or as `load_object` has it. A class of
    verl stands for ours.

    `methods` show how its methods are written, each with the arguments that it is called with. Raises
    ConfigError for a method of another form, before anything is imported where the source shows it.
    """
    location, _, last = name.rpartition(":" if ":" in name else ".")
    if location.startswith("verl."):  # also where verl is installed, whose classes are not run here
        home = home_of(location)
        if home is None:
            raise ConfigError(f"{key}: {name}: nothing here takes its place: name a class of your own")
        location = home
    spec = f"{location}:{last}"
    _check_methods(define(spec), spec, methods, key)
    found = load_object(spec, key=key)
    _check_methods(definition_of(found), spec, methods, key)
    return found


def _check_methods(found: Definition, spec: str, methods: Mapping[str, Sequence[str]], key: str) -> None:
    """Raise ConfigError for a class that lacks a method or has one of another form."""
    name = spec.rpartition(":")[2]
    for wanted, arguments in methods.items():
        method = wanted.partition("(")[0]
        known = found.method(method)
        if found.kind == "class" and known.kind == "missing":
            raise ConfigError(f"{key}: {name} has no method {wanted}")
        if fault := call_fault(known.signature, arguments):
            raise ConfigError(defined_as(key, f"{name}.{method}", known.signature, fault, f"def {wanted}"))


def load_entries(path: str, under: str | None, wanted: str, *, key: str) -> list[dict[str, Any]]:
    """Return the entries of a YAML file: its list, or the one under a name; each has the key `wanted`.

    Raises ConfigError for a file that is missing or of another form, and for an empty list.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}: no file {path} (looked in {Path.cwd()})")
    try:
        entries: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from error
    where = ""
    if under is not None:
        where = f" `{under}`"
        entries = entries.get(under) if isinstance(entries, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{key}: {path} has no list{where} of entries")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get(wanted), str):
            raise ConfigError(f"{key}: {path}, entry {number}: got {entry!r}, wanted a {wanted}")
    return entries


def check_location(location: str, *, key: str) -> None:
    """Raise ConfigError if a Python file does not exist, or a path is none of a Python file.

    Nothing is imported, so a module's dotted name is not looked for.
    """
    if location.endswith(".py"):
        path = Path(location).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}: no file {path} (looked in {Path.cwd()})")
    elif "/" in location or "\\" in location:
        raise ConfigError(f"{key}: {location} is not a Python file (its name must end in .py); {WANTED}")


def _load_file(path: Path, key: str) -> ModuleType:
    path = path.resolve()
    source = path.read_bytes()
    content = hashlib.blake2b(str(path).encode() + source, digest_size=8).hexdigest()
    name = f"{PLUGIN}{path.stem}_{content}"
    if name in sys.modules:
        return sys.modules[name]
    file_spec = importlib.util.spec_from_file_location(name, path)
    assert file_spec is not None, f"no import loader for {path}"
    module = importlib.util.module_from_spec(file_spec)
    sys.modules[name] = module  # before execution: dataclasses and pickling look their module up by name
    try:
        # not by the loader, whose kept bytecode may be that of the file before an edit within the same second
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except Exception as error:  # a user's file: anything may come out of it
        del sys.modules[name]
        raise ConfigError(f"{key}: importing {path} failed: {_last_line(error)}") from error
    logger.info("loaded %s", path)
    return module


def _last_line(error: Exception) -> str:
    """The traceback's last line, with the line of the user's code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if frames:
        place = f" (at {frames[-1].filename}:{frames[-1].lineno})"
    if isinstance(error, SyntaxError) and error.filename:
        place = f" (at {error.filename}:{error.lineno})"
    return traceback.format_exception_only(error)[-1].strip() + place


def join_spec(path: str | None, name: str | None, *, key: str) -> str | None:
    """Join two keys to one "path:name", where the path may already carry the name; None if there is no path.

    Raises ConfigError if neither key gives a name, or only the name is set.
    """
    if not path:
        if name:
            raise ConfigError(f"{key}: a name ({name}) without a file or module; set the path too")
        return None
    if name:
        return f"{path.removesuffix(f':{name}')}:{name}"
    location, colon, last = path.rpartition(":")
    if not colon or not location or "/" in last or "\\" in last:
        raise ConfigError(
            f"{key}: {path} does not say which object to take; write {path}:name or set the name"
        )
    return path
