"""The trainer's side of a push: packs weights into buckets and sends them to all workers of an engine.

    weights ──bucket──► Writer ─────────────► Reader ──► engine's worker
                 └─entries, checksums─ Channel ─► compared with what arrived ──ack──► the next bucket

`call` asks the engine's workers to receive, and returns when they have everything; so it runs in a thread
while this one sends.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.distributed.accelerators import features
from hybridflow.distributed.shards import bit_sums
from hybridflow.distributed.transfers import HostCopy
from hybridflow.errors import RolloutError
from hybridflow.weight_sync.wire.channel import LOOPBACK, Channel, Listener
from hybridflow.weight_sync.wire.receiver import Weights
from hybridflow.weight_sync.wire.transports import (
    ALIGNMENT,
    DeviceMemoryWriter,
    Entry,
    GroupWriter,
    SharedMemoryWriter,
    Writer,
)

BUCKET_BYTES = 256 * 2**20
_CACHED_BYTES = 16 * 2**20
"""Largest buffer in shared memory, in bytes: a larger one costs more in page faults than it saves."""

_COMPARED_BYTES = 64 * 2**20
"""Weights whose checksums are read together, in bytes, where no bytes travel."""

Transport = Literal["shared_memory", "cuda_ipc", "process_group"]
CallWorkers = Callable[[str, dict[str, Any]], list[Any]]
"""Function that calls a method of the workers' extension with its arguments and returns each worker's answer.
"""


def checked(weights: Weights) -> Iterator[list[tuple[str, Tensor, int]]]:
    """Yield weights in buckets, each with its checksum."""
    for bucket in _buckets(weights, _COMPARED_BYTES):
        sums = bucket.checksums()
        yield [(name, tensor, checksum) for (name, tensor), checksum in zip(bucket.weights, sums)]


class KeptGroup:
    """The process group that all pushes to one engine use, made by the first of them."""

    def __init__(self) -> None:
        self._writer: GroupWriter | None = None

    def take(self, tokens: set[str | None]) -> GroupWriter | None:
        """Return the group where all receivers have it still, by the tokens that they say; else close it."""
        writer = self._writer
        self._writer = None
        if writer is not None and tokens != {writer.token}:  # a receiver was restarted
            writer.close()
            return None
        return writer

    def keep(self, writer: Writer) -> None:
        """Keep a writer that has a group for the next push, and close any other one."""
        if not isinstance(writer, GroupWriter):
            writer.close()
            return
        writer.rest()
        self._writer = writer

    def close(self) -> None:
        """Leave the group."""
        self.take(set())


def push(
    call: CallWorkers,
    weights: Weights,
    version: int,
    *,
    workers: int,
    transport: Transport = "shared_memory",
    host: str = LOOPBACK,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: float = 300.0,
    kept: KeptGroup | None = None,
    **more: Any,
) -> None:
    """Send weights, called `version`, to the `workers` processes of an engine, by their `hybridflow_receive`.

    `host`: address of this machine that the workers can reach. `kept`: what the pushes to this engine have in
    common; without it, each makes its own process group. `more`: further facts for the workers, as JSON.
    Raises RolloutError where not all weights arrived as sent; then the engine has no version.
    """
    open_writer: Callable[..., Writer] = DeviceMemoryWriter
    if transport == "process_group":
        open_writer = partial(GroupWriter, host=host, receivers=workers, timeout=timeout)
    elif transport == "shared_memory":
        open_writer = SharedMemoryWriter
        bucket_bytes = min(bucket_bytes, _CACHED_BYTES)
    lasting = KeptGroup() if kept is None else kept
    listener = Listener(host)
    receipt = {"host": host, "port": listener.port, "token": listener.token, "timeout": timeout, **more}
    with ThreadPoolExecutor(1, thread_name_prefix="push") as pool:
        job = pool.submit(call, "hybridflow_receive", {**receipt, "version": version})
        broken: RolloutError | None = None
        try:
            channels = listener.accept(workers, timeout=timeout, failed=job.done)
            try:
                staged = transport == "shared_memory"
                _send(channels, weights, bucket_bytes, open_writer, lasting, staged=staged)
            finally:
                for channel in channels:
                    channel.close()
        except RolloutError as error:  # what the workers say of it is the better reason
            broken = error
        finally:
            listener.close()
            if kept is None:
                lasting.close()
        _judge(job, version, broken)


def _judge(job: Future[list[Any]], version: int, broken: RolloutError | None) -> None:
    reasons = [answer["error"] for answer in job.result() if "error" in answer][:1]
    if broken is not None:
        reasons.append(f"on the trainer's side: {broken}" if reasons else str(broken))
    if reasons:
        raise RolloutError(
            f"weights of version {version} did not reach the engine: {'; '.join(reasons)}"
        ) from broken


def _send(
    channels: list[Channel],
    weights: Weights,
    bucket_bytes: int,
    open_writer: Callable[..., Writer],
    kept: KeptGroup,
    *,
    staged: bool = False,
) -> None:
    """Send all weights; `staged` says that writers have their buffers in main memory."""
    writer: Writer | None = kept.take({channel.receive()["group"] for channel in channels})
    sent = 0
    try:
        buckets = _buckets(weights, bucket_bytes, staged=staged)
        bucket = next(buckets, None)
        while bucket is not None:
            if writer is None or not writer.reserve(bucket.size, bucket.device):
                if writer is not None:
                    writer.close()
                writer = open_writer(max(bucket.size, bucket_bytes), bucket.device)
                for number, channel in enumerate(channels):
                    channel.send({"open": writer.facts(number)})
                writer.meet()
            entries = bucket.fill(writer.buffer)
            writer.settle()
            for channel in channels:
                channel.send({"bucket": entries, "size": bucket.size})
            writer.publish(bucket.size)
            sent += len(entries)
            bucket = next(buckets, None)  # its copies run while the engine reads the bucket before it
            for channel in channels:
                channel.receive()
        for channel in channels:
            channel.send({"end": sent})
            channel.receive()
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    if writer is not None:
        kept.keep(writer)


class Bucket:
    """Weights of one device that travel together. Their checksums are on their way to the host.

    `stage`: pinned main memory, [≥ size] uint8, to which the weights are sent as well; not awaited
    before `fill`.
    """

    def __init__(self, weights: list[tuple[str, Tensor]], stage: Tensor | None = None) -> None:
        self.weights = weights
        self.device = weights[0][1].device
        self.size = sum(_padded(tensor) for _, tensor in weights)
        """Bytes that it takes in a buffer."""
        self._stage: Tensor | None = None
        if stage is not None:
            self._stage = stage[: self.size]
            self._stage.copy_(self._packed(), non_blocking=True)
        # queued behind the copy: with the checksums on the host the stage is complete
        self._sums = HostCopy([bit_sums([tensor for _, tensor in weights])])

    def checksums(self) -> list[int]:
        """Return the checksum of each weight, as soon as the device has sent them."""
        return [int(each) for each in self._sums.tensors()[0]]

    def fill(self, buffer: Tensor) -> list[Entry]:
        """Write the weights into `buffer`, [≥ size] uint8; return where each of them lies there."""
        sums = self.checksums()
        if buffer.device == self.device:
            self._write(buffer)
        elif self._stage is not None:
            buffer[: self.size].copy_(self._stage)
        elif len(self.weights) == 1:  # a large one: no second copy of it on the device
            _, tensor = self.weights[0]
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            buffer[: len(data)].copy_(data)
        else:
            buffer[: self.size].copy_(self._packed())
        entries = []
        offset = 0
        for (name, tensor), checksum in zip(self.weights, sums, strict=True):
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(Entry(name, dtype, list(tensor.shape), offset, checksum))
            offset += _padded(tensor)
        return entries

    def _packed(self) -> Tensor:
        """Return the weights' bytes, [size] uint8 on their device."""
        packed = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        self._write(packed)
        return packed

    def _write(self, buffer: Tensor) -> None:
        """Write the weights into a buffer on their device."""
        offset = 0
        for _, tensor in self.weights:
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            buffer[offset : offset + len(data)].copy_(data)
            offset += _padded(tensor)


def _buckets(weights: Weights, limit: int, *, staged: bool = False) -> Iterator[Bucket]:
    """Yield weights in groups of at most `limit` bytes of one device; a larger weight is a separate group.

    With `staged`, those of a device that copies to pinned memory are sent there; a bucket must be in a buffer
    before the next one is asked for.
    """
    stage: Tensor | None = None

    def bucket_of(group: list[tuple[str, Tensor]], size: int) -> Bucket:
        nonlocal stage
        if not staged or size > limit or not features(group[0][1].device.type).pins_memory:
            return Bucket(group)
        if stage is None:
            stage = torch.empty(limit, dtype=torch.uint8, pin_memory=True)
        return Bucket(group, stage)

    group: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in weights:
        tensor = tensor.detach()
        size = _padded(tensor)
        if group and (filled + size > limit or tensor.device != group[0][1].device):
            yield bucket_of(group, filled)
            group = []
            filled = 0
        group.append((name, tensor))
        filled += size
    if group:
        yield bucket_of(group, filled)


def _padded(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes, rounded up to where the next one may begin."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that `host` can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
