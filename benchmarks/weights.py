"""Weights from the trainer to the rollout: nothing moves in one process; to another one bytes through shared
memory, against a plain copy.

    python benchmarks/weights.py [--rounds 9] [--megabytes 256] [--quick]

    colocated    the actor's engine and the native rollout engine of a run in one process: in which memory
    their weights are, what an update
                 of the rollout copies and allocates, and how long it takes; beside it, the time of copying
                 the parameters once
    push         `weight_sync.wire.sender.push` to a `Receiver` in another process, which copies every
                 tensor into its own weights: with the checksums that prove the arrival, and without them
    transport    the same bytes by the same road without protocol: into a file in memory, and by the other
    process out of it

Writes `benchmarks/results/weights.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import side_by_side as kit
import torch

TENSORS = 64
HEAD = ("way", "s", "GB/s", "of the transport")


def make_weights(megabytes: int) -> dict[str, torch.Tensor]:
    """Float32 matrices of so many MB in all."""
    rows = megabytes * 10**6 // (4 * 1024 * TENSORS)
    return {f"layer.{number}.weight": torch.full((rows, 1024), float(number)) for number in range(TENSORS)}


def receive(megabytes: int, *, summed: bool) -> None:
    """The process that has the engine's weights: takes a push, or a plain copy, for each question."""
    from hybridflow.weight_sync.wire import receiver
    from hybridflow.weight_sync.wire.transports import SharedMemoryReader

    own = make_weights(megabytes)
    taker = receiver.Receiver()
    if not summed:
        receiver.bit_sums = no_sums  # type: ignore[assignment]

    def load(weights: Any) -> None:
        for name, tensor in weights:
            own[name].copy_(tensor)

    kit.say({"ready": True})
    source: SharedMemoryReader | None = None
    while True:
        asked = kit.next_question()
        if "receipt" in asked:
            kit.say(taker.receive(load, asked["receipt"]))
            continue
        source = source or SharedMemoryReader(asked["plain"])
        offset = 0
        for tensor in own.values():
            flat = tensor.view(-1).view(torch.uint8)
            flat.copy_(source.fetch(offset + len(flat))[offset:])
            offset += len(flat)
        kit.say({"copied": offset})


def no_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In place of checksums."""
    return torch.zeros(len(tensors), dtype=torch.int64)


def across(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each way of bringing the weights to another process."""
    from hybridflow.weight_sync.wire import sender
    from hybridflow.weight_sync.wire.transports import SharedMemoryWriter

    weights = make_weights(options.megabytes)
    bit_sums = sender.bit_sums
    size = sum(tensor.numel() * 4 for tensor in weights.values())
    commands = {
        name: kit.own_command(__file__, "--receive", name, "--megabytes", options.megabytes)
        for name in ("checked", "unchecked", "plain")
    }
    writer = SharedMemoryWriter(size, torch.device("cpu"))
    version = iter(range(1, 1000))
    with kit.open_sides(commands, threads=1) as sides:

        def pushed(name: str) -> float:
            def call(method: str, receipt: dict[str, Any]) -> list[Any]:
                return [sides[name].ask({"receipt": receipt})]

            sender.bit_sums = bit_sums if name == "checked" else no_sums  # type: ignore[assignment]
            began = time.perf_counter()
            sender.push(call, weights.items(), next(version), workers=1)
            return time.perf_counter() - began

        def plain() -> float:
            began = time.perf_counter()
            offset = 0
            for tensor in weights.values():
                flat = tensor.view(-1).view(torch.uint8)
                writer.buffer[offset : offset + len(flat)].copy_(flat)
                offset += len(flat)
            sides["plain"].ask({"plain": writer.facts(0)})
            return time.perf_counter() - began

        ways = {
            "transport": plain,
            "push": lambda: pushed("checked"),
            "push without checksums": lambda: pushed("unchecked"),
        }
        try:
            return kit.in_turn(ways, options.quick or options.rounds, warm_up=1)
        finally:
            writer.close()


def colocated(rounds: int) -> dict[str, Any]:
    """Measure an update of the rollout where it shares the actor's process."""
    from hybridflow.config import PPOConfig
    from hybridflow.config.load import prepare_config
    from hybridflow.trainer.ppo.build import build

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kit.make_model(folder / "model", end=kit.END)
        kit.make_tokenizer(folder / "tokenizer")
        rows = [
            {"data_source": "letters", "prompt": text, "reward_model": {"ground_truth": ""}}
            for text in kit.make_prompts(8)
        ]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = [
            f"actor_rollout_ref.model.path='{folder / 'model'}'",
            f"data.tokenizer='{folder / 'tokenizer'}'",
            f"data.train_files='{folder / 'prompts.jsonl'}'",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.use_kl_loss=false",
            f"reward.custom_reward_function.path='{Path(__file__).with_name('letters_reward.py')}'",
            "reward.num_workers=0",
            f"trainer.default_local_dir='{folder / 'run'}'",
            "trainer.controller=local",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.logger=[]",
        ]
        with build(prepare_config(PPOConfig, keys, recipe="grpo").config) as trainer:
            return _compared(trainer, rounds)


def _compared(trainer: Any, rounds: int) -> dict[str, Any]:
    actor = trainer.step.roles.actor
    rollout = trainer.source.roles.rollout
    trained = dict(actor.backend.worker("actor").engine.module.named_parameters())
    generating = dict(rollout.backend.worker("rollout").engine.policy.named_parameters())
    target = {name: parameter.detach().clone() for name, parameter in trained.items()}

    def update() -> float:
        began = time.perf_counter()
        rollout.update_from(actor, 1)
        return time.perf_counter() - began

    def copy() -> float:
        began = time.perf_counter()
        for name, parameter in trained.items():
            target[name].copy_(parameter.detach())
        return time.perf_counter() - began

    found = kit.in_turn({"update": update, "copying the parameters once": copy}, rounds, warm_up=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        rollout.update_from(actor, 1)
    events = list(profile.events() or [])
    return {
        "bytes": sum(parameter.numel() * parameter.element_size() for parameter in trained.values()),
        "tensors": len(trained),
        "same_memory": sum(
            trained[name].data_ptr() == parameter.data_ptr() for name, parameter in generating.items()
        ),
        "copies": sum(event.name in ("aten::copy_", "aten::clone") for event in events),
        "allocated_bytes": sum(max(0, event.cpu_memory_usage) for event in events),
        "seconds": found,
    }


def main() -> None:
    """Measure, print, write; with `--receive` be the process that receives."""
    parser = kit.arguments(__doc__, rounds=9)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--receive", choices=("checked", "unchecked", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receive:
        receive(options.megabytes, summed=options.receive == "checked")
        return
    if options.page:
        result = kit.committed("weights")
    else:
        shared = colocated(options.quick or options.rounds)
        assert shared["same_memory"] == shared["tensors"], "the rollout has weights of its own"
        size = sum(tensor.numel() * 4 for tensor in make_weights(options.megabytes).values())
        result = kit.facts(["torch"], threads=1)
        result |= {"colocated": shared, "across": across(options), "bytes": size}
    kit.write("weights", result, "Weights from trainer to rollout", page_of(result), dry=options.quick)


def page_of(result: dict[str, Any]) -> str:
    """The page's text."""
    shared = result["colocated"]
    seconds = result["across"]
    size = result["bytes"]
    transport = statistics.median(seconds["transport"])
    shares = {way: transport / statistics.median(times) for way, times in seconds.items()}
    lines = [
        [
            way,
            kit.spread(times, ".3f"),
            f"{size / statistics.median(times) / 1e9:.2f}",
            f"{shares[way]:.2f}",
        ]
        for way, times in seconds.items()
    ]
    micro = {
        name: kit.spread([value * 1e6 for value in times], ",.0f")
        for name, times in shared["seconds"].items()
    }
    without_copies = kit.verdict(shared["copies"] == 0 and shared["allocated_bytes"] == 0)
    return f"""One thread a process; medians (fastest–slowest) of {len(seconds["transport"])} in turn.

## In one process

{shared["tensors"]} parameters of {shared["bytes"] / 1e6:.1f} MB: {shared["same_memory"]} of the rollout's
lie in the memory of the actor's. An update of the rollout makes {shared["copies"]} copies, allocates
{shared["allocated_bytes"]} bytes and takes {micro["update"]} µs; copying the parameters once takes
{micro["copying the parameters once"]} µs. Goal, 0 copies and 0 bytes: {without_copies}.

## To another process

{size / 1e6:.0f} MB in {TENSORS} tensors, into weights that the other process has. "Of the transport": of the
rate of two plain copies, into shared memory and out of it.

{kit.table(HEAD, lines)}

Goal, a push at 0.8 of the transport or more: {kit.verdict(shares["push"] >= 0.8)} ({shares["push"]:.2f})."""


if __name__ == "__main__":
    sys.exit(main())
