"""Generation on this machine's CPU: our engine, transformers' `generate` and vLLM's CPU build, in turn on the
same work.

    python benchmarks/generation.py [--model tiny,real] [--rows 64,128,512] [--threads 1,2] [--rounds 5]
        [--vllm PYTHON] [--clock wall|cpu] [--result NAME] [--quick]

The models of bench_models.py, of 4.3 M and of 135 M parameters; prompts of 15 tokens, eight responses each,
at most 64 tokens, no end token. Two patterns of lengths, the same length for each row on all sides:

    uniform   64 tokens each
    life      log-normal, mean 0.4 of the maximum; `generate` works until its longest row has ended

Each side is a process of its own, idle while another is asked; each round asks all, in an order that turns.
On a machine that other work shares, `--clock cpu` measures the CPU time of a side, which with one thread is
about what it would take alone.

`floor` is, summed over the steps as rows end, the longer of the time of the matrix products and that of
reading weights, keys and values, at the rates that the native side's process reaches. `generate_batch`,
transformers' continuous batching, is not among the sides: benchmarks/NOTES.md has what it takes here. Writes
`benchmarks/results/NAME.json` and `.md`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_models
import side_by_side as kit
from bench_models import REAL, TINY, BenchModel

WORKER = Path(__file__).parent / "generation_vllm.py"
VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
TITLE = "Generation on a CPU"
HEAD = (
    "model",
    "threads",
    "rows",
    "lengths",
    "native, tokens/s",
    "transformers",
    "vLLM",
    "native against the best",
    "of the floor",
)
TEXT = """Prompts of {prompt} tokens, {group} responses each, at most {most} tokens. The 4.3 M model has
random weights; the 135 M model is SmolLM2-135M-Instruct, with fewer rows and rounds: its tokens cost thirty
times as much. Tokens per second{clock}: medians of {rounds} rounds in
turn, with the smallest and the largest.
`life`: log-normal lengths, mean 0.4 of the maximum. "Of the floor": of what matrix products and reading of
memory would allow, {rates}.

{table}

{left_out}{noise}

Goals:

{goals}"""
NO_VLLM = "vLLM is not among the sides: it is not installed here (`make .venv-vllm/.ready`)."
RIVAL_GOAL = 1.0
"""How many times as fast as the fastest rival, at least."""
FLOOR_ROWS = 64
"""A tiny model is judged by its floor from so many rows on; with fewer, what a step costs at all is more."""
FLOOR_GOALS = {"tiny": 0.6, "real": 0.75}
"""Shares of the floor."""


def make_prompts(rows: int, vocabulary: int) -> list[list[int]]:
    """The prompt of each row; a group has the same one."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(kit.PROMPT)] for _ in range(rows // kit.GROUP)]
    return [prompts[row // kit.GROUP] for row in range(rows)]


def native(folder: Path, rows: int) -> Callable[[list[list[int]], list[int]], float]:
    """Our engine on its model: seconds of a batch."""
    from hybridflow.models.files.build import build_policy
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
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=kit.PAD, eos_token_id=None)

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


def serve(side: str, folder: Path, rows: int) -> None:
    """A side: the seconds of each batch that is asked for.

    The native one first says the rates of matrix products and of copies.
    """
    generate = native(folder, rows) if side == "native" else transformers(folder)
    ceilings = {}
    if side == "native":
        ceilings["rate"] = bench_models.matrix_rate(bench_models.config_of(folder), rows)
        ceilings["bandwidth"] = bench_models.copy_bandwidth()
    kit.say(ceilings)
    while True:
        asked = kit.next_question()
        before = time.process_time()
        seconds = generate(asked["prompts"], asked["lengths"])
        kit.say({"wall": seconds, "cpu": time.process_time() - before})


def measure(
    model: BenchModel, folder: Path, rows: int, threads: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Both patterns at a number of rows and threads."""
    config = bench_models.config_of(folder)
    prompts = make_prompts(rows, config["vocab_size"])
    rounds = options.quick or min(options.rounds, model.most_rounds)
    commands = {
        side: kit.own_command(__file__, "--side", side, folder, rows) for side in ("native", "transformers")
    }
    if options.vllm:
        commands["vllm"] = [options.vllm, str(WORKER), str(folder), str(rows)]
    found = []
    with kit.open_sides(commands, threads) as sides:
        ceilings = sides["native"].first
        for pattern in kit.LENGTHS:
            lengths = kit.lengths_of(rows, pattern)
            question = {"prompts": prompts, "lengths": lengths}
            answers = kit.in_turn(
                {name: partial(side.ask, question) for name, side in sides.items()}, rounds, warm_up=1
            )
            case = {
                "model": model.name,
                "threads": threads,
                "rows": rows,
                "lengths": pattern,
                "tokens": sum(lengths),
                **ceilings,
            }
            case["vllm"] = sides["vllm"].first["version"] if "vllm" in sides else None
            case["floor_s"] = bench_models.decode_floor(config, kit.PROMPT, lengths, **ceilings)
            case["seconds"] = {
                name: [answer[options.clock] for answer in given] for name, given in answers.items()
            }
            case["clock"] = options.clock
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
        model_of(case).size,
        case["threads"],
        case["rows"],
        case["lengths"],
        speeds["native"],
        speeds["transformers"],
        speeds.get("vllm", "–"),
    ]
    against = kit.ratio(case["seconds"][best], case["seconds"]["native"])
    share = "–" if shared(case) else f"{case['floor_s'] / medians['native']:.2f}"
    return [*row, against, share]


def shared(case: dict[str, Any]) -> bool:
    """Return whether other work shared the machine, so that nobody knows the rates of its floor."""
    return bool(case.get("clock") == "cpu")


def model_of(case: dict[str, Any]) -> BenchModel:
    """Return the model of a case; results of before there was a choice are of the tiny one."""
    return bench_models.MODELS[case.get("model", TINY.name)]


def goal_of(case: dict[str, Any]) -> str:
    """Whether a case's goals were met."""
    model = model_of(case)
    medians = {name: statistics.median(seconds) for name, seconds in case["seconds"].items()}
    own = medians.pop("native")
    rival = min(medians, key=medians.__getitem__)
    reached = medians[rival] / own
    met = kit.verdict(reached >= RIVAL_GOAL)
    text = f"- {model.size}, {case['threads']} thread(s), {case['rows']} rows, {case['lengths']}: "
    text += f"{reached:.2f} times {rival}, the fastest rival, wanted {RIVAL_GOAL:.0f}: {met}"
    if (case["rows"] >= FLOOR_ROWS or model is REAL) and not shared(case):
        share = case["floor_s"] / own
        goal = FLOOR_GOALS[model.name]
        text += f"; {share:.2f} of the floor, wanted {goal}: {kit.verdict(share >= goal)}"
    return text


def rates_of(found: list[dict[str, Any]]) -> str:
    """Return the ceilings of each number of threads and rows."""
    told = {}
    for case in found:
        text = f"{case['rate'] / 1e9:.0f} GFLOP/s"
        if "bandwidth" in case:
            text += f" and {case['bandwidth'] / 1e9:.0f} GB/s"
        where = (model_of(case).size, case["threads"], case["rows"])
        told[where] = "{} ({}, {} threads, {} rows)".format(text, *where)
    return ", ".join(told.values())


def page_of(found: list[dict[str, Any]]) -> str:
    """The page's text."""
    left_out = []
    if not any(model_of(case) is REAL for case in found):
        left_out.append(bench_models.NOT_RUN)
    if not any("vllm" in case["seconds"] for case in found):
        left_out.append(NO_VLLM)
    rounds = {model_of(case).size: len(case["seconds"]["native"]) for case in found}
    clock = ""
    rates = f"at {rates_of(found)}"
    if shared(found[0]):
        clock = " of CPU time, since other work shared the machine"
        rates = "which cannot be measured on a shared machine"
    return TEXT.format(
        prompt=kit.PROMPT,
        group=kit.GROUP,
        most=kit.MAX_TOKENS,
        rounds=" and ".join(f"{count} ({size})" for size, count in rounds.items()),
        clock=clock,
        rates=rates,
        table=kit.table(HEAD, [cells(case) for case in found]),
        left_out="".join(f"{sentence}\n\n" for sentence in left_out),
        noise=kit.NOISE,
        goals="\n".join(map(goal_of, found)),
    )


def main() -> None:
    """All rows, patterns and threads."""
    if len(sys.argv) > 1 and sys.argv[1] == "--side":
        return serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    parser = kit.arguments(__doc__, rounds=5)
    bench_models.add_choice(parser)
    parser.add_argument("--rows", type=kit.numbers, help="default: 64,128,512 for tiny, 32 for real")
    parser.add_argument(
        "--vllm",
        default=str(VLLM) if VLLM.is_file() else "",
        help="Python of an environment with vLLM (make .venv-vllm/.ready); empty: without",
    )
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what is measured")
    parser.add_argument("--result", default="generation", help="name of the page in benchmarks/results")
    options = parser.parse_args()
    if options.page:
        result = kit.committed(options.result)
        return kit.write(options.result, result, TITLE, page_of(result["cases"]))
    if options.quick:
        options.threads = options.threads[:1]
    found = []
    print(kit.line(HEAD), kit.line(["---"] * len(HEAD)), sep="\n", flush=True)
    for model in bench_models.available(options.model):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            bench_models.write_model(model, folder)
            usual = [model.quick_rows] if options.quick else model.generation_rows
            for threads in options.threads:
                for rows in options.rows or usual:
                    found += measure(model, folder, rows, threads, options)
    facts = kit.facts(["torch", "transformers"])
    facts["machine"] += f", vLLM {found[0]['vllm']}" if options.vllm else ", no vLLM"
    kit.write(options.result, {**facts, "cases": found}, TITLE, page_of(found), dry=options.quick)


if __name__ == "__main__":
    main()
