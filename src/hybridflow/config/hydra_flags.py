"""The flags of Hydra: a user's own YAML file is read as a recipe, and the others are refused in a sentence.

["--config-path=conf", "--config-name=mine", "data.seed=1"] ──read_flags──► [data.seed=1], conf/mine.yaml
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridflow.config.recipes import BASES, MEGATRON_BASE, recipe_names
from hybridflow.errors import ConfigError

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
        overrides.insert(0, "actor_rollout_ref.actor.strategy=megatron")
    return overrides, named or recipe


def _name(given: dict[str, str]) -> str:
    """Return the name that --config-name gives, without its ending."""
    return given.get("--config-name", "").removesuffix(".yaml").removesuffix(".yml")


def _named_file(given: dict[str, str]) -> str | None:
    """The recipe that --config-path and --config-name stand for; None where they name verl's own base."""
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
