"""Weights between two processes: bucket by bucket, and what is lost or changed on the way is found."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from hybridflow.distributed.shards import Box, bit_sum
from hybridflow.errors import RolloutError
from hybridflow.weight_sync.wire import channel as channels
from hybridflow.weight_sync.wire import receiver as receiving
from hybridflow.weight_sync.wire import sender as sending
from hybridflow.weight_sync.wire import transports
from hybridflow.weight_sync.wire.channel import Channel, Listener, TunnelEnd
from hybridflow.weight_sync.wire.receiver import NOTHING, Receiver
from hybridflow.weight_sync.wire.sender import KeptGroup, Transport, address_towards, push
from ranks import forked

HERE = Receiver()
HELD: dict[str, Tensor] = {}


def engine_receives(receipt: dict[str, Any]) -> dict[str, Any]:
    """In the engine's process."""
    torch.set_num_threads(1)
    return HERE.receive(HELD.update, receipt)


def engine_has(_: dict[str, Any]) -> dict[str, Any]:
    """What the engine's process holds, by a number of each."""
    sums = {name: int(bit_sum(tensor, Box.whole(tensor.shape))) for name, tensor in HELD.items()}
    return {"version": HERE.version, "sums": sums, "checksums": HERE.checksums}


def engine_knows_nothing(_: dict[str, Any]) -> None:
    """The next push may have other tensors."""
    HERE._names.clear()


def engine_forgets_its_group(_: dict[str, Any]) -> None:
    """As an engine that was started anew."""
    HERE._group = None


def engine_group(_: dict[str, Any]) -> tuple[int, int] | None:
    """The object of the group that the engine's process has kept, and the bytes that it holds."""
    return HERE._group and (id(HERE._group), len(HERE._group.buffer))


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=forked()) as pool:
        yield pool


def weights(scale: float = 1.0) -> list[tuple[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"a": (40, 30), "large": (300, 50), "b.bias": (7,), "scalar": ()}
    found = [(name, scale * torch.randn(shape, generator=draw)) for name, shape in shapes.items()]
    return [*found, ("half", found[0][1].bfloat16()), ("turned", found[0][1].T)]


def send(
    engine: ProcessPoolExecutor,
    tensors: list[tuple[str, Tensor]],
    version: int,
    transport: Transport = "shared_memory",
    kept: KeptGroup | None = None,
) -> None:
    def call(method: str, receipt: dict[str, Any]) -> list[Any]:
        assert method == "hybridflow_receive"
        return [engine.submit(engine_receives, receipt).result(600)]

    push(call, tensors, version, workers=1, transport=transport, bucket_bytes=8192, timeout=600, kept=kept)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_what_arrives_is_what_was_sent(
    engine: ProcessPoolExecutor, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "MEMORY", tmp_path)
    for version in (4, 5):
        send(engine, weights(version), version, transport)
        found = engine.submit(engine_has, {}).result(600)
        wanted = {name: int(bit_sum(tensor, Box.whole(tensor.shape))) for name, tensor in weights(version)}
        assert found == {"version": version, "sums": wanted, "checksums": wanted}
    assert not list(tmp_path.iterdir())


def test_a_process_group_serves_all_pushes_until_one_fails(
    engine: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store and a communicator of their own would cost every push a second and, by NCCL, memory."""
    made = []
    begin = transports.GroupWriter.__init__

    def counted(self: transports.GroupWriter, *args: Any, **how: Any) -> None:
        made.append(self)
        begin(self, *args, **how)

    monkeypatch.setattr(transports.GroupWriter, "__init__", counted)
    kept = KeptGroup()

    def push_one(tensors: Any, version: int) -> Any:
        send(engine, tensors, version, "process_group", kept)
        found = engine.submit(engine_has, {}).result(600)
        sums = {name: int(bit_sum(tensor, Box.whole(tensor.shape))) for name, tensor in tensors}
        assert found["version"] == version and {name: found["sums"][name] for name in sums} == sums
        group = engine.submit(engine_group, {}).result(600)
        assert group[1] == len(made[-1].buffer) == 0, "buffers are given back between pushes"
        return group[0]

    groups = [push_one(weights(version), version) for version in (1, 2)]
    larger = [*weights(3), ("larger than any before", torch.ones(300_000))]
    groups.append(push_one(larger, 3))
    assert len(made) == len(set(groups)) == 1

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield from larger[:3]
        raise RolloutError("the trainer's side broke")

    with pytest.raises(RolloutError, match="version 4 did not reach the engine"):
        send(engine, breaking(), 4, "process_group", kept)  # type: ignore[arg-type]
    assert engine.submit(engine_group, {}).result(600) is None
    push_one(larger, 5)
    assert len(made) == 2
    engine.submit(engine_forgets_its_group, {}).result(600)
    push_one(larger, 6)
    push_one(larger, 7)
    assert len(made) == 3
    kept.close()
    assert made[-1]._tunnel._closed.is_set()
    send(engine, larger, 8)  # by shared memory
    assert engine.submit(engine_group, {}).result(600) is None
    engine.submit(engine_knows_nothing, {}).result(600)


def test_readers_are_told_of_a_bucket_when_it_is_in_the_buffer() -> None:
    """The copy into a CUDA buffer goes on after the call that begins it has returned."""
    happened = []

    class Recorded(transports.Writer):
        buffer = torch.empty(1 << 20, dtype=torch.uint8)

        def facts(self, receiver: int) -> dict[str, Any]:
            return {}

        def settle(self) -> None:
            happened.append("settled")

        def publish(self, size: int) -> None:
            happened.append("published")

        def close(self) -> None:
            happened.append("closed")

    class Told:
        def send(self, frame: dict[str, Any]) -> None:
            happened.append(next(iter(frame)))

        def receive(self) -> dict[str, Any]:
            return {"group": None}

    channel: Any = Told()
    sending._send([channel], weights(), 8192, lambda *_: Recorded(), KeptGroup())
    assert happened[:4] == ["open", "settled", "bucket", "published"]
    assert all(happened[place - 1] == "settled" for place, what in enumerate(happened) if what == "bucket")
    assert happened[-2:] == ["end", "closed"]


def test_a_buffer_of_a_device_is_settled_once_its_stream_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.cpu, "current_stream", Stream)
    writer = object.__new__(transports.DeviceMemoryWriter)
    writer.buffer = torch.empty(8, dtype=torch.uint8)
    writer.settle()
    assert waited == [torch.device("cpu")]


def test_a_changed_byte_is_found(engine: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = sending.Bucket.fill

    def flipping(bucket: sending.Bucket, buffer: Tensor) -> Any:
        entries = fill(bucket, buffer)
        buffer[5] ^= 1
        return entries

    monkeypatch.setattr(sending.Bucket, "fill", flipping)
    with pytest.raises(
        RolloutError,
        match=r"version 6 did not reach the engine: RolloutError: a did not arrive as it was sent",
    ):
        send(engine, weights(), 6)
    assert engine.submit(engine_has, {}).result(600)["version"] == NOTHING


def test_a_push_that_is_cut_off_leaves_no_version(engine: ProcessPoolExecutor) -> None:
    send(engine, weights(), 1)

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield from weights()[:3]
        raise RolloutError("the trainer's side broke")

    with pytest.raises(RolloutError, match="version 7 did not reach the engine"):
        send(engine, breaking(), 7)  # type: ignore[arg-type]
    assert engine.submit(engine_has, {}).result(600)["version"] == NOTHING
    with pytest.raises(
        RolloutError, match="2 tensors that an earlier push had are not in this one, such as half"
    ):
        send(engine, weights()[:4], 8)
    send(engine, weights(), 9)
    assert engine.submit(engine_has, {}).result(600)["version"] == 9


def test_memory_that_is_full_is_reported_and_nothing_stays(
    engine: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check the trainer's process would be killed by SIGBUS in the middle of a write."""

    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transports, "MEMORY", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RolloutError, match=rf"trainer's side: {tmp_path} has no room for .* \(No space left"):
        send(engine, weights(), 3)
    assert not list(tmp_path.iterdir())


def test_a_process_group_that_fails_is_an_error_of_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any) -> None:
        raise RuntimeError("Timed out waiting 600000ms for recv operation to complete")

    monkeypatch.setattr(transports.dist, "ProcessGroupGloo", late)
    writer = transports.GroupWriter(64, torch.device("cpu"), host="127.0.0.1", receivers=1, timeout=600)
    try:
        with pytest.raises(RolloutError, match="the process group of a push failed: Timed out"):
            writer.meet()
    finally:
        writer.close()


def test_a_device_without_a_group_of_its_own_sends_through_main_memory() -> None:
    """gloo takes no tensors of other devices than the CPU."""
    here = torch.arange(8, dtype=torch.uint8)
    sent = []

    class OnDevice:
        def __getitem__(self, part: slice) -> OnDevice:
            return self

        def cpu(self) -> Tensor:
            return here

    class Gloo:
        def broadcast(self, tensors: list[Tensor], options: Any) -> SimpleNamespace:
            sent.extend(tensors)
            return SimpleNamespace(wait=lambda: None)

    writer: Any = object.__new__(transports.GroupWriter)
    writer.buffer = OnDevice()
    writer._group = Gloo()
    writer._by_gloo = True
    writer.publish(8)
    assert sent == [here]


def test_an_engine_that_stops_reading_has_no_version() -> None:
    receiver = Receiver()
    with pytest.raises(RolloutError, match="stopped taking weights after 1 tensors"):
        receiver.take(next, sending.checked(weights()), 3)
    assert receiver.version == NOTHING
    receiver.take(dict, sending.checked(weights()), 3)
    assert receiver.version == 3


def test_workers_that_do_not_come_are_reported() -> None:
    with pytest.raises(RolloutError, match="version 2 did not reach the engine: no such method"):
        push(lambda method, receipt: [{"error": "no such method"}], weights(), 2, workers=1, timeout=600)
    with pytest.raises(RolloutError, match="0 of 1 workers of the engine came"):
        push(lambda method, receipt: [{"version": 2}], weights(), 2, workers=1, timeout=600)


def test_strangers_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_TOKEN_S", 0.2)
    listener = Listener("127.0.0.1")
    address = (listener.host, listener.port)
    with (
        contextlib.closing(socket.create_connection(address)),
        contextlib.closing(socket.create_connection(address)) as stranger,
    ):
        stranger.sendall(b"x" * 64)
        own = Channel.connect(listener.host, listener.port, listener.token, 600)
        (channel,) = listener.accept(1, timeout=600, failed=lambda: False)
        own.send({"hello": 1})
        assert channel.receive() == {"hello": 1} and stranger.recv(1) == b""
        own.close()
        with pytest.raises(RolloutError, match="cut off before its end"):
            channel.receive()
    listener.close()
    assert address_towards("127.0.0.1", 9) == "127.0.0.1" and receiving.NOTHING == -1


def test_silent_strangers_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent strangers are waited for side by side with those that have the token, not before them."""
    monkeypatch.setattr(channels, "_TOKEN_S", 1e6)  # with one after the other this would never end
    monkeypatch.setattr(channels, "_MAX_PENDING", 8)
    listener = Listener("127.0.0.1")
    address = (listener.host, listener.port)
    with contextlib.ExitStack() as silent:
        early = [silent.enter_context(socket.create_connection(address)) for _ in range(3)]
        first = Channel.connect(listener.host, listener.port, listener.token, 60)
        late = [silent.enter_context(socket.create_connection(address)) for _ in range(7)]
        second = Channel.connect(listener.host, listener.port, listener.token, 60)
        received = listener.accept(2, timeout=60, failed=lambda: False)
        for number, channel in enumerate((first, second)):
            channel.send({"number": number})
        assert sorted(channel.receive()["number"] for channel in received) == [0, 1]
        assert early[0].recv(1) == b"", "the oldest stranger makes room for the ninth"
        assert late[-1].recv(1) == b"", "and the others go when all have come"
        for channel in (first, second, *received):
            channel.close()
    listener.close()


def test_the_store_of_a_process_group_takes_no_strangers() -> None:
    """It cannot be reached by the address that receivers get, nor through the tunnel without the token."""
    writer = transports.GroupWriter(64, torch.device("cpu"), host="127.0.0.2", receivers=1, timeout=60)
    facts = writer.facts(0)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", writer._store.port), timeout=60)
    with contextlib.closing(socket.create_connection((facts["host"], facts["port"]), timeout=60)) as stranger:
        stranger.sendall(b"\x00" * 64)
        assert stranger.recv(1) == b""
    end = TunnelEnd(facts["host"], facts["port"], facts["token"], 60)
    store = TCPStore(end.host, end.port, 2, is_master=False)
    store.set("key", "value")
    assert writer._store.get("key") == b"value"
    end.close()
    writer.close()
