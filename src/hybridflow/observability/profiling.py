"""Profiles one process during a step: spans of calls, and the tools of torch.

    start(settings) ─► span("actor.update_mini_batch"), span("gen"), … ─► stop() ─► spans, for the driver's
    trace
                  └──► torch's profiler or memory history ─► a file of this process

There is one `profiler` in a process, as there is one clock. A span costs nothing where nothing is recorded.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.root import DEVICE_TOOLS, ProfilerTool
from hybridflow.distributed.accelerators import features
from hybridflow.distributed.facilities import Facilities, facilities
from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_ALLOCATIONS = 100_000
"""Allocations that a memory history remembers."""


@dataclass(frozen=True)
class ProfiledSpan:
    """Something that a thread has done, in seconds since the epoch, so that machines' spans can be laid
    beside each other as far as their clocks agree.
    """

    name: str
    start: float
    end: float
    thread: str


@dataclass(frozen=True)
class ProfileSettings:
    """The tool by which a process records, and the place of its own files."""

    tool: ProfilerTool
    folder: Path
    name: str
    """Name of this process's files."""


def check_tool(tool: ProfilerTool) -> None:
    """Raise ConfigError where this process has not what a tool records, or records with."""
    import torch  # not before it is needed: timings are read where there is no torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if tool in DEVICE_TOOLS and (device is None or tool not in features(device.type).profilers):
        raise ConfigError(
            f"global_profiler.tool={tool} records CUDA, and this process has no such device: take torch or "
            "phases"
        )
    is_under_nsys = any(name.startswith("NSYS_") for name in os.environ)
    if tool == "nsys" and not is_under_nsys and shutil.which("nsys") is None:
        raise ConfigError(
            "global_profiler.tool=nsys opens the range that Nsight Systems captures, and there is no nsys "
            "here: start the run by `nsys profile --capture-range=cudaProfilerApi`, or take torch or phases"
        )


def _device_facilities() -> Facilities:
    """Return the facilities of this process's accelerator, which it has once `check_tool` has passed."""
    import torch

    device = torch.accelerator.current_accelerator()
    assert device is not None, "check_tool lets no process without an accelerator record one"
    return facilities(device.type)


class Profiler:
    """Records what this process does between `start` and `stop`, which one thread calls."""

    def __init__(self) -> None:
        self.active = False
        self._spans: list[ProfiledSpan] = []
        self._lock = threading.Lock()
        self._settings: ProfileSettings | None = None
        self._torch: Any = None

    def start(self, settings: ProfileSettings | None) -> None:
        """Begin to record spans and, with settings, what their tool records. Does nothing where it does
        already: several roles may share a process.
        """
        if self.active:
            return
        if settings is not None:
            check_tool(settings.tool)
        self.active = True
        self._settings = settings
        if settings is None:
            return
        settings.folder.mkdir(parents=True, exist_ok=True)
        if settings.tool == "torch":
            import torch

            # the engine that generates is stepped in its own thread
            every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self._torch = torch.profiler.profile(
                record_shapes=False, with_stack=False, experimental_config=every_thread
            )
            self._torch.start()
        elif settings.tool == "torch_memory":
            _device_facilities().start_memory_history(MOST_ALLOCATIONS)
        elif settings.tool == "nsys":
            _device_facilities().start_capture_range()

    def stop(self) -> list[ProfiledSpan]:
        """End the recording, write this process's own files, and return the spans; none where it was off."""
        if not self.active:
            return []
        self.active = False
        self._write()
        with self._lock:
            spans = self._spans
            self._spans = []
        return spans

    def _write(self) -> None:
        settings = self._settings
        if settings is None:
            return
        if settings.tool == "torch":
            self._torch.stop()
            self._torch.export_chrome_trace(str(settings.folder / f"{settings.name}.torch.json"))
            self._torch = None
        elif settings.tool == "torch_memory":
            history = settings.folder / f"{settings.name}.memory.pickle"
            _device_facilities().write_memory_history(str(history))
        elif settings.tool == "nsys":
            _device_facilities().stop_capture_range()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what happens in this context, if anything is recorded."""
        if not self.active:
            yield
            return
        import torch

        start = time.time()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            span = ProfiledSpan(name, start, time.time(), threading.current_thread().name)
            with self._lock:
                self._spans.append(span)


profiler = Profiler()
"""What this process records."""
