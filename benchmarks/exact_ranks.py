"""Exact mode with one and two threads, and over two ranks: do the log-probs of generation and of training
stay equal to the bit, and what does it cost?

    python benchmarks/exact_ranks.py [--steps 200] [--rounds 3] [--quick]        (half an hour; extra `ray`)

Runs of the tiny task with a model whose dense layers sum 1,024 numbers and more. The exact run has all its
steps; the price is that of a step of a shorter exact run beside a fast one of as many steps, in turn. Writes
`benchmarks/results/exact_ranks.json` and `.md`; ends with status 1 where a log-prob differs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import side_by_side as kit

from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.trackers.jsonl import read_metrics

TITLE = "Exact mode with threads and ranks"
BLOCK = "actor_rollout_ref"
TWO = "trainer.n_gpus_per_node=2"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one thread": (1, ()),
    "two threads": (2, ()),
    "two ranks that share the weights": (1, (TWO,)),
    "two ranks that cut the layers": (
        1,
        (
            TWO,
            f"{BLOCK}.actor.fsdp_config.tensor_parallel_size=2",
            f"{BLOCK}.rollout.tensor_model_parallel_size=2",
        ),
    ),
}
"""Threads of each process, and keys."""
MODEL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 2048}
PRICED_STEPS = 12


def keys(model: Path, folder: Path, steps: int, exact: bool, more: tuple[str, ...]) -> list[str]:
    """The keys of a run."""
    return [
        f"{BLOCK}.model.path='{model}'",
        f"{BLOCK}.rollout.exact={str(exact).lower()}",
        f"{BLOCK}.rollout.n=4",
        f"{BLOCK}.actor.ppo_mini_batch_size=8",
        "data.train_batch_size=8",
        f"trainer.default_local_dir='{folder}'",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[jsonl]",
        *more,
    ]


def run(model: Path, folder: Path, steps: int, exact: bool, layout: str) -> list[dict[str, float]]:
    """The metrics of each step of a run in a process of its own."""
    threads, more = LAYOUTS[layout]
    command = [sys.executable, "-m", "hybridflow", "train", "--recipe", "tiny/grpo"]
    command += keys(model, folder, steps, exact, more)
    done = subprocess.run(command, env=kit.environment(threads), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{layout}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return list(read_metrics(folder / "metrics.jsonl").values())


def measure(layout: str, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """What a layout's runs have shown."""
    model = create_tiny_model(folder / "model", **MODEL)
    lines = run(model, folder / "long", steps, True, layout)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for exact, found in seconds.items():
            short = run(model, folder / f"{number}-{exact}", PRICED_STEPS, exact, layout)
            found.append(statistics.median(line["timing_s/step"] for line in short[2:]))
    return {
        "layout": layout,
        "steps": len(lines),
        "apart": max(line["training/rollout_log_probs_diff_max"] for line in lines),
        "rows": sum(line["training/rollout_rows_checked"] for line in lines),
        "saved": sum(line["training/old_log_probs_from_rollout"] for line in lines),
        "ratios": [
            min(line["training/first_ratio_min"] for line in lines),
            max(line["training/first_ratio_max"] for line in lines),
        ],
        "exact_s": seconds[True],
        "fast_s": seconds[False],
    }


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    rows = []
    for case in result["cases"]:
        exact, fast = (statistics.median(case[name]) for name in ("exact_s", "fast_s"))
        ratios = [one / other for one, other in zip(case["exact_s"], case["fast_s"], strict=True)]
        rows.append(
            f"| {case['layout']} | {case['steps']} | {case['rows']:.0f} | {case['apart']} | "
            f"{case['saved']:.0f} | {case['ratios'][0]} to {case['ratios'][1]} | {exact:.3f} | {fast:.3f} | "
            f"{exact / fast:.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |"
        )
    holds = all(case["apart"] == 0 and case["steps"] == result["wanted"] for case in result["cases"])
    verdict = kit.verdict(holds)
    return f"""A Llama whose MLPs have {MODEL["intermediate"]} numbers, 8 prompts × 4 responses a step of
the tiny task. `apart` is the largest difference of a log-prob between generation and training over all steps,
`saved` the steps without a pass for old log-probs, `ratios` those of the first mini-batch. Prices are seconds
of a step, medians of {PRICED_STEPS - 2} steps, in runs in turn; with a ratio below 1 the saved pass costs
more than exact mode.

| layout | steps | rows checked | apart | saved | ratios | exact, s | fast, s | exact / fast |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Wanted: a difference of 0 over {result["wanted"]} steps in each layout: {verdict}.
"""


def main() -> int:
    """Run all layouts, print, write; 1 where a log-prob differs."""
    parser = kit.arguments(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    options = parser.parse_args()
    if options.page:
        result = kit.committed("exact_ranks")
        kit.write("exact_ranks", result, TITLE, page(result))
        return 0
    steps = 5 if options.quick else options.steps
    cases = []
    for layout in options.only:
        with tempfile.TemporaryDirectory() as folder:
            cases.append(measure(layout, steps, options.quick or options.rounds, Path(folder)))
        print(cases[-1], flush=True)
    result = kit.facts(["torch", "transformers", "ray"]) | {"wanted": steps, "cases": cases}
    kit.write("exact_ranks", result, TITLE, page(result), dry=options.quick)
    return int(any(case["apart"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
