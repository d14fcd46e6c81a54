"""Weights on the device that are pushed to another process: few waits, and every changed byte is told."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from simulated_accelerator import counts
from simulated_accelerator.row import ROW
from torch import Tensor

from hybridflow.distributed.shards import Box, bit_sum
from hybridflow.errors import RolloutError
from hybridflow.weight_sync.wire import sender as sending
from hybridflow.weight_sync.wire.receiver import NOTHING, Receiver
from hybridflow.weight_sync.wire.sender import Transport, checked, push
from ranks import forked

SIM = torch.device("sim", 0)
BUCKET_BYTES = 64 * 1024
HERE = Receiver()
HELD: dict[str, Tensor] = {}


def receive(receipt: dict[str, Any]) -> dict[str, Any]:
    """In the engine's process."""
    torch.set_num_threads(1)
    return HERE.receive(HELD.update, receipt)


def received(_: None) -> tuple[int, dict[str, int]]:
    """The version and the checksums of what the engine's process holds."""
    return HERE.version, {name: int(bit_sum(each, Box.whole(each.shape))) for name, each in HELD.items()}


def know_nothing(_: None) -> None:
    """The next push may have other weights."""
    HERE._names.clear()
    HELD.clear()


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=forked()) as pool:
        yield pool


@pytest.fixture
def engine(process: ProcessPoolExecutor) -> ProcessPoolExecutor:
    process.submit(know_nothing, None).result(60)
    return process


def weights(number: int) -> list[tuple[str, Tensor]]:
    """So many weights of 1,000 bytes, one of several buckets' size, and a view that is not contiguous."""
    draw = torch.Generator().manual_seed(number)
    found = [(f"weight {at}", torch.randn(10, 25, generator=draw).to(SIM)) for at in range(number)]
    large = torch.randn(50_000, generator=draw).to(SIM)
    return [*found, ("large", large), ("turned", found[0][1].t()), ("half", large[:700].bfloat16())]


def send(engine: ProcessPoolExecutor, tensors: Any, version: int, transport: Transport) -> None:
    def call(method: str, receipt: dict[str, Any]) -> list[Any]:
        return [engine.submit(receive, receipt).result(60)]

    push(call, tensors, version, workers=1, transport=transport, bucket_bytes=BUCKET_BYTES, timeout=60)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_push_waits_at_most_twice_a_bucket(engine: ProcessPoolExecutor, transport: Transport) -> None:
    """A device whose group does not send goes through main memory."""
    for version, number in enumerate((20, 200)):
        tensors = weights(number)
        with counts.phase(f"push {version} by {transport}") as phase:
            send(engine, tensors, version, transport)
        buckets = len(list(sending._buckets(tensors, BUCKET_BYTES)))
        assert buckets < number / 10 + 4
        assert phase.num_waits <= 2 * buckets, counts.report()
        wanted = {name: int(bit_sum(each, Box.whole(each.shape))) for name, each in tensors}
        found, sums = engine.submit(received, None).result(60)
        assert found == version and wanted.items() <= sums.items()


def test_small_weights_by_shared_memory_wait_once_a_bucket(engine: ProcessPoolExecutor) -> None:
    tensors = weights(200)[:200]
    with counts.phase("small ones") as phase:
        send(engine, tensors, 1, "shared_memory")
    waits = 1 if ROW.pins_memory else 2
    buckets = len(list(sending._buckets(tensors, BUCKET_BYTES)))
    assert buckets == 4 and phase.num_waits == waits * buckets, counts.report()


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_changed_byte_is_told(
    engine: ProcessPoolExecutor, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = sending.Bucket.fill

    def spoiling(bucket: sending.Bucket, buffer: Tensor) -> Any:
        entries = fill(bucket, buffer)
        buffer[5] ^= 1
        return entries

    monkeypatch.setattr(sending.Bucket, "fill", spoiling)
    with pytest.raises(RolloutError, match="weight 0 did not arrive as it was sent"):
        send(engine, weights(200), 7, transport)
    assert engine.submit(received, None).result(60)[0] == NOTHING


def test_an_engine_in_the_same_process_compares_with_two_waits_a_bucket() -> None:
    receiver = Receiver()
    tensors = weights(100)
    with counts.phase("in the process") as phase:
        receiver.take(dict, checked(tensors), 3)
    assert receiver.version == 3 and len(receiver.checksums) == len(tensors)
    assert phase.num_waits == 2, counts.report()
