"""What only some kinds of device can do, behind one interface: recorded steps, shared memory, profilers.

    features("cuda").facilities = "hybridflow.distributed.cuda:CudaFacilities"
    facilities("cuda") ──► CudaFacilities() ──► recorder(device), share_memory(buffer), process_group(…), …

Memory, streams, events and the current device are asked of `torch.get_device_module(device)`, which has the
same functions for all kinds. Nothing outside of a class of this interface names a kind of device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from hybridflow.distributed.accelerators import features
from hybridflow.errors import ConfigError

if TYPE_CHECKING:  # a class of facilities brings torch where it needs it
    import torch
    from torch import Tensor


class Recorder(Protocol):
    """Recorder of functions that work only on the device, on tensors that stay where they are."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run `run`, perhaps often; return a function that fills and returns the same tensor again."""
        ...

    def forget(self) -> None:
        """Free the recorded functions, which are not replayed any longer."""
        ...


class Facilities:
    """The facilities of one kind of device; this base has none of them, as a CPU has none.

    A method that the device's row promises raises NotImplementedError where a class leaves it out. Those that
    may be asked of any device answer with None or an empty list instead.
    """

    def recorder(self, device: torch.device) -> Recorder:
        """Return a recorder of steps on `device`; the row promises it by `records_steps`."""
        self._lacks("records no steps", "records_steps")

    def share_memory(self, buffer: Tensor) -> dict[str, Any]:
        """Return facts, as JSON, by which another process of this machine opens `buffer`, [size] uint8.

        The buffer is kept until the other process has let go of it; the row promises it by `shares_memory`.
        """
        self._lacks("shares no memory between processes", "shares_memory")

    def open_memory(self, facts: dict[str, Any]) -> Tensor:
        """Return the buffer of another process, [size] uint8, for the facts of its `share_memory`.

        Raises RolloutError where this process does not see that device.
        """
        self._lacks("shares no memory between processes", "shares_memory")

    def process_group(self, store: Any, rank: int, world: int, timeout: float) -> Any:
        """Return a group of `world` processes that broadcasts tensors on the device, or None.

        `store` is a store of torch.distributed; each collective waits at most `timeout` seconds. With None
        the bytes go through main memory, by gloo.
        """
        return None

    def start_memory_history(self, max_entries: int) -> None:
        """Start to record the last `max_entries` allocations; the row promises `torch_memory`."""
        self._lacks("records no history of its memory", "profilers")

    def write_memory_history(self, path: str) -> None:
        """Write the recording to a file, and end it."""
        self._lacks("records no history of its memory", "profilers")

    def start_capture_range(self) -> None:
        """Open the range that the device's own profiler captures; the row promises `nsys`."""
        self._lacks("opens no range for a profiler", "profilers")

    def stop_capture_range(self) -> None:
        """Close that range."""
        self._lacks("opens no range for a profiler", "profilers")

    def card_name(self) -> str | None:
        """Return the product name of the current device, as its data sheet has it, or None."""
        return None

    def cards(self) -> list[dict[str, Any]]:
        """Return `name`, `bytes` of memory and, as `major`, the generation of each device that torch sees.

        `major` is the first part of CUDA's compute capability, and None for other kinds.
        """
        return []

    def _lacks(self, what: str, promise: str) -> NoReturn:
        raise NotImplementedError(
            f"this kind of device {what} ({type(self).__name__}), so its row must not set {promise}"
        )


@cache
def facilities(device_type: str) -> Facilities:
    """Return the facilities of a kind of device; ConfigError where its row names no such class."""
    row = features(device_type)
    module, _, name = row.facilities.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the row of {row.device} in the table of accelerators says facilities={row.facilities!r}, which "
            f"cannot be imported ({error}): write module:Class"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Facilities)):
        raise ConfigError(
            f"the row of {row.device} in the table of accelerators says facilities={row.facilities!r}, which "
            "is no subclass of hybridflow.distributed.facilities.Facilities"
        )
    return found()
