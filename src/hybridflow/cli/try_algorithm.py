"""`hybridflow try-algorithm`: an estimator or a loss on a few rows that can be checked by hand."""

from __future__ import annotations

import argparse
from typing import Any


def add_try_algorithm(words: Any, overrides: str) -> None:
    """Add the command to the grammar."""
    trial = words.add_parser(
        "try-algorithm",
        help="an advantage estimator or a policy loss, your own or a built-in one, on six rows",
    )
    trial.add_argument("algorithm", help="path/to/file.py:name, package.module:name, or a built-in name")
    trial.add_argument("overrides", nargs="*", help=f"{overrides}; options of your own by algorithm.options")
    trial.set_defaults(body=try_algorithm)


def try_algorithm(options: argparse.Namespace) -> int:
    """Print the result of the function; status 1 where an invariance check fails."""
    from hybridflow.config import PPOConfig
    from hybridflow.config.load import prepare_config

    is_loss = _is_loss(options.algorithm)
    key = "actor_rollout_ref.actor.policy_loss.loss_mode" if is_loss else "algorithm.adv_estimator"
    values = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 3,
        "actor_rollout_ref.model.path": "none",
        key: options.algorithm,
    }
    config = prepare_config(
        PPOConfig,
        options.overrides,
        values=values,
        runs=False,
        needs_model=False,
        needs_files=False,
    ).config

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hybridflow.explain.trial import try_estimator, try_loss

    trial = try_loss(config) if is_loss else try_estimator(config)
    console = Console()
    console.print(Text(trial.summary))
    table = Table(*trial.columns)
    for row in zip(*trial.columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    for check in trial.checks:
        mark = "WRONG" if check.problem else "ok"
        problem = f": {check.problem}" if check.problem else ""
        console.print(Text(f"{mark:<5} {check.meaning}{problem}"), soft_wrap=True)
    return int(not trial.passed)


def _is_loss(name: str) -> bool:
    """Return whether a name is that of a policy loss: a built-in one, or a function that takes log_prob or
    inputs, or that takes anything by place, as only losses do.

    A function that is not known by its source is loaded.
    """
    from hybridflow.algorithms.catalog import ESTIMATORS, LOSS_INPUTS, POLICY_LOSSES
    from hybridflow.config.source_code import define, definition_of
    from hybridflow.data.plugin import load_function

    if ":" not in name:
        return name in POLICY_LOSSES and name not in ESTIMATORS
    found = define(name)
    if found.kind == "unknown":
        found = definition_of(load_function(name, key="algorithm"))
    arguments = {} if found.signature is None else found.signature.parameters
    if {"log_prob", LOSS_INPUTS} & set(arguments):
        return True
    return any(each.kind is each.VAR_POSITIONAL for each in arguments.values())
