"""Calls that do not depend on each other, run side by side where their roles live on different processes.

jobs ──by processes──► one thread for each set of processes ──► results, in the order of the jobs

Roles that share processes take turns there anyway, so their calls run one after the other in the caller's
thread: with everything colocated, and with the local controller, this is a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybridflow.observability.timing import Timer

T = TypeVar("T")


@dataclass(frozen=True)
class Job(Generic[T]):
    """A call on a role, with the section of the step's timing that it is counted in."""

    role: str
    section: str
    call: Callable[[], T]


class Overlap:
    """A runner of jobs; `together` says whether two roles share processes."""

    def __init__(self, together: Callable[[str, str], bool], timer: Timer) -> None:
        self.together = together
        self.timer = timer

    def __call__(self, jobs: Sequence[Job[T]]) -> list[T]:
        """Return the results in the order of `jobs`.

        Where calls fail, the error of the first of them is raised after the others have ended.
        """
        lanes = self._lanes(jobs)
        results: dict[int, T] = {}
        if len(lanes) <= 1:
            for index, job in enumerate(jobs):
                with self.timer(job.section):
                    results[index] = job.call()
            return list(results.values())
        with ThreadPoolExecutor(len(lanes), thread_name_prefix="overlap") as threads:
            running: list[Future[list[T]]] = [
                threads.submit(self.__call__, [jobs[index] for index in lane]) for lane in lanes
            ]
        for lane, future in zip(lanes, running, strict=True):
            results.update(zip(lane, future.result(), strict=True))
        return [results[index] for index in range(len(jobs))]

    def _lanes(self, jobs: Sequence[Job[T]]) -> list[list[int]]:
        """Return the numbers of jobs that have to take turns, lane by lane, ordered by their first job."""
        lanes: list[list[int]] = []
        for index, job in enumerate(jobs):
            touched = [
                lane for lane in lanes if any(self.together(jobs[other].role, job.role) for other in lane)
            ]
            lanes = [lane for lane in lanes if lane not in touched]
            lanes.append(sorted([index, *(other for lane in touched for other in lane)]))
        return sorted(lanes)
