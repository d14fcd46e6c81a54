"""Write docs/configuration.md from the configuration's dataclasses; with --check only test whether it is
fresh.

python scripts/config_docs.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hybridflow.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.tree import KeyInfo, keys_of, type_name
from hybridflow.config.verl_keys import Rule, tables

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by scripts/config_docs.py from the dataclasses in src/hybridflow/config; do not edit. -->

A run is described by keys. A recipe (`--recipe grpo`) sets those of an algorithm, and `key=value` on the
command line sets one more. `null` as a value means that the key follows another key or is off.
"""

FIRST_KEYS = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "data.train_files": "train.parquet",
    "data.val_files": "test.parquet",
    "reward.custom_reward_function.path": "my_reward.py",
    "actor_rollout_ref.rollout.n": "8",
    "data.train_batch_size": "128",
    "data.max_response_length": "1024",
    "actor_rollout_ref.actor.optim.lr": "2e-6",
    "trainer.total_epochs": "3",
    "trainer.n_gpus_per_node": "4",
}
"""The ten keys that most runs set, each with an example."""

GRAMMAR = """\
## How keys are written

- On the command line, `key=value` sets a key: `a.b=1`, `a=[x,y]`, `a={k: v}`, `a='some text'`. The grammar is
  Hydra's, and beside it JSON is read, `a={"k": [1, "v"]}`, and a chat template as it is. A list is set as a
  whole; a block is merged into the recipe's, and `~a` before `a={…}` replaces it: words act from left to
  right. A value may refer to another key, `${trainer.project_name}`, or to the environment, `${oc.env:HOME}`.
- A leading `+` is not needed and does no harm. `~key` sets a key back to its default.
- A recipe is a YAML file that sets several keys, and may build on others through its `defaults` list.
  `--recipe` takes a name or a path. Hydra's `--config-path FOLDER --config-name NAME` name the file too, to
  `hybridflow train`, `config` and the others as to `python -m hybridflow.trainer.main_ppo`.
- `hybridflow train --multirun` runs `a=1,2` one after another, each in a run folder of its own. Let
  `trainer.experiment_name` follow the values, as in `lr-${actor_rollout_ref.actor.optim.lr}`.
- `hybridflow config` lists every key. Followed by a run's words it prints the whole configuration as it will
  run, and with `--explain` what follows from it: steps, processes, memory.

Wrong keys, types and values are reported together, before anything is built. A model folder is looked at
then, too.
"""


def main(arguments: list[str]) -> int:
    """Return exit status 0, or 1 where --check finds the page stale."""
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
    """Return the whole page."""
    parts = [
        INTRODUCTION,
        "## The ten keys to begin with\n",
        _table(("key", "default", "meaning", "example"), _first_keys()),
        "Together, with the other keys as the recipe and the defaults have them:\n",
        f"```bash\n{first_command()}\n```\n",
        GRAMMAR,
        "## Reinforcement learning\n\n`hybridflow train` and `python -m hybridflow.trainer.main_ppo` read "
        "these keys.\n",
        *_tables(PPOConfig),
        "## Supervised fine-tuning\n\n`hybridflow sft` and `python -m hybridflow.trainer.main_sft` read "
        "these keys.\n",
        *_tables(SFTConfig),
        "## Preference optimisation and reward models\n\n`hybridflow dpo` (`main_dpo`) and `hybridflow "
        "reward-model` (`main_reward_model`) read the keys of supervised fine-tuning, and these.\n",
        "### `hybridflow dpo`\n",
        *_further_tables(DPOConfig),
        "### `hybridflow reward-model`\n",
        *_further_tables(RewardModelConfig),
        "## Keys of verl\n\nA command of verl's documents runs after its module's name is changed. This is "
        "what becomes of verl's keys that are not in the tables above.\n",
        "### Other names\n\nEach of these prints one line that names the key now used. The patterns are "
        "regular expressions of whole keys.\n",
        _table(("key", "now"), _aliases()),
        "### Without effect, or not in this version\n\nA value in the second column prints one line that "
        "says why it has no effect; any other value is refused, with the way out.\n",
        _table(("keys", "accepted", "because", "way out of other values"), map(_rule, _unique_rules())),
        "### Refused values\n\nThese values of keys above are verl's and not in this version.\n",
        _table(("key", "values", "way out"), _refused()),
    ]
    return "\n".join(parts)


def first_command() -> str:
    """Return the command that sets the ten keys of the page's first table."""
    words = [f"{key}={example}" for key, example in FIRST_KEYS.items()]
    return " \\\n  ".join(["hybridflow train --recipe grpo", *words])


def _first_keys() -> Iterator[tuple[str, ...]]:
    infos = keys_of(PPOConfig)
    for key, example in FIRST_KEYS.items():
        yield (f"`{key}`", f"`{_value(infos[key].default)}`", infos[key].meaning, f"`{key}={example}`")


def _tables(root: type[Any]) -> Iterator[str]:
    blocks: dict[str, list[KeyInfo]] = {}
    for info in keys_of(root).values():
        blocks.setdefault(info.path.rpartition(".")[0], []).append(info)
    for block, infos in blocks.items():
        yield f"### {block}\n"
        yield _table(("key", "type", "default", "meaning"), (_key(info) for info in infos))


def _further_tables(root: type[Any]) -> Iterator[str]:
    """Give one table of the keys that a run of supervised fine-tuning does not have, or not so."""
    own = keys_of(SFTConfig)
    further = [info for path, info in keys_of(root).items() if own.get(path) != info]
    rows = ((f"`{info.path}`", *_key(info)[1:]) for info in further)
    yield _table(("key", "type", "default", "meaning"), rows)


def _key(info: KeyInfo) -> tuple[str, ...]:
    name = info.path.rpartition(".")[2]
    return (f"`{name}`", _type(info), f"`{_value(info.default)}`", info.meaning)


def _type(info: KeyInfo) -> str:
    signs = (("≥", info.minimum), (">", info.above), ("≤", info.maximum), ("<", info.below))
    bounds = " and ".join(f"{sign} {bound}" for sign, bound in signs if bound is not None)
    return ", ".join(filter(None, (type_name(info.type), bounds)))


def _aliases() -> Iterator[tuple[str, ...]]:
    table = tables()
    for old, new in dict.fromkeys([*table.ppo_aliases.items(), *table.sft_aliases.items()]):
        yield (f"`{old}`", f"`{new}`")
    for old, values, new in table.aliases_by_value:
        yield (f"`{old}` with {', '.join(f'`{_value(value)}`' for value in values)}", f"`{new}`")


def _unique_rules() -> Sequence[Rule]:
    table = tables()
    return list({rule.pattern: rule for rule in (*table.overrides, *table.ppo, *table.sft)}.values())


def _rule(rule: Rule) -> tuple[str, ...]:
    return (f"`{rule.pattern}`", _accepted(rule), rule.why, rule.refusal)


def _accepted(rule: Rule) -> str:
    if rule.accepted is None:
        return "any"
    shown = [value for value in rule.accepted if value not in ("", "null", "none", [], {})]
    return ", ".join(f"`{_value(value)}`" for value in shown) or "none"


def _refused() -> Iterator[tuple[str, ...]]:
    for key, values in tables().refused_values.items():
        for reason, group in groupby(values.items(), key=lambda item: item[1]):
            yield (f"`{key}`", ", ".join(f"`{value}`" for value, _ in group), reason)


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace("\n", "\\n")  # a line break would end the row of the table


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    shown = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n".join(shown) + "\n"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
