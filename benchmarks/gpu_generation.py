"""Generation on one CUDA device: the native engine, and transformers' `generate` and `generate_batch`.

    python benchmarks/gpu_generation.py [--sizes 0.5B,1.5B,7B] [--rows 64,128,256,512] [--rounds 3] [--sides
    native,generate]
    python benchmarks/gpu_generation.py --tiny --device cpu          (a dry run)

Models of Qwen 2's architecture with random weights in bfloat16; prompts of 512 tokens, all different, 512
new tokens each, sampled at temperature 1 without an end token. `eager` is the native engine without CUDA
graphs. The sides run one after the other, because the caches of two do not fit beside each other; each once
to warm up.

The roofline of decoding: a step reads all weights that it multiplies with and the keys and values of all
rows. These bytes over the bandwidth that a copy reaches on this device are the least time of decoding; it is
compared with the time of a generation less that of one that ends with the first token (the prefill). Writes
`benchmarks/results/gpu_generation.json` and `.md`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_kit as gpu
import side_by_side as kit
import torch

from hybridflow.models.policy import PolicyModel, use_attention
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine

SIDES = ("native", "eager", "generate", "batch")
OURS = ("native", "eager")
HEAD = (
    "model",
    "rows",
    *(f"{side}, tokens/s" for side in SIDES),
    "native against the best",
    "native decode of the roofline",
    "graphs",
)


class Bench:
    """One model and the ways to generate with it."""

    def __init__(self, size: str, device: torch.device, prompt: int, new: int) -> None:
        self.hf = gpu.make_hf(size, device)
        self.device = device
        self.prompt = prompt
        self.new = new
        self.policy = PolicyModel(self.hf)
        self.draw = random.Random(0)
        self.vocabulary = self.hf.config.vocab_size
        self.engines: dict[str, NativeEngine] = {}

    def prompts(self, rows: int) -> list[list[int]]:
        """Others each time, so that nothing is at hand from before."""
        return [[self.draw.randrange(3, self.vocabulary) for _ in range(self.prompt)] for _ in range(rows)]

    def native(self, rows: int, new: int, *, eager: bool = False) -> None:
        """Our engine."""
        use_attention(self.hf)
        name = f"{rows} {eager}"
        if name not in self.engines:
            self.drop_engines()
            settings: dict[str, Any] = {
                "max_num_seqs": rows,
                "max_num_batched_tokens": 16_384,
                "gpu_memory_utilization": 0.8,
                "enforce_eager": eager,
            }
            self.engines[name] = NativeEngine(self.policy, eos_token_ids=[], **settings)
        sampling = SamplingParams(max_tokens=new)
        requests = [
            GenerationRequest(row, Prompt(tuple(tokens)), sampling, seed=row)
            for row, tokens in enumerate(self.prompts(rows))
        ]
        outputs = list(self.engines[name].generate(requests))
        assert (
            all(output.error is None and len(output.token_ids) == new for output in outputs)
            and len(outputs) == rows
        )

    def drop_engines(self) -> None:
        """Give their memory back."""
        for engine in self.engines.values():
            engine.sleep()
        self.engines.clear()
        gpu.free(self.device)

    def generate(self, rows: int, new: int) -> None:
        """transformers' `generate`."""
        self.hf.set_attn_implementation("sdpa")
        ids = torch.tensor(self.prompts(rows), device=self.device)
        with torch.no_grad():
            lengths = {"min_new_tokens": new, "max_new_tokens": new}
            out = self.hf.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **lengths
            )
        assert tuple(out.shape) == (rows, self.prompt + new)

    def batch(self, rows: int, new: int) -> None:
        """transformers' `generate_batch`, its continuous batching."""
        from transformers import GenerationConfig

        self.hf.set_attn_implementation("sdpa")
        config = GenerationConfig(
            max_new_tokens=new, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=kit.PAD
        )
        outputs = self.hf.generate_batch(inputs=self.prompts(rows), generation_config=config)
        assert len(outputs) == rows and all(
            len(output.generated_tokens) == new for output in outputs.values()
        )

    def roofline(self, rows: int, bandwidth: float) -> float:
        """Least seconds of all decode steps but the first token's."""
        return gpu.decode_floor(self.policy, rows, self.prompt, self.new, bandwidth)


def measure(
    options: argparse.Namespace, bench: Bench, size: str, rows: int, bandwidth: float
) -> dict[str, Any]:
    """All sides, and our prefill alone."""
    ways: dict[str, Callable[[int, int], None]] = {
        "native": bench.native,
        "eager": partial(bench.native, eager=True),
        "generate": bench.generate,
        "batch": bench.batch,
    }
    case: dict[str, Any] = {
        "size": size,
        "rows": rows,
        "tokens": rows * bench.new,
        "seconds": {},
        "first": {},
        "failed": {},
    }
    for side in options.sides:
        work = partial(ways[side], rows, bench.new)
        try:
            case["first"][side] = gpu.seconds_of(work, bench.device)
            case["seconds"][side] = [gpu.seconds_of(work, bench.device) for _ in range(options.rounds)]
            if side == "native":
                prefill = [
                    gpu.seconds_of(lambda: bench.native(rows, 1), bench.device) for _ in range(options.rounds)
                ]
                case |= {
                    "prefill_s": prefill,
                    "roofline_s": bench.roofline(rows, bandwidth),
                    **_graphs(bench),
                }
        except Exception as error:  # a rival that cannot do it is told as such
            if side in OURS and not isinstance(error, torch.OutOfMemoryError):
                raise
            case["failed"][side] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        bench.drop_engines()
    print(kit.line(line_of(case)), flush=True)
    return case


def _graphs(bench: Bench) -> dict[str, Any]:
    graphs = next(iter(bench.engines.values())).graphs
    return {
        "graphs": 0 if graphs is None else graphs.num_recorded,
        "graphs_problem": None if graphs is None else graphs.problem,
    }


def line_of(case: dict[str, Any]) -> list[object]:
    """A row of the table."""
    medians = {side: gpu.median(values) for side, values in case["seconds"].items()}
    missing = {side: "failed" if side in case["failed"] else "–" for side in SIDES}
    speeds = [
        f"{case['tokens'] / medians[side]:,.0f}" if side in medians else missing[side] for side in SIDES
    ]
    rivals = [medians[side] for side in ("generate", "batch") if side in medians]
    against = f"{min(rivals) / medians['native']:.1f} ×" if rivals and "native" in medians else "–"
    share = "–"
    if "native" in medians:
        share = f"{case['roofline_s'] / max(1e-9, medians['native'] - gpu.median(case['prefill_s'])):.2f}"
    return [case["size"], case["rows"], *speeds, against, share, case.get("graphs", "–")]


SPEED_GOAL = 5.0
ROOFLINE_GOAL = 0.7
"""Times as fast as `generate`, and share of the roofline."""


def goals_of(case: dict[str, Any]) -> str:
    """Whether a case's goals were met."""
    medians = {side: gpu.median(values) for side, values in case["seconds"].items()}
    found = []
    if {"native", "generate"} <= medians.keys():
        reached = medians["generate"] / medians["native"]
        found.append(
            f"{reached:.1f} times `generate`, wanted {SPEED_GOAL:.0f}: {kit.verdict(reached >= SPEED_GOAL)}"
        )
    if "native" in medians:
        share = case["roofline_s"] / max(1e-9, medians["native"] - gpu.median(case["prefill_s"]))
        met = kit.verdict(share >= ROOFLINE_GOAL)
        found.append(f"{share:.2f} of the roofline, wanted {ROOFLINE_GOAL}: {met}")
    return f"- {case['size']}, {case['rows']} rows: {'; '.join(found) or 'no figures'}"


def main() -> None:
    """Measure, print, write."""
    parser = gpu.parser_of(__doc__, rounds=3, sizes=("0.5B", "1.5B", "7B"))
    parser.add_argument("--rows", type=kit.numbers, default=[64, 128, 256, 512])
    parser.add_argument(
        "--sides",
        type=lambda text: text.split(","),
        help=f"of {', '.join(SIDES)}; left out: all, in a dry run not batch",
    )
    options = parser.parse_args()
    device = gpu.device_of(options)
    options.sides = options.sides or [side for side in SIDES if side != "batch" or not options.tiny]
    prompt = 512
    new = 512
    if options.tiny:
        options.sizes = ["tiny"]
        options.rows = [3]
        options.rounds = 1
        prompt = 8
        new = 6
    bandwidth = gpu.copy_bandwidth(device)
    print(f"copy: {bandwidth / 1e9:,.0f} GB/s\n\n{kit.line(HEAD)}", flush=True)
    cases = []
    for size in options.sizes:
        bench = Bench(size, device, prompt, new)
        cases += [measure(options, bench, size, rows, bandwidth) for rows in options.rows]
        del bench
        gpu.free(device)
    failures = "\n".join(
        f"- {case['size']}, {case['rows']} rows, {side}: {why}"
        for case in cases
        for side, why in case["failed"].items()
    )
    goals = "\n".join(map(goals_of, cases))
    text = f"""Prompts of {prompt} tokens, {new} new tokens; tokens per second of the whole call, medians of
{options.rounds}. A copy reaches {bandwidth / 1e9:,.0f} GB/s (read and written). Roofline: the bytes of
weights, keys and values of each step over that, against the call less its prefill.

{kit.table(HEAD, [line_of(case) for case in cases])}

{failures}

Goals:

{goals}"""
    result = gpu.facts(device) | {"copy_bytes_per_s": bandwidth, "cases": cases}
    gpu.write(options, "gpu_generation", result, "Generation on one CUDA device", text)


if __name__ == "__main__":
    sys.exit(main())
