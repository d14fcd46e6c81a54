"""Ways to move the bytes of a bucket from the trainer's process to an engine's.

    shared_memory   a file in memory that both map; any two processes of one machine
    cuda_ipc        a buffer of a GPU that the other process opens; two processes that see the same GPU
    process_group   a broadcast by the device's own group (NCCL), else by gloo; any machines

Each has a writer, which owns the buffer, and a reader. A frame says which tensors lie where in it (`Entry`).
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from hybridflow.distributed.accelerators import features, is_accelerator
from hybridflow.distributed.facilities import facilities
from hybridflow.errors import RolloutError
from hybridflow.weight_sync.wire.channel import LOOPBACK, Tunnel, TunnelEnd

MEMORY = Path("/dev/shm")
ALIGNMENT = 64


def memory_folder() -> Path | None:
    """Return the folder of files in memory, or None where the system has none."""
    if MEMORY.is_dir():
        return MEMORY
    return None


class Entry(NamedTuple):
    """Where a tensor lies in a bucket, and its checksum."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    checksum: int


class Writer(ABC):
    """The sender's end: a buffer of uint8 that readers see once it was published."""

    buffer: Tensor

    @abstractmethod
    def facts(self, receiver: int) -> dict[str, Any]:
        """Return what reader number `receiver` needs to know, as JSON."""

    def meet(self) -> None:  # noqa: B027
        """Wait for the readers, which have been sent their facts, where a writer has to."""

    def reserve(self, size: int, device: torch.device) -> bool:
        """Return whether a bucket of `size` bytes on `device` fits, for which a writer may make room."""
        return size <= len(self.buffer)

    def settle(self) -> None:  # noqa: B027
        """Wait until the bucket is in the buffer, where readers look as soon as they are notified."""

    def publish(self, size: int) -> None:  # noqa: B027
        """Send the first `size` bytes, which hold a bucket, to readers that wait for them."""

    @abstractmethod
    def close(self) -> None:
        """Release the buffer."""


class Reader:
    """The receiver's end."""

    buffer: Tensor

    def fetch(self, size: int) -> Tensor:
        """Return the bytes of the bucket, [size] uint8, valid until the next call."""
        return self.buffer[:size]

    def close(self) -> None:
        """Release the buffer."""


class SharedMemoryWriter(Writer):
    """A file in memory, freed when both sides have closed it."""

    def __init__(self, size: int, device: torch.device) -> None:
        handle, path = tempfile.mkstemp(prefix="hybridflow_", dir=memory_folder())
        self._path = Path(path)
        try:
            _reserve(handle, size)
            self._map = mmap.mmap(handle, size)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(handle)
        self.buffer = torch.frombuffer(self._map, dtype=torch.uint8)

    def facts(self, receiver: int) -> dict[str, Any]:
        return {"kind": "shared_memory", "path": str(self._path), "size": len(self.buffer)}

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def _reserve(handle: int, size: int) -> None:
    """Give a file its size and memory; RolloutError where there is too little: a write would be a SIGBUS."""
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(handle, size)
        return
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        raise RolloutError(
            f"{memory_folder() or tempfile.gettempdir()} has no room for a bucket of {size:,} bytes of "
            f"weights ({error.strerror}): make it larger (in a container: --shm-size), or set "
            "actor_rollout_ref.rollout.server.transport to another one"
        ) from error


class SharedMemoryReader(Reader):
    """Maps the writer's file."""

    def __init__(self, facts: dict[str, Any]) -> None:
        with Path(facts["path"]).open("r+b") as file:
            self.buffer = torch.frombuffer(mmap.mmap(file.fileno(), facts["size"]), dtype=torch.uint8)


class DeviceMemoryWriter(Writer):
    """A buffer on this process's accelerator."""

    def __init__(self, size: int, device: torch.device) -> None:
        if not features(device.type).shares_memory:
            raise RolloutError(
                f"transport=cuda_ipc, and the weights are on {device}: set transport=shared_memory"
            )
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def facts(self, receiver: int) -> dict[str, Any]:
        device = self.buffer.device.type
        return {"kind": "cuda_ipc", "device": device, **facilities(device).share_memory(self.buffer)}

    def settle(self) -> None:
        device = self.buffer.device
        torch.get_device_module(device).current_stream(device).synchronize()

    def close(self) -> None:
        del self.buffer


class DeviceMemoryReader(Reader):
    """Opens the writer's buffer; RolloutError where this process does not see that device."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.buffer = facilities(facts["device"]).open_memory(facts)

    def close(self) -> None:
        _synchronize(self.buffer.device)  # what is read must be read before the writer lets go
        del self.buffer


class _GroupEnd:
    """The part that both ends of a process group share, which serves any number of pushes (`rest`)."""

    buffer: Tensor
    _group: Any
    _by_gloo: bool
    """Whether bytes travel in main memory, since there is no process group for the device."""
    _tunnel: Tunnel | TunnelEnd

    def _join(self, store: Any, rank: int, world: int, device: str, timeout: float) -> None:
        own = facilities(device).process_group(store, rank, world, timeout)
        self._by_gloo = own is None
        self._group = own
        if own is None:
            self._group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout))

    def rest(self) -> None:
        """Release the buffer until the next push, and keep the group."""
        self.buffer = self.buffer.new_empty(0)

    def close(self) -> None:
        """Release the group."""
        self._group = None
        self._tunnel.close()


class GroupWriter(_GroupEnd, Writer):
    """Rank 0 of a process group: the device's own (NCCL for CUDA), else gloo, through main memory.

    The ranks find each other by a TCPStore that listens on this machine's loopback alone; readers come to it
    through a `Tunnel`, with the token that their facts hold. The group serves any number of pushes (`rest`).
    """

    def __init__(self, size: int, device: torch.device, *, host: str, receivers: int, timeout: float) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._size = size
        self._host = host
        self._world = receivers + 1
        self._timeout = timeout
        with socket.create_server((LOOPBACK, 0)) as listening:
            port = int(listening.getsockname()[1])
            self._store = TCPStore(
                LOOPBACK,
                port,
                self._world,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
                master_listen_fd=listening.detach(),
            )
        tunnel = Tunnel(host, port)
        self._tunnel = tunnel
        self._group = None
        self.token = tunnel.token
        """The name by which readers know the group, and its password."""

    def facts(self, receiver: int) -> dict[str, Any]:
        return {
            "kind": "process_group",
            "host": self._host,
            "port": self._tunnel.port,
            "token": self.token,
            "rank": receiver + 1,
            "world": self._world,
            "device": self.buffer.device.type,
            "timeout": self._timeout,
        }

    def meet(self) -> None:
        with _failures_explained():
            self._join(self._store, 0, self._world, self.buffer.device.type, self._timeout)

    def reserve(self, size: int, device: torch.device) -> bool:
        self._size = max(size, self._size)
        if device == self.buffer.device and len(self.buffer) < self._size:
            self.buffer = self.buffer.new_empty(self._size)
        return device == self.buffer.device

    def publish(self, size: int) -> None:
        data = self.buffer[:size]
        if self._by_gloo:
            data = data.cpu()
        with _failures_explained():
            _broadcast(self._group, data)


class GroupReader(_GroupEnd, Reader):
    """Another rank of that group."""

    def __init__(self, facts: dict[str, Any]) -> None:
        timeout = facts["timeout"]
        self.token: str = facts["token"]
        self._tunnel = TunnelEnd(facts["host"], facts["port"], self.token, timeout)
        kind = facts["device"]
        try:
            store = TCPStore(
                self._tunnel.host,
                self._tunnel.port,
                facts["world"],
                is_master=False,
                timeout=timedelta(seconds=timeout),
            )
            self._join(store, facts["rank"], facts["world"], kind, timeout)
        except BaseException:
            self._tunnel.close()
            raise
        device = torch.device("cpu")
        if not self._by_gloo:
            device = torch.device(kind, torch.get_device_module(kind).current_device())
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def fetch(self, size: int) -> Tensor:
        if len(self.buffer) < size:
            self.buffer = self.buffer.new_empty(size)
        _broadcast(self._group, self.buffer[:size])
        return super().fetch(size)


@contextmanager
def _failures_explained() -> Iterator[None]:
    """Turn errors of a process group whose peers are gone or late into a RolloutError."""
    try:
        yield
    except RuntimeError as error:
        raise RolloutError(f"the process group of a push failed: {error}") from error


def _broadcast(group: Any, data: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([data], options).wait()
    _synchronize(data.device)


def _synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done all that was queued; nothing on a CPU."""
    if is_accelerator(device.type):
        torch.get_device_module(device).synchronize(device)


def open_reader(facts: dict[str, Any]) -> Reader:
    """Return the reader for a writer's facts."""
    kinds = {
        "shared_memory": SharedMemoryReader,
        "cuda_ipc": DeviceMemoryReader,
        "process_group": GroupReader,
    }
    return kinds[facts["kind"]](facts)


def unpack(data: Tensor, entries: Sequence[Entry]) -> list[Tensor]:
    """Return copies of the tensors in a bucket."""
    found = []
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        part = data[entry.offset : entry.offset + math.prod(entry.shape) * dtype.itemsize]
        found.append(part.clone().view(dtype).reshape(entry.shape))
    return found
