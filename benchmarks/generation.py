"""Generation on this machine: the native engine, transformers' `generate`, and vLLM's CPU build where it is installed, in turn.

    python benchmarks/generation.py [--rows 64,128,512] [--threads 1,2] [--rounds 5] [--vllm .venv-vllm/bin/python]

A model of 4.3 M parameters with random weights (Qwen 2, hidden 256, 4 layers, vocabulary 262), prompts of 15 tokens, eight responses each,
at most 64 tokens, no end token. Two patterns of lengths, the same length for each row on all sides:

    uniform   64 tokens each
    life      log-normal, mean 0.4 of the maximum

Each round runs every engine once, in an order that turns; medians over the rounds after one of warm-up. The floor is the time of the matrix
products alone, at the rate that this process reaches with them. Writes `benchmarks/results/generation.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, GROUP, MAX_TOKENS = 15, 8, 64
RESULT = Path(__file__).parent / "results" / "generation"
WORKER = Path(__file__).parent / "generation_vllm.py"
LENGTHS = {"uniform": (MAX_TOKENS, 0.0), "life": (0.4 * MAX_TOKENS, 0.7)}
PAGE = """# Generation on a CPU

{date} · `{command}` · {machine}

Written by benchmarks/generation.py; do not edit. 4.3 M parameters, prompts of {prompt} tokens, {group} responses each, at most {most}
tokens; tokens per second, medians of {rounds} rounds in turn. "Of the floor": of what the matrix products alone would allow, at
{rates} GFLOP/s with {threads} threads.

| threads | rows | lengths | native | transformers | vLLM | native against the best | of the floor |
|---|---|---|---|---|---|---|---|
{table}

Goals: at least 2 times (uniform) and 4 times (life) the best rival, and half of the floor at 128 rows.
"""


def lengths_of(rows: int, pattern: str) -> list[int]:
    """Response lengths of a pattern, always the same ones."""
    mean, sigma = LENGTHS[pattern]
    draw = random.Random(rows)
    return [min(MAX_TOKENS, max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))) for _ in range(rows)]


def prompts_of(rows: int) -> list[list[int]]:
    """One prompt for each group."""
    draw = random.Random(0)
    return [[draw.randrange(3, 262) for _ in range(PROMPT)] for _ in range(rows // GROUP)]


class Native:
    """Our engine on its model."""

    def __init__(self, folder: Path, rows: int) -> None:
        from hybridflow.models.build import build_policy
        from hybridflow.rollout.native.engine import NativeEngine

        self.engine = NativeEngine(build_policy(folder, device="cpu", dtype="float32"), eos_token_ids=[], max_num_seqs=rows)
        self.engine.wake_up()

    def __call__(self, prompts: list[list[int]], lengths: list[int]) -> float:
        from hybridflow.rollout.base import GenerationRequest, SamplingParams

        requests = [
            GenerationRequest(row, tuple(prompts[row // GROUP]), SamplingParams(max_tokens=length), seed=row)
            for row, length in enumerate(lengths)
        ]
        started = time.perf_counter()
        outputs = list(self.engine.generate(requests))
        seconds = time.perf_counter() - started
        assert {output.request_id: len(output.token_ids) for output in outputs} == dict(enumerate(lengths))
        return seconds


class Transformers:
    """`generate`, which works until the longest row has ended."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def __call__(self, prompts: list[list[int]], lengths: list[int]) -> float:
        import torch

        ids = torch.tensor([prompts[row // GROUP] for row in range(len(lengths))])
        most = max(lengths)
        started = time.perf_counter()
        with torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=most, max_new_tokens=most
            )
        seconds = time.perf_counter() - started
        assert tuple(out.shape) == (len(lengths), PROMPT + most)
        return seconds


class VLLM:
    """vLLM's CPU build in a process and an environment of its own."""

    def __init__(self, python: str, folder: Path, rows: int, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [python, str(WORKER), str(folder), str(rows)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the vLLM process ended with status {self.process.wait()}")

    def __call__(self, prompts: list[list[int]], lengths: list[int]) -> float:
        assert self.process.stdin is not None
        print(
            json.dumps({"prompts": [prompts[row // GROUP] for row in range(len(lengths))], "lengths": lengths}),
            file=self.process.stdin,
            flush=True,
        )
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


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


def make_model(folder: Path) -> int:
    """Write the model; gives the parameters that each token is multiplied with."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 262, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen2Config(
        **sizes, num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0, eos_token_id=None
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(options: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    """All rows and patterns with a number of threads: in this process, whose torch it sets."""
    import torch

    torch.set_num_threads(threads)
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_model(folder)
        for rows in options.rows:
            rate = matrix_rate(rows)
            ways: dict[str, Callable[[list[list[int]], list[int]], float]] = {
                "native": Native(folder, rows),
                "transformers": Transformers(folder),
            }
            if options.vllm:
                ways["vllm"] = VLLM(options.vllm, folder, rows, threads)
            for pattern in LENGTHS:
                prompts, lengths = prompts_of(rows), lengths_of(rows, pattern)
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                for turn in range(options.rounds + 1):
                    order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
                    for way in order:
                        taken = ways[way](prompts, lengths)
                        if turn:
                            seconds[way].append(taken)
                floor = 2 * parameters * sum(lengths) / rate
                found.append(
                    {
                        "threads": threads,
                        "rows": rows,
                        "lengths": pattern,
                        "tokens": sum(lengths),
                        "rate": rate,
                        "floor_s": floor,
                        "seconds": seconds,
                    }
                )
                print(line_of(found[-1]), flush=True)
            if "vllm" in ways:
                ways["vllm"].close()  # type: ignore[attr-defined]
    return found


def line_of(case: dict[str, Any]) -> str:
    """A row of the table."""
    medians = {way: statistics.median(values) for way, values in case["seconds"].items()}
    speed = {way: f"{case['tokens'] / seconds:,.0f}" for way, seconds in medians.items()}
    best = min(seconds for way, seconds in medians.items() if way != "native")
    cells = [case["threads"], case["rows"], case["lengths"], speed["native"], speed["transformers"], speed.get("vllm", "–")]
    cells += [f"{best / medians['native']:.2f}", f"{case['floor_s'] / medians['native']:.2f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Each number of threads in a process of its own, because torch takes its number once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--rows", type=numbers, default=[64, 128, 512])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    default = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
    parser.add_argument(
        "--vllm", default=str(default) if default.is_file() else "", help="Python of an environment with vLLM; empty: without"
    )
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        options.into.write_text(json.dumps(measure(options, options.threads[0])))
        return
    found: list[dict[str, Any]] = []
    for threads in options.threads:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "found.json"
            command = [sys.executable, __file__, "--rows", ",".join(map(str, options.rows)), "--threads", str(threads)]
            command += ["--rounds", str(options.rounds), "--vllm", options.vllm, "--into", str(into)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
            subprocess.run(command, check=True, env=environment)
            found += json.loads(into.read_text())
    write(found, options)


def write(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The figures, and the page."""
    import datetime
    import platform

    import torch
    import transformers

    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, transformers {transformers.__version__}"
    command = f"python benchmarks/generation.py --rows {','.join(map(str, options.rows))} --rounds {options.rounds}"
    date = datetime.date.today().isoformat()
    RESULT.with_suffix(".json").write_text(
        json.dumps({"date": date, "command": command, "machine": machine, "cases": found}, indent=1) + "\n"
    )
    rates = {case["threads"]: case["rate"] for case in found if case["rows"] == 128 or len(options.rows) == 1}
    page = PAGE.format(
        date=date,
        command=command,
        machine=machine,
        prompt=PROMPT,
        group=GROUP,
        most=MAX_TOKENS,
        rounds=options.rounds,
        rates=" and ".join(f"{rate / 1e9:.0f}" for rate in rates.values()),
        threads=" and ".join(map(str, rates)),
        table="\n".join(map(line_of, found)),
    )
    RESULT.with_suffix(".md").write_text(page)
    print(f"\n{page}")


if __name__ == "__main__":
    main()
