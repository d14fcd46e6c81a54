"""The facilities of CUDA: graphs, memory that processes share, NCCL, profilers.

Only this file says `torch.cuda`.

A ROCm build of torch answers to the same names.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.distributed.facilities import Facilities
from hybridflow.errors import RolloutError

_RECORDING = threading.Lock()
"""Held while a graph is recorded: engines in other threads of the process record theirs after it."""
_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy, _ATEN.copy_)
_BY_INDEX = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)
_DATA_DECIDES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CudaFacilities(Facilities):
    """What a process can do with NVIDIA's GPUs, and with AMD's."""

    def recorder(self, device: torch.device) -> CudaRecorder:
        return CudaRecorder(device)

    def share_memory(self, buffer: Tensor) -> dict[str, Any]:
        handle = buffer.untyped_storage()._share_cuda_()
        packed = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in handle]
        packs = [isinstance(part, bytes) for part in handle]
        return {"handle": packed, "bytes": packs, "uuid": _uuid(buffer.device)}

    def open_memory(self, facts: dict[str, Any]) -> Tensor:
        seen = [_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        if facts["uuid"] not in seen:
            raise RolloutError(
                "the engine does not see the GPU that the weights are on: set "
                "actor_rollout_ref.rollout.server.transport=shared_memory"
            )
        handle = [
            base64.b64decode(part) if packed else part
            for part, packed in zip(facts["handle"], facts["bytes"])
        ]
        device = torch.device("cuda", seen.index(facts["uuid"]))  # it may have another number there
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle[1:])
        return torch.tensor([], dtype=torch.uint8, device=device).set_(storage)

    def process_group(self, store: Any, rank: int, world: int, timeout: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, world, options)

    def start_memory_history(self, max_entries: int) -> None:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)

    def write_memory_history(self, path: str) -> None:
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)

    def start_capture_range(self) -> None:
        torch.cuda.profiler.start()

    def stop_capture_range(self) -> None:
        torch.cuda.profiler.stop()

    def card_name(self) -> str | None:
        if not torch.cuda.is_available():
            return None
        return str(torch.cuda.get_device_name())

    def cards(self) -> list[dict[str, Any]]:
        if not torch.cuda.is_available():
            return []
        every: list[Any] = [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
        return [{"name": each.name, "bytes": each.total_memory, "major": each.major} for each in every]


def _uuid(device: torch.device) -> str:
    """Return the GPU's uuid, which is the same in every process."""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


class CudaRecorder:
    """CUDA graphs, whose memory is shared: a result is read before another graph runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record as `torch.cuda.graph` does, without its garbage collection, which takes longer than that."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()  # libraries set themselves up in the first run, which a recording forbids
            with _RefuseWaiting():  # type: ignore[no-untyped-call]
                run()
            with _RECORDING:
                output = self._capture(graph, run)
        current.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Tensor]) -> Tensor:
        # no other stream is waited for: one of another thread may be recording
        self._stream.synchronize()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = run()
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to report
                graph.capture_end()
            raise
        graph.capture_end()
        return output

    def forget(self) -> None:
        """Give the next graphs a separate memory pool."""
        self._pool = torch.cuda.graph_pool_handle()


class _RefuseWaiting(TorchDispatchMode):
    """RuntimeError for an operation of this thread that waits for the device.

    A recording would fail there too, and leave the allocator in disorder. torch's own check, by
    `set_sync_debug_mode`, would fail the other threads of the process as well.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **kwargs)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host needs values of the device, or the device such of the host, to go on."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    devices = {tensor.device.type for tensor in tensors}
    kind = getattr(func, "overloadpacket", None)
    if kind in _COPIES:
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        return len(devices) > 1 and not kwargs.get("non_blocking", args[2:3] == (True,))
    if devices <= {"cpu"}:
        return False
    if kind in _BY_INDEX:
        # a mask becomes the places where it is true
        return len(devices) > 1 or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
    return not _DATA_DECIDES.isdisjoint(getattr(func, "tags", ()))
