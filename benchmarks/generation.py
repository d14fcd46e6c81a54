"""Generation on this machine's CPU: our engine, transformers' `generate` and vLLM's CPU build, in turn on the
same work.

    python benchmarks/generation.py [--rows 64,128,512] [--threads 1,2] [--rounds 5] [--vllm PYTHON] [--quick]

A model of 4.3 M parameters (hidden 256, 4 layers, vocabulary 262), prompts of 15 tokens, eight responses
each, at most 64 tokens, no end token. Two patterns of lengths, the same length for each row on all sides:

    uniform   64 tokens each
    life      log-normal, mean 0.4 of the maximum; `generate` works until its longest row has ended

Each side is a process of its own, idle while another is asked; each round asks all, in an order that turns.
`floor` is the time of the matrix products alone, at the rate that the native side's process reaches with
them. `generate_batch`, transformers' continuous batching, is not among the sides: benchmarks/NOTES.md has
what it takes here. Writes `benchmarks/results/generation.json` and `.md`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import side_by_side as kit

WORKER = Path(__file__).parent / "generation_vllm.py"
VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
TITLE = "Generation on a CPU"
HEAD = (
    "threads",
    "rows",
    "lengths",
    "native, tokens/s",
    "transformers",
    "vLLM",
    "native against the best",
    "of the floor",
)
TEXT = """4.3 M parameters, prompts of {prompt} tokens, {group} responses each, at most {most} tokens. Tokens
per second: medians of {rounds} rounds in turn, with the smallest and the largest. `life`: log-normal
lengths, mean 0.4 of the maximum. "Of the floor": of what the matrix products alone would allow, at {rates}.

{table}

{noise}

Goals:

{goals}"""
GOALS = {"uniform": 2.0, "life": 4.0}
"""How many times as fast as the best rival."""
FLOOR_ROWS = 128
FLOOR_GOAL = 0.5
"""At so many rows, this share of the floor."""


def make_prompts(rows: int) -> list[list[int]]:
    """The prompt of each row; a group has the same one."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, kit.SIZES["vocab_size"]) for _ in range(kit.PROMPT)]
        for _ in range(rows // kit.GROUP)
    ]
    return [prompts[row // kit.GROUP] for row in range(rows)]


def native(folder: Path, rows: int) -> Callable[[list[list[int]], list[int]], float]:
    """Our engine on its model: seconds of a batch."""
    from hybridflow.models.build import build_policy
    from hybridflow.protocol.prompt import Prompt
    from hybridflow.rollout.base import GenerationRequest, SamplingParams
    from hybridflow.rollout.native.engine import NativeEngine

    engine = NativeEngine(
        build_policy(folder, device="cpu", dtype="float32"), eos_token_ids=[], max_num_seqs=rows
    )
    engine.wake_up()

    def generate(prompts: list[list[int]], lengths: list[int]) -> float:
        requests = [
            GenerationRequest(row, Prompt(tuple(prompt)), SamplingParams(max_tokens=length), seed=row)
            for row, (prompt, length) in enumerate(zip(prompts, lengths))
        ]
        started = time.perf_counter()
        outputs = list(engine.generate(requests))
        seconds = time.perf_counter() - started
        assert {output.request_id: len(output.token_ids) for output in outputs} == dict(enumerate(lengths))
        return seconds

    return generate


def transformers(folder: Path) -> Callable[[list[list[int]], list[int]], float]:
    """`generate`, which works until the longest row has ended: seconds of a batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def generate(prompts: list[list[int]], lengths: list[int]) -> float:
        ids = torch.tensor(prompts)
        most = max(lengths)
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=most,
                max_new_tokens=most,
            )
        seconds = time.perf_counter() - started
        assert tuple(out.shape) == (len(lengths), kit.PROMPT + most)
        return seconds

    return generate


def matrix_rate(rows: int) -> float:
    """FLOP per second of the products of a decode step of `rows` rows."""
    import torch

    shapes = [(256, 256)] * 4 + [(256, 1024)] * 2 + [(1024, 256)]
    pairs = [(torch.randn(rows, inner), torch.randn(outer, inner)) for inner, outer in shapes]
    best = math.inf
    for _ in range(30):
        started = time.perf_counter()
        for left, right in pairs:
            torch.nn.functional.linear(left, right)
        best = min(best, time.perf_counter() - started)
    return sum(2 * rows * inner * outer for inner, outer in shapes) / best


def serve(side: str, folder: Path, rows: int) -> None:
    """A side: the seconds of each batch that is asked for; the native one says the rate of matrix products
    first.
    """
    generate = native(folder, rows) if side == "native" else transformers(folder)
    kit.say({"rate": matrix_rate(rows) if side == "native" else None})
    while True:
        asked = kit.next_question()
        kit.say({"seconds": generate(asked["prompts"], asked["lengths"])})


def measure(
    folder: Path, parameters: int, rows: int, threads: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Both patterns at a number of rows and threads."""
    commands = {
        side: kit.own_command(__file__, "--side", side, folder, rows) for side in ("native", "transformers")
    }
    if options.vllm:
        commands["vllm"] = [options.vllm, str(WORKER), str(folder), str(rows)]
    found = []
    with kit.open_sides(commands, threads) as sides:
        rate = sides["native"].first["rate"]
        for pattern in kit.LENGTHS:
            lengths = kit.lengths_of(rows, pattern)
            question = {"prompts": make_prompts(rows), "lengths": lengths}
            answers = kit.in_turn(
                {name: partial(side.ask, question) for name, side in sides.items()}, options.rounds, warm_up=1
            )
            case = {
                "threads": threads,
                "rows": rows,
                "lengths": pattern,
                "tokens": sum(lengths),
                "rate": rate,
            }
            case["vllm"] = sides["vllm"].first["version"] if "vllm" in sides else None
            case["floor_s"] = 2 * parameters * sum(lengths) / rate
            case["seconds"] = {
                name: [answer["seconds"] for answer in given] for name, given in answers.items()
            }
            print(kit.line(cells(case)), flush=True)
            found.append(case)
    return found


def cells(case: dict[str, Any]) -> list[object]:
    """A row of the table."""
    medians = {name: statistics.median(seconds) for name, seconds in case["seconds"].items()}
    speeds = {
        name: kit.spread([case["tokens"] / second for second in seconds], ",.0f")
        for name, seconds in case["seconds"].items()
    }
    best = min((name for name in medians if name != "native"), key=medians.__getitem__)
    row: list[object] = [
        case["threads"],
        case["rows"],
        case["lengths"],
        speeds["native"],
        speeds["transformers"],
        speeds.get("vllm", "–"),
    ]
    against = kit.ratio(case["seconds"][best], case["seconds"]["native"])
    return [*row, against, f"{case['floor_s'] / medians['native']:.2f}"]


def goal_of(case: dict[str, Any]) -> str:
    """Whether a case's goals were met."""
    medians = {name: statistics.median(seconds) for name, seconds in case["seconds"].items()}
    own = medians.pop("native")
    reached = min(medians.values()) / own
    goal = GOALS[case["lengths"]]
    text = (
        f"- {case['threads']} thread(s), {case['rows']} rows, {case['lengths']}: {reached:.2f} times the "
        "best "
    )
    text += f"rival, wanted {goal:.0f}: {kit.verdict(reached >= goal)}"
    if case["rows"] == FLOOR_ROWS:
        share = case["floor_s"] / own
        text += f"; {share:.2f} of the floor, wanted {FLOOR_GOAL}: {kit.verdict(share >= FLOOR_GOAL)}"
    return text


def page_of(found: list[dict[str, Any]]) -> str:
    """The page's text."""
    rates = {(case["threads"], case["rows"]): case["rate"] for case in found}
    return TEXT.format(
        prompt=kit.PROMPT,
        group=kit.GROUP,
        most=kit.MAX_TOKENS,
        rounds=len(found[0]["seconds"]["native"]),
        rates=", ".join(
            f"{rate / 1e9:.0f} GFLOP/s ({threads} threads, {rows} rows)"
            for (threads, rows), rate in rates.items()
        ),
        table=kit.table(HEAD, [cells(case) for case in found]),
        noise=kit.NOISE,
        goals="\n".join(map(goal_of, found)),
    )


def main() -> None:
    """All rows, patterns and threads."""
    if len(sys.argv) > 1 and sys.argv[1] == "--side":
        return serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    parser = kit.arguments(__doc__, rounds=5)
    parser.add_argument("--rows", type=kit.numbers, default=[64, 128, 512])
    parser.add_argument(
        "--vllm",
        default=str(VLLM) if VLLM.is_file() else "",
        help="Python of an environment with vLLM (make .venv-vllm/.ready); empty: without",
    )
    options = parser.parse_args()
    if options.page:
        result = kit.committed("generation")
        return kit.write("generation", result, TITLE, page_of(result["cases"]))
    if options.quick:
        options.rounds = options.quick
        options.rows = options.rows[:1]
        options.threads = options.threads[:1]
    with tempfile.TemporaryDirectory() as name:
        parameters = kit.make_model(Path(name))
        print(kit.line(HEAD), kit.line(["---"] * len(HEAD)), sep="\n", flush=True)
        found = [
            case
            for threads in options.threads
            for rows in options.rows
            for case in measure(Path(name), parameters, rows, threads, options)
        ]
    facts = kit.facts(["torch", "transformers"])
    facts["machine"] += f", vLLM {found[0]['vllm']}" if options.vllm else ", no vLLM"
    kit.write("generation", {**facts, "cases": found}, TITLE, page_of(found), dry=options.quick)


if __name__ == "__main__":
    main()
