"""Log-probs and update on this machine's CPU: our engine, TRL's own functions and a plain padded loop, on the
same rows, in turn.

    python benchmarks/training.py [--model tiny,real] [--threads 1,2] [--rounds 7] [--patterns life,uniform]
        [--quick]
    (needs the extra `bench`)

The models of bench_models.py: 4.3 M parameters with 128 rows, and 135 M with 16 rows and at most 3 rounds.
Responses have the lengths of grpo_step.py. `log-probs` is the pass without gradients, `update` forward,
backward, clipping and an AdamW step.

    ours   `FSDPEngine` by the actor's worker: packed micro-batches, a prompt once for its responses
           (`use_prefix_grouper`); `ours-apart`, of the small model only, has each row's own prompt
    trl    `GRPOTrainer._get_per_token_logps_and_entropies` and its `compute_loss`, all rows padded to the
           longest; all of them at a time (the small model only), and as many as `plain`
    plain  a transformers model, 16 rows (of the large model 8) at a time in the order of the batch, padded to
           the longest of them

Floor: the matrix products of the tokens that are no padding, each prompt once, at the rate that this process
reaches with them. Writes `benchmarks/results/training.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_models
import side_by_side as kit
from bench_models import REAL, TINY, BenchModel
from training_sides import TRL, Ours, Plain, Work, make_work

TASKS = ("log-probs", "update")
GOAL = 2.0
"""The small model: how many times as fast as each of the others, where lengths are as in life."""
REAL_GOALS = {"uniform": 1.1, "life": 2.0}
"""The large model: how many times as fast as the plain loop an update is, by lengths."""
RATE_TOKENS = 512
"""Tokens of the products whose rate is measured."""
TITLE = "Log-probs and update on a CPU"
HEAD = ("model", "threads", "lengths", "task", "side", "s", "CPU s", "ours is", "of the floor")


def agree(sides: dict[str, Any], lengths: list[int]) -> float:
    """The largest difference of log-probs between ours and the others, before anything is trained."""
    ours = sides["ours"].log_probs()
    worst = 0.0
    for name, side in sides.items():
        theirs = side.log_probs()
        rows = [row for part in (theirs if isinstance(theirs, list) else [theirs]) for row in part]
        for row, length in enumerate(lengths):
            worst = max(worst, float((rows[row][:length] - ours[row, :length]).abs().max()))
        assert worst < 1e-4, f"{name} has other log-probs than ours, by {worst}"
    return worst


def make_sides(model: BenchModel, work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """Return all sides of a model on a batch; the large one has fewer, which saves time and memory."""
    keys = [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={options.tokens}", *options.key]
    shared = "actor_rollout_ref.actor.use_prefix_grouper=true"
    sides: dict[str, Any] = {"ours": Ours(work, [*keys, shared])}
    if model is TINY:
        sides["ours-apart"] = Ours(work, keys)
        sides[f"trl-{work.rows}"] = TRL(work, work.rows)
    sides[f"trl-{work.at_a_time}"] = TRL(work, work.at_a_time)
    sides["plain"] = Plain(work)
    return sides


def measure(options: argparse.Namespace, model: BenchModel, threads: int) -> list[dict[str, Any]]:
    """All patterns of a model with a number of threads, in this process."""
    import torch

    torch.set_num_threads(threads)
    config = bench_models.config_of(options.folder)
    rate = bench_models.matrix_rate(config, RATE_TOKENS)
    rows = model.quick_rows if options.quick else model.training_rows
    rounds = options.quick or min(options.rounds, model.most_rounds)
    cases = []
    for pattern in options.patterns:
        work = make_work(options.folder, rows, model.at_a_time, pattern)
        sides = make_sides(model, work, options)
        apart = agree(sides, work.lengths)
        for task, products in zip(TASKS, (2, 6)):
            ways = {side: timed(getattr(worker, task.replace("-", "_"))) for side, worker in sides.items()}
            found = kit.in_turn(ways, rounds, warm_up=0 if options.quick else 1)
            times = {
                side: {"seconds": [wall for wall, _ in pairs], "cpu": [cpu for _, cpu in pairs]}
                for side, pairs in found.items()
            }
            case = {
                "model": model.name,
                "rows": rows,
                "threads": threads,
                "pattern": pattern,
                "task": task,
                "sides": times,
                "floor_s": products * bench_models.parameters_of(config) * work.tokens / rate,
                "apart": apart,
                "rate": rate,
            }
            cases.append(case)
            for line in lines_of(case):
                print(kit.line(line), flush=True)
    return cases


def timed(work: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
    """Its wall-clock and CPU seconds."""

    def run() -> tuple[float, float]:
        wall = time.perf_counter()
        cpu = time.process_time()
        work()
        return time.perf_counter() - wall, time.process_time() - cpu

    return run


def lines_of(case: dict[str, Any]) -> list[list[str]]:
    """Rows of the table."""
    ours = case["sides"]["ours"]["seconds"]
    lines = []
    for side, found in case["sides"].items():
        seconds = statistics.median(found["seconds"])
        against = "" if side.startswith("ours") else kit.ratio(found["seconds"], ours, "as fast")
        cells = [
            bench_models.MODELS[case["model"]].size,
            case["threads"],
            case["pattern"],
            case["task"],
            side,
            kit.spread(found["seconds"]),
            kit.spread(found["cpu"]),
        ]
        lines.append([*map(str, cells), against, f"{case['floor_s'] / seconds:.2f}"])
    return lines


def goal_of(case: dict[str, Any]) -> str | None:
    """Return whether a case's goal was met; None for a case without a goal."""
    model = bench_models.MODELS[case["model"]]
    medians = {side: statistics.median(found["seconds"]) for side, found in case["sides"].items()}
    if model is REAL:
        if case["task"] != "update":
            return None
        goal = REAL_GOALS[case["pattern"]]
        rival = "plain"
    else:
        if case["pattern"] != "life":
            return None
        goal = GOAL
        rivals = {side: each for side, each in medians.items() if not side.startswith("ours")}
        rival = min(rivals, key=rivals.__getitem__)
    reached = medians[rival] / medians["ours"]
    return (
        f"- {model.size}, {case['task']}, {case['pattern']}, {case['threads']} thread(s): {reached:.2f} × as "
        f"fast as {rival}, wanted {goal}: {kit.verdict(reached >= goal)}"
    )


def page_of(result: dict[str, Any]) -> str:
    """Return the page's text."""
    cases = result["cases"]
    apart = max(case["apart"] for case in cases)
    goals = "\n".join(filter(None, map(goal_of, cases)))
    shapes = {}
    for case in cases:
        model = bench_models.MODELS[case["model"]]
        rounds = len(case["sides"]["ours"]["seconds"])
        shapes[model.size] = f"{model.size} parameters, {case['rows']} rows, medians of {rounds}"
    left_out = "" if any(case["model"] == REAL.name for case in cases) else f"\n{bench_models.NOT_RUN}\n"
    return f"""{"; ".join(shapes.values())}. Rows have {kit.PROMPT} prompt tokens and at most {kit.MAX_TOKENS}
more; seconds (fastest–slowest), all sides in turn. The 4.3 M model has random weights; the 135 M model is
SmolLM2-135M-Instruct, with fewer rows, rounds and sides, because its tokens cost thirty times as much.
{left_out}
The log-probs of all sides are within {apart:.0e}. `ours` computes a prompt once for its responses
(`actor.use_prefix_grouper`, as a run does where exact mode is off), `ours-apart` does not. `trl-N` has N rows
in a forward pass, padded to the longest of the batch; `plain` has {TINY.at_a_time} (the 135 M model:
{REAL.at_a_time}), padded to the longest of these.

{kit.table(HEAD, [line for case in cases for line in lines_of(case)])}

{kit.NOISE}

Goals, of the 4.3 M model against the fastest of the others where lengths are as in life, of the 135 M model
against the plain loop:

{goals}"""


def measure_apart(model: BenchModel, threads: int, folder: Path) -> list[dict[str, Any]]:
    """Measure in a process of its own, because torch takes its number of threads once."""
    into = folder / "found.json"
    more = ["--model", model.name, "--threads", str(threads)]
    subprocess.run(
        [
            sys.executable,
            __file__,
            *sys.argv[1:],
            *more,
            "--folder",
            str(folder / "model"),
            "--into",
            str(into),
        ],
        check=True,
        env=kit.environment(threads),
    )
    found: list[dict[str, Any]] = json.loads(into.read_text())
    return found


def main() -> None:
    """Measure each model with each number of threads, print, write."""
    parser = kit.arguments(__doc__, rounds=7)
    bench_models.add_choice(parser)
    parser.add_argument("--patterns", type=lambda text: text.split(","), default=["life", "uniform"])
    parser.add_argument("--tokens", type=int, default=2048, help="ours: tokens in a forward pass")
    parser.add_argument("--key", action="append", default=[], help="ours: a further key=value")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        options.into.write_text(json.dumps(measure(options, options.model[0], options.threads[0])))
        return
    if options.page:
        result = kit.committed("training")
        kit.write("training", result, TITLE, page_of(result))
        return
    if options.quick:
        options.threads = options.threads[:1]
    cases: list[dict[str, Any]] = []
    for model in bench_models.available(options.model):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            bench_models.write_model(model, folder / "model", end=kit.END)
            kit.make_tokenizer(folder / "tokenizer")
            kit.write_prompts(folder / "prompts.jsonl", model.training_rows // kit.GROUP)
            for threads in options.threads:
                cases += measure_apart(model, threads, folder)
    result = kit.facts(["torch", "transformers", "trl"]) | {"cases": cases}
    kit.write("training", result, TITLE, page_of(result), dry=options.quick)


if __name__ == "__main__":
    main()
