"""Training on one CUDA device: the share of the device's matrix rate that log-probs and updates on packed
micro-batches reach.

    python benchmarks/gpu_update.py [--sizes 0.5B,1.5B,3B] [--rounds 5] [--tokens 8192] [--checkpointing 3B]
    python benchmarks/gpu_update.py --tiny --device cpu          (a dry run)

Models of Qwen 2's architecture with random weights in bfloat16, float32 masters and AdamW moments; a
mini-batch is four micro-batches of 8,192 packed tokens, in rows of 512 + 512 (`uniform`) or with log-normal
responses (`life`). An update is the whole of it: packing, forward, backward, gradient norm, optimizer. 7 B
parameters with their optimizer take more memory than one device has.

The ceiling is the rate of a large bfloat16 matrix product, measured here. FLOPs are those of
`hybridflow.models.files.size`: what gradient checkpointing computes again does not count. Writes
`benchmarks/results/gpu_update.json` and `.md`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from functools import partial
from typing import Any

import gpu_kit as gpu
import side_by_side as kit
import torch
from torch import Tensor

from hybridflow.config.model import OptimConfig
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.models.files.build import enable_gradient_checkpointing, without_dropout
from hybridflow.models.files.size import matmul_parameters, workload_of
from hybridflow.models.policy import PolicyModel
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows

MICRO_BATCHES = 4
HEAD = (
    "model",
    "lengths",
    "checkpointing",
    "log-probs, MFU",
    "update, MFU",
    "update, of the peak",
    "update, s",
    "tokens/s",
    "memory, GiB",
)


def rows_of(tokens: int, width: int, pattern: str, vocabulary: int) -> tuple[DataProto, list[int]]:
    """Rows of about so many tokens, prompt and response of at most `width` each; and their lengths."""
    draw = random.Random(0)
    prompts = []
    responses = []
    left = tokens
    while left > width:
        size = width
        if pattern == "life":
            size = min(width, max(1, round(draw.lognormvariate(math.log(0.4 * width) - 0.7**2 / 2, 0.7))))
        size = min(size, left - width)
        prompts.append([draw.randrange(3, vocabulary) for _ in range(width)])
        responses.append([draw.randrange(3, vocabulary) for _ in range(size)])
        left -= width + size
    return DataProto.from_dict(make_rows(prompts, responses, kit.PAD)), [
        width + len(row) for row in responses
    ]


def loss_of(count: int) -> Any:
    """The mean negative log-prob, of `count` tokens in all."""

    def loss(outputs: dict[str, Tensor], rows: DataProto) -> tuple[Tensor, Metrics]:
        return -outputs["log_probs"].sum() / count, Metrics()

    return loss


def measure(
    options: argparse.Namespace, size: str, device: torch.device, width: int, rate: float
) -> list[dict[str, Any]]:
    """One model on both patterns."""
    hf = gpu.make_hf(size, device)
    without_dropout(hf)
    checkpointing = size in options.checkpointing
    if checkpointing:
        enable_gradient_checkpointing(hf)
    parameters = matmul_parameters(hf)
    engine = FSDPEngine(PolicyModel(hf), name="actor", optim=OptimConfig(lr=1e-7), grad_clip=1.0)
    limits = BatchLimits(options.tokens)
    spec = OutputSpec(log_probs=True)
    cases = []
    for pattern in ("uniform", "life"):
        batch, lengths = rows_of(MICRO_BATCHES * options.tokens, width, pattern, hf.config.vocab_size)
        loss = loss_of(sum(lengths) - width * len(lengths))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds: dict[str, list[float]] = {"log_probs": [], "update": []}
        for turn in range(options.rounds + 1):
            scored = gpu.seconds_of(partial(engine.forward, batch, spec, limits), device)
            updated = gpu.seconds_of(partial(engine.train_mini_batch, batch, spec, loss, limits), device)
            if turn:
                seconds["log_probs"].append(scored)
                seconds["update"].append(updated)
        case = {
            "size": size,
            "lengths": pattern,
            "checkpointing": checkpointing,
            "tokens": sum(lengths),
            "seconds": seconds,
            "rate": rate,
        }
        workload = workload_of(hf.config, parameters)
        forward = sum(workload.cost(length) for length in lengths)
        case |= {"forward_flops": forward, "peak": gpu.peak_flops(device)}
        # a backward pass costs twice the forward
        case |= {"training_flops": 3 * forward, "memory_gib": memory(device)}
        print(kit.line(line_of(case)), flush=True)
        cases.append(case)
    return cases


def memory(device: torch.device) -> float:
    """GiB at the peak."""
    return torch.cuda.max_memory_allocated(device) / gpu.GIB if device.type == "cuda" else 0.0


def line_of(case: dict[str, Any]) -> list[object]:
    """A row of the table."""
    scored, updated = (gpu.median(case["seconds"][name]) for name in ("log_probs", "update"))
    achieved = case["training_flops"] / updated
    peak = f"{achieved / case['peak']:.2f}" if case["peak"] else "–"
    shares = [f"{case['forward_flops'] / scored / case['rate']:.2f}", f"{achieved / case['rate']:.2f}", peak]
    start = [case["size"], case["lengths"], "yes" if case["checkpointing"] else "no"]
    return [
        *start,
        *shares,
        kit.spread(case["seconds"]["update"]),
        f"{case['tokens'] / updated:,.0f}",
        f"{case['memory_gib']:.1f}",
    ]


GOALS = {"0.5B": 0.35}
LARGER_GOAL = 0.5
"""MFU of the update, in models larger than those of `GOALS`."""


def goal_of(case: dict[str, Any]) -> str:
    """Whether a case's goal was met."""
    reached = case["training_flops"] / gpu.median(case["seconds"]["update"]) / case["rate"]
    goal = GOALS.get(case["size"], LARGER_GOAL)
    checkpointing = ", checkpointing" if case["checkpointing"] else ""
    return (
        f"- {case['size']}, {case['lengths']}{checkpointing}: MFU of the update {reached:.2f}, "
        f"wanted {goal}: "
        f"{kit.verdict(reached >= goal)}"
    )


def main() -> None:
    """Measure, print, write."""
    parser = gpu.parser_of(__doc__, rounds=5, sizes=("0.5B", "1.5B", "3B"))
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument(
        "--checkpointing",
        type=lambda text: text.split(","),
        default=["3B"],
        help="sizes that compute activations again",
    )
    options = parser.parse_args()
    device = gpu.device_of(options)
    width = 512
    if options.tiny:
        options.sizes = ["tiny"]
        options.tokens = 64
        options.rounds = 1
        width = 8
    rate = gpu.matrix_rate(device)
    print(f"matrix product: {rate / 1e12:,.2f} TFLOP/s\n\n{kit.line(HEAD)}", flush=True)
    cases = []
    for size in options.sizes:
        with gpu.told_if_too_large(size):
            cases += measure(options, size, device, width, rate)
        gpu.free(device)
    goals = "\n".join(map(goal_of, cases))
    text = f"""Mini-batches of {MICRO_BATCHES} micro-batches of at most {options.tokens:,} packed tokens;
medians of {options.rounds}. MFU: of the {rate / 1e12:,.0f} TFLOP/s that a large matrix product reaches here;
"of the peak": of the data sheet's.

{kit.table(HEAD, [line_of(case) for case in cases])}

Goals:

{goals}"""
    gpu.write(
        options,
        "gpu_update",
        gpu.facts(device) | {"matrix_flops": rate, "cases": cases},
        "Training on one CUDA device",
        text,
    )


if __name__ == "__main__":
    sys.exit(main())
