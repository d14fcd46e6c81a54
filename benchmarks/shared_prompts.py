"""Where it pays to compute a prompt once for its responses: updates and log-probs, prompts apart and shared.

    python benchmarks/shared_prompts.py [--model tiny,real] [--rounds 5] [--quick]

The models of bench_models.py, 8 responses a prompt, their lengths as in life. Prompts grow from few tokens to
many, and with them the share of the tokens that sharing leaves out. Both sides are the actor's worker on the
same rows in one process with one thread, in turn; CPU seconds, since nothing here waits. Writes
`benchmarks/results/shared_prompts.json` and `.md`.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_models
import side_by_side as kit
from bench_models import TINY, BenchModel
from training_sides import Ours, Work

PROMPTS = (4, 8, 16, 32, 64, 128, 256)
"""Tokens of a prompt."""
ROWS = {"tiny": 64, "real": 8}
TITLE = "Prompts computed once for their responses, on a CPU"
HEAD = ("model", "prompt", "tokens left out", "task", "apart, CPU s", "shared, CPU s", "apart / shared")


def work_of(folder: Path, model: BenchModel, prompt: int) -> Work:
    """Return random rows whose prompts have `prompt` tokens."""
    draw = random.Random(prompt)
    vocabulary = bench_models.config_of(folder)["vocab_size"]

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(count)]

    rows = ROWS[model.name]
    prompts = [tokens(prompt) for _ in range(rows // kit.GROUP)]
    responses = [tokens(length) for length in kit.lengths_of(rows, "life")]
    return Work(folder, [prompts[row // kit.GROUP] for row in range(rows)], responses, model.at_a_time)


def cpu_seconds(work: Callable[[], Any]) -> Callable[[], float]:
    """Return the work as a way whose answer is its CPU seconds."""

    def run() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return run


def measure(folder: Path, model: BenchModel, rounds: int, warm_up: int) -> list[dict[str, Any]]:
    """All lengths of prompts of a model."""
    cases = []
    for prompt in PROMPTS:
        work = work_of(folder, model, prompt)
        keys = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"]
        key = "actor_rollout_ref.actor.use_prefix_grouper"
        sides = {
            name: Ours(work, [*keys, f"{key}={value}"])
            for name, value in (("apart", "false"), ("shared", "true"))
        }
        apart = float((sides["apart"].old - sides["shared"].old).abs().max())
        assert apart < 1e-4, f"shared prompts change log-probs by {apart}"
        whole = work.rows * prompt + sum(work.lengths)
        left_out = (work.rows - work.rows // kit.GROUP) * prompt / whole
        for task in ("log_probs", "update"):
            ways = {name: cpu_seconds(getattr(side, task)) for name, side in sides.items()}
            found = kit.in_turn(ways, rounds, warm_up)
            case = {"model": model.name, "prompt": prompt, "left_out": left_out, "task": task, "sides": found}
            cases.append(case)
            print(kit.line(line_of(case)), flush=True)
    return cases


def line_of(case: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    sides = case["sides"]
    pairs = [one / other for one, other in zip(sides["apart"], sides["shared"], strict=True)]
    return [
        bench_models.MODELS[case["model"]].size,
        str(case["prompt"]),
        f"{case['left_out']:.0%}",
        case["task"].replace("_", "-"),
        kit.spread(sides["apart"]),
        kit.spread(sides["shared"]),
        kit.spread(pairs),
    ]


def page_of(result: dict[str, Any]) -> str:
    """Return the page's text."""
    rounds = len(result["cases"][0]["sides"]["apart"])
    lines = [line_of(case) for case in result["cases"]]
    lost = {}
    for task in ("log_probs", "update"):
        ratios = [
            (
                case["left_out"],
                statistics.median(case["sides"]["apart"]) / statistics.median(case["sides"]["shared"]),
            )
            for case in result["cases"]
            if case["task"] == task
        ]
        lost[task] = max((share for share, ratio in ratios if ratio < 1), default=0.0)
    return f"""{kit.GROUP} responses a prompt, lengths as in life (at most {kit.MAX_TOKENS} tokens), one
thread, medians (fastest–slowest) of {rounds} in turn. `apart / shared` is how many times as fast sharing is,
by pairs.

The largest share of tokens left out at which sharing was the slower side: {lost["log_probs"]:.0%} in the pass
for log-probs, {lost["update"]:.0%} in the update.

{kit.table(HEAD, lines)}"""


def main() -> None:
    """Measure each model, print, write."""
    parser = kit.arguments(__doc__, rounds=5)
    bench_models.add_choice(parser)
    options = parser.parse_args()
    if options.page:
        result = kit.committed("shared_prompts")
        kit.write("shared_prompts", result, TITLE, page_of(result))
        return
    import torch

    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = []
    for model in bench_models.available(options.model):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            bench_models.write_model(model, folder / "model", end=kit.END)
            kit.make_tokenizer(folder / "tokenizer")
            kit.write_prompts(folder / "prompts.jsonl", 8)
            rounds = options.quick or (options.rounds if model is TINY else min(3, options.rounds))
            cases += measure(folder / "model", model, rounds, 0 if options.quick else 1)
    result = kit.facts(["torch", "transformers"]) | {"cases": cases}
    kit.write("shared_prompts", result, TITLE, page_of(result), dry=options.quick)


if __name__ == "__main__":
    main()
