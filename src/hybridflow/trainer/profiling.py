"""Profiles of single steps over all processes (`global_profiler`), as one trace that Chrome and Perfetto
open.

    step N ─► every process records ─► the step ─► spans of the driver and of every rank ─► step_N.json
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hybridflow.config.root import SECOND, ProfilerConfig
from hybridflow.controller.worker import Worker
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.errors import ConfigError
from hybridflow.observability.profiling import ProfiledSpan, ProfileSettings, profiler

logger = logging.getLogger(__name__)

DRIVER = "driver"


class StepProfiler:
    """Gives each step the context in which it is recorded, or not; ConfigError where traces have no place."""

    def __init__(self, config: ProfilerConfig, groups: Sequence[WorkerGroup[Any]], run_folder: Path) -> None:
        self._config = config
        self._groups = groups
        self._folder = run_folder / "profile"
        if config.save_path is not None:
            self._folder = Path(config.save_path)
        if config.tool is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"global_profiler.save_path={config.save_path}: the folder {self._folder} cannot be made "
                    f"({error.strerror or error}): set one that can"
                ) from error
        if config.tool not in (None, "phases"):
            for group, rank in self._recording():  # said now, and not when the step comes
                group.call_one(rank, Worker.check_profile, config.tool).result()

    def __call__(self, step: int) -> AbstractContextManager[None]:
        """Return the context of a step."""
        if self._config.tool is None or step not in (self._config.steps or SECOND):
            return nullcontext()
        return self._recorded(step)

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        self._start(step)
        profiler.start(None)
        try:
            yield
        except BaseException:  # workers that have failed are asked nothing more
            self._write(step, {DRIVER: profiler.stop()})
            raise
        own = profiler.stop()  # before the workers: one of them may be in this process
        # a process is called after its first role; its others have no spans
        futures = {
            f"{group.role} {rank}": group.call_one(rank, Worker.profiled)
            for group in self._groups
            for rank in range(group.world_size)
        }
        found = {name: future.result() for name, future in futures.items()}
        self._write(step, {DRIVER: own} | {name: spans for name, spans in found.items() if spans})

    def _write(self, step: int, spans: Mapping[str, Sequence[ProfiledSpan]]) -> None:
        file = self._folder / f"step_{step}.json"
        file.write_text(json.dumps(trace_of(spans)), encoding="utf-8")
        logger.info("profile of step %d: %s, for chrome://tracing or ui.perfetto.dev", step, file)

    def _recording(self) -> Iterator[tuple[WorkerGroup[Any], int]]:
        for group in self._groups:
            for rank in range(group.world_size):
                if rank in (self._config.ranks or (0,)):
                    yield group, rank

    def _start(self, step: int) -> None:
        config = self._config
        assert config.tool is not None, "only a step with a tool is recorded"
        futures = []
        for group in self._groups:
            for rank in range(group.world_size):
                settings = None
                if config.tool != "phases" and rank in (config.ranks or (0,)):
                    settings = ProfileSettings(config.tool, self._folder, f"step_{step}.{group.role}.{rank}")
                futures.append(group.call_one(rank, Worker.profile, settings))
        for future in futures:
            future.result()


def trace_of(spans: Mapping[str, Sequence[ProfiledSpan]]) -> dict[str, Any]:
    """Return Chrome's trace of spans by process: a lane for each thread, times in microseconds from the
    first span."""
    begin = min((span.start for each in spans.values() for span in each), default=0.0)
    events: list[dict[str, Any]] = []
    for number, (process, own) in enumerate(spans.items()):
        threads = {name: lane for lane, name in enumerate(dict.fromkeys(span.thread for span in own))}
        events.append(_named("process_name", number, 0, process))
        events += [_named("thread_name", number, lane, name) for name, lane in threads.items()]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": number,
                "tid": threads[span.thread],
                "ts": (span.start - begin) * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
            for span in own
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
