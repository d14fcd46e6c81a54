"""A configuration as YAML with the meaning of each key beside it: `hybridflow config`.

config ──to_yaml──► text that can be saved and given back as a recipe
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hybridflow.config.resolve import resolve
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.tree import KeyInfo, get_value, keys_of, with_values

COMMENT_COLUMN = 64


def to_yaml(config: PPOConfig | SFTConfig, only_changed: bool = False) -> str:
    """Return the keys as YAML with comments; `only_changed`: those that were set, as `is_changed` says."""
    infos = keys_of(type(config))
    shown = {path: info for path, info in infos.items() if not only_changed or is_changed(config, info)}
    if not shown:
        return "{}\n"
    return "\n".join(_lines(config, shown)) + "\n"


def is_changed(config: PPOConfig | SFTConfig, info: KeyInfo) -> bool:
    """Return whether a key was set: its value is neither its default nor derived from other keys."""
    value = get_value(config, info.path)
    if value == info.default:
        return False
    without, _ = resolve(with_values(config, {info.path: info.default}))
    return bool(get_value(without, info.path) != value)


def _lines(config: Any, infos: Mapping[str, KeyInfo]) -> list[str]:
    lines: list[str] = []
    open_blocks: list[str] = []
    for path, info in infos.items():
        *blocks, name = path.split(".")
        depth = 0
        while depth < min(len(blocks), len(open_blocks)) and blocks[depth] == open_blocks[depth]:
            depth += 1
        for i in range(depth, len(blocks)):
            lines.append(f"{'  ' * i}{blocks[i]}:")
        open_blocks = blocks
        text = f"{'  ' * len(blocks)}{name}: {_scalar(get_value(config, path))}"
        if info.meaning:
            text = f"{text:<{COMMENT_COLUMN}}  # {info.meaning}"
        lines.append(text)
    return lines


def _scalar(value: Any) -> str:
    """A value on one line, as JSON (which is YAML); a plain word needs no quotes."""
    if isinstance(value, str):
        plain = value and all(c.isalnum() or c in "_./-" for c in value) and value[0].isalpha()
        word = value.lower() in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
        return value if plain and not word else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        if math.isinf(value):
            return repr(value).replace("inf", ".inf")
        text = repr(value)
        mantissa, e, exponent = text.partition("e")
        if e and "." not in mantissa:
            # YAML 1.1 reads 1e-06 as a string
            return f"{mantissa}.0e{exponent}"
        return text
    if isinstance(value, list):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    if isinstance(value, Mapping):
        entries = (f"{json.dumps(str(k), ensure_ascii=False)}: {_scalar(v)}" for k, v in value.items())
        return "{" + ", ".join(entries) + "}"
    return json.dumps(value)
