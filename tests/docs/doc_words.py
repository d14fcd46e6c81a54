"""The words of a command, checked as the command would check them, without a model, data or a machine.

`…` or `...` among the words stands for those that a page does not repeat: data and a model.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from doc_blocks import ROOT

from hybridflow.cli.main import parser
from hybridflow.config import RUNS, DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.load import expand_sweeps, prepare_config
from hybridflow.errors import ConfigError
from hybridflow.trainer.fallback import fallback

MODULES: dict[str, type[PPOConfig] | type[SFTConfig]] = {
    "hybridflow.trainer.main_ppo": PPOConfig,
    "hybridflow.trainer.main_sft": SFTConfig,
    "hybridflow.trainer.main_dpo": DPOConfig,
    "hybridflow.trainer.main_reward_model": RewardModelConfig,
}
DOTS = ("…", "...")
WITH_KEYS = ("config", "explain", "reward-test", "demo", *RUNS)
"""Commands whose overrides are the keys of a run."""


class WrongWords(AssertionError):
    """A command of a page that its own grammar or configuration refuses."""


def filled(words: Sequence[str], root: type[Any]) -> list[str]:
    """Return the words of a run with `…` replaced by data and a model."""
    model = "actor_rollout_ref.model.path"
    if root is not PPOConfig:
        model = "model.path"
    usual = {"data.train_files": "train.jsonl", model: "MODEL"}
    given = {word.partition("=")[0] for word in words}
    more = [f"{key}={value}" for key, value in usual.items() if key not in given]
    return [part for word in words for part in (more if word in DOTS else [word])]


def parsed(words: Sequence[str]) -> Any:
    """Return the options that `hybridflow` makes of its words; WrongWords as it would refuse them."""
    said = io.StringIO()
    grammar = parser()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            options, rest = grammar.parse_known_args(list(words))
    except SystemExit as ended:
        if ended.code:
            raise WrongWords(f"hybridflow {' '.join(words)}: {said.getvalue()}") from None
        return None  # --help, --version
    if odd := [word for word in rest if word.startswith("-") or not hasattr(options, "overrides")]:
        raise WrongWords(f"hybridflow {' '.join(words)}: unrecognized arguments {odd}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def root_of(options: Any) -> type[PPOConfig] | type[SFTConfig]:
    """Return the kind of the keys that a command's overrides set."""
    if options.command == "config":
        return RUNS[options.run]
    return RUNS.get(options.command, PPOConfig)


def check_hybridflow(words: Sequence[str]) -> None:
    """Check the words after `hybridflow`: its grammar, and the keys and values of a run."""
    options = parsed(words)
    if options is None or options.command not in WITH_KEYS:
        return
    recipe = getattr(options, "recipe", None)
    if options.command == "demo":
        recipe = f"tiny/{options.algo}"
    root = root_of(options)
    shows = options.command == "config" and not (options.overrides or recipe)
    sweep = [options.overrides]
    if getattr(options, "multirun", False):
        sweep = expand_sweeps(options.overrides)
    for overrides in [] if shows else sweep:
        check_keys(root, filled(overrides, root), recipe)


def check_module(module: str, words: Sequence[str]) -> None:
    """Check the words after `python -m MODULE`, where these are the keys of a run."""
    if module in MODULES:
        root = MODULES[module]
        check_keys(root, filled(words, root), None)


def check_keys(root: type[Any], overrides: Sequence[str], recipe: str | Path | None) -> Any:
    """Return the configuration; WrongWords with every problem, of which a missing model or file is none."""
    try:
        return prepare_config(
            root, overrides, recipe, runs=False, needs_model=False, needs_files=False, fallback=fallback
        ).config
    except ConfigError as error:
        raise WrongWords(f"{' '.join(overrides)}: {error}") from None


def check_command(words: Sequence[str]) -> None:
    """Check a whole command: `hybridflow …`, or `python …`."""
    if words[0] == "hybridflow":
        check_hybridflow(words[1:])
    elif words[1:2] == ["-m"]:
        check_module(words[2], words[3:])
    elif words[1:2] and words[1].startswith(("examples/", "scripts/")) and not (ROOT / words[1]).is_file():
        raise WrongWords(f"{' '.join(words)}: there is no file {words[1]}")
