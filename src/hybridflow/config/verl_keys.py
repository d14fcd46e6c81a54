"""The fate of each key that verl documents: native, alias, without effect, or refused with a way out.

    status(PPOConfig, "actor_rollout_ref.rollout.name", "trtllm") ──► KeyStatus("refused", …, "…: use native")

The fate may depend on the value: the key of a feature that is off is accepted, and the value that would
switch the feature on is refused. Nothing that changes results is ever ignored. A key that is in no table is
unknown. The tables are `verl.yaml` and `aliases.py`; `load.py` acts on the answer.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from hybridflow.config.aliases import rewrite, rewrite_value
from hybridflow.config.root import SFTConfig
from hybridflow.config.tree import blocks_of, is_native

Kind = Literal["native", "alias", "no effect", "refused", "unknown"]
OFF: tuple[Any, ...] = (None, False, 0, "null", "none", "", [], {})
"""Values that leave a feature off."""
OFF_VALUES = "off values"
"""Their name in the table."""


@dataclass(frozen=True)
class Rule:
    """Keys outside the schema. A value in `accepted` (None: every value) has no effect, because `why`; every
    other value is refused with `refusal`.

    A text in `accepted` may hold `*`, and upper and lower case count the same. `True` is not `1`, and `False`
    is not `0`.
    """

    pattern: str
    accepted: tuple[Any, ...] | None
    why: str
    refusal: str = ""


class Tables(NamedTuple):
    """The content of verl.yaml. The first rule that matches a path counts."""

    overrides: tuple[Rule, ...]
    """Rules that come before the schema."""
    ppo: tuple[Rule, ...]
    sft: tuple[Rule, ...]
    refused_values: Mapping[str, Mapping[str, str]]
    """Why values of native keys are refused that verl knows and this version does not."""


@cache
def tables() -> Tables:
    """Return the tables, read once."""
    text = Path(__file__).with_name("verl.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    rules = {
        name: tuple(_rule(entry) for entry in entries)
        for name, entries in found.items()
        if name not in ("ppo", "sft", "refused values")
    }
    ppo = tuple(rule for name in found["ppo"] for rule in rules[name])
    sft = tuple(rule for name in found["sft"] for rule in rules[name])
    return Tables(rules["overrides"], ppo, sft, found["refused values"])


def _rule(entry: Mapping[str, Any]) -> Rule:
    if "ignored" in entry:
        return Rule(entry["keys"], None, entry["ignored"])
    if "refused" in entry:
        return Rule(entry["keys"], OFF, "the feature is off", entry["refused"])
    accepted: tuple[Any, ...] = ()
    for value in entry["accepted"]:
        accepted += OFF if value == OFF_VALUES else (value,)
    why = entry.get("why", "")
    return Rule(entry["keys"], accepted, why, entry.get("refusal", f"{why}: leave it out"))


@dataclass(frozen=True)
class KeyStatus:
    """The fate of a key and value; `path` and `value` are those now used, `reason` is one sentence."""

    kind: Kind
    path: str
    reason: str = ""
    value: Any = None


def status(root: type[Any], path: str, value: Any) -> KeyStatus:
    """Return the fate of the key at a dotted path when it is given this value."""
    new = rewrite(root, path, value)
    if new is not None:
        target = status(root, new, value)
        kind: Kind = "alias" if target.kind == "native" else target.kind
        return KeyStatus(kind, target.path, target.reason or f"{path} is now {target.path}", target.value)
    instead = rewrite_value(path, value)
    if instead is not value:
        return KeyStatus("alias", path, f"{value} is now {instead}", instead)
    overrides, ppo, sft, refused = tables()
    if isinstance(value, str) and value in refused.get(path, {}):
        return KeyStatus("refused", path, refused[path][value])
    for rule in overrides:
        if re.fullmatch(rule.pattern, path):
            return _ruled(rule, path, value)
    if path in blocks_of(root) and value is None:
        return KeyStatus("no effect", path, "the keys of the block keep their values")
    if is_native(root, path) or path in blocks_of(root):
        return KeyStatus("native", path, value=value)
    for rule in sft if issubclass(root, SFTConfig) else ppo:
        if re.fullmatch(rule.pattern, path):
            return _ruled(rule, path, value)
    return KeyStatus("unknown", path)


def _ruled(rule: Rule, path: str, value: Any) -> KeyStatus:
    if rule.accepted is None or any(_same(value, accepted) for accepted in rule.accepted):
        return KeyStatus("no effect", path, rule.why)
    return KeyStatus("refused", path, rule.refusal)


def _same(value: Any, accepted: Any) -> bool:
    """Whether a value is one that a rule accepts: `True` is no number, and a text may match a `*`."""
    if isinstance(value, str) and isinstance(accepted, str):
        return fnmatch.fnmatchcase(value.lower(), accepted.lower())
    if isinstance(value, bool) != isinstance(accepted, bool):
        return False
    return bool(value == accepted)
