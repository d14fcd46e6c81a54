"""The bodies of the commands. Each imports what it needs when it runs, so that the command starts fast."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from hybridflow.cli.time_travel import cannot_is_two


def demo(options: argparse.Namespace) -> int:
    """Train the tiny model and show what changed."""
    from hybridflow.cli.demo_view import show_summary
    from hybridflow.errors import Stopped
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    with progress.shown():
        with progress.importing():
            from hybridflow.demo.demo import DemoOptions, run_demo

        wanted = DemoOptions(
            Path(options.out),
            algorithm=options.algo,
            experts=options.experts,
            seed=options.seed,
            reward=options.reward,
            overrides=tuple(options.overrides),
        )
        try:
            summary = run_demo(wanted)
        except KeyboardInterrupt as interrupted:
            where = "in the demo, which starts anew the next time; what it has made so far is in"
            raise Stopped(signal.SIGINT, f"{where} {wanted.folder}") from interrupted
    show_summary(summary)
    return 0


def train(options: argparse.Namespace) -> int:
    """Run a command that trains: one run, or every combination of a sweep."""
    from hybridflow.observability.importing import importing
    from hybridflow.observability.progress import progress

    with progress.shown():
        with progress.phase("reading the configuration"), importing():
            from hybridflow.config import RUNS
            from hybridflow.trainer.main import run

            configs = _prepared(options, RUNS[options.command])
        for each in configs:
            run(each)
    return 0


PROFILED = (
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.experiment_name=profile",
    "global_profiler.tool=torch",
)
"""Overrides of a run that is there to be profiled; those of the command line come after them."""


def profile(options: argparse.Namespace) -> int:
    """Run two steps of a run and record the second one."""
    options.command = "train"
    options.multirun = False
    options.overrides = [*PROFILED, *options.overrides]
    return train(options)


def _prepared(options: argparse.Namespace, root: type[Any]) -> list[Any]:
    """Prepare the configurations of all runs: a mistake in the last one shows before the first one runs."""
    from hybridflow.config.load import expand_sweeps, prepare_config
    from hybridflow.errors import ConfigError
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.trainer.fallback import fallback
    from hybridflow.trainer.main import missing_here

    setup_logging()
    sweep = [options.overrides]
    if options.multirun:
        sweep = expand_sweeps(options.overrides)
    prepared = [
        prepare_config(root, overrides, recipe=options.recipe, missing=missing_here, fallback=fallback)
        for overrides in sweep
    ]
    folders = [each.config.trainer.default_local_dir for each in prepared]
    if len(set(folders)) < len(folders):
        raise ConfigError(
            f"--multirun: {len(folders)} runs would write into {len(set(folders))} run folders, for example "
            f"{folders[0]}: let its name "
            "follow the values, as in 'trainer.experiment_name=lr-${actor_rollout_ref.actor.optim.lr}'"
        )
    for each in prepared:
        _show_notes(each.notes)
    return [each.config for each in prepared]


def _resolved(options: argparse.Namespace, root: type[Any], **choices: Any) -> Any:
    """Show the notes of a configuration for a command that starts no run, and return it.

    `choices` are those of `prepare_config`.
    """
    from hybridflow.config.load import prepare_config
    from hybridflow.trainer.fallback import fallback

    prepared = prepare_config(
        root, options.overrides, recipe=options.recipe, runs=False, fallback=fallback, **choices
    )
    _show_notes(prepared.notes)
    return prepared.config


def config(options: argparse.Namespace) -> int:
    """Print the resolved configuration as YAML, or what follows from it; without words, the defaults."""
    from hybridflow.config import RUNS
    from hybridflow.config.show import to_yaml

    root = RUNS[options.run]
    if not (options.recipe or options.overrides or options.explain or options.changed):
        print(to_yaml(root()), end="")
        return 0
    from hybridflow.trainer.main import missing_libraries

    resolved = _resolved(options, root, missing=missing_libraries)
    if options.explain:
        from hybridflow.cli.explain_view import show_explanation

        show_explanation(resolved)
    else:
        print(to_yaml(resolved, only_changed=options.changed), end="")
    return 0


def explain(options: argparse.Namespace) -> int:
    """Print the formulas of a run with its numbers."""
    from hybridflow.cli.explain_view import show_algorithm
    from hybridflow.config import PPOConfig

    show_algorithm(_resolved(options, PPOConfig, needs_model=False, needs_files=False))
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print what is installed, what a run can use here, and what to fix."""
    from hybridflow.cli.doctor import show_machine

    return show_machine(as_json=options.json)


def merge(options: argparse.Namespace) -> int:
    """Write a checkpoint's actor as a Hugging Face folder, and upload it if requested."""
    from hybridflow.data.remote import HubUpload
    from hybridflow.errors import ConfigError
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    if options.private and options.upload is None:
        raise ConfigError("--private says how to upload: give --upload OWNER/NAME too, or leave it out")
    upload = None
    with progress.shown():
        if options.upload is not None:
            with progress.phase("asking the hub"):
                upload = HubUpload(options.upload, options.private, options.token_env)
                upload.check()
        with progress.importing():
            from hybridflow.merger import merge as merge_checkpoint

        with progress.phase("merging the checkpoint"):
            target = merge_checkpoint(
                Path(options.checkpoint),
                Path(options.target),
                lora=options.lora,
                base_model=options.base_model,
                dtype=options.dtype,
                trust_remote_code=options.trust_remote_code,
            )
        if upload is not None:
            with progress.phase("uploading"):
                upload.send(target)
    return 0


def import_gguf(options: argparse.Namespace) -> int:
    """Write the model of a GGUF file as a Hugging Face folder."""
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    with progress.shown():
        with progress.importing():
            from hybridflow.models.files.gguf import import_gguf as convert

        with progress.phase("converting the GGUF file"):
            convert(options.file, options.target, dtype=options.dtype)
    return 0


def reward_test(options: argparse.Namespace) -> int:
    """Score the first rows of the training data; only answers of the model need a model."""
    from hybridflow.cli.reward_view import GENERATE, show_reward_test
    from hybridflow.config import PPOConfig
    from hybridflow.observability.logging_setup import setup_logging

    setup_logging()
    if options.cases or options.suggest or options.json:
        return reward_cases(options)
    resolved = _resolved(options, PPOConfig, needs_model=options.response == GENERATE)
    return show_reward_test(resolved, rows=options.rows, response=options.response)


@cannot_is_two
def reward_cases(options: argparse.Namespace) -> int:
    """Print how often the reward errs on labelled cases, or a run's samples as cases to label."""
    from hybridflow.cli.reward_view import show_cases, show_suggestions
    from hybridflow.config import PPOConfig
    from hybridflow.errors import ConfigError

    if options.suggest:
        return show_suggestions(Path(options.suggest))
    if not options.cases:
        raise ConfigError("--json is for labelled cases: give --cases FILE, too, or leave it out")
    resolved = _resolved(options, PPOConfig, needs_model=False, needs_files=False)
    return show_cases(resolved, options.cases, as_json=options.json)


def try_environment(options: argparse.Namespace) -> int:
    """Run one trajectory of an environment with a person, or a model."""
    from hybridflow.cli.try_view import read_options, read_row, show_try
    from hybridflow.environments.load import load_environment
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    given = read_options(options.options)
    row = read_row(options.row, options.seed)
    if options.model is None:
        show_try(options.environment, given, options.seed, row)
        return 0
    load_environment(options.environment, given, key="environment")  # a mistake shows before torch is loaded
    with progress.shown(), progress.importing():
        from hybridflow.cli.try_model import show_model

    show_model(options.environment, given, options.seed, row, options.model, options.max_new_tokens)
    return 0


def view(options: argparse.Namespace) -> int:
    """Write the page of a run as one self-contained HTML file, or serve it while the run writes."""
    from hybridflow.errors import ConfigError
    from hybridflow.observability.report import LiveServer, write_report

    if not options.live:
        print(f"wrote {write_report(options.run, options.out, options.against)}")
        return 0
    if options.out:
        raise ConfigError("--out names the file that is written, and --live writes none: give one of them")
    server = LiveServer([run for run in (options.run, options.against) if run], options.port)
    print(f"{server.url}\nfollows {options.run}; Ctrl-C ends it, and the run goes on", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        server.close()
    return 0


def _show_notes(notes: list[str]) -> None:
    """Print notes on stderr, because stdout may be YAML for a file."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
