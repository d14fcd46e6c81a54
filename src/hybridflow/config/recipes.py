"""Recipes: YAML files that hold only the keys that differ from the defaults, and may build on others.

"grpo", "tiny/grpo" or path/to/run.yaml ──read_recipe──► nested dict, over the recipes of its `defaults`
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.config.thresholds import quote_bounds
from hybridflow.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent / "recipes"
MEGATRON_BASE = "ppo_megatron_trainer"
"""verl's name for the file of all keys whose strategy is megatron."""
BASES = ("ppo_trainer", MEGATRON_BASE, "sft_trainer", "sft_trainer_engine")
"""verl's names for files of all keys with their defaults: in a `defaults` list they stand for the schema."""


ROOTS = {"train": "PPOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "reward-model": "RewardModelConfig"}
"""The class of the keys of each command, by the command that a recipe's comment names."""
COMPARISONS = ("dpo", "reward_model", "process_reward")
"""Names of the recipes of `hybridflow dpo` and `hybridflow reward-model`."""


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package, those in folders as `folder/name`."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def find_recipe(name: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a recipe: a YAML file by path, or a name beside another recipe or in the package.

    Raises ConfigError where there is none.
    """
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if beside is not None:
            # an absolute path stays as it is
            path = beside / path
        if not path.is_file():
            raise ConfigError(f"recipe {name}: there is no file {path}")
        return path
    for folder in filter(None, (beside, FOLDER)):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    near = difflib.get_close_matches(str(name), recipe_names(), n=1)
    if near:
        raise ConfigError(f"no recipe is called {name}: did you mean {near[0]}?")
    raise ConfigError(
        f"no recipe is called {name}: there are {', '.join(recipe_names())}; a path to a .yaml file works too"
    )


def recipe_hint(word: str) -> str:
    """Return a hint for a word that stands alone on a command line, which may be the name of a recipe."""
    names = recipe_names()
    if word in names or word.endswith((".yaml", ".yml")):
        return f"A recipe is given as --recipe {word} to `hybridflow train`"
    near = difflib.get_close_matches(word, names, n=1)
    if near:
        return f"If you mean the recipe {near[0]}, write --recipe {near[0]}"
    return (
        f"Recipes are given as --recipe NAME: {', '.join(name for name in names if '/' not in name)}; also "
        "tiny/NAME, for tiny models"
    )


def check_command(name: str | Path, root: str) -> None:
    """Raise ConfigError where a recipe of the package is for a command whose keys are of another class.

    `root` is the name of the class. A file of the user's own may be for any command.
    """
    path = find_recipe(name)
    if FOLDER not in path.parents:
        return
    told = re.search(r"^# hybridflow (\S+) --recipe", path.read_text(encoding="utf-8"), re.MULTILINE)
    if told is None or root not in ROOTS.values() or ROOTS[told[1]] == root:
        return
    raise ConfigError(f"recipe {name} is for `hybridflow {told[1]}`, whose keys are others: use that command")


def read_recipe(name: str | Path) -> dict[str, Any]:
    """Return a recipe merged over those of its `defaults` list; its own keys come at `_self_`, or last.

    ${…} is left in place. Raises ConfigError for a missing or unreadable recipe and for a circle.
    """
    return _read(find_recipe(name), ())


def _read(path: Path, through: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in through:
        raise ConfigError(
            "recipes build on each other in a circle: " + " → ".join(p.name for p in (*through, path))
        )
    try:
        own = OmegaConf.to_container(
            OmegaConf.create(quote_bounds(path.read_text(encoding="utf-8"))), resolve=False
        )
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: cannot be read as YAML: {error}") from None
    if not isinstance(own, dict):
        raise ConfigError(f"recipe {path}: wanted a block of keys, got a {type(own).__name__}")
    parents = own.pop("defaults", [])
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"recipe {path}: `defaults` is a list of recipe names, got {parents!r}")
    order = list(parents)
    if "_self_" not in order:
        order.append("_self_")
    layers = []
    for name in order:
        if name == "_self_":
            layers.append(own)
        elif name not in BASES or (path.parent / f"{name}.yaml").is_file():
            layers.append(_read(find_recipe(name, path.parent), (*through, path)))
    merged = OmegaConf.to_container(
        OmegaConf.merge(*(OmegaConf.create(layer) for layer in layers)), resolve=False
    )
    assert isinstance(merged, dict), "dicts merge into a dict"
    return {str(key): value for key, value in merged.items()}
