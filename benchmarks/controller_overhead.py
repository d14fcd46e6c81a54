"""The time of a training step that is not spent in workers, measured on few of them and simulated for up to
1,024.

    python benchmarks/controller_overhead.py [--steps 7] [--only local,ray,simulated]        (about 2 minutes;
    needs the extra `ray`)

A step makes the calls of GRPO on workers that compute nothing: one generate, two log-probs, four mini-batches
of an update. So nearly all of its time is the controller's: cutting, dealing, sending, collecting. Prints
tables, writes `benchmarks/results/controller_overhead.json` and `.md`. The simulation runs the driver's own
code and its encoding for many ranks that answer at once; what Ray adds for each message is taken from the
measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from controller_workers import (
    MINI_BATCHES,
    RESPONSES,
    Simulated,
    TinyGroup,
    TinyWorker,
    Work,
    make_tiny,
    make_work,
    run_step,
)
from side_by_side import machine

from hybridflow.config.cluster import RayConfig, RayInitConfig
from hybridflow.controller import Backend, LocalBackend, MeshInfo, Placement
from hybridflow.protocol import Workload

RESULT = Path(__file__).parent / "results" / "controller_overhead"
ROLES = ("actor", "rollout", "reference")
WORKLOAD = Workload(1.0, 1e-4)
WORKERS = (1, 2, 4)
RANKS = (1, 8, 64, 256, 1024)
PROMPTS = 32
PROMPT_WIDTH = 128
RESPONSE_WIDTH = 384
"""Measured: 256 rows of up to 512 tokens."""
PROMPTS_A_RANK = 2
"""Simulated: 16 rows a rank, so 16,384 for 1,024 ranks, each with hardly more than its length."""
PAGE = """# Controller overhead

{date} · `{command}` · {machine}

Written by benchmarks/controller_overhead.py; do not edit. A step makes the calls of GRPO on workers that
compute nothing: 1 generate, 2 log-probs, {mini_batches} mini-batches of an update. "Overhead" is the time of
the step that is not spent in workers: the step less what the busiest worker worked; "driver CPU" is what the
driver's process computed in it. Medians of {steps} steps after one of warm-up, with the fastest and the
slowest.

## Measured: {rows} rows of up to {tokens} tokens

{measured}

Processes share the machine's cores, so with more workers than cores they wait for each other: the figure is
an upper bound.

## Simulated: {rows_a_rank} rows a rank, metadata only

The driver's own work for ranks that answer at once: dealing, building calls, encoding them, decoding the
answers, collecting. Times are CPU seconds of the driver's one thread. Bytes are of rows {width} tokens wide.
"With Ray" adds {message_ms:.2f} ms a message: what one more message cost the driver's CPU on the workers
above, with as small rows. That counts the encoding twice, so it is an upper bound.

{simulated}

## What breaks first

{breaks}
"""


def measure(backend: Backend, work: Work, steps: int) -> dict[str, Any]:
    """Seconds a step outside the workers, over `steps` steps after one of warm-up."""
    groups = {role: TinyGroup(backend, role) for role in ROLES}
    overhead = []
    total = []
    cpu = []
    for step in range(steps + 1):
        for group in groups.values():
            group.call_list(TinyWorker.take_seconds)
        began = time.perf_counter()
        cpu_began = time.process_time()
        run_step(groups, work, step)
        seconds = time.perf_counter() - began
        cpu_seconds = time.process_time() - cpu_began
        worked = [group.call_list(TinyWorker.take_seconds) for group in groups.values()]
        busiest = max(sum(of_rank) for of_rank in zip(*worked, strict=True))
        if step:
            total.append(seconds)
            overhead.append(seconds - busiest)
            cpu.append(cpu_seconds)
    return {"step_s": spread(total), "overhead_s": spread(overhead), "driver_cpu_s": spread(cpu)}


def simulate(ranks: int, steps: int) -> dict[str, Any]:
    """CPU seconds of the driver a step, messages and bytes, for `ranks` ranks that answer at once."""
    work = make_work(PROMPTS_A_RANK * ranks, 8, 56)
    backend = Simulated(MeshInfo(ranks, workload=WORKLOAD))
    groups = {role: TinyGroup(backend, role) for role in ROLES}
    driver = []
    phases = []
    for step in range(steps + 1):
        backend.reset()
        began = time.process_time()
        run_step(groups, work, step)
        if step:
            driver.append(time.process_time() - began - backend.worker_seconds)
            phases.append(dict(backend.seconds))
    return {
        "ranks": ranks,
        "rows": len(work.batch),
        "driver_s": spread(driver),
        "encode_s": statistics.median(phase["encode"] for phase in phases),
        "decode_s": statistics.median(phase["decode"] for phase in phases),
        "messages": 2 * backend.messages,
        "sent_bytes": backend.sent,
        "received_bytes": backend.received,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, fastest, slowest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@contextlib.contextmanager
def on_ray(most: int) -> Iterator[Callable[[int], Backend]]:
    """A Ray of this run's own, and a function that starts a backend of so many workers on it."""
    from hybridflow.controller.ray.backend import RayBackend
    from hybridflow.controller.ray.cluster import RayCluster

    cluster = RayCluster.connect(RayConfig(ray_init=RayInitConfig(num_cpus=most)), device="cpu", wanted=most)

    def start(workers: int) -> Backend:
        return RayBackend(
            cluster,
            Placement.colocated(ROLES, [workers]),
            {role: MeshInfo(workers, workload=WORKLOAD) for role in ROLES},
            make_tiny,
            device="cpu",
            num_threads=1,
            call_timeout=60.0,
            heartbeat_timeout=60.0,
            startup_timeout=240.0,
        )

    try:
        yield start
    finally:
        cluster.shutdown()


def measured_rows(only: set[str], steps: int) -> list[dict[str, Any]]:
    """One row for each backend and number of workers."""
    work = make_work(PROMPTS, PROMPT_WIDTH, RESPONSE_WIDTH)
    metadata = make_work(PROMPTS_A_RANK * max(WORKERS), 8, 56)
    rows = []
    calls = 3 + MINI_BATCHES
    if "local" in only:
        rows.append(
            {"backend": "local", "workers": 1, "messages": 0, **measure(LocalBackend(make_tiny), work, steps)}
        )
        print(line_of(rows[-1]), flush=True)
    if "ray" in only:
        with on_ray(sum(WORKERS)) as start:  # the devices of one backend come free a while after it has ended
            for workers in WORKERS:
                backend = start(workers)
                rows.append(
                    {
                        "backend": "ray",
                        "workers": workers,
                        "messages": 2 * calls * workers,
                        **measure(backend, work, steps),
                    }
                )
                rows[-1]["metadata_cpu_s"] = measure(backend, metadata, steps)["driver_cpu_s"]
                backend.shutdown()
                print(line_of(rows[-1]), flush=True)
    return rows


def message_seconds(rows: list[dict[str, Any]]) -> float:
    """CPU seconds of the driver for one more message on Ray, with metadata only: the slope from the fewest
    workers to the most.
    """
    ray = [row for row in rows if row["backend"] == "ray"]
    if len(ray) < 2:
        return 0.0
    fewest = ray[0]
    most = ray[-1]
    more: float = most["metadata_cpu_s"]["median"] - fewest["metadata_cpu_s"]["median"]
    return more / (most["messages"] - fewest["messages"])


def line_of(row: dict[str, Any]) -> str:
    """A line of the first table."""
    found = row["overhead_s"]
    return (
        f"| {row['backend']} | {row['workers']} | {row['messages']} | {1e3 * found['median']:.1f} ms | "
        f"{1e3 * found['min']:.1f} – {1e3 * found['max']:.1f} ms | "
        f"{1e3 * row['driver_cpu_s']['median']:.1f} ms |"
    )


def simulated_line(row: dict[str, Any], message_s: float) -> str:
    """A line of the second table."""
    found = row["driver_s"]
    cells = [f"{row['ranks']:,}", f"{row['rows']:,}", f"{row['messages']:,}"]
    cells += [f"{row['sent_bytes'] / 1e6:.1f} MB", f"{row['received_bytes'] / 1e6:.1f} MB"]
    cells += [f"{1e3 * found['median']:.0f} ms ({1e3 * found['min']:.0f} – {1e3 * found['max']:.0f})"]
    cells += [f"{1e3 * row['encode_s']:.0f} ms", f"{1e3 * row['decode_s']:.0f} ms"]
    cells += [f"{1e3 * (found['median'] + message_s * row['messages']):.0f} ms"]
    return f"| {' | '.join(cells)} |"


def breaks(simulated: list[dict[str, Any]], message_s: float) -> str:
    """Describe what limits a larger cluster first, by the figures of this run."""
    most = simulated[-1]
    own = most["driver_s"]["median"]
    messages = most["messages"] * message_s
    coding = (most["encode_s"] + most["decode_s"]) / own
    many = (own + messages) * 67 / (3 + MINI_BATCHES)
    # bytes of a row of 16k tokens on its way to log-probs: ids, mask, responses
    wide = (8 + 1 + 8 * 0.8) * 16_384
    return f"""At {most["ranks"]:,} ranks a step costs the driver {own:.1f} s of its own work and
{messages:.1f} s of messages. From 8 ranks on both grow with ranks × calls: {coding:.0%} of the own work is
packing and unpacking for each rank, most of the rest is cutting and joining. One thread does it all, and the
mini-batches of an update wait for each other, so short steps with many mini-batches suffer first: 64
mini-batches on {most["ranks"]:,} ranks would take {many:.0f} s. What would replace it: one message for a
node, which deals to its ranks, instead of one for each rank (with 8 devices a node an eighth of the messages
and packets), and the mini-batches of an update sent ahead as one plan. Bytes break next: a row of 16k tokens
is {wide / 1e6:.2f} MB in each call, so {most["rows"]:,} rows are {most["rows"] * wide / 1e9:.1f} GB through
one node's memory and network for each log-prob call. What would replace that: rows that stay where they were
generated and go from worker to worker by reference (a `Future` as an argument does so where two calls deal
alike), so that the driver holds lengths and scores only."""


def main() -> int:
    """Measure, simulate, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=7, help="steps of each median")
    parser.add_argument(
        "--only", default="local,ray,simulated", help="parts to run; the results are written when all are"
    )
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    torch.set_num_threads(1)
    head = (
        "| backend | workers | messages a step | overhead a step | range | driver CPU "
        "|\n|---|---|---|---|---|---|"
    )
    print(head)
    rows = measured_rows(only, arguments.steps)
    message_s = message_seconds(rows)
    head_simulated = (
        "| ranks | rows | messages a step | sent | received | driver a step | of it encoding | decoding | "
        "with Ray, estimated |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    simulated = []
    if "simulated" in only:
        print(head_simulated)
        for ranks in RANKS:
            simulated.append(simulate(ranks, arguments.steps))
            print(simulated_line(simulated[-1], message_s), flush=True)
    if only != {"local", "ray", "simulated"}:
        return 0
    facts = {
        "command": f"python benchmarks/controller_overhead.py --steps {arguments.steps}",
        "date": datetime.date.today().isoformat(),
        "machine": (f"{machine()}, torch {torch.__version__}, ray {ray_version()}, one thread a process"),
    }
    RESULT.parent.mkdir(exist_ok=True)
    result = {**facts, "measured": rows, "ray_message_s": message_s, "simulated": simulated}
    RESULT.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    RESULT.with_suffix(".md").write_text(
        PAGE.format(
            **facts,
            mini_batches=MINI_BATCHES,
            steps=arguments.steps,
            rows=PROMPTS * RESPONSES,
            tokens=PROMPT_WIDTH + RESPONSE_WIDTH,
            rows_a_rank=PROMPTS_A_RANK * RESPONSES,
            width=64,
            message_ms=1e3 * message_s,
            measured="\n".join([head, *map(line_of, rows)]),
            simulated="\n".join([head_simulated, *(simulated_line(row, message_s) for row in simulated)]),
            breaks=breaks(simulated, message_s),
        )
    )
    return 0


def ray_version() -> str:
    """Version of the Ray that was measured."""
    import ray

    return str(ray.__version__)


if __name__ == "__main__":
    raise SystemExit(main())
