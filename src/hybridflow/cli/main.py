"""The `hybridflow` command: its grammar. Nothing heavy is imported before the body of a command runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow import __version__
from hybridflow.cli import commands
from hybridflow.cli.evaluate import add_evaluation
from hybridflow.cli.invariants import add_invariants
from hybridflow.cli.plan import add_plan
from hybridflow.cli.recipe_flags import add_recipe, put_flags_first
from hybridflow.cli.serve import add_serve
from hybridflow.cli.time_travel import add_time_travel, add_why
from hybridflow.cli.tinker import add_tinker
from hybridflow.cli.try_algorithm import add_try_algorithm
from hybridflow.trainer.command import ends_in_status

FIRST_STEPS = (
    "First steps: `hybridflow doctor`, `hybridflow demo`, then `hybridflow config --explain --recipe grpo "
    "key=value …` and the same with `train`. `hybridflow COMMAND --help` has the options of a command."
)
RECIPE = "a recipe by name (grpo, ppo, dapo, …), or a YAML file"
TRAINING = {
    "train": "train by reinforcement learning",
    "sft": "supervised fine-tuning",
    "dpo": "preference optimisation on pairs of answers: dpo, ipo, kto, simpo, orpo",
    "reward-model": "train a reward model on pairs of answers, or on labels of steps",
}
OVERRIDES = "key=value, as in `data.train_batch_size=256`; `hybridflow config` alone lists all keys"


def parser() -> argparse.ArgumentParser:
    """Return the grammar of the command line."""
    root = argparse.ArgumentParser(
        prog="hybridflow",
        description="Reinforcement-learning post-training of language models.",
        epilog=FIRST_STEPS,
    )
    root.add_argument("--version", action="version", version=f"hybridflow {__version__}")
    words = root.add_subparsers(dest="command", metavar="command", required=True)

    _add_demo(words)
    for word, text in TRAINING.items():
        run = words.add_parser(word, help=text)
        add_recipe(run, RECIPE)
        run.add_argument(
            "-m",
            "--multirun",
            action="store_true",
            help="run every combination of comma-separated values, one after another",
        )
        run.add_argument("overrides", nargs="*", help=OVERRIDES)
        run.set_defaults(body=commands.train)

    profile = words.add_parser(
        "profile",
        help="two steps of a run, the second one recorded: phases and calls of all ranks in one trace",
    )
    add_recipe(profile, RECIPE)
    profile.add_argument("overrides", nargs="*", help=OVERRIDES)
    profile.set_defaults(body=commands.profile)

    _add_looking(words)
    add_plan(words, RECIPE, OVERRIDES)
    doctor = words.add_parser(
        "doctor",
        help="what this machine has and what to mend: versions, devices, ports, memory, optional parts",
    )
    doctor.add_argument("--json", action="store_true", help="print it as one JSON object")
    doctor.set_defaults(body=commands.doctor)

    _add_merge(words)
    _add_import_gguf(words)
    add_serve(words)
    add_tinker(words)
    add_evaluation(words, RECIPE, OVERRIDES)
    _add_try(words)
    add_try_algorithm(words, OVERRIDES)
    add_invariants(words)
    add_why(words)
    reward = words.add_parser(
        "reward-test", help="try a reward: score the first rows of the data, or judge labelled answers"
    )
    reward.add_argument("-n", "--rows", type=int, default=8)
    reward.add_argument(
        "--response",
        default="ground_truth",
        help="what is scored: ground_truth, empty, generate (the model answers), a column of the data, "
        "a file, or a text",
    )
    tried = reward.add_mutually_exclusive_group()
    tried.add_argument(
        "--cases",
        metavar="FILE",
        help="how often the reward errs on answers whose verdict is known: a file of JSON lines, "
        "or the cases that come with math, math_dapo, gsm8k, search_r1, code, or with all (shipped)",
    )
    tried.add_argument(
        "--suggest",
        metavar="RUN",
        help="print samples of a run as cases to label: verdicts that do not agree",
    )
    reward.add_argument("--json", action="store_true", help="with --cases: print it as one JSON object")
    add_recipe(reward, RECIPE)
    reward.add_argument("overrides", nargs="*", help=OVERRIDES)
    reward.set_defaults(body=commands.reward_test)

    _add_view(words)
    add_time_travel(words)
    return root


def _add_view(words: Any) -> None:
    view = words.add_parser(
        "view", help="curves, rollouts and times of a run as one HTML file, or served while it writes"
    )
    view.add_argument("run", help="folder of the run")
    view.add_argument("--against", metavar="OTHER", help="folder of a run to compare it with")
    view.add_argument("-o", "--out", help="file to write (default: report.html in the run's folder)")
    view.add_argument(
        "--live", action="store_true", help="serve the page on this machine; it follows the run's files"
    )
    view.add_argument("--port", type=int, default=0, help="port of --live (default: one that is free)")
    view.set_defaults(body=commands.view)


def _add_demo(words: Any) -> None:
    demo = words.add_parser(
        "demo", help="watch a tiny language model learn arithmetic, in minutes, on this machine"
    )
    demo.add_argument(
        "--algo", choices=_demo_names(), metavar="NAME", default="grpo", help="a tiny recipe: %(choices)s"
    )
    demo.add_argument(
        "--experts", type=int, default=0, help="experts in each layer of the model, of which a token has two"
    )
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--out", default="demo", help="folder of the run (default: demo)")
    demo.add_argument(
        "--reward",
        choices=["arithmetic_chain", "random"],
        default="arithmetic_chain",
        help="random: the control that must not learn",
    )
    demo.add_argument(
        "overrides", nargs="*", help=f"overrides of the reinforcement-learning run: {OVERRIDES}"
    )
    demo.set_defaults(body=commands.demo)


def _add_looking(words: Any) -> None:
    """Add the commands that describe a run without starting it."""
    config = words.add_parser(
        "config", help="print the keys and values of a run, or with --explain its steps, processes and memory"
    )
    add_recipe(config, RECIPE)
    for word in list(TRAINING)[1:]:
        text = f"a run of `hybridflow {word}`"
        config.add_argument(f"--{word}", dest="run", action="store_const", const=word, help=text)
    config.add_argument(
        "--explain",
        action="store_true",
        help="steps, processes, rows and memory of each, instead of the keys",
    )
    config.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    config.add_argument("overrides", nargs="*", help=OVERRIDES)
    config.set_defaults(body=commands.config, run="train")

    explained = words.add_parser(
        "explain",
        help="print a run's formulas (advantage, loss) with its numbers put in; needs no model and no data",
    )
    add_recipe(explained, RECIPE)
    explained.add_argument("overrides", nargs="*", help=OVERRIDES)
    explained.set_defaults(body=commands.explain)


def _add_merge(words: Any) -> None:
    merge = words.add_parser("merge", help="turn a checkpoint into a Hugging Face folder")
    merge.add_argument("checkpoint", help="global_step_N, or its folder actor or critic")
    merge.add_argument("target", help="folder to write; must be new or empty")
    merge.add_argument(
        "--lora", choices=["fold", "keep"], help="adapters: fold them into their base, or keep them beside it"
    )
    merge.add_argument(
        "--dtype",
        choices=["source", "trained", "float32", "bfloat16", "float16"],
        default="source",
        help="dtype of the weights: of the model the run started from (default), of training, or this one",
    )
    merge.add_argument("--base_model", help="where the base of adapters is, if not where the run had it")
    merge.add_argument(
        "--trust-remote-code", action="store_true", help="run the model code that the checkpoint brings along"
    )
    merge.add_argument(
        "--upload", metavar="OWNER/NAME", help="then upload the folder to this repository of the hub"
    )
    merge.add_argument("--private", action="store_true", help="with --upload: a new repository is private")
    merge.add_argument(
        "--token-env",
        default="HF_TOKEN",
        metavar="VARIABLE",
        help="with --upload: environment variable that holds the hub's token (default: %(default)s)",
    )
    merge.set_defaults(body=commands.merge)


def _add_import_gguf(words: Any) -> None:
    gguf = words.add_parser("import-gguf", help="turn a GGUF file into a Hugging Face folder that trains")
    gguf.add_argument("file", help="a .gguf file, quantised or not, with its tokenizer inside")
    gguf.add_argument("target", help="folder to write; must be new or empty")
    gguf.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="dtype of the written weights (default: %(default)s, which keeps every value of the file)",
    )
    gguf.set_defaults(body=commands.import_gguf)


def _add_try(words: Any) -> None:
    trial = words.add_parser("try", help="play an environment in the terminal, or watch a model do so")
    trial.add_argument("environment", help="a built-in one (guess, calculator, …), or path/to/file.py:Name")
    trial.add_argument(
        "--options", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of its constructor"
    )
    trial.add_argument("--model", help="a Hugging Face folder or hub name; without it you play")
    trial.add_argument(
        "--max-new-tokens",
        type=int,
        default=1024,
        help="tokens of one turn of the model, at most (default: %(default)s)",
    )
    trial.add_argument("--seed", type=int, default=0, help="seed of the environment (default: %(default)s)")
    trial.add_argument(
        "--row", default="{}", help="the data row that the environment reads: a JSON object, or a file of it"
    )
    trial.set_defaults(body=commands.try_environment)


def _demo_names() -> list[str]:
    """Return the names of the recipes with a tiny twin that needs nothing but the demo's own model, and of
    the one for a mixture of experts.
    """
    folder = Path(__file__).parents[1] / "recipes"
    names = {path.stem for path in (folder / "tiny").glob("*.yaml") if (folder / path.name).is_file()}
    return sorted(names - {"on_policy_distillation", "dpo", "reward_model"} | {"moe"})


@ends_in_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit status: 0, 2 for words that are no command, or that of an error."""
    grammar = parser()
    options, rest = grammar.parse_known_args(arguments)
    # argparse takes the overrides before an option or those after it, not both: the rest are overrides too
    if odd := [word for word in rest if word.startswith("-") or not hasattr(options, "overrides")]:
        hint = "; keys are given as key=value, and a YAML file of your own as --recipe PATH"
        grammar.error(f"unrecognized arguments: {' '.join(odd)}{hint if hasattr(options, 'recipe') else ''}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    put_flags_first(options)
    return int(options.body(options) or 0)


if __name__ == "__main__":
    sys.exit(main())
