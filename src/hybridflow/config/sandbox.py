"""`reward.sandbox.*`: what programs of the model may use, and which layers of protection may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.schema import key


@dataclass(frozen=True)
class SandboxConfig:
    """The local sandbox for code from the model, see docs/sandbox.md."""

    timeout: float = key(10.0, "Seconds a program may take.", above=0)
    cpu_time: float = key(10.0, "Seconds of CPU time that a program and its processes may take.", above=0)
    memory_limit_mb: int = key(
        1024, "MiB of memory that a program and its processes may have in use.", minimum=32
    )
    address_space_mb: int = key(
        4096, "MiB of addresses that one process may reserve, used or not (RLIMIT_AS).", minimum=64
    )
    max_processes: int = key(64, "Processes and threads of a program at the same time.", minimum=1)
    max_output_kb: int = key(
        1024, "KiB that a program may print, and as many of errors; more stops it.", minimum=1
    )
    scratch_mb: int = key(64, "MiB of files in a program's scratch folder.", minimum=1)
    give_up: list[Literal["private_root", "namespaces", "other_uid", "seccomp"]] = key(
        [],
        "Layers of protection without which programs may run where this machine does not have them; "
        "`hybridflow doctor` lists what each is for.",
    )
