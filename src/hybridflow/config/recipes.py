"""Recipes: YAML files that hold only the keys that differ from the defaults, and may build on others.

"grpo", "tiny/grpo" or path/to/run.yaml ──read_recipe──► nested dict, over the recipes of its `defaults`

Of the flags of Hydra, a user's own YAML file is read as a recipe, and the others are refused in a sentence.

["--config-path=conf", "--config-name=mine", "data.seed=1"] ──read_flags──► [data.seed=1], conf/mine.yaml
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
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
"""verl's names for files of all keys with their defaults: in a `defaults` list they mean the schema."""


ROOTS = {"train": "PPOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "reward-model": "RewardModelConfig"}
"""The class of the keys of each command, by the command that a recipe's comment names."""
COMPARISONS = ("dpo", "reward_model", "process_reward")
"""Names of the recipes of `hybridflow dpo` and `hybridflow reward-model`."""
LONG = {
    "-cp": "--config-path",
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-m": "--multirun",
    "-r": "--run",
    "-c": "--cfg",
    "-p": "--package",
    "-i": "--info",
    "-sc": "--shell-completion",
    "-h": "--help",
}
FOLDER_FLAGS = ("--config-path", "--config-dir")
WITH_VALUE = (*FOLDER_FLAGS, "--config-name", "--cfg", "--package", "--experimental-rerun")
SHOW = "print a run's keys and values with `hybridflow config key=value …`, and what follows with --explain"
REFUSED = {
    "--multirun": "run several with `hybridflow train --multirun key=1,2` (or `hybridflow sft --multirun`)",
    "--cfg": SHOW,
    "--resolve": SHOW,
    "--package": SHOW,
    "--info": SHOW,
    "--hydra-help": "the command is not run by Hydra; `hybridflow config` lists every key",
    "--version": "`hybridflow --version` prints the version",
    "--shell-completion": "the command is not run by Hydra, and completes no words",
    "--experimental-rerun": "give the run's config.yaml as `hybridflow train --recipe RUN/config.yaml`",
}
NOT_SHIPPED = (
    "; verl's own YAML files are not part of hybridflow, where every key has its default: leave "
    "--config-path and --config-name out, and keep the key=value words"
)
HELP_FLAGS = ("--help", "-h")

HELP = """\
usage: python -m hybridflow.trainer.{module} [--config-path FOLDER --config-name NAME] key=value ...

Each key=value sets one key of the run, as in data.train_batch_size=256. `hybridflow config{flag}` lists every
key with its default and its meaning, and docs/configuration.md is the same as a page.

--config-path FOLDER  folder of a YAML file of your own, which sets several keys
--config-name NAME    name of that file, or of a recipe of hybridflow: grpo, ppo, dapo and others
--help                show this text

`hybridflow {command}` runs the same, and has --recipe and --multirun. Before anything runs,
`hybridflow config --explain{flag} key=value ...` shows what follows from the keys.
"""


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


def asks_for_help(words: Sequence[str]) -> bool:
    """Return whether --help or -h is among the words of a command line."""
    return any(word in HELP_FLAGS for word in words)


def help_text(module: str) -> str:
    """Return the help of `python -m hybridflow.trainer.main_ppo` or one of its like, by the module's name."""
    if module == "main_ppo":
        return HELP.format(module=module, command="train", flag="")
    word = module.removeprefix("main_").replace("_", "-")
    return HELP.format(module=module, command=word, flag=f" --{word}")


def read_flags(words: Sequence[str], recipe: str | Path | None = None) -> tuple[list[str], str | Path | None]:
    """Return the overrides among the words of a command line, and the recipe that the flags or `recipe` name.

    Raises ConfigError for an unknown flag, one that means nothing here, and a file that is not there.
    """
    overrides: list[str] = []
    given: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flag, sign, value = word.partition("=")
        flag = LONG.get(flag, flag)
        if flag in WITH_VALUE and not sign:
            value = next(rest, "")
        given[flag] = value
    for flag in given:
        if flag not in (*FOLDER_FLAGS, "--config-name", "--run"):
            raise ConfigError(
                f"{flag}: {REFUSED.get(flag, 'there is no such option')}; keys are given as key=value"
            )
    named = _named_file(given)
    if named is not None and recipe is not None:
        raise ConfigError(f"--config-name={given['--config-name']} and --recipe {recipe}: give one of them")
    if named is None and _name(given) == MEGATRON_BASE:
        overrides[:0] = ["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"]
    return overrides, named or recipe


def _name(given: dict[str, str]) -> str:
    """Return the name that --config-name gives, without its ending."""
    return given.get("--config-name", "").removesuffix(".yaml").removesuffix(".yml")


def _named_file(given: dict[str, str]) -> str | None:
    """The recipe that --config-path and --config-name name; None where they name verl's own base."""
    folders = [given[flag] for flag in FOLDER_FLAGS if flag in given]
    name = _name(given)
    if "--config-name" in given and not name:
        raise ConfigError("--config-name without a name: give the name of a YAML file, or of a recipe")
    hint = NOT_SHIPPED if "trainer" in name else ""
    if not folders:
        if hint and name not in (*BASES, *recipe_names()):
            raise ConfigError(f"--config-name={name}: no recipe is called {name}{hint}")
        return None if name in ("", *BASES) else name
    folder = Path(folders[-1].removeprefix("file://")).expanduser()
    flag = f"--config-path={folders[-1]}"
    if not folder.is_dir() and name in BASES:  # the folder of verl's own file
        return None
    if not folder.is_dir():
        raise ConfigError(
            f"{flag}: there is no folder {folder} (a relative one starts at the working directory){hint}"
        )
    if not name:
        there = ", ".join(sorted(path.stem for path in folder.glob("*.y*ml"))) or "no YAML file"
        raise ConfigError(f"{flag} without --config-name: name a file in it (it holds {there})")
    for suffix in (".yaml", ".yml"):
        if (folder / f"{name}{suffix}").is_file():
            return str(folder / f"{name}{suffix}")
    if name in BASES:
        return None
    raise ConfigError(f"{flag} --config-name={name}: there is no file {folder / name}.yaml{hint}")
