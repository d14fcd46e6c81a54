"""The way from a recipe and a command line to a typed configuration.

    recipe.yaml (and those it builds on) ─┐
                                          ├─► Setting ─► aliases, verl_keys ─► tree ─► convert ─► Loaded
    key=value +key=value ~key (Hydra) ────┘

`load_config` parses; `prepare_config` also fills derived values (`resolve.py`) and refuses what cannot run.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.config.by_source import sources_of
from hybridflow.config.checks.root import find_notes, find_problems
from hybridflow.config.convert import WRONG, WrongKeyRead, convert_what_fits, raise_all, suggest, unknown_key
from hybridflow.config.recipes import check_command, read_flags, read_recipe, recipe_hint
from hybridflow.config.relations import shown
from hybridflow.config.resolve import resolve
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.thresholds import quote_bounds
from hybridflow.config.tree import (
    blocks_of,
    delete_path,
    flatten,
    is_native,
    keys_of,
    set_path,
    to_tree,
    type_name,
    with_values,
)
from hybridflow.config.verl_keys import KeyStatus, status
from hybridflow.distributed.accelerators import device_problem
from hybridflow.errors import ConfigError

C = TypeVar("C", bound=PPOConfig | SFTConfig)


class Loaded(NamedTuple, Generic[C]):
    """A typed configuration, a note for each key rewritten or without effect, and the paths the user set."""

    config: C
    notes: list[str]
    given: frozenset[str]


class Change(NamedTuple):
    """A key, the value that this machine has for it, and why the one that was set is left."""

    key: str
    value: Any
    reason: str
    needed: bool = True
    """Whether the run cannot start without the change."""

    @property
    def word(self) -> str:
        """The change as a word of the command line."""
        value = self.value
        if isinstance(value, list):
            value = f"[{','.join(map(shown, value))}]"
        return f"{self.key}={shown(value)}"

    def __str__(self) -> str:
        return f"{self.word}: {self.reason} (trainer.on_missing=fallback)"


@dataclass(frozen=True)
class Setting:
    """One value of a recipe or of the command line; `delete` sets the key back to its default."""

    path: str
    value: Any = None
    delete: bool = False


def load_config(
    root: type[C],
    overrides: Sequence[str] = (),
    recipe: str | Path | None = None,
    *,
    values: Mapping[str, Any] | None = None,
) -> Loaded[C]:
    """Compose a recipe (a name, or a path to a YAML file) and Hydra overrides into a typed configuration.

    `values` are keys and values of a program, nested or with dotted names; they come between the two. Hydra's
    --config-path and --config-name among the overrides name a recipe too. Raises ConfigError that lists every
    unknown, refused and ill-typed key.
    """
    loaded, problems, _ = _load(root, overrides, recipe, values)
    raise_all(problems)
    return loaded


def _load(
    root: type[C], overrides: Sequence[str], recipe: str | Path | None, values: Mapping[str, Any] | None
) -> tuple[Loaded[C], list[str], set[str]]:
    """Return what `load_config` does, a line for each wrong key, and the keys without a usable value.

    Those are the wrong keys, which have their defaults, and the keys that an unknown one may mean.
    """
    problems: list[str] = []
    wrong: set[str] = set()
    overrides, recipe = read_flags(overrides, recipe)
    settings: list[Setting] = []
    if recipe is not None:
        settings.extend(Setting(path, value) for path, value in flatten(read_recipe(recipe)))
        check_command(recipe, root.__name__)
    settings.extend(Setting(path, value) for path, value in flatten(values or {}))
    for text in overrides:
        settings.extend(_parse(text, problems, wrong))
        if re.fullmatch(r"[\w/-]+", text):
            wrong.update(keys_of(root))  # it may mean a recipe, which sets any key
    settings = _interpolate(root, settings, problems, wrong)
    accepted, notes = _normalise(root, settings, problems, wrong)
    tree = to_tree(root())
    for setting in accepted:
        if setting.delete:
            delete_path(tree, setting.path)
        else:
            set_path(tree, setting.path, setting.value)
    config = convert_what_fits(root, _plain(tree, problems), problems, wrong)
    device_fault = device_problem(config.trainer.device)
    if device_fault is not None:
        problems.append(device_fault)
        wrong.add("trainer.device")
        config = with_values(config, {"trainer.device": "auto"})
    if isinstance(config, PPOConfig):
        try:
            sources_of(config.algorithm)
        except ConfigError as error:
            problems.extend(error.problems or [str(error)])
            wrong.add("algorithm.by_source")
            config = with_values(config, {"algorithm.by_source": {}})
    given = {s.path for s in accepted if not s.delete} - {s.path for s in accepted if s.delete}
    blocks = tuple(f"{path}." for path in wrong)
    keys = {path for path in keys_of(root) if path in wrong or path.startswith(blocks)}
    return Loaded(config, notes, frozenset(given)), problems, keys


def prepare_config(
    root: type[C],
    overrides: Sequence[str] = (),
    recipe: str | Path | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    runs: bool = True,
    needs_model: bool = True,
    needs_files: bool = True,
    missing: Callable[[C], list[str]] | None = None,
    fallback: Callable[[C], Sequence[Change]] | None = None,
) -> Loaded[C]:
    """Return the configuration that a command runs with: loaded, with derived values filled in, and checked.

    `values` are those of `load_config`; `runs`, `needs_model` and `needs_files` are those of `check`.
    `missing` gives a line for each thing that the run asks for and this machine lacks: problems, or notes
    where nothing runs. `fallback` gives the keys that would have to change for that; they are changed, with a
    note each, where trainer.on_missing says so. Raises ConfigError that lists every problem, but for what
    depends on a key that is wrong itself.
    """
    loaded: Loaded[C]
    loaded, problems, wrong = _load(root, overrides, recipe, values)
    config: C = loaded.config
    changes: Sequence[Change] = ()
    if fallback is not None:
        changes = fallback(config)
    way_out = ""
    if config.trainer.on_missing == "fallback":
        config = with_values(config, {change.key: change.value for change in changes})
    else:
        if any(change.needed for change in changes):
            words = ", ".join(change.word for change in changes)
            way_out = f"add trainer.on_missing=fallback to run with what is here: {words}"
        changes = ()
    config, notes = resolve(with_values(config, dict.fromkeys(wrong, WRONG)), loaded.given)
    lacking: list[str] = []
    if missing is not None:
        with suppress(WrongKeyRead):
            lacking = missing(config)
    problems += find_problems(config, runs=runs, needs_model=needs_model, needs_files=needs_files)
    try:
        raise_all([*problems, *(lacking if runs else ())])
    except ConfigError as error:
        for line in () if runs else lacking:
            error.add_note(f"note: {line}")
        if way_out:
            error.add_note(way_out)
        raise
    notes = [*loaded.notes, *map(str, changes), *notes, *find_notes(config, loaded.given)]
    return Loaded(config, [*notes, *(() if runs else lacking)], loaded.given)


def expand_sweeps(overrides: Sequence[str]) -> list[list[str]]:
    """Return the runs of a command line with sweeps (`a=1,2`, `choice(…)`, `range(…)`); the last key varies
    fastest.
    """
    choices: list[list[str]] = []
    for text in overrides:
        if text.startswith("-"):  # a flag, which names a file
            choices.append([text])
            continue
        override = _parse_one(text)
        if not override.is_sweep_override():
            choices.append([text])
        elif isinstance(override.value(), (ChoiceSweep, RangeSweep)):
            sign = {"ADD": "+", "FORCE_ADD": "++"}.get(override.type.name if override.type else "", "")
            choices.append(
                [f"{sign}{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
            )
        else:
            raise ConfigError(
                f"{text}: of Hydra's sweeps, lists (a=1,2), choice(…) and range(…) can be run: list the "
                "values"
            )
    return [list(run) for run in itertools.product(*choices)]


def _parse_one(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"{text}: not an override, which is key=value. {recipe_hint(text)}")
    text = quote_bounds(text)
    name, sign, value = text.partition("=")
    attempts = [text]
    # a path with characters that Hydra wants quoted: ~ or =
    if sign and re.fullmatch(r"[~./\w][^\[\]{}'\",()$]*", value):
        attempts.append(f"{name}='{value}'")
    reason = ""
    for attempt in attempts:
        try:
            return OverridesParser.create().parse_override(attempt)
        except HydraException as error:
            reason = reason or str(error).splitlines()[0]
    read = _read_otherwise(name, value) if sign else None
    if read is not None:
        return read
    if "[" in name:
        raise ConfigError(f"{text}: {_whole_list(name.partition('[')[0].lstrip('+~'))}")
    raise ConfigError(
        f"{text}: not an override ({reason}); write key=value, and quote a value as \"key='…'\""
    )


def _read_otherwise(name: str, value: str) -> Override | None:
    """Return the override of a value that Hydra's grammar has no place for; None where it is not clear.

    That is JSON, or Python's form of it, whose keys are in quotes, and a chat template.
    """
    found: Any = None
    if re.match(r"\s*[\[{]", value):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                found = read(value)
                break
    if not isinstance(found, dict | list):
        found = value if re.search(r"\{%.*%\}|\{\{.*\}\}", value, re.DOTALL) else None
    if found is None:
        return None
    with suppress(HydraException):
        return replace(OverridesParser.create().parse_override(f"{name}=null"), _value=found)
    return None


def _whole_list(path: str) -> str:
    return f"a list is set as a whole, {path}=[…]"


def _entry_of_a_list(root: type[Any], path: str) -> str:
    """Return the line for a key that means one entry of a list, such as data.train_files.0; else none."""
    keys = keys_of(root)
    parts = path.split(".")
    for place, part in enumerate(parts):
        info = keys.get(".".join(parts[:place]))
        if info is not None and part.isdigit() and "list" in type_name(info.type):
            return f"{path}: {_whole_list(info.path)}"
    return ""


def _parse(text: str, problems: list[str], wrong: set[str]) -> list[Setting]:
    """Return the settings of an override; for a wrong one add the problem, and note its key as wrong."""
    try:
        override = _parse_one(text)
    except ConfigError as error:
        problems.append(str(error))
        wrong.add(text.partition("=")[0].lstrip("+~"))
        return []
    path = override.key_or_group
    if override.package is not None:
        problems.append(f"{text}: config groups (group@package) are not used here; name the recipe instead")
    elif override.is_sweep_override():
        problems.append(
            f"{text}: several values; write [a,b] for a list, or give --multirun to run them one after "
            f"another; a text with commas goes into quotes: \"{path}='a,b'\""
        )
    elif override.is_delete():
        return [Setting(path, delete=True)]
    else:
        value = override.value()
        if isinstance(value, dict) and any("." in str(name) for name in value):
            return [Setting(path, value)]  # names such as those of data sources
        if isinstance(value, dict) and value:
            return [Setting(p, v) for p, v in flatten(value, path + ".")]
        return [Setting(path, value)]
    wrong.add(path)
    return []


def _interpolate(
    root: type[Any], settings: list[Setting], problems: list[str], wrong: set[str]
) -> list[Setting]:
    """Fill ${…} in the given values, against all keys as the user wrote them (defaults included)."""
    if not any("${" in str(setting.value) for setting in settings):
        return settings
    tree = to_tree(root())
    for setting in settings:
        if not setting.delete:
            set_path(tree, setting.path, setting.value)
    raw = OmegaConf.create(tree)
    filled = []
    for setting in settings:
        if "${" in str(setting.value):
            try:
                value = OmegaConf.select(raw, setting.path, throw_on_resolution_failure=True)
                setting = Setting(
                    setting.path,
                    OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value,
                )
            except OmegaConfBaseException as error:
                problems.append(f"{setting.path}={setting.value}: {str(error).splitlines()[0]}")
                wrong.add(setting.path)
                continue
        filled.append(setting)
    return filled


def _normalise(
    root: type[Any], settings: list[Setting], problems: list[str], wrong: set[str]
) -> tuple[list[Setting], list[str]]:
    """Return the settings under the names that keys have here, and notes; of one key the last setting counts,
    so a value that is replaced later is not judged.
    """
    fates = [_fate(root, setting) for setting in settings]
    accepted: list[Setting] = []
    notes: dict[str, None] = {}
    ignored: dict[tuple[str, str], dict[str, None]] = {}
    refused: dict[str, list[str]] = {}
    known = [*keys_of(root), *blocks_of(root)]
    for setting, result, place in zip(settings, fates, _replacements(settings, fates), strict=True):
        if place is not None:
            notes |= dict.fromkeys(_lost(setting, settings[place], result.path))
            continue
        told = f"{setting.path}={shown(setting.value)}"
        if result.kind == "unknown":
            problems.append(_entry_of_a_list(root, setting.path) or unknown_key(setting.path, known))
            wrong.update(suggest(setting.path, known))
        elif result.kind == "refused":
            refused.setdefault(result.reason, []).append(told)
            wrong.add(result.path)
        elif result.kind == "no effect":
            block, _, name = setting.path.rpartition(".")
            named = ignored.setdefault((block, result.reason), {})
            named[f"{name}={shown(setting.value)}"] = None
        elif result.kind == "alias" and result.path == setting.path:
            notes[f"{told} is now {shown(result.value)}"] = None
            accepted.append(Setting(setting.path, result.value))
        elif result.kind == "alias":
            now = result.path
            if not setting.delete and result.value != setting.value:
                now += f"={shown(result.value)}"
            notes[f"{setting.path} is now {now}"] = None
            if not _leaves_open(setting, result):
                accepted.append(Setting(result.path, result.value, setting.delete))
        else:
            accepted.append(setting)
    # a reason that many keys share is said once
    problems.extend(f"{', '.join(told)}: {reason}" for reason, told in refused.items())
    return accepted, [*_ignored_notes(ignored), *notes]


def _ignored_notes(ignored: Mapping[tuple[str, str], Mapping[str, None]]) -> Iterator[str]:
    """Give a note for the keys of each block that have no effect for the same reason."""
    for (block, reason), named in ignored.items():
        dot = "." if block else ""
        if len(named) == 1:
            yield f"{block}{dot}{next(iter(named))} has no effect: {reason}"
        else:
            yield f"{block}{dot}{{{', '.join(named)}}} have no effect: {reason}"


def _fate(root: type[Any], setting: Setting) -> KeyStatus:
    if setting.delete and (is_native(root, setting.path) or setting.path in blocks_of(root)):
        return KeyStatus("native", setting.path)
    return status(root, setting.path, setting.value)


def _leaves_open(setting: Setting, result: KeyStatus) -> bool:
    """Whether an older name is null: then the key's own name decides."""
    return result.kind == "alias" and not setting.delete and result.value is None


def _replacements(settings: list[Setting], fates: list[KeyStatus]) -> list[int | None]:
    """Return, for each setting, the place of the last one that sets the same key, by whatever name, or that
    deletes it; None for a setting that counts.
    """
    by_name: dict[str, int] = {}
    by_key: dict[str, int] = {}
    deleted: dict[str, int] = {}
    replaced: list[int | None] = []
    for place in reversed(range(len(settings))):
        name = settings[place].path
        key = fates[place].path
        blocks = (later for path, later in deleted.items() if key.startswith(f"{path}."))
        replaced.append(by_name.get(name, by_key.get(key, next(blocks, None))))
        by_name.setdefault(name, place)
        if not _leaves_open(settings[place], fates[place]):
            by_key.setdefault(key, place)
        if settings[place].delete:
            deleted.setdefault(key, place)
    return replaced[::-1]


def _lost(setting: Setting, later: Setting, key: str) -> Iterator[str]:
    """Give the note on a value that is lost to another name of the same key."""
    null = setting.value is None and not setting.delete
    if later.path == setting.path or later.delete or null or setting.value == later.value:
        return
    yield (
        f"{setting.path}={shown(setting.value)} and {later.path}={shown(later.value)} both set {key}: the "
        f"last one counts, {shown(later.value)}"
    )


def _plain(tree: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The tree with the ${…} of defaults filled in; raises `problems` and its own.

    Only a block with ${…} is given to OmegaConf, which is slow with hundreds of keys: a default refers to
    keys of its own block, and given values are filled in before.
    """
    plain = dict(tree)
    for name, block in tree.items():
        if "${" in str(block):
            try:
                filled = OmegaConf.to_container(OmegaConf.create({name: block}), resolve=True)
            except OmegaConfBaseException as error:
                raise_all([*problems, str(error).splitlines()[0]])
            assert isinstance(filled, dict), "a dict stays a dict"
            plain[name] = filled[name]
    return plain
