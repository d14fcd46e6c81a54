"""Tools of MCP servers: a program over stdio and a server over HTTP, written with the same package."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from PIL import Image

pytest.importorskip("mcp.server.mcpserver", reason="the extra mcp is not installed")

from endings import gone, wait_until
from hybridflow.config.agent import MultiTurnConfig
from hybridflow.data.pictures import pack_media, read_picture
from hybridflow.errors import ConfigError
from hybridflow.processes.local import LocalHosts
from hybridflow.tools.base import ToolAnswer
from hybridflow.tools.parsers import ToolCall
from hybridflow.tools.toolset import Toolset

PIXEL = pack_media(Image.new("RGB", (2, 2), (220, 30, 30))).partition(",")[2]
"""A picture as base64."""
SERVER = """
import base64, json, os, sys
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")

@server.tool()
def price(item: str, count: int = 1) -> str:
    "Say what something costs."
    if item == "gold":
        raise ToolError("not for sale")
    if item == "bomb":
        os._exit(3)
    return f"{item}: {3 * count}"

@server.tool()
def find(query: str) -> str:
    "Search the shop."
    return json.dumps({"query": query, "results": [{"title": query.upper()}]})

@server.tool()
def look() -> list:
    "Look into the shop."
    return ["a shelf", Image(data=base64.b64decode("PIXEL"), format="png")]

@server.tool()
def process() -> str:
    "Say the number of the process."
    return str(os.getpid())

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
""".replace("PIXEL", PIXEL)
BASE = "hybridflow.tools.mcp_base_tool.MCPBaseTool"


def load(tmp_path: Path, server: dict[str, Any], *, class_name: str = BASE, **mcp: Any) -> Toolset:
    servers = tmp_path / "servers.json"
    servers.write_text(json.dumps({"mcpServers": {"shop": server}}))
    entry = {
        "class_name": class_name,
        "config": {"type": "mcp", "timeout": 60},
        "mcp": {"mcp_servers_config_path": str(servers), **mcp},
    }
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return Toolset.load(
        MultiTurnConfig(tool_config_path=str(path), max_parallel_calls=4, max_tool_response_length=1000)
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("shop") / "server.py"
    path.write_text(SERVER)
    return {"command": sys.executable, "args": [str(path)], "env": {"PYTHONPATH": os.pathsep.join(sys.path)}}


@pytest.fixture(scope="module")
def address(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A server for all tests that do not end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program["command"], *program["args"], str(port)],
        env=os.environ | program["env"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None:
            try:
                httpx.get(f"http://127.0.0.1:{port}/")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield {"url": f"http://127.0.0.1:{port}/mcp"}
    finally:
        process.kill()
        process.wait()


def answers(toolset: Toolset, *calls: ToolCall) -> list[ToolAnswer]:
    async def episode() -> list[ToolAnswer]:
        tools = await toolset.open(LocalHosts())
        try:
            return await tools.call(calls)
        finally:
            await tools.close()

    return asyncio.run(episode())


def check(toolset: Toolset) -> None:
    assert list(toolset.specs) == ["price", "find", "look", "process"]
    function = dict(toolset.specs["price"].schema)["function"]
    assert function["description"] == "Say what something costs."
    assert function["parameters"]["required"] == ["item"]
    found = answers(
        toolset,
        ToolCall("price", '{"item": "egg", "count": 2}'),
        ToolCall("price", '{"item": "gold"}'),
        ToolCall("price", "{}"),
    )
    assert found[0] == ToolAnswer("egg: 6")
    assert found[1].problem == "raised" and "not for sale" in found[1].text
    assert found[2].problem == "malformed"
    (seen,) = answers(toolset, ToolCall("look", "{}"))
    assert seen.text == "a shelf" and read_picture(seen.images[0]).getpixel((0, 0)) == (220, 30, 30)


def test_a_program_over_stdio_serves_all_trajectories_and_comes_back(
    program: dict[str, Any], tmp_path: Path
) -> None:
    toolset = load(tmp_path, program)
    try:
        check(toolset)
        one = answers(toolset, ToolCall("process", "{}"))
        assert answers(toolset, ToolCall("process", "{}")) == one  # another event loop, the same process
        (lost,) = answers(toolset, ToolCall("price", '{"item": "bomb"}'))
        assert lost.problem == "raised"
        (again,) = answers(toolset, ToolCall("process", "{}"))
        assert not again.problem and again != one[0]
    finally:
        toolset.close()
    assert wait_until(lambda: gone(int(again.text)))


def test_a_server_over_http(address: dict[str, Any], tmp_path: Path) -> None:
    toolset = load(tmp_path, address)
    try:
        check(toolset)
    finally:
        toolset.close()


def test_verls_search_tool_takes_selected_tools_and_reads_their_hits(
    address: dict[str, Any], tmp_path: Path
) -> None:
    name = "hybridflow.tools.mcp_search_tool.MCPSearchTool"
    toolset = load(tmp_path, address, class_name=name, tool_selected_list=["find"])
    try:
        assert answers(toolset, ToolCall("find", '{"query": "egg"}')) == [
            ToolAnswer('[{"title": "EGG"}]', 0.0, {"query_count": 1.0, "total_results": 1.0})
        ]
    finally:
        toolset.close()


def test_servers_that_are_wrong_are_errors(address: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="no server has \\['lose'\\]; they have \\['find', 'look', 'price', 'process'\\]"
    ):
        load(tmp_path, address, tool_selected_list=["lose"])
    with pytest.raises(ConfigError, match="'shop' cannot be used"):
        load(tmp_path, {"command": str(tmp_path / "missing")})
    with pytest.raises(ConfigError, match="needs a command, or a url"):
        load(tmp_path, {})
    with pytest.raises(ConfigError, match="wants a subclass of MCPBaseTool"):
        load(tmp_path, address, class_name="hybridflow.tools.search_tool.SearchTool")
