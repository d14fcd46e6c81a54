"""Write docs/configuration.md from the configuration's dataclasses; with --check only say whether it is
fresh.

python scripts/config_docs.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.aliases import PPO_ALIASES, SFT_ALIASES
from hybridflow.config.tree import KeyInfo, keys_of, type_name
from hybridflow.config.verl_rule import Rule
from hybridflow.config.verl_rules import PPO_RULES, REFUSED_VALUES
from hybridflow.config.verl_rules_sft import SFT_RULES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by scripts/config_docs.py from the dataclasses in src/hybridflow/config; do not edit. -->

A run is described by a tree of keys. `key=value` on the command line sets one (Hydra's grammar: `a.b=1`, `a=[x,y]`, `a={k: v}`,
`a='some text'`, `${trainer.project_name}`, `${oc.env:HOME}`); a recipe is a YAML file that sets several and may build on others through
its `defaults` list. A leading `+` is not needed and does no harm; `~key` sets a key back to its default. With `--multirun`, `a=1,2` runs
one after another, each into a folder of its own: let `trainer.experiment_name` follow the values, as in
`lr-${actor_rollout_ref.actor.optim.lr}`. `hybridflow config` lists every key; followed by a run's words it prints
the whole tree as it will run, with `--explain` what follows from it.

Wrong keys, types and values are all reported at once, before anything is built. `null` means that the key follows another or is off.
"""


def main(arguments: list[str]) -> int:
    """Exit status 0, or 1 where --check finds the page stale."""
    text = render()
    if "--check" in arguments:
        if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write(f"{TARGET} is not what the dataclasses say: run python scripts/config_docs.py\n")
        return 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


def render() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        "## Reinforcement learning\n\n`hybridflow train`, `python -m hybridflow.trainer.main_ppo`\n",
        *_tables(PPOConfig),
        "## Supervised fine-tuning\n\n`hybridflow sft`, `python -m hybridflow.trainer.main_sft`\n",
        *_tables(SFTConfig),
        "## Keys of verl\n\nA command of verl's documents runs with the module's name changed. Its keys "
        "that are not in the tables:\n",
        "### Other names\n\nEach prints one line that names the key now used. Patterns are regular "
        "expressions of whole keys.\n",
        _table(
            ("key", "now"), ((f"`{old}`", f"`{new}`") for old, new in _unique([*PPO_ALIASES, *SFT_ALIASES]))
        ),
        "### Without effect, or not in this version\n\nAn accepted value prints one line; any other value "
        "is refused.\n",
        _table(
            ("keys", "accepted", "because", "else"),
            (_rule(rule) for rule in _unique([*PPO_RULES, *SFT_RULES])),
        ),
        "### Refused values\n",
        _table(("key", "values", "way out"), _refused()),
    ]
    return "\n".join(parts)


def _tables(root: type[Any]) -> Iterator[str]:
    blocks: dict[str, list[KeyInfo]] = {}
    for info in keys_of(root).values():
        blocks.setdefault(info.path.rpartition(".")[0], []).append(info)
    for block, infos in blocks.items():
        yield f"### {block}\n"
        yield _table(("key", "type", "default", "meaning"), (_key(info) for info in infos))


def _key(info: KeyInfo) -> tuple[str, ...]:
    return (f"`{info.path.rpartition('.')[2]}`", _type(info), f"`{_value(info.default)}`", info.meaning)


def _type(info: KeyInfo) -> str:
    signs = (("≥", info.minimum), (">", info.above), ("≤", info.maximum), ("<", info.below))
    bounds = " and ".join(f"{sign} {bound}" for sign, bound in signs if bound is not None)
    return type_name(info.type) + (f", {bounds}" if bounds else "")


def _rule(rule: Rule) -> tuple[str, ...]:
    if rule.accepted is None:
        accepted = "any"
    else:
        accepted = (
            ", ".join(
                f"`{_value(v)}`" for v in rule.accepted if v not in ("", "null", "none", "None", [], {})
            )
            or "none"
        )
    return (f"`{rule.pattern}`", accepted, rule.why, rule.refusal)


def _refused() -> Iterator[tuple[str, ...]]:
    for key, values in REFUSED_VALUES.items():
        for reason, group in groupby(values.items(), key=lambda item: item[1]):
            yield (f"`{key}`", ", ".join(f"`{value}`" for value, _ in group), reason)


def _unique(items: Iterable[Any]) -> list[Any]:
    return (
        list(dict.fromkeys(items))
        if all(not isinstance(item, Rule) for item in items)
        else list({i.pattern: i for i in items}.values())
    )


def _value(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value]
        if isinstance(value, (bool, type(None)))
        else str(value)
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
