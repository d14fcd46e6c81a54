"""The fate of each key that verl documents: native, alias, without effect, or refused with a way out.

    status(PPOConfig, "actor_rollout_ref.rollout.name", "trtllm") ──► KeyStatus("refused", …, "…: use native")

The fate may depend on the value: the key of a feature that is off is accepted, and the value that would
switch the feature on is refused. Nothing that changes results is ever ignored. A key that is in no table is
unknown. The tables are `verl_rules.py`, `verl_rules_sft.py` and `aliases.py`; `load.py` acts on the answer.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.aliases import rewrite, rewrite_value
from hybridflow.config.root import SFTConfig
from hybridflow.config.tree import blocks_of, is_native
from hybridflow.config.verl_rule import OVERRIDES, Rule
from hybridflow.config.verl_rules import PPO_RULES, REFUSED_VALUES, SFT_RULES

Kind = Literal["native", "alias", "no effect", "refused", "unknown"]


@dataclass(frozen=True)
class KeyStatus:
    """The fate of a key and value; `path` and `value` are those now used, `reason` is one sentence."""

    kind: Kind
    path: str
    reason: str = ""
    value: Any = None


def _rules(root: type[Any]) -> tuple[Rule, ...]:
    if issubclass(root, SFTConfig):
        return SFT_RULES
    return PPO_RULES


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
    if isinstance(value, str) and value in REFUSED_VALUES.get(path, {}):
        return KeyStatus("refused", path, REFUSED_VALUES[path][value])
    for rule in OVERRIDES:
        if re.fullmatch(rule.pattern, path):
            return _ruled(rule, path, value)
    if path in blocks_of(root) and value is None:
        return KeyStatus("no effect", path, "the keys of the block keep their values")
    if is_native(root, path) or path in blocks_of(root):
        return KeyStatus("native", path, value=value)
    for rule in _rules(root):
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
