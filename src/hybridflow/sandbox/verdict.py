"""The limits of a program in the sandbox, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal[
    "ok",
    "raised",
    "timed_out",
    "cpu_exceeded",
    "memory_exceeded",
    "output_exceeded",
    "process_exceeded",
    "killed",
    "refused",
    "lost",
]


@dataclass(frozen=True)
class Limits:
    """What one execution may use, all of its processes together where nothing else is said."""

    wall_s: float = 10.0
    """Seconds from the start of the program to its end."""
    cpu_s: float = 10.0
    """Seconds of CPU time."""
    memory_mb: int = 1024
    """MiB of memory that is in use."""
    address_space_mb: int = 4096
    """MiB of addresses of one process (RLIMIT_AS): what it may reserve, used or not."""
    processes: int = 64
    """Processes and threads at the same time."""
    output_kb: int = 1024
    """KiB of standard output, and as many of standard error."""
    scratch_mb: int = 64
    """MiB of files in the scratch folder, which is the working folder, HOME and /tmp."""


@dataclass(frozen=True)
class Verdict:
    """How one execution ended. Everything in it, but the status, may be made up by the program.

    `status` is one of

    - `ok`: exit code 0; `raised`: another exit code, an uncaught exception among them;
    - `timed_out`, `cpu_exceeded`, `memory_exceeded`, `output_exceeded`, `process_exceeded`: it was stopped at
      a limit, or ended because of it;
    - `killed`: a signal ended it, such as a segmentation fault;
    - `refused`: it was not started, and `stderr` says why;
    - `lost`: the sandbox itself failed, and `stderr` says how; another try may go well.
    """

    status: Status
    exit_code: int | None = None
    """Exit code, minus the number of the signal that ended it, or None where the program was stopped."""
    stdout: str = ""
    stderr: str = ""
    cut: bool = False
    """True if the program wrote more than `output_kb`: `stdout` and `stderr` are the beginning."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0
    """The most memory seen at once, sampled: short peaks of several processes may be missed."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself, with exit code 0."""
        return self.status == "ok"
