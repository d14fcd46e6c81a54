"""A batch of tensors from the driver to two workers and back: ours against Ray's default pickling and against
raw numpy arrays.

    python benchmarks/transport.py [--megabytes 100] [--rounds 9] [--steps 200]        (about 2 minutes; needs
    the extras `ray` and `bench`)

    ours      DataProto halves through `RayBackend`
    pickled   the same halves as arguments of a plain Ray actor, which pickles torch tensors as it always does
    raw       numpy arrays of the same sizes, put, sent by reference and got: what the shared memory itself
    costs

All three in turn in one run. Each half has memory of its own: by default a view is pickled with the whole
storage behind it. Then `--steps` round trips of ours, to see whether the driver's memory or the object store
grows. Writes `benchmarks/results/transport.json` and `.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from side_by_side import machine, ratio, verdict

from hybridflow.config.cluster import RayConfig, RayInitConfig
from hybridflow.controller import (
    Dispatch,
    Factories,
    MeshInfo,
    Placement,
    RankInfo,
    Worker,
    WorkerGroup,
    WorkerHost,
    register,
)
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.protocol import DataProto

RESULT = Path(__file__).parent / "results" / "transport"
FIELDS = 10
ROWS = 1000
WARM_UP = 2
PAGE = """# Transport of tensors

{date} · `{command}` · {machine}

Written by benchmarks/transport.py; do not edit. A batch of {megabytes} MB ({fields} float32 fields of {rows}
rows), half to each of two workers and back, all three ways in turn; {rounds} rounds after {warm_up} of
warm-up.

| way | median s | fastest | slowest | against ours |
|---|---|---|---|---|
{table}

Goals: pickling takes 3 times as long as ours or more ({over_pickled:.1f}): {pickled}. Ours takes at most 1.5
times as long as the raw arrays ({over_raw:.2f}): {raw}. Within the noise: the ranges overlap.

## {steps} steps of ours

| after step | driver's own memory, MiB | object store, MiB |
|---|---|---|
{leak}

From step {first} to step {last} the driver's own memory (without what it shares) grew by {growth:.1f} MiB,
while {moved:.0f} GB went there and back.
"""


class Echo(Worker):
    """Gives back what it gets."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, batch: DataProto) -> DataProto:
        """The same rows."""
        return batch


def make_echo(host: WorkerHost) -> Factories:
    """One role."""

    def echo(info: RankInfo) -> Worker:
        return Echo()

    return {"echo": echo}


class Plain:
    """A Ray actor as one writes it first."""

    def echo(self, value: Any) -> Any:
        """The same value."""
        return value


def make_ways(backend: RayBackend, halves: list[DataProto]) -> dict[str, Callable[[], list[Any]]]:
    """The three ways, each as a function that makes the round trip."""
    group = WorkerGroup[Echo](backend, "echo")
    actors: list[Any] = [ray.remote(Plain).remote() for _ in halves]  # type: ignore[attr-defined]
    arrays = [{name: np.array(tensor.numpy()) for name, tensor in half.batch.items()} for half in halves]

    def pickled() -> list[Any]:
        return list(ray.get([actor.echo.remote(half) for actor, half in zip(actors, halves)]))

    def raw() -> list[Any]:
        return list(ray.get([actor.echo.remote(ray.put(half)) for actor, half in zip(actors, arrays)]))

    return {"ours": lambda: group.call_each(Echo.echo, halves), "pickled": pickled, "raw": raw}


def measure(ways: dict[str, Callable[[], list[Any]]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round trip, the ways in turn."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(WARM_UP + rounds):
        for way, trip in ways.items():
            began = time.perf_counter()
            results = trip()
            if number >= WARM_UP:
                seconds[way].append(time.perf_counter() - began)
            del results
    return seconds


def held(address: str) -> tuple[float, float]:
    """MiB of the driver's own memory, and of objects in the store."""
    memory = psutil.Process().memory_info()
    store = get_memory_info_reply(get_state_from_address(address)).store_stats.object_store_bytes_used
    return (memory.rss - memory.shared) / 2**20, store / 2**20


def watch_memory(trip: Callable[[], list[Any]], steps: int, address: str) -> list[tuple[int, float, float]]:
    """(step, driver, store) every tenth of the steps."""
    seen = []
    for step in range(1, steps + 1):
        trip()
        if step % max(1, steps // 10) == 0:
            time.sleep(0.5)  # the store counts what is freed with a delay
            seen.append((step, *held(address)))
            print(f"step {step}: driver {seen[-1][1]:.0f} MiB, store {seen[-1][2]:.0f} MiB", flush=True)
    return seen


def table_of(seconds: dict[str, list[float]]) -> str:
    """Medians, spread, and how they compare."""
    lines = []
    for way, times in seconds.items():
        against = "" if way == "ours" else ratio(times, seconds["ours"])
        lines.append(
            f"| {way} | {statistics.median(times):.3f} | {min(times):.3f} | {max(times):.3f} | {against} |"
        )
    return "\n".join(lines)


def write(
    options: argparse.Namespace,
    seconds: dict[str, list[float]],
    seen: list[tuple[int, float, float]],
) -> None:
    """The numbers and the page."""
    facts = {
        "command": (
            f"python benchmarks/transport.py --megabytes {options.megabytes} --rounds "
            f"{options.rounds} --steps {options.steps}"
        ),
        "date": datetime.date.today().isoformat(),
        "machine": (f"{machine()}, torch {torch.__version__}, ray {ray.__version__}, one thread a process"),
    }
    leak = [{"step": step, "driver_mib": driver, "store_mib": store} for step, driver, store in seen]
    result = {**facts, "megabytes": options.megabytes, "seconds": seconds, "memory": leak}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    RESULT.with_suffix(".md").write_text(page_of(result))


def page_of(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    medians = {way: statistics.median(times) for way, times in result["seconds"].items()}
    over_pickled = medians["pickled"] / medians["ours"]
    over_raw = medians["ours"] / medians["raw"]
    memory = result["memory"]
    first = memory[0]
    last = memory[-1]
    return PAGE.format(
        **{name: result[name] for name in ("date", "command", "machine", "megabytes")},
        over_pickled=over_pickled,
        pickled=verdict(over_pickled >= 3),
        over_raw=over_raw,
        raw=verdict(over_raw <= 1.5),
        rounds=len(result["seconds"]["ours"]),
        steps=last["step"],
        fields=FIELDS,
        rows=ROWS,
        warm_up=WARM_UP,
        table=table_of(result["seconds"]),
        leak="\n".join(
            f"| {seen['step']} | {seen['driver_mib']:.0f} | {seen['store_mib']:.0f} |" for seen in memory
        ),
        first=first["step"],
        last=last["step"],
        growth=last["driver_mib"] - first["driver_mib"],
        moved=result["megabytes"] * (last["step"] - first["step"]) / 1000,
    )


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="a dry run: one round, nothing is written")
    parser.add_argument("--page", action="store_true", help="only write the page again, from the result")
    options = parser.parse_args()
    if options.page:
        result = json.loads(RESULT.with_suffix(".json").read_text())
        RESULT.with_suffix(".md").write_text(page_of(result))
        return 0
    if options.quick:
        options.rounds = 1
        options.steps = 10
    torch.set_num_threads(1)
    width = options.megabytes * 10**6 // (4 * FIELDS * ROWS)
    halves = [
        DataProto.from_dict({f"x{index}": torch.randn(ROWS // 2, width) for index in range(FIELDS)})
        for _ in range(2)
    ]
    cluster = RayCluster.connect(RayConfig(ray_init=RayInitConfig(num_cpus=4)), device="cpu", wanted=2)
    placement = Placement.colocated(["echo"], [2])
    times = {"call_timeout": 600.0, "heartbeat_timeout": 60.0, "startup_timeout": 300.0}
    backend = RayBackend(
        cluster, placement, {"echo": MeshInfo(2)}, make_echo, device="cpu", num_threads=1, **times
    )
    try:
        ways = make_ways(backend, halves)
        seconds = measure(ways, options.rounds)
        print(table_of(seconds), flush=True)
        memory = watch_memory(ways["ours"], options.steps, cluster.address)
        if not options.quick:
            write(options, seconds, memory)
    finally:
        backend.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
