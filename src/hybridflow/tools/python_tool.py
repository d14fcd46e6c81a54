"""The model's Python programs, run on this machine: `code_interpreter`, the name of verl's and ReTool's tool.

code ──► a fresh interpreter in an empty folder, with limits ──► what it printed, and how it ended

It is no sandbox. A program has the rights of the user who started the run: it can read and write that
user's files, use the network, start processes that outlive it (until its worker ends), and fill the disk. It
can also reach into its worker, whose answers the driver unpickles, and so run code in the driver. It is kept
from: going on after its time, using more memory, printing without end, and reading the run's environment
variables through its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, schema_with

logger = logging.getLogger(__name__)

MAX_OUTPUT = 1 << 20
"""Bytes that are read of what a program has printed."""
MAX_FILE = 64 << 20
"""Bytes of a file that a program writes."""

# in an interpreter of its own, which is safe beside threads as code between fork and exec is not
_LIMIT = """
import os, resource, sys
seconds, memory, file = map(int, sys.argv[1:4])
for kind, limit in [("CPU", seconds), ("AS", memory), ("FSIZE", file), ("CORE", 0), ("NOFILE", 256)]:
    kind = getattr(resource, f"RLIMIT_{kind}")
    most = resource.getrlimit(kind)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (limit, limit))
os.execv(sys.executable, [sys.executable, "-I", "-u", "program.py"])
"""


class PythonTool(BaseTool):
    """Runs `code`, and answers with what it printed, errors included; programs share nothing with each other.

    Its config needs `allow_unsafe: true`, because a program can do what the user can, and change what its
    worker sends, which the driver unpickles (see above). Optional
    are `default_timeout` (30 seconds) and `memory_limit_mb` (1024).
    """

    default_schema = schema_with(
        "code_interpreter",
        "Runs a Python program and returns what it prints.",
        code={"type": "string", "description": "The program. Print what you want to read."},
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        if config.get("allow_unsafe") is not True:
            raise ConfigError(
                f"PythonTool: got allow_unsafe={config.get('allow_unsafe')!r}; it runs the model's programs "
                "with your rights on this machine, your files and its network included. Set allow_unsafe: "
                "true in its config where that does no harm (in a container of its own), or take "
                "SandboxFusionTool"
            )
        self.timeout = float(config.get("default_timeout", 30))
        self.memory_limit_mb = int(config.get("memory_limit_mb", 1024))
        _warn(self.name)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        text = await asyncio.to_thread(self.run, str(parameters.get("code", "")))
        return ToolResponse(text=text), 0.0, {}

    def run(self, code: str) -> str:
        """Run a program; return what it has printed, and how it ended where it did not do so by itself."""
        limits = [int(self.timeout) + 1, self.memory_limit_mb << 20, MAX_FILE]
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
            Path(folder, "program.py").write_text(code, encoding="utf-8", errors="replace")
            program = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LIMIT, *map(str, limits)],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            end = ""
            try:
                code_of_end = program.wait(self.timeout)
                if code_of_end < 0:
                    end = f"[the program was ended by {signal.Signals(-code_of_end).name}]"
            except subprocess.TimeoutExpired:
                end = f"[the program took longer than {self.timeout:g} seconds]"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                program.wait()
            output.seek(0)
            printed = output.read(MAX_OUTPUT).decode("utf-8", errors="replace")
        if end and printed:
            end = "\n" + end
        return printed + end


@functools.cache
def _warn(name: str) -> None:
    logger.warning(
        "the tool %s runs the model's programs with the rights of this user: nothing keeps them from its "
        "files and from the network",
        name,
    )
