"""The fate of each key that verl documents: native, alias, without effect, or refused with a way out.

    status(PPOConfig, "actor_rollout_ref.rollout.name", "trtllm") ──► KeyStatus("refused", …, "…: use native")

The fate may depend on the value: the key of a feature that is off is accepted, and the value that would
switch the feature on is refused. Nothing that changes results is ever ignored. A key that is in no table is
unknown. The tables are in `verl.yaml`; `load.py` acts on the answer.

    "reward_model.reward_fn.path" ──rewrite──► "reward.custom_reward_function.path"
    "algorithm.adv_estimator", "grpo_vectorized" ──rewrite_value──► "grpo"

A rewritten key may itself be an alias; `status` follows the chain.
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
    ppo_aliases: Mapping[str, str]
    """Regular expressions of whole paths, and the keys that replace them; the first that matches counts."""
    sft_aliases: Mapping[str, str]
    aliases_by_value: tuple[tuple[str, tuple[Any, ...], str], ...]
    """A regular expression of whole paths, the values with which it is another key, and that key."""
    value_aliases: Mapping[str, Mapping[Any, Any]]
    """Other values of keys of the schema, by key, and the values that replace them."""


@cache
def tables() -> Tables:
    """Return the tables, read once."""
    text = Path(__file__).with_name("verl.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    rules = {
        name: tuple(_rule(entry) for entry in found[name])
        for name in {"overrides", *found["ppo"], *found["sft"]}
    }
    ppo = tuple(rule for name in found["ppo"] for rule in rules[name])
    sft = tuple(rule for name in found["sft"] for rule in rules[name])
    return Tables(
        rules["overrides"],
        ppo,
        sft,
        found["refused values"],
        found["aliases"]["ppo"],
        found["aliases"]["sft"],
        tuple((each["keys"], tuple(each["values"]), each["key"]) for each in found["aliases by value"]),
        found["value aliases"],
    )


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


def rewrite(root: type[Any], path: str, value: Any) -> str | None:
    """Return the key that replaces `path` with this value, or None where `path` is no alias."""
    table = tables()
    for pattern, values, new in table.aliases_by_value:
        match = re.fullmatch(pattern, path)
        if match and value in values:
            return match.expand(new)
    aliases = table.sft_aliases if issubclass(root, SFTConfig) else table.ppo_aliases
    for pattern, new in aliases.items():
        match = re.fullmatch(pattern, path)
        if match:
            return match.expand(new)
    return None


def rewrite_value(path: str, value: Any) -> Any:
    """Return the value that replaces `value` at a key of the schema; itself if it is no alias."""
    if not isinstance(value, (str, bool, type(None))):
        return value
    return tables().value_aliases.get(path, {}).get(value, value)


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
    table = tables()
    if isinstance(value, str) and value in table.refused_values.get(path, {}):
        return KeyStatus("refused", path, table.refused_values[path][value])
    for rule in table.overrides:
        if re.fullmatch(rule.pattern, path):
            return _ruled(rule, path, value)
    if path in blocks_of(root) and value is None:
        return KeyStatus("no effect", path, "the keys of the block keep their values")
    if is_native(root, path) or path in blocks_of(root):
        return KeyStatus("native", path, value=value)
    for rule in table.sft if issubclass(root, SFTConfig) else table.ppo:
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
