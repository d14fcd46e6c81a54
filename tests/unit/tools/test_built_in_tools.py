"""Tools that come with the library: calculator, search by words, gsm8k, and the clients of HTTP services."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.agent import MultiTurnConfig
from hybridflow.errors import ConfigError
from hybridflow.processes.local import LocalHosts
from hybridflow.tools import http_post
from hybridflow.tools.base import ToolAnswer
from hybridflow.tools.bm25 import Bm25, passages
from hybridflow.tools.calculator import calculate
from hybridflow.tools.parsers import ToolCall
from hybridflow.tools.toolset import Toolset


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * (4 - 1)", "11"),
        (" -7 // 2 ", "-4"),
        ("100000000000000000000 / 10", "10000000000000000000"),
        ("1 / 8", "0.125"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 0.5", "1.41421356237"),
        ("7 % 4 + +2", "5"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("2 +", "no arithmetic expression"),
        ("abs(-2)", "no number and no operation"),
        ("x", "no number"),
        ("True", "no number"),
        ("'a' * 3", "no number"),
        ("2 ^ 3", r"\*\*"),
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 4095 * 4", "too large"),
        ("1e308 * 10", "too large"),
        ("(-8) ** 0.5", "no real number"),
        ("1" * 201, "longer than 200"),
        ("(" * 99 + "1" + ")" * 99, None),
        ("-" * 199 + "1", None),
    ],
)
def test_the_calculator_says_what_it_does_not_compute(expression: str, words: str | None) -> None:
    if words is None:
        assert calculate(expression) in ("1", "-1")
        return
    with pytest.raises(ValueError, match=words):
        calculate(expression)


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.integers(0, 99).map(str), lambda inner: st.tuples(inner, inner).map("({0[0]}-{0[1]})".format)
    )
)
def test_the_calculator_agrees_with_python(expression: str) -> None:
    if len(expression) <= 200:
        assert calculate(expression) == str(eval(expression))


def test_the_calculator_is_a_tool_of_a_run() -> None:
    toolset = Toolset.load(MultiTurnConfig(function_tool_path="hybridflow.tools.calculator"))
    calls = [ToolCall("calculator", '{"expression": "12*12"}')]
    assert answers(toolset, calls) == [ToolAnswer("144")]
    assert "for example (3 + 4) * 12" in json.dumps(toolset.specs["calculator"].schema)


def test_bm25_prefers_rare_words_and_short_documents() -> None:
    index = Bm25(["the cat sat on the mat", "the dog", "the cat", "a bird"])
    assert [number for number, _ in index.search("The CAT", 10)] == [2, 0, 1]
    assert [number for number, _ in index.search("the bird", 1)] == [3]
    assert index.search("fish", 3) == []
    assert Bm25([]).search("fish", 3) == []


def test_local_search_reads_a_corpus_and_answers_with_passages(tmp_path: Path) -> None:
    corpus = tmp_path / "facts.jsonl"
    rows = [
        {"contents": "Zorb\nZorb is red."},
        {"title": "Plim", "text": "Plim is blue."},
        "Quax\nQuax sings.",
    ]
    corpus.write_text("\n".join(json.dumps(row) for row in rows))
    toolset = load(tmp_path, "hybridflow.tools.bm25.LocalSearchTool", {"corpus": str(corpus), "topk": 2})
    (found, nothing) = answers(
        toolset, [ToolCall("search", '{"query": "blue plim"}'), ToolCall("search", '{"query": "green"}')]
    )
    assert found.text == "Doc 1 (Title: Plim)\nPlim is blue."
    assert nothing.text == "No search results found."
    corpus.write_text('{"name": 1}')
    with pytest.raises(ConfigError, match=r"line 1 of .* has no `contents`"):
        load(tmp_path, "hybridflow.tools.bm25.LocalSearchTool", {"corpus": str(corpus)})


def test_gsm8k_rewards_an_answer_that_is_better_and_the_trajectory_by_its_last(tmp_path: Path) -> None:
    toolset = load(tmp_path, "hybridflow.tools.gsm8k_tool.Gsm8kTool", {})

    async def episode() -> tuple[list[float], float]:
        tools = await toolset.open(
            LocalHosts(), {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}
        )
        rewards = []
        for answer in ("71", "72", "#### 72", "72"):
            call = ToolCall("calc_gsm8k_reward", json.dumps({"answer": answer}))
            rewards.append((await tools.call([call]))[0].reward)
        return rewards, await tools.close()

    assert asyncio.run(episode()) == ([-0.05, 0.0, -0.05, -0.05], 1.0)


Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@pytest.fixture
def service() -> Iterator[Callable[[Answer], str]]:
    """A local HTTP service; gives its address for a function from a request to a status and an answer."""
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, content = answer(request)
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/retrieve"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_search_asks_a_retrieval_service_and_tries_again_while_it_is_busy(
    tmp_path: Path, service: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_post, "RETRY_DELAYS", (0.0, 0.0))
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        requests.append(request)
        if len(requests) < 3:
            return 503, "busy"
        return 200, {
            "result": [[{"document": {"contents": f"{query}\nis old"}}] for query in request["queries"]]
        }

    config = {"retrieval_service_url": service(answer), "topk": 2, "num_workers": 1}
    toolset = load(tmp_path, "hybridflow.tools.search_tool.SearchTool", config)
    call = ToolCall("search", '{"query_list": ["Rome", "Ur"]}')
    (found,) = answers(toolset, [call])
    text = "Doc 1 (Title: Rome)\nis old\n---\nDoc 1 (Title: Ur)\nis old"
    assert found == ToolAnswer(json.dumps({"result": text}), 0.0, {"query_count": 2.0, "total_results": 2.0})
    assert requests == [{"queries": ["Rome", "Ur"], "topk": 2, "return_scores": True}] * 3
    assert answers(toolset, [call]) == [found]  # another event loop
    requests.clear()
    monkeypatch.setattr(http_post, "RETRY_DELAYS", (0.0,))
    (failed,) = answers(toolset, [call])
    assert (failed.problem, len(requests)) == ("raised", 2)
    assert "503" in failed.text


def test_sandbox_fusion_answers_with_what_a_program_printed(
    tmp_path: Path, service: Callable[[Answer], str]
) -> None:
    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        assert request["memory_limit_MB"] == 64 and request["run_timeout"] == 5.0
        if request["code"] == "loop":
            run = {"status": "TimeLimitExceeded", "stdout": "a", "stderr": ""}
            return 200, {"status": "Failed", "compile_result": None, "run_result": run}
        if request["code"] == "broken":
            return 200, {"status": "SandboxError", "message": "no room"}
        run = {"status": "Finished", "return_code": 1, "stdout": request["language"], "stderr": "!"}
        return 200, {"status": "Failed", "compile_result": None, "run_result": run}

    config = {"sandbox_fusion_url": service(answer), "memory_limit_mb": 64, "default_timeout": 5}
    toolset = load(tmp_path, "hybridflow.tools.sandbox_fusion_tools.SandboxFusionTool", config)
    calls = [ToolCall("code_interpreter", json.dumps({"code": code})) for code in ("fine", "loop", "broken")]
    found = [answers(toolset, [call])[0] for call in calls]
    assert [each.text for each in found[:2]] == ["python!", "a[TimeLimitExceeded]"]
    assert found[2].problem == "raised" and "no room" in found[2].text


VERL_FILE = """
tools:
  - class_name: "hybridflow.tools.search_tool.SearchTool"
    config:
      retrieval_service_url: ${oc.env:RETRIEVAL_URL}
      num_workers: 120
      rate_limit: 120
      timeout: 30
      type: native
    tool_schema:
      type: "function"
      function:
        name: "search"
        description: "Searches the web for relevant information based on the given query."
        parameters:
          type: "object"
          properties:
            query_list:
              type: "array"
              item:
                type: "string"
              description: "A list of fully-formed semantic queries."
          required: ["query_list"]
  - class_name: "hybridflow.tools.sandbox_fusion_tools.SandboxFusionTool"
    config:
      sandbox_fusion_url: "http://127.0.0.1:1/run_code"
      num_workers: 10
      enable_global_rate_limit: true
      rate_limit: 10
      default_timeout: 30
      default_language: "python"
      memory_limit_mb: 1024
      type: native
  - class_name: "hybridflow.tools.gsm8k_tool.Gsm8kTool"
    config: {}
"""


def test_files_in_the_form_that_verl_documents(
    tmp_path: Path, service: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRIEVAL_URL", service(lambda request: (200, {"result": [[]]})))
    path = tmp_path / "tools.yaml"
    path.write_text(VERL_FILE)
    toolset = Toolset.load(MultiTurnConfig(tool_config_path=str(path)))
    assert list(toolset.specs) == ["search", "code_interpreter", "calc_gsm8k_reward"]

    async def episode() -> ToolAnswer:
        tools = await toolset.open(
            LocalHosts(), {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}}
        )
        (answer,) = await tools.call([ToolCall("search", '{"query_list": ["x"]}')])
        await tools.close()
        return answer

    assert asyncio.run(episode()).text == '{"result": "No search results found."}'


def test_a_service_without_an_address_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="retrieval_service_url"):
        load(tmp_path, "hybridflow.tools.search_tool.SearchTool", {})
    with pytest.raises(ConfigError, match="sandbox_fusion_url"):
        load(tmp_path, "hybridflow.tools.sandbox_fusion_tools.SandboxFusionTool", {})


def test_passages_without_a_title() -> None:
    assert passages(["one line"]) == "Doc 1 (Title: one line)"


def load(tmp_path: Path, class_name: str, config: dict[str, Any]) -> Toolset:
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [{"class_name": class_name, "config": config}]}))
    return Toolset.load(
        MultiTurnConfig(tool_config_path=str(path), max_parallel_calls=4, max_tool_response_length=1000)
    )


def answers(toolset: Toolset, calls: list[ToolCall]) -> list[ToolAnswer]:
    async def episode() -> list[ToolAnswer]:
        tools = await toolset.open(LocalHosts())
        try:
            return await tools.call(calls)
        finally:
            await tools.close(score=False)

    return asyncio.run(episode())
