"""Order on the device: streams, events, and copies that are on their way.

Kernels run at once, in the order in which the host asks for them. What a GPU would run later or beside each
other is held by clocks instead: each stream knows up to where of every other stream it has waited, and so
does the host. A kernel that reads what another stream writes, without a wait between, is a fault; so is one
that writes what another stream still reads. A copy to pinned memory leaves poison there until the host has
waited for it, and a copy from pinned memory whose source has changed before the host could know that it is
done is a fault.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simulated_accelerator import counts

if TYPE_CHECKING:
    from simulated_accelerator.memory import Block

Clock = dict[int, int]
"""By stream, the number of its work up to which somebody has waited."""

_numbers = itertools.count()
_lock = threading.RLock()
host: Clock = {}
"""What the host has waited for."""
_streams: list[Stream] = []


@dataclass
class Copy:
    """A copy between the host and the device that the host has not waited for."""

    stream: int
    number: int
    """Its place in the work of the stream."""
    on_host: Tensor
    value: Tensor
    """What is to arrive on the host, or what the source was when the copy was asked for."""
    to_host: bool
    where: str


_copies: list[Copy] = []


def merge(clock: Clock, other: Clock) -> None:
    """Take over all that `other` has waited for."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


class Event:
    """A place in the work of a stream, which a stream or the host can wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Note how far the stream has been given work."""
        self._clock = (stream or current()).known()

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of the stream wait for the event."""
        merge((stream or current()).clock, self._clock)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        refuse_in_recording("event.synchronize")
        counts.waited("event")
        arrive(self._clock)

    def query(self) -> bool:
        """Say that the event has happened: simulated work is done at once."""
        arrive(self._clock)
        return True

    def elapsed_time(self, other: Event) -> float:
        """There is no clock on the device."""
        return 0.0


class Stream:
    """A queue of work of the device. Each thread has one that is current."""

    def __init__(self, device: Any = None, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("sim", 0)
        self.stream_id = next(_numbers)
        self.clock: Clock = {}
        self.number = 0
        self.given_back: list[tuple[int, Clock, str]] = []
        """Memory of its pool that others may still use: bytes, by whom it is used, where it was made."""
        _streams.append(self)

    def known(self) -> Clock:
        """Return the clock of one that has waited for all work so far."""
        return {**self.clock, self.stream_id: self.number}

    def wait_event(self, event: Event) -> None:
        """Let later work wait for an event."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Let later work wait for what the other stream was given so far."""
        merge(self.clock, other.known())

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event at this place."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all work of the stream."""
        refuse_in_recording("stream.synchronize")
        counts.waited("stream")
        arrive(self.known())

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    def __enter__(self) -> Stream:
        _local.before = [*getattr(_local, "before", []), current()]  # it may be entered within itself
        _local.stream = self
        return self

    def __exit__(self, *exception: object) -> None:
        _local.stream = _local.before.pop()


_local = threading.local()
default = Stream()


def current() -> Stream:
    """Return the stream that this thread gives work to."""
    return getattr(_local, "stream", default)


def tape() -> Any:
    """Return the tape that this thread records its work on, or None."""
    return getattr(_local, "tape", None)


def record_on(tape: Any) -> None:
    """Record this thread's work on a tape; None ends it."""
    _local.tape = tape


def refuse_in_recording(what: str) -> None:
    """Raise where a step is being recorded: a graph cannot hold a wait of the host."""
    if tape() is not None:
        raise RuntimeError(f"{what}: operation not permitted when a stream is capturing")


def wait(reason: str) -> None:
    """Let the host wait for the current stream, as a blocking copy or a read of a number does."""
    refuse_in_recording(reason)
    counts.waited(reason)
    arrive(current().known())


def wait_for_all(device: Any = None) -> None:
    """Let the host wait for all streams."""
    refuse_in_recording("device.synchronize")
    counts.waited("device")
    for stream in _streams:
        arrive(stream.known())


def arrive(clock: Clock) -> None:
    """Let the host know all work of a clock to be done: its copies are there now."""
    with _lock:
        merge(host, clock)
        late = []
        for copy in _copies:
            if host.get(copy.stream, 0) < copy.number:
                late.append(copy)
            elif copy.to_host:
                copy.on_host.copy_(copy.value)
        done = [copy for copy in _copies if not copy.to_host and copy not in _Same(late)]
        _copies[:] = late
    for copy in done:
        if not _same(copy.on_host, copy.value):
            problem = "pinned memory was changed while a copy of it to the device was on its way"
            counts.faults.append(f"{problem}, asked for at {copy.where}")
            raise counts.DeviceFault(f"{problem}, asked for at {copy.where}")


class _Same(list[Copy]):
    """A list that is searched by identity: a copy holds tensors, which do not compare to a bool."""

    def __contains__(self, copy: object) -> bool:
        return any(each is copy for each in self)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.reshape(-1).view(torch.uint8).equal(right.reshape(-1).view(torch.uint8))


def send(on_host: Tensor, value: Tensor, *, to_host: bool) -> None:
    """Note a copy that the current stream was given and the host does not wait for."""
    with _lock:
        stream = current()
        if to_host:
            _end_copies_from(on_host, stream)
        _copies.append(Copy(stream.stream_id, stream.number, on_host, value, to_host, counts.place()))


def _end_copies_from(on_host: Tensor, stream: Stream) -> None:
    """Check and forget earlier copies from memory that the stream writes next: they are done by then."""
    known = stream.known()
    for copy in _of_memory(on_host, to_host=False):
        if known.get(copy.stream, 0) < copy.number:
            raise counts.fault(
                f"a copy to host memory that another stream still reads, asked for at {copy.where}"
            )
        if not _of_memory(on_host, to_host=True) and not _same(copy.on_host, copy.value):
            raise counts.fault(
                f"pinned memory was changed while a copy of it was on its way, asked for at {copy.where}"
            )
        _copies[:] = [each for each in _copies if each is not copy]


def as_copied_now(on_host: Tensor) -> Tensor:
    """Return host memory as the next copy of the current stream finds it, with what arrives before it."""
    with _lock:
        coming = _of_memory(on_host, to_host=True)
        known = current().known()
        for copy in coming:
            if known.get(copy.stream, 0) < copy.number:
                raise counts.fault(
                    f"host memory is read before the copy to it has arrived, asked for at {copy.where}"
                )
        if not coming:
            return on_host
        whole = torch.empty(0, dtype=torch.uint8).set_(on_host.untyped_storage()).clone().untyped_storage()
        for copy in coming:
            _at(copy.on_host, whole).copy_(copy.value)
        return _at(on_host, whole)


def _at(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor at the same place in another storage."""
    with torch.no_grad():
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype).set_(storage, *place)


def _of_memory(on_host: Tensor, *, to_host: bool) -> list[Copy]:
    first = on_host.untyped_storage().data_ptr()
    return [
        copy
        for copy in _copies
        if copy.to_host == to_host and copy.on_host.untyped_storage().data_ptr() == first
    ]


def on_the_way(tensor: Tensor) -> str | None:
    """Return where a copy to this host memory was asked for, if the host has not waited for it."""
    first = tensor.untyped_storage().data_ptr()
    with _lock:
        for copy in _copies:
            if copy.to_host and copy.on_host.untyped_storage().data_ptr() == first:
                return copy.where
    return None


def work(name: str, read: Iterable[Block], written: Iterable[Block]) -> None:
    """Give the current stream a kernel; raise DeviceFault where it races with another stream's."""
    stream = current()
    stream.number += 1
    if len(_streams) == 1:
        return
    with _lock:
        merge(stream.clock, host)
        for block in read:
            _ordered(name, "reads", block.writer, stream)
            block.readers[stream.stream_id] = stream.number
        for block in written:
            _ordered(name, "writes", block.writer, stream)
            for reader, number in block.readers.items():
                _ordered(name, "writes", (reader, number, "a kernel that reads it"), stream)
            block.writer = (stream.stream_id, stream.number, f"{name} at {counts.place(1)}")
            block.readers = {}


def _ordered(name: str, does: str, earlier: tuple[int, int, str] | None, stream: Stream) -> None:
    if earlier is None or earlier[0] == stream.stream_id:
        return
    if stream.clock.get(earlier[0], 0) < earlier[1]:
        raise counts.fault(
            f"{name} {does} memory on a stream that has not waited for another stream's {earlier[2]}"
        )


def give_back(block: Block) -> None:
    """Note memory that goes back to its stream's pool while another stream may still use it."""
    if len(_streams) == 1:
        return
    own = next((each for each in _streams if each.stream_id == block.stream), None)
    if own is None:
        return
    used = dict(block.readers)
    if block.writer is not None:
        used[block.writer[0]] = max(used.get(block.writer[0], 0), block.writer[1])
    for stream in (block.stream, *block.noted):
        used.pop(stream, None)
    if _missing(used, own):
        own.given_back.append((block.size, used, block.where))


def check_pool(size: int) -> None:
    """Raise DeviceFault where new memory may be such that another stream still uses."""
    stream = current()
    if not stream.given_back:
        return
    with _lock:
        merge(stream.clock, host)
        stream.given_back = [each for each in stream.given_back if _missing(each[1], stream)]
        again = next((each for each in stream.given_back if each[0] >= size), None)
        if again is not None:
            stream.given_back.remove(again)
            raise counts.fault(
                f"memory made at {again[2]} was given back, and is taken again while another stream may "
                "still use it: record_stream was not called"
            )


def _missing(used: Clock, stream: Stream) -> bool:
    """Return whether neither a stream nor the host has waited for all that `used` names."""
    return any(max(stream.clock.get(key, 0), host.get(key, 0)) < number for key, number in used.items())
