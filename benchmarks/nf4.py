"""A base in 4 bits (`model.quantization=nf4`) beside an ordinary LoRA run: memory, and CPU seconds of an
update and of generation.

    python benchmarks/nf4.py --model FOLDER [--rounds 3]

Each side is a process of its own on one thread, asked in turn. An update is an optimizer step over two rows
of 128 tokens, half prompt and half response, with gradient checkpointing; generation is 16 tokens for each of
eight rows. Seconds are those of the CPU. Writes `benchmarks/results/nf4.json` and `.md`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import side_by_side as kit

SIDES = ("float32", "nf4")
LENGTH = 128
ROWS = 8
TOKENS = 16
TEXT = """\
LoRA of rank 16 on all linear layers, computed in float32; the base has {parameters:,} parameters in linear
layers, and embeddings, head and norms stay as they are on both sides. Rounds: {rounds}; medians (smallest to
largest), one thread; other processes shared the machine. One run.

{table}

In 4 bits a weight takes {each:.4f} bytes, {share:.3f} of bfloat16."""
HEAD = ("side", "parameters and buffers, MiB", "update, CPU s", "generation, CPU s")


def measure(model: str, side: str) -> None:
    """A side: builds the engine, then answers with the CPU seconds of what it is asked for."""
    import torch

    from hybridflow.config.model import OptimConfig
    from hybridflow.engines import BatchLimits, OutputSpec
    from hybridflow.engines.build import build_engine
    from hybridflow.models.adapters.lora import LoraSettings, quantized_layers
    from hybridflow.observability.metrics import Metrics
    from hybridflow.protocol import DataProto
    from hybridflow.protocol.packing import make_rows
    from hybridflow.protocol.prompt import Prompt
    from hybridflow.rollout.base import GenerationRequest, SamplingParams
    from hybridflow.rollout.native.engine import NativeEngine

    torch.set_num_threads(1)
    lora = LoraSettings(16, 32, quantization=None if side == "float32" else side)
    settings = {"path": model, "device": "cpu", "dtype": "float32", "gradient_checkpointing": True}
    engine = build_engine(
        "policy", {**settings, "probe": False}, name="actor", optim=OptimConfig(), grad_clip=1.0, lora=lora
    )
    module = engine.policy
    layers = quantized_layers(module).values()
    held = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    half = LENGTH // 2
    tokens = [[(7919 * (row + 1) * place) % 90 + 3 for place in range(LENGTH)] for row in range(2)]
    rows = DataProto.from_dict(
        make_rows([row[:half] for row in tokens], [row[half:] for row in tokens], pad_id=kit.PAD)
    )
    native = NativeEngine(module, eos_token_ids=(), max_num_seqs=ROWS)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    requests = [
        GenerationRequest(row, Prompt(tuple(tokens[0][:32])), sampling, seed=row) for row in range(ROWS)
    ]

    def loss(outputs: dict[str, torch.Tensor], batch: DataProto) -> tuple[torch.Tensor, Metrics]:
        return -outputs["log_probs"].sum() / LENGTH, Metrics()

    def update() -> None:
        engine.train_mini_batch(rows, OutputSpec(log_probs=True), loss, BatchLimits(2 * LENGTH))

    def generate() -> None:
        list(native.generate(requests))

    work: dict[str, Callable[[], None]] = {"update": update, "generation": generate}
    quantized = sum(layer.in_features * layer.out_features for layer in layers)
    bits = sum(layer.codes.nbytes + layer.scales.nbytes for layer in layers)
    kit.say({"held": held / 2**20, "quantized": quantized, "bits": bits})
    while True:
        asked = kit.next_question()
        start = time.process_time()
        work[asked]()
        kit.say({"seconds": time.process_time() - start})


def main() -> None:
    """Both sides in turn, and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    if options.side:
        measure(options.model, options.side)
    commands = {side: kit.own_command(__file__, "--model", options.model, "--side", side) for side in SIDES}
    with kit.open_sides(commands, 1) as sides:
        found: dict[str, Any] = {side: dict(one.first) for side, one in sides.items()}
        for what in ("update", "generation"):
            ways = {side: lambda one=one, what=what: one.ask(what)["seconds"] for side, one in sides.items()}
            for side, seconds in kit.in_turn(ways, options.rounds, 1 if options.rounds > 1 else 0).items():
                found[side][what] = seconds
            print(what, {side: statistics.median(one[what]) for side, one in found.items()}, file=sys.stderr)
    result = {
        **kit.facts(("torch", "transformers", "peft"), threads=1),
        "rounds": options.rounds,
        "sides": found,
    }
    kit.write("nf4", result, "A base in 4 bits", page_of(result))


def page_of(result: dict[str, Any]) -> str:
    """The text of the page."""
    rows = []
    whole = result["sides"]["float32"]
    for side, one in result["sides"].items():
        cells = [f"{one['held']:.0f}", *(kit.spread(one[what]) for what in ("update", "generation"))]
        if side != "float32":
            cells[0] += f" ({one['held'] / whole['held']:.2f} ×)"
            cells[1] += f", {kit.ratio(one['update'], whole['update'])}"
            cells[2] += f", {kit.ratio(one['generation'], whole['generation'])}"
        rows.append([side, *cells])
    bits = result["sides"]["nf4"]
    each = bits["bits"] / bits["quantized"]
    return TEXT.format(
        parameters=bits["quantized"],
        rounds=result["rounds"],
        table=kit.table(HEAD, rows),
        each=each,
        share=each / 2,
    )


if __name__ == "__main__":
    main()
