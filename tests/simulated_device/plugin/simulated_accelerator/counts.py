"""What the device was asked to do: launches, waits of the host and bytes copied, by phase and line.

They are figures without a clock, the same on each machine.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

OWN = "/hybridflow/"
MOST_FRAMES = 3


class DeviceFault(RuntimeError):
    """Something that a real accelerator would do silently wrong, or refuse."""


@dataclass
class Counts:
    """Figures of a phase, or of the whole process."""

    entered: int = 0
    """How often the phase was entered."""
    launches: Counter[str] = field(default_factory=Counter)
    """Number of kernels by operator."""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often the host waited for the device, by reason and place."""
    to_device: int = 0
    """Bytes copied from the host."""
    to_host: int = 0
    """Bytes copied to the host."""
    peak: int = 0
    """Most bytes of device memory at a time."""

    @property
    def num_launches(self) -> int:
        """Number of kernels."""
        return sum(self.launches.values())

    @property
    def num_waits(self) -> int:
        """Number of waits of the host."""
        return sum(self.waits.values())


total = Counts()
"""Figures of this process."""
phases: dict[str, Counts] = {}
"""Figures of each phase that was entered, those of phases within it included."""
faults: list[str] = []
"""Faults that were found where nothing can be raised, such as in a destructor."""

_open: list[str] = []
_lock = threading.RLock()


def place(most: int = MOST_FRAMES) -> str:
    """Return the innermost lines of the product that led here, the innermost first."""
    frame = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < most:
        name = frame.f_code.co_filename
        if OWN in name:
            found.append(f"{name.rsplit(OWN, 1)[1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or f"no line of ours, in the thread {threading.current_thread().name}"


def _running() -> Iterator[Counts]:
    yield total
    yield from (phases[name] for name in _open)


def launched(name: str) -> None:
    """Count a kernel."""
    with _lock:
        for each in _running():
            each.launches[name] += 1


def waited(reason: str) -> None:
    """Count a wait of the host for the device."""
    where = place()
    with _lock:
        for each in _running():
            each.waits[(reason, where)] += 1


def copied(num_bytes: int, *, to_host: bool) -> None:
    """Count the bytes of a copy between host and device."""
    with _lock:
        for each in _running():
            if to_host:
                each.to_host += num_bytes
            else:
                each.to_device += num_bytes


def used(num_bytes: int) -> None:
    """Note that so many bytes of device memory are taken now."""
    with _lock:
        for each in _running():
            each.peak = max(each.peak, num_bytes)


def fault(problem: str) -> DeviceFault:
    """Return the error for a fault, with its place; it is kept too, for where an error is swallowed."""
    told = f"{problem}, at {place()}"
    faults.append(told)
    return DeviceFault(told)


@contextmanager
def phase(name: str) -> Iterator[Counts]:
    """Count what happens in this context, in any thread, under `name` too."""
    from simulated_accelerator import memory

    found = phases.setdefault(name, Counts())
    if name in _open:  # it was entered within itself
        yield found
        return
    with _lock:
        found.entered += 1
        _open.append(name)
        found.peak = max(found.peak, memory.taken())
    try:
        yield found
    finally:
        with _lock:
            _open.remove(name)


def forget() -> None:
    """Begin to count anew."""
    with _lock:
        total.__init__()  # type: ignore[misc]
        total.peak = 0
        phases.clear()
        faults.clear()


def report(most: int = 40) -> str:
    """Return the figures as lines of text: waits by place, faults, phases."""
    lines = [
        f"{total.num_launches} launches, {total.num_waits} waits, {total.to_device} bytes to the device, "
        f"{total.to_host} to the host, peak {total.peak} bytes"
    ]
    lines += [f"  waited {n:6d} {why:30s} {where}" for (why, where), n in total.waits.most_common(most)]
    lines += [f"  fault {each}" for each in faults[:most]]
    for name, each in phases.items():
        lines.append(
            f"  {name}: entered {each.entered}, {each.num_waits} waits, {each.num_launches} launches"
        )
        lines += [f"      waited {n:5d} {why:26s} {where}" for (why, where), n in each.waits.most_common(12)]
    return "\n".join(lines)
