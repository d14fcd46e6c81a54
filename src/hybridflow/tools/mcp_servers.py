"""Connections to MCP servers, which stay open for a run.

An event loop in a separate thread holds them, because a connection belongs to one loop, and a run has a loop
for each step. A server that goes away is connected again for the next call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import shutil
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from hybridflow.errors import ConfigError, install_extra
from hybridflow.processes.supervisor import keeper_command

try:
    import httpx2
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client.sse import sse_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import CONNECTION_CLOSED
except ImportError as error:
    raise ConfigError(f"tools of MCP servers need the package mcp 2: {install_extra('mcp')}") from error

T = TypeVar("T")

START_TIMEOUT = 120.0
"""Seconds for a server to start and to answer."""


class Connection:
    """One server; its client lives in one task, as the client wants it."""

    def __init__(self, name: str, server: Mapping[str, Any], timeout: float) -> None:
        self.name = name
        self._server = server
        self._timeout = timeout
        self._client: asyncio.Future[Client] | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def client(self) -> Client:
        """Return the connected client. Raises what connecting raises."""
        if self._task is None or self._task.done():
            self._client = asyncio.get_running_loop().create_future()
            self._stop = asyncio.Event()
            self._task = asyncio.create_task(self._keep(self._client, self._stop))
        assert self._client is not None, "a task has its future"
        try:
            async with asyncio.timeout(START_TIMEOUT):
                return await asyncio.shield(self._client)
        except TimeoutError:
            self._task.cancel()
            raise

    async def _keep(self, connected: asyncio.Future[Client], stop: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                target = await _target(self._server, stack)
                client = Client(target, read_timeout_seconds=self._timeout)
                connected.set_result(await stack.enter_async_context(client))
                await stop.wait()
        except Exception as error:  # a server may fail in any way
            if not connected.done():
                connected.set_exception(error)

    async def end(self) -> None:
        """Leave the server; the next call connects again."""
        self._stop.set()
        if self._task is not None and self._client is not None:
            if not self._client.done():
                self._task.cancel()
            await asyncio.wait([self._task], timeout=START_TIMEOUT)


class McpServers:
    """All servers of a run, by name."""

    def __init__(self, servers: Mapping[str, Mapping[str, Any]], timeout: float, rate_limit: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="MCP servers", daemon=True)
        self._thread.start()
        self._limit = asyncio.Semaphore(rate_limit)
        self._connections = [Connection(name, server, timeout) for name, server in servers.items()]
        self._of_tool: dict[str, Connection] = {}

    def list_tools(self, selected: Sequence[str] | None) -> list[dict[str, Any]]:
        """Return the schemas of all tools, or of those selected, in OpenAI's form.

        Raises ConfigError if a server does not answer, or a name is missing or not unique.
        """
        return self._run(self._list_tools(selected)).result()

    async def call(self, tool: str, arguments: dict[str, Any]) -> Sequence[Any]:
        """Return the parts of a tool's result. Raises RuntimeError with the server's words if it failed."""
        return await asyncio.wrap_future(self._run(self._call(tool, arguments)))

    def close(self) -> None:
        """Leave all servers; those that were started here end."""
        if self._loop.is_running():
            self._run(self._end()).result(2 * START_TIMEOUT)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _list_tools(self, selected: Sequence[str] | None) -> list[dict[str, Any]]:
        schemas = []
        names: list[str] = []
        for connection in self._connections:
            try:
                client = await connection.client()
                page = await client.list_tools()
                tools = list(page.tools)
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
            except Exception as error:  # a server may fail in any way
                raise ConfigError(f"the MCP server {connection.name!r} cannot be used: {error!r}") from error
            names += [tool.name for tool in tools]
            for tool in tools:
                if selected and tool.name not in selected:
                    continue
                if tool.name in self._of_tool:
                    raise ConfigError(
                        f"two MCP servers have a tool {tool.name!r}: {self._of_tool[tool.name].name!r} and "
                        f"{connection.name!r}; name those to take in tool_selected_list"
                    )
                self._of_tool[tool.name] = connection
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                schemas.append({"type": "function", "function": function})
        if missing := sorted(set(selected or ()) - set(names)):
            raise ConfigError(f"tool_selected_list: no server has {missing}; they have {sorted(names)}")
        return schemas

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Sequence[Any]:
        connection = self._of_tool[tool]
        async with self._limit:
            client = await connection.client()
            try:
                result = await client.call_tool(tool, arguments)
            except MCPError as error:
                if error.code == CONNECTION_CLOSED:
                    await connection.end()
                raise
        if result.is_error:
            raise RuntimeError(" ".join(part.text for part in result.content if part.type == "text"))
        content: Sequence[Any] = result.content
        return content

    async def _end(self) -> None:
        await asyncio.gather(*(connection.end() for connection in self._connections))


async def _target(server: Mapping[str, Any], stack: AsyncExitStack) -> Any:
    """Return the target of the client: a program, or an address by either of the protocols over HTTP."""
    if "command" in server:
        program = StdioServerParameters.model_validate(server)
        if shutil.which(program.command, path=(program.env or {}).get("PATH")) is None:
            raise FileNotFoundError(f"there is no program {program.command!r}")
        python, *words = keeper_command([program.command, *program.args])
        return program.model_copy(update={"command": python, "args": words})
    headers = dict(server.get("headers") or {})
    if "auth_token" in server:
        headers["Authorization"] = f"Bearer {server['auth_token']}"
    if server.get("transport") == "sse" or server["url"].rstrip("/").endswith("/sse"):
        return sse_client(server["url"], headers=headers)
    # an answer may take long: the deadline of its call ends it
    http_client = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30.0, read=None))
    await stack.enter_async_context(http_client)
    return streamable_http_client(server["url"], http_client=http_client)
