"""Programs of a response, run in the sandbox of this machine or by a SandboxFusion service.

[Program, …] ──LocalRunner or RemoteRunner──► [Verdict, …], in their order
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from hybridflow.config.reward import RewardConfig, SandboxConfig, SandboxFusionConfig
from hybridflow.rewards.apart.programs import Program, together
from hybridflow.sandbox.sandbox import Sandbox
from hybridflow.sandbox.verdict import Limits, Status, Verdict
from hybridflow.tools.http_post import OpenRequests, post

NOT_RUN: Status = "timed_out"
"""Status of programs for which no time was left."""
FAILED = ("lost", "refused")
"""Statuses of programs that the sandbox has failed to run."""
MAX_OUTPUT = 1 << 20
"""Characters of a program's output that are read where a service has run it."""
SHARE_OF_TIMEOUT = 0.7
"""Share of `reward.timeout` that the programs of a response may take; the rest is for all else."""


class ProgramRunner(Protocol):
    """Runs the programs of one response."""

    def prepare(self) -> None:
        """Get ready before the first response. Raises ConfigError where programs cannot run here."""

    def run(self, programs: Sequence[Program]) -> list[Verdict]: ...


class LocalRunner:
    """One sandbox, in which the programs of a response have `budget_s` seconds together.

    Tests that are a separate process run in a second one, which is started when it is first needed.
    """

    def __init__(self, config: SandboxConfig, budget_s: float) -> None:
        self._sandbox = Sandbox(config)
        self._of_tests = Sandbox(config)
        self._budget_s = budget_s

    def prepare(self) -> None:
        """Start the sandbox. Raises ConfigError where layers of it are missing."""
        self._sandbox.layers()

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """Run one after the other; those after one that ran into its time limit are skipped."""
        results: list[Verdict] = []
        deadline = time.monotonic() + self._budget_s
        for program in programs:
            left = deadline - time.monotonic()
            if left <= 0 or (results and results[-1].status == NOT_RUN):
                results.append(Verdict(NOT_RUN))
                continue
            limits = replace(self._sandbox.limits, wall_s=left)  # the keys' limit holds where it is less
            if program.tests:
                results.append(self._run_both(program, limits))
            else:
                results.append(self._sandbox.run(program.code, stdin=program.stdin, limits=limits))
        return results

    def _run_both(self, program: Program, limits: Limits) -> Verdict:
        """Run the solution and the tests side by side, with a socket between them."""
        to_tests, to_solution = socket.socketpair()
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(self._sandbox.run, program.code, limits=limits, channel=to_tests)
            tests = self._of_tests.run(program.tests, stdin=program.stdin, limits=limits, channel=to_solution)
            solution = running.result()
        if solution.status in FAILED:
            return solution
        if tests.status not in FAILED and solution.status != "ok":
            return replace(solution, stdout=tests.stdout)
        return tests


class RemoteRunner:
    """A SandboxFusion service, asked for at most `num_parallel` programs of a response at once.

    A program has `seconds`, and the programs of a response `budget_s` together. Where the service cannot be
    reached or refuses, a program is "lost".
    """

    def __init__(
        self, config: SandboxFusionConfig, seconds: float, budget_s: float, num_parallel: int
    ) -> None:
        assert config.url is not None, "no service is asked for"
        self._url = config.url
        self._seconds = seconds
        self._budget_s = budget_s
        self._memory_limit_mb = config.memory_limit_mb
        self._limit = OpenRequests(num_parallel)

    def prepare(self) -> None:
        """Do nothing: the service is there, or each response says that it is not."""

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """Run them side by side."""
        # a separate thread: the caller may run inside an event loop, where asyncio.run is refused
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._run_all(programs)).result()

    async def _run_all(self, programs: Sequence[Program]) -> list[Verdict]:
        deadline = asyncio.get_running_loop().time() + self._budget_s
        return list(await asyncio.gather(*(self._run(program, deadline) for program in programs)))

    async def _run(self, program: Program, deadline: float) -> Verdict:
        async with self._limit.here():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return Verdict(NOT_RUN)
            # a program is compiled, then run, each within its time
            seconds = min(self._seconds, left / 2)
            request = {
                "code": together() if program.tests else program.code,
                "stdin": program.stdin,
                "language": "python",
                "compile_timeout": seconds,
                "run_timeout": seconds,
                "memory_limit_MB": self._memory_limit_mb,
                "files": {},
                "fetch_files": [],
            }
            try:
                async with asyncio.timeout(left):  # for all tries
                    answer = await post(self._url, request, timeout=2 * seconds)
            except Exception as error:  # of the network, or of an answer that is no JSON
                return Verdict("lost", stderr=f"{self._url}: {type(error).__name__}: {error}")
        return verdict_of(answer)


def build_runner(config: RewardConfig) -> LocalRunner | RemoteRunner:
    """Return the runner of programs that the keys choose, for one of `reward.num_workers` processes."""
    budget_s = SHARE_OF_TIMEOUT * config.timeout
    service = config.sandbox_fusion
    if not service.url:
        return LocalRunner(config.sandbox, budget_s)
    num_parallel = max(1, service.max_concurrent // max(1, config.num_workers))
    return RemoteRunner(service, config.sandbox.timeout, budget_s, num_parallel)


def verdict_of(answer: dict[str, Any]) -> Verdict:
    """Return the verdict on a program in a service's answer."""
    if answer.get("status") == "SandboxError":
        return Verdict("lost", stderr=str(answer.get("message")))
    ended = answer.get("run_result") or answer.get("compile_result") or {}
    output = str(ended.get("stdout") or "")[:MAX_OUTPUT]
    if ended.get("status") == "TimeLimitExceeded":
        return Verdict("timed_out", stdout=output)
    if ended.get("status") == "Finished" and ended.get("return_code") == 0:
        return Verdict("ok", stdout=output)
    return Verdict("raised", stdout=output)
