"""`hybridflow eval` and `generate`: the options of the commands, the model they name, the tables."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.cli.recipe_flags import add_recipe

KEY_VARIABLE = "OPENAI_API_KEY"
ENDPOINTS = ("http://", "https://")


def add_evaluation(words: Any, recipe_help: str, overrides_help: str) -> None:
    """Add the grammar of the two commands."""
    for word, text in (
        ("eval", "measure a model: answers to held-out prompts, scored, as pass@k and maj@k with intervals"),
        ("generate", "answer the prompts of a data file with a model, without scoring"),
    ):
        command = words.add_parser(word, help=text)
        command.add_argument(
            "model",
            nargs="?",
            help="a Hugging Face folder or hub name, a run's folder (its newest checkpoint), a checkpoint "
            "(global_step_N), or the address of an OpenAI-compatible endpoint (http://…/v1)",
        )
        command.add_argument(
            "--out",
            default=word,
            help="folder of the answers; the same command goes on there (default: %(default)s)",
        )
        add_recipe(command, f"{recipe_help}; for a checkpoint the default is the config.yaml of its run")
        command.add_argument("-n", type=int, help="answers to each prompt, sampled if more than one")
        command.add_argument(
            "--environment", help="what the model talks to: guess, calculator, …, or path/to/file.py:Name"
        )
        command.add_argument(
            "--served-model",
            help="name of the model at an endpoint (default: that of the tokenizer's folder)",
        )
        command.add_argument(
            "--deadline",
            type=float,
            default=600.0,
            help="seconds for an answer of an endpoint (default: %(default)s)",
        )
        command.add_argument(
            "--explain", action="store_true", help="print the keys that differ from the defaults, and end"
        )
        if word == "eval":
            command.add_argument(
                "--responses", metavar="COLUMN", help="score this column of data.val_files; no model answers"
            )
        command.add_argument(
            "overrides",
            nargs="*",
            help=f"{overrides_help}; validation keys are read, those of training are not",
        )
        command.set_defaults(body=run)


def run(options: argparse.Namespace) -> int:
    """Run `eval` or `generate`: 1 where an answer failed."""
    from hybridflow.config.evaluation import prepare_evaluation
    from hybridflow.config.show import to_yaml
    from hybridflow.errors import ConfigError
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.trainer.evaluation.main import evaluate

    setup_logging()
    if options.model is not None and _is_override(options.model):  # its place is that of the first one, too
        options.overrides = [options.model, *options.overrides]
        options.model = None
    if options.command == "eval" and options.responses:
        from hybridflow.config.evaluation import prepare_evaluation
        from hybridflow.trainer.evaluation.responses import score_file

        config, notes = prepare_evaluation(_words(options), options.recipe, needs_model=False)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return _show(score_file(config, response_key=options.responses), Path(options.out))
    if options.model is None:
        raise ConfigError(
            f"hybridflow {options.command} needs a model: give a folder, a hub name, a checkpoint or the "
            "address of an endpoint"
        )
    with ExitStack() as stack:
        subject, words, recipe = _subject(options, stack)
        # of a checkpoint and of an endpoint the folder that is named has no weights
        has_weights = subject.weights is None and subject.endpoint is None
        words += _words(options)
        config, notes = prepare_evaluation(words, recipe, n=options.n, runs=has_weights)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        if options.explain:
            print(to_yaml(config, only_changed=True), end="")
            return 0
        if subject.endpoint is not None and not subject.endpoint.model:
            named = Path(str(config.actor_rollout_ref.model.path)).name
            subject = replace(subject, endpoint=replace(subject.endpoint, model=named))
        responses = None
        if options.command == "generate":
            responses = Path(options.out).expanduser() / "responses.jsonl"
        results = evaluate(config, subject, responses=responses)
    return _show(results, responses or Path(options.out))


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith(ENDPOINTS) and not Path(word).expanduser().exists()


def _words(options: argparse.Namespace) -> list[str]:
    """Return the options that are keys, then the user's own overrides."""
    words = [f"trainer.default_local_dir='{options.out}'"]
    if options.environment:
        words.append(f"data.environment='{options.environment}'")
    return [*words, *options.overrides]


def _subject(options: argparse.Namespace, stack: ExitStack) -> tuple[Any, list[str], str | None]:
    """Return the model that answers, the overrides that it brings, and the recipe."""
    from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER, STRUCTURE, step_of
    from hybridflow.errors import ConfigError
    from hybridflow.trainer.evaluation.main import ModelEndpoint, Subject, state_of
    from hybridflow.trainer.stopping import newest_checkpoint

    model = "actor_rollout_ref.model"
    if options.model.startswith(ENDPOINTS):
        endpoint = ModelEndpoint(
            options.model, options.served_model or "", os.environ.get(KEY_VARIABLE), options.deadline
        )
        return Subject(options.model, endpoint=endpoint), [], options.recipe
    folder = Path(options.model).expanduser()
    checkpoint = newest_checkpoint(folder) or folder
    if checkpoint.name == ACTOR:
        checkpoint = checkpoint.parent
    if not (checkpoint / ACTOR / STRUCTURE).is_file():
        if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is the folder of a run without a checkpoint: set trainer.save_freq")
        words = [f"{model}.path='{options.model}'"]
        if options.recipe is not None:
            # the recipe may be a run's, with adapters that this model has not; a run's nf4, which would round
            # the model once more, is then refused
            words.append(f"{model}.lora_rank=0")
        return Subject.of(options.model), words, options.recipe
    recipe = options.recipe
    if recipe is None and (checkpoint.parent / "config.yaml").is_file():
        recipe = str(checkpoint.parent / "config.yaml")
    config = checkpoint / ACTOR / HF_FOLDER
    words = [f"{key}='{config}'" for key in (f"{model}.path", f"{model}.tokenizer_path", "data.tokenizer")]
    words += [f"{model}.{name}" for name in ("lora_rank=0", "lora_adapter_path=null", "quantization=null")]
    weights = partial(merged, checkpoint, stack)
    return (
        Subject(str(checkpoint.resolve()), state_of(checkpoint), step_of(checkpoint) or 0, weights),
        words,
        recipe,
    )


def merged(checkpoint: Path, stack: ExitStack, trust_remote_code: bool) -> str:
    """Return the Hugging Face folder made of a checkpoint, which is removed when the stack ends."""
    from hybridflow.merger import merge

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridflow-")))
    return str(
        merge(checkpoint, folder / checkpoint.name, dtype="trained", trust_remote_code=trust_remote_code)
    )


def _show(results: Mapping[str, Any], written: Path) -> int:
    """Print a table for each data source and where the answers are; return 1 where one failed."""
    from rich.console import Console
    from rich.table import Table

    failures = 0
    for source, found in results.items():
        failed = sum(found["failed"].values())
        failures = max(failures, failed)  # those of all sources together are the most
        causes = "".join(f", {count} {cause}" for cause, count in found["failed"].items())
        print(f"{source}: {found['prompts']} prompts, {found['answers']} answers, {failed} failed{causes}")
        if failed:
            print(f"the first failure: {found['first_failure']}", file=sys.stderr)
        table = Table("metric", "value", "95 % interval", "prompts")
        for name, estimate in found["metrics"].items():
            bounds = ""
            if estimate["low"] is not None:
                bounds = f"{estimate['low']:.4f} to {estimate['high']:.4f}"
            table.add_row(name, f"{estimate['value']:.4f}", bounds, str(estimate["prompts"]))
        if found["metrics"]:
            Console().print(table)
    view = ""
    if written.name != "responses.jsonl":
        view = f"; `hybridflow view {written}` shows the answers"
    print(f"written to {written}{view}")
    if failures:
        print(
            f"{failures} of the answers failed and are in no metric; the same command tries them again",
            file=sys.stderr,
        )
    return int(failures > 0)
