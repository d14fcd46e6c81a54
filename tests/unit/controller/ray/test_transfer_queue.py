"""TransferQueue as the place of the shards of remote columns: what is held when."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import ray
import torch
import transfer_queue
from house import Counter, CounterGroup
from ray_house import start

from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.controller.ray.transfer_queue import CONTROLLER, TransferQueue, cpus_of
from hybridflow.controller.ray.transport import encode
from hybridflow.errors import WorkerError, WorkerLost
from hybridflow.protocol import DataProto

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def held_backend(cluster: RayCluster) -> Iterator[RayBackend]:
    """Two processes whose rows are in the queue."""
    backend = start(
        cluster, {"train": 2}, {"counter": "train"}, start_queue=lambda left: TransferQueue.start({}, left)
    )
    yield backend
    backend.shutdown()


def batch(rows: int, width: int) -> DataProto:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator)
    return DataProto.from_dict(
        {"x": x, "row_id": torch.arange(rows), "attention_mask": torch.ones(rows, 1)},
        {"uid": [f"u{row}" for row in range(rows)]},
    )


def keys(backend: RayBackend) -> set[str]:
    assert backend._queue is not None
    listed = transfer_queue.kv_list(backend._queue.partition)
    return set(listed.get(backend._queue.partition, {}))


def settled(backend: RayBackend, count: int) -> bool:
    """Whether the queue comes to hold so many packets: they are freed in a thread."""
    for _ in range(600):
        gc.collect()
        if len(keys(backend)) == count:
            return True
        time.sleep(0.1)
    return False


def test_what_is_put_and_what_a_call_keeps_is_in_the_queue_and_is_freed(held_backend: RayBackend) -> None:
    group = CounterGroup(held_backend, "counter")
    rows = batch(64, 1024)
    assert settled(held_backend, 0)
    rows |= group.keep(rows, ["x"])
    assert len(keys(held_backend)) == 1
    rows |= group.call_and_keep(Counter.write, ["doubled", "word"], rows, times=3.0)
    assert len(keys(held_backend)) == 3, "a shard of each process"
    read = group.call(Counter.read, rows.by_reference())
    assert torch.equal(read.batch["doubled"], rows.batch["x"] * 3)
    assert torch.equal(read.batch["x"], rows.batch["x"])
    assert sorted(rows.materialized().names()) == ["attention_mask", "doubled", "row_id", "uid", "word", "x"]
    del read, rows
    assert settled(held_backend, 0), keys(held_backend)


def test_a_second_run_joins_the_queue_and_frees_its_own_rows_only(held_backend: RayBackend) -> None:
    other = TransferQueue.start({}, 60.0)
    kept = CounterGroup(held_backend, "counter").keep(batch(1, 64), ["x"])
    held = other.hold(encode(torch.arange(64)))
    assert list(transfer_queue.kv_list(other.partition)[other.partition]) == [held.key]
    other.close()
    assert not transfer_queue.kv_list(other.partition).get(other.partition)
    assert len(keys(held_backend)) == 1 and kept.has("x")
    with pytest.raises(WorkerLost, match="TransferQueue has lost rows"):
        other.opened(held)


def test_a_queue_that_finds_no_cpus_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_queue, "init", lambda conf=None: time.sleep(30))
    with pytest.raises(WorkerError, match="its processes take 5 CPUs"):
        TransferQueue.start({"backend": {"SimpleStorage": {"num_data_storage_units": 4}}}, 0.2)


def test_the_processes_of_the_queue() -> None:
    assert cpus_of({}) == 3
    assert cpus_of({"backend": {"storage_backend": "MooncakeStore"}}) == 1


def test_the_queue_ends_with_the_run_that_started_it(cluster: RayCluster, held_backend: RayBackend) -> None:
    held_backend.shutdown()
    with pytest.raises(ValueError):
        ray.get_actor(**CONTROLLER)
