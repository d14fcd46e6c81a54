"""The model's Python programs, run in the sandbox: `code_interpreter`, the name of verl's and ReTool's tool.

code ──► sandbox, see docs/sandbox.md ──► what the program printed, and how it ended
"""

from __future__ import annotations

import signal
from typing import Any

from hybridflow.config.reward import SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.sandbox.sandbox import SandboxPool
from hybridflow.sandbox.verdict import Verdict
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, schema_with


class PythonTool(BaseTool):
    """Runs `code`, and answers with what it printed, errors included; programs share nothing with each other.

    Optional in its config are `default_timeout` (30 seconds), `memory_limit_mb` (1024), `num_workers` (2
    programs at once) and `give_up`, the layers of the sandbox that may be missing. Raises ConfigError where
    others are missing.
    """

    in_process = True
    default_schema = schema_with(
        "code_interpreter",
        "Runs a Python program and returns what it prints.",
        code={"type": "string", "description": "The program. Print what you want to read."},
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        if "allow_unsafe" in config:
            raise ConfigError(
                "PythonTool: got allow_unsafe, but programs run in a sandbox. Leave it out; where layers of "
                "the sandbox are missing on this machine, name those to do without in give_up"
            )
        timeout = float(config.get("default_timeout", 30))
        self.sandboxes = SandboxPool(
            SandboxConfig(
                timeout=timeout,
                cpu_time=timeout,
                memory_limit_mb=int(config.get("memory_limit_mb", 1024)),
                give_up=list(config.get("give_up", [])),
            ),
            num_workers=int(config.get("num_workers", 2)),
        )
        self.sandboxes.layers()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        verdict = await self.sandboxes.run_async(str(parameters.get("code", "")))
        return ToolResponse(text=_text(verdict)), 0.0, {}

    def close(self) -> None:
        self.sandboxes.close()


ENDS = {
    "timed_out": "the program took longer than its time",
    "cpu_exceeded": "the program took more CPU time than it may",
    "memory_exceeded": "the program used more memory than it may",
    "output_exceeded": "the program printed more than it may",
    "process_exceeded": "the program started more processes than it may",
    "refused": "the program was not run",
    "lost": "the sandbox failed; try again",
}


def _text(verdict: Verdict) -> str:
    """Return the output of a program, and how it ended where it did not exit by itself."""
    printed = verdict.stdout + verdict.stderr
    end = ENDS.get(verdict.status, "")
    if verdict.status == "killed":
        end = "the program was ended"
        if verdict.exit_code is not None:
            end += f" by {signal.Signals(-verdict.exit_code).name}"
    if not end:
        return printed
    return "\n".join(part for part in (printed, f"[{end}]") if part)
