"""Tools of MCP servers, by the official client, over stdio and HTTP.

tools:
  - class_name: hybridflow.tools.mcp_base_tool.MCPBaseTool
    config: {type: mcp, timeout: 30, rate_limit: 120}
    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}

servers.json: {"mcpServers": {NAME: {"command": …, "args": […], "env": {…}} or {"url": …, "auth_token": …}}}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.mcp_servers import McpServers
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class MCPBaseTool(BaseTool):
    """One tool of a server; a subclass may read its results in another way (`_parse_tool_result`).

    The servers are connected before the run, and serve all its trajectories. `config.timeout` is in seconds
    (30), `config.rate_limit` the most calls that are open at once (120).
    """

    in_process = True
    servers: McpServers

    @classmethod
    def connect(cls, config: dict[str, Any], mcp: dict[str, Any]) -> list[BaseTool]:
        """Connect the servers of `mcp.mcp_servers_config_path`, and return their tools.

        `mcp.tool_selected_list` names the tools that are taken; without it, all are. Raises ConfigError.
        """
        timeout = float(config.get("timeout", 30))
        servers = McpServers(_read_servers(mcp), timeout, int(config.get("rate_limit", 120)))
        try:
            tools: list[BaseTool] = []
            for schema in servers.list_tools(mcp.get("tool_selected_list")):
                tool = cls(config | {"in_process": True}, OpenAIFunctionToolSchema.model_validate(schema))
                tool.servers = servers
                tools.append(tool)
        except BaseException:
            servers.close()
            raise
        return tools

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        content = await self.servers.call(self.name, parameters)
        text, metadata = self._parse_tool_result(content)
        images = [f"data:image;base64,{part.data}" for part in content if part.type == "image"]
        return ToolResponse(text=text, image=images), 0.0, metadata

    def _parse_tool_result(self, content: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """Return what the model reads of a result's parts, and numbers about it."""
        return " ".join(part.text for part in content if part.type == "text"), {}

    def close(self) -> None:
        self.servers.close()


def _read_servers(mcp: dict[str, Any]) -> dict[str, dict[str, Any]]:
    path = mcp.get("mcp_servers_config_path")
    if not path:
        raise ConfigError("mcp_servers_config_path is missing: set it under `mcp`")
    path = Path(path).expanduser()
    try:
        servers = json.loads(path.read_text(encoding="utf-8"))["mcpServers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"mcp_servers_config_path: {path} is no JSON file with mcpServers ({error!r})"
        ) from error
    for name, server in servers.items():
        if not isinstance(server, dict) or ("command" in server) == ("url" in server):
            raise ConfigError(f"{path}: server {name!r} needs a command, or a url")
    return dict(servers)
