"""verl's documented files of tools, interactions and agent loops, unchanged but for the module's name and the
addresses of services: each is trained on for a step. Services are small local ones.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_trainer import build, ppo_config

from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.tools.parsers import TOOL_PARSERS, ToolCall
from hybridflow.tools.parsers.base import CallParser

TOOLS = {
    "gsm8k_tool_config.yaml": """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k. (1.0 if correct, 0.0 if incorrect)"
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem, must be a digits"
          required: ["answer"]
""",
    "search_tool_config.yaml": """
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config:
      retrieval_service_url: http://127.0.0.1:8000/retrieve
      num_workers: 120
      rate_limit: 120
      timeout: 30
      type: native
    tool_schema:
      type: function
      function:
        name: search
        description: Searches the web for relevant information based on the given query.
        parameters:
          type: object
          properties:
            query_list:
              type: array
              item:
                type: string
              description: A list of fully-formed semantic queries.
          required:
            - query_list
""",
    "sandbox_fusion_tool_config.yaml": """
tools:
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config:
      sandbox_fusion_url: "http://127.0.0.1:8000/run_code"
      num_workers: 10
      enable_global_rate_limit: true
      rate_limit: 10
      default_timeout: 30
      default_language: "python"
      memory_limit_mb: 1024
      type: native
    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
          required: ["code"]
""",
    "mcp_tool_config.yaml": """
tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config:
      rate_limit: 120
      timeout: 120
      type: mcp
    mcp:
      mcp_servers_config_path: ./mcp_server.json
      # optional
      tool_selected_list:
        - tavily_search_tool
""",
}
CALLS = {
    "gsm8k_tool_config.yaml": ("calc_gsm8k_reward", {"answer": "2"}),
    "search_tool_config.yaml": ("search", {"query_list": ["Rome", "Ur"]}),
    "sandbox_fusion_tool_config.yaml": ("code_interpreter", {"code": "print(3)"}),
    "mcp_tool_config.yaml": ("tavily_search_tool", {"query": "Rome"}),
}
INTERACTION = """
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""
MCP_SERVER = """
import json
from mcp.server.mcpserver import MCPServer

server = MCPServer("tavily")

@server.tool()
def tavily_search_tool(query: str) -> str:
    "Search."
    return json.dumps({"query": query, "results": [{"title": query}]})

server.run()
"""
LOOPS = '''
"""A loop as verl's guide shows, with the answer of a tool between two calls."""
import asyncio
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("math_expression")
class MathExpression(AgentLoopBase):
    def __init__(self, *args, rounds=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.rounds = rounds
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        request_id = uuid4().hex
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True),
        )
        response_mask = []
        for round in range(self.rounds):
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            prompt_ids += output.token_ids
            response_mask += [1] * len(output.token_ids)
            if round + 1 < self.rounds:
                answer = self.tokenizer.encode(" = 2 .", add_special_tokens=False)
                prompt_ids += answer
                response_mask += [0] * len(answer)
        return AgentLoopOutput(
            prompt_ids=prompt_ids[: -len(response_mask)],
            response_ids=prompt_ids[-len(response_mask) :][: self.response_length],
            response_mask=response_mask[: self.response_length],
            num_turns=2 * self.rounds,
            metrics={},
        )
'''
NEW_NAMES = (("verl.experimental.agent_loop", "hybridflow.agent"), ("verl.", "hybridflow."))
EVERY_TOKEN_ENDS = f"actor_rollout_ref.rollout.stop_token_ids=[{','.join(map(str, range(112)))}]"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@pytest.fixture
def service() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a service that searches and runs code, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer: dict[str, Any] = {
                "status": "Success",
                "run_result": {"status": "Finished", "stdout": "3\n"},
            }
            if self.path == "/retrieve":
                found = [[{"document": {"contents": f"{each}\nis old"}}] for each in asked[-1]["queries"]]
                answer = {"result": found}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def ours(text: str) -> str:
    """A document of verl's with the names of our modules."""
    for old, new in NEW_NAMES:
        text = text.replace(old, new)
    return text


def train(model: Path, folder: Path, *overrides: str, **extra_info: Any) -> dict[str, float]:
    """Train one step on rows with this `extra_info`; the metrics."""
    row = {
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": extra_info,
    }
    (folder / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    settings = (
        "algorithm.adv_estimator=grpo",
        "data.task.name=null",
        f"data.train_files={folder / 'rows.jsonl'}",
        "actor_rollout_ref.rollout.max_model_len=300",
        "data.max_response_length=40",  # verl's loops cut the whole response at it
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.agent.num_workers=0",
        "trainer.total_training_steps=1",
        EVERY_TOKEN_ENDS,
        *overrides,
    )
    with build(ppo_config(model, folder / "run", *settings)) as trainer:
        trainer.fit()
    metrics = read_metrics(folder / "run" / "metrics.jsonl")[1]
    assert metrics["actor/grad_norm"] > 0
    assert not any(name.startswith("training/num_failed") for name in metrics)
    return metrics


class EveryTurnCalls(CallParser):
    """A format of tool calls in which every turn of the model is the same call."""

    starts = ()
    example = ""
    call: ToolCall

    def opening(self, name: str | None) -> str:
        return ""

    def _read(self) -> Iterator[None]:
        self._parts.append(self.call)
        yield


def format_of(name: str, arguments: dict[str, Any]) -> type[EveryTurnCalls]:
    """The format in which every turn of the model calls this tool."""
    return type("Format", (EveryTurnCalls,), {"call": ToolCall(name, json.dumps(arguments))})


@pytest.mark.parametrize("name", TOOLS)
def test_tool_files(
    name: str,
    model: Path,
    tmp_path: Path,
    service: tuple[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name.startswith("mcp"):
        pytest.importorskip("mcp.server.mcpserver", reason="the extra mcp is not installed")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "server.py").write_text(MCP_SERVER)
        environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
        server = {"command": sys.executable, "args": [str(tmp_path / "server.py")], "env": environment}
        (tmp_path / "mcp_server.json").write_text(json.dumps({"mcpServers": {"Tavily": server}}))
    address, asked = service
    (tmp_path / name).write_text(ours(TOOLS[name]).replace("http://127.0.0.1:8000", address))
    tool, arguments = CALLS[name]
    monkeypatch.setitem(TOOL_PARSERS, "every_turn", format_of(tool, arguments))
    metrics = train(
        model,
        tmp_path,
        f"{MULTI_TURN}.enable=true",
        f"{MULTI_TURN}.format=every_turn",
        f"{MULTI_TURN}.tool_config_path={tmp_path / name}",
        f"{MULTI_TURN}.max_assistant_turns=3",
        need_tools_kwargs=True,
        tools_kwargs={tool: {"create_kwargs": {"ground_truth": "2"}}},
    )
    assert metrics["agent/num_turns/mean"] == 3.0 and metrics["agent/tools/tool_calls"] == 2.0
    problems = ("unknown", "malformed", "raised", "deadline", "too_many")
    assert not any(metrics[f"agent/tools/{problem}"] for problem in problems)
    if not name.startswith(("gsm8k", "mcp")):
        assert len(asked) == 32


def test_the_interaction_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "gsm8k_interaction_config.yaml").write_text(ours(INTERACTION))
    metrics = train(
        model,
        tmp_path,
        f"{MULTI_TURN}.enable=true",
        f"{MULTI_TURN}.interaction_config_path={tmp_path / 'gsm8k_interaction_config.yaml'}",
        f"{MULTI_TURN}.max_user_turns=2",
        interaction_kwargs={"name": "gsm8k", "query": "1 + 1", "ground_truth": "2"},
    )
    assert 1.0 < metrics["agent/num_turns/mean"] <= 3.0


@pytest.mark.parametrize("by", ["file", "place"])
def test_the_agent_loop(by: str, model: Path, tmp_path: Path) -> None:
    """By `agent_loop_config_path` and the row's or the run's name of an agent, and by its place."""
    (tmp_path / "loops.py").write_text(ours(LOOPS))
    place = f"{tmp_path / 'loops.py'}:MathExpression"
    agent = "actor_rollout_ref.rollout.agent"
    keys = [f"{agent}.default_agent_loop='{place}'", f"{agent}.options={{rounds: 3}}"]
    if by == "file":
        (tmp_path / "agent.yaml").write_text(
            yaml.safe_dump([{"name": "math_expression_", "_target_": place, "rounds": 3}])
        )
        keys = [
            f"{agent}.agent_loop_config_path={tmp_path / 'agent.yaml'}",
            f"{agent}.default_agent_loop=math_expression_",
        ]
    metrics = train(model, tmp_path, *keys)
    assert metrics["agent/num_turns/mean"] == 3.0 and metrics["agent/num_rows/mean"] == 1.0
    assert metrics["agent/num_messages"] == 6.0
