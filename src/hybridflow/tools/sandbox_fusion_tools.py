"""verl's code interpreter: programs run by a SandboxFusion service, over its HTTP API."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.http_post import OpenRequests, post
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, schema_with


class SandboxFusionTool(BaseTool):
    """Sends `code` to `sandbox_fusion_url` (which ends in /run_code), and answers with what it printed.

    A call may name its `language` and `timeout`, else `default_language` (python) and `default_timeout` (30
    seconds) hold. A program has `memory_limit_mb` (1024). At most `num_workers` and `rate_limit` programs (10
    each) run at once.
    """

    in_process = True
    default_schema = schema_with(
        "code_interpreter",
        "A tool for executing code.",
        code={"type": "string", "description": "The code to execute."},
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        if not config.get("sandbox_fusion_url"):
            raise ConfigError("SandboxFusionTool: set sandbox_fusion_url in its config")
        self.url: str = config["sandbox_fusion_url"]
        self.timeout = float(config.get("default_timeout", 30))
        self.language: str = config.get("default_language", "python")
        self.memory_limit_mb = int(config.get("memory_limit_mb", 1024))
        self.limit = OpenRequests(min(int(config.get("num_workers", 10)), int(config.get("rate_limit", 10))))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        seconds = float(parameters.get("timeout", self.timeout))
        request = {
            "code": str(parameters.get("code", "")),
            "language": parameters.get("language", self.language),
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": self.memory_limit_mb,
            "stdin": "",
            "files": {},
            "fetch_files": [],
        }
        async with self.limit.here():
            # the service compiles and runs, each within the time, and answers after that
            answer = await post(self.url, request, timeout=2 * seconds + 10)
        return ToolResponse(text=_output(answer)), 0.0, {}


def _output(answer: dict[str, Any]) -> str:
    """Return the output of the program; where it did not finish, the reason."""
    if answer.get("status") == "SandboxError":
        raise RuntimeError(f"the sandbox failed: {answer.get('message')}")
    parts = []
    for stage in ("compile_result", "run_result"):
        result = answer.get(stage) or {}
        printed = (result.get("stdout") or "") + (result.get("stderr") or "")
        if result and result.get("status") != "Finished":
            return f"{printed}[{result.get('status')}]".strip()
        parts.append(printed)
    return "".join(parts)
