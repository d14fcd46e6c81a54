"""Rows from the driver to a worker, and from one worker to another, by the backends of the row store: Ray's
object store against TransferQueue.

    python benchmarks/row_stores.py [--megabytes 1,8,64] [--rounds 7]        (`make row-stores`)

driver ──put──► row store ──► worker reads; worker writes ──► row store ──► the other worker reads

Both in turn in one Ray. Writes results/row_stores.json and row_stores.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from side_by_side import facts, in_turn, numbers, ratio, spread, table, write

from hybridflow.config.cluster import RayConfig, RayInitConfig
from hybridflow.controller import (
    Dispatch,
    Factories,
    MeshInfo,
    Placement,
    RankInfo,
    ResourcePool,
    Worker,
    WorkerGroup,
    WorkerHost,
    register,
)
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.controller.ray.transfer_queue import TransferQueue, cpus_of
from hybridflow.protocol import DataProto

ROWS = 64
WAYS = ("ray", "transferqueue")


class Scribe(Worker):
    """Reads and writes columns."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def write(self, batch: DataProto) -> DataProto:
        """A column as large as what was read."""
        return DataProto.from_dict({"y": batch.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("sum",))
    def read_x(self, batch: DataProto) -> DataProto:
        """What the driver has put, looked at."""
        return DataProto.from_dict({"sum": batch.batch["x"].sum(dim=1)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("y",), writes=("sum",))
    def read_y(self, batch: DataProto) -> DataProto:
        """What another worker has written, looked at."""
        return DataProto.from_dict({"sum": batch.batch["y"].sum(dim=1)})


def make_scribes(host: WorkerHost) -> Factories:
    """Two roles in a process each."""

    def scribe(info: RankInfo) -> Worker:
        return Scribe()

    return {"writer": scribe, "reader": scribe}


def trip(backend: RayBackend, rows: DataProto) -> dict[str, float]:
    """Seconds of each way of the rows through the store."""
    writer = WorkerGroup[Scribe](backend, "writer")
    reader = WorkerGroup[Scribe](backend, "reader")
    light = rows.select(["attention_mask"], [])
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - began

    def kept(call: Callable[[], DataProto]) -> Callable[[], None]:
        def work() -> None:
            nonlocal light
            light |= call()

        return work

    timed("driver puts", kept(lambda: writer.keep(rows, ["x"])))
    timed("worker reads", lambda: reader.call(Scribe.read_x, light))
    timed("worker writes", kept(lambda: writer.call_and_keep(Scribe.write, ["y"], light)))
    timed("other worker reads", lambda: reader.call(Scribe.read_y, light))
    return seconds


def make_backend(cluster: RayCluster, way: str) -> RayBackend:
    """Two processes, whose rows wait in one of the two places."""
    start_queue = partial(TransferQueue.start, {}) if way == "transferqueue" else None
    placement = Placement(
        (ResourcePool(f"{way}-writing", (1,)), ResourcePool(f"{way}-reading", (1,))),
        {"writer": (f"{way}-writing",), "reader": (f"{way}-reading",)},
    )
    return RayBackend(
        cluster,
        placement,
        {"writer": MeshInfo(1), "reader": MeshInfo(1)},
        make_scribes,
        device="cpu",
        num_threads=1,
        call_timeout=600.0,
        heartbeat_timeout=60.0,
        startup_timeout=300.0,
        start_queue=start_queue,
    )


def rows_of(megabytes: int) -> DataProto:
    """Rows with a column of so many MB."""
    x = torch.randn(ROWS, megabytes * 10**6 // (4 * ROWS))
    return DataProto.from_dict(
        {"x": x, "row_id": torch.arange(ROWS), "attention_mask": torch.ones(ROWS, 1, dtype=torch.bool)}
    )


def table_of(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """A line for each size and way through the store."""
    lines = []
    for megabytes, ways in found.items():
        for name in ways["ray"][0]:
            taken = {way: [trip[name] for trip in trips] for way, trips in ways.items()}
            slower = ratio(taken["transferqueue"], taken["ray"])
            lines.append([megabytes, name, *(spread(taken[way], ".4f") for way in WAYS), slower])
    return table(["MB", "what", "Ray's object store, s", "TransferQueue, s", "TransferQueue / Ray"], lines)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=numbers, default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a dry run, which writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray_config = RayConfig(ray_init=RayInitConfig(num_cpus=4))
    cluster = RayCluster.connect(ray_config, device="cpu", wanted=4, further_cpus=cpus_of({}))
    backends = {way: make_backend(cluster, way) for way in WAYS}
    found: dict[str, Any] = {}
    try:
        for megabytes in options.megabytes:
            rows = rows_of(megabytes)
            trips = {way: partial(trip, backend, rows) for way, backend in backends.items()}
            found[str(megabytes)] = in_turn(trips, options.rounds, 2)
    finally:
        for backend in backends.values():
            backend.shutdown()
        cluster.shutdown()
    text = (
        f"A float32 column of {ROWS} rows, in both stores in turn, {options.rounds} rounds; medians, and the "
        "fastest and slowest round. Both have all their processes on this machine, so nothing crosses a "
        "network, for which TransferQueue's other backends are made: SimpleStorage alone was run.\n\n"
        f"{table_of(found)}"
    )
    result = {**facts(["torch", "ray", "transferqueue"], threads=1), "seconds": found}
    write("row_stores", result, "Row stores", text, dry=options.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
