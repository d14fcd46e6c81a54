"""Agents that know a base URL only: their reward, their failures by the true cause, and nothing left over."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from endpoint_scene import END, TOKENIZER, endpoint, ids, nothing_is_left, policy_of, text
from spoken_engine import FakeSession, client_of, episode

from hybridflow.agent.black_box import BlackBoxes, CommandAgent, FunctionAgent
from hybridflow.agent.episode import Agent, AgentResult, LengthReached, Policy, TrajectoryFailed
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.errors import ConfigError
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import HostsLike, LocalHosts
from hybridflow.protocol.trajectory import rows_of
from hybridflow.rollout.base import GenerationRequest

ASK = """
import asyncio, json, os, subprocess, sys, time
import httpx

def ask(base_url, content):
    body = {"messages": [{"role": "user", "content": content}]}
    answer = httpx.post(base_url + "/chat/completions", json=body, timeout=600)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Write a file of an agent; give its path."""

    def write(code: str) -> str:
        path = tmp_path / "agent.py"
        path.write_text(ASK + textwrap.dedent(code))
        return str(path)

    return write


def says_yes(request: GenerationRequest) -> list[int]:
    return ids("yes")


def played(
    make: Any,
    hosts: HostsLike | None = None,
    *,
    cancelled: bool = False,
    script: Any = says_yes,
    dies_at: int | None = None,
    **row: Any,
) -> Any:
    """Play one episode with the agent that `make(endpoint, hosts)` gives: (result, policy); it can be
    `cancelled` after its first call.
    """

    async def work() -> tuple[AgentResult | None, Policy]:
        server = endpoint()
        agent: Agent = make(server, hosts or LocalHosts())
        with client_of(FakeSession(script, end=END, dies_at=dies_at)) as client:
            policy = policy_of(client)
            playing = asyncio.create_task(agent.run(episode(**row), policy))
            try:
                while cancelled and not policy.calls:
                    await asyncio.sleep(0.01)
                if cancelled:
                    playing.cancel()
                    await asyncio.wait([playing])
                    return None, policy
                return await playing, policy
            finally:
                assert client.load == 0
                await nothing_is_left(server)

    return asyncio.run(work())


def function(path: str, name: str = "run") -> Any:
    return lambda endpoint, hosts: FunctionAgent(f"{path}:{name}", endpoint, hosts, deadline_s=600.0)


def test_an_async_function_gives_the_reward_and_numbers(script: Any) -> None:
    path = script(
        """
        async def run(base_url, row):
            text = await asyncio.to_thread(ask, base_url, "hi")
            return {"score": float(text == "yes"), "length": 3, "ground_truth": row["reward_model"]}
        """
    )
    result, policy = played(function(path))
    assert result.reward == 1.0 and result.metrics == {"length": 3.0} and len(policy.calls) == 1
    assert [message["content"] for message in result.messages] == ["hi", "yes"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_that_blocks_runs_elsewhere(script: Any, num_workers: int) -> None:
    path = script(
        """
        def run(base_url, row):
            ask(base_url, "hi")
            return os.getpid()

        def fails(base_url, row):
            ask(base_url, "hi")
            raise KeyError("a mistake of mine")
        """
    )
    hosts: HostsLike = Hosts(num_workers) if num_workers else LocalHosts()
    try:
        result, _ = played(function(path), hosts=hosts)
        assert (result.reward == os.getpid()) == (num_workers == 0)
        with pytest.raises(TrajectoryFailed, match="a mistake of mine") as caught:
            played(function(path, "fails"), hosts=hosts)
        assert caught.value.cause == "environment"
    finally:
        hosts.close()


def test_an_answer_that_is_none_is_refused(script: Any) -> None:
    path = script("async def run(base_url, row): return 'good'")
    with pytest.raises(TrajectoryFailed, match="wanted a finite number"):
        played(function(path))


def test_an_error_of_ours_keeps_its_cause(script: Any) -> None:
    path = script(
        """
        async def run(base_url, row):
            await asyncio.to_thread(ask, base_url, "hi")
            await asyncio.to_thread(ask, base_url, "a" * 500)
        """
    )
    with pytest.raises(LengthReached):
        played(function(path))


def test_a_lost_engine_fails_an_agent_that_goes_on_without_its_answer(script: Any) -> None:
    path = script(
        """
        async def run(base_url, row):
            try:
                await asyncio.to_thread(ask, base_url, "hi")
            except httpx.HTTPStatusError:
                return 1.0
        """
    )
    with pytest.raises(TrajectoryFailed) as caught:
        played(function(path), dies_at=1)
    assert caught.value.cause == "infrastructure"


def command(path: str, *words: str) -> Any:
    return lambda endpoint, hosts: CommandAgent([sys.executable, path, *words], endpoint)


@pytest.mark.parametrize("word, reward", [("line", 0.5), ("file", 0.25), ("nothing", None)])
def test_a_command_gives_its_reward_by_a_line_or_a_file(script: Any, word: str, reward: float | None) -> None:
    path = script(
        """
        row = json.load(open(os.environ["HYBRIDFLOW_ROW"]))
        assert row["reward_model"] == {"ground_truth": "4"}
        assert ask(os.environ["OPENAI_BASE_URL"], "hi") == "yes"
        if sys.argv[1] == "file":
            json.dump({"score": 0.25}, open(os.environ["HYBRIDFLOW_RESULT"], "w"))
        print(0.5 if sys.argv[1] == "nothing" else json.dumps({"score": 0.5}))
        """
    )
    result, policy = played(command(path, word))
    assert result.reward == reward and len(policy.calls) == 1


def test_a_command_that_fails_tells_what_it_said(script: Any) -> None:
    with pytest.raises(TrajectoryFailed, match="status 3\nit is broken") as caught:
        played(command(script("sys.stderr.write('it is broken'); sys.exit(3)")))
    assert caught.value.cause == "environment"


def test_a_command_ends_with_all_that_it_has_started(script: Any, tmp_path: Path) -> None:
    path = script(
        f"""
        sleeps = [sys.executable, "-c", "import time; time.sleep(3600)"]
        child = subprocess.Popen(sleeps)
        detached = subprocess.Popen(sleeps, start_new_session=True)
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}} {{detached.pid}}")
        ask(os.environ["OPENAI_BASE_URL"], "hi")
        time.sleep(3600)
        """
    )
    played(command(path), cancelled=True)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    assert not left


def test_a_file_that_is_not_there_is_a_mistake_of_the_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        played(function(str(tmp_path / "none.py")))


def test_a_port_that_is_taken_is_told_before_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"agent.endpoint_port={port}: cannot listen"):
            BlackBoxes(
                TOKENIZER,
                ChatTemplate(TOKENIZER),
                hosts=LocalHosts(),
                address=("127.0.0.1", port),
                max_model_len=100,
                tool_parser="hermes",
                deadline_s=60.0,
            )


EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


def multiplies(request: GenerationRequest) -> list[int]:
    """A call of the tool, then the number that it gave."""
    prompt = text(request.prompt_token_ids)
    if "tool\n" in prompt:
        return ids("It is " + prompt.rpartition("tool\n")[2].partition("<|im_end|>")[0])
    return ids('<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>')


@pytest.mark.parametrize(
    "package, make, reward",
    [
        ("openai", function(str(EXAMPLES / "openai_script.py")), None),
        ("openai", command(str(EXAMPLES / "openai_script.py")), None),
        ("langgraph.prebuilt", function(str(EXAMPLES / "langgraph_agent.py")), 1.0),
        ("agents", command(str(EXAMPLES / "openai_agents_agent.py")), 1.0),
    ],
    ids=["openai-function", "openai-command", "langgraph", "openai-agents"],
)
def test_the_examples_play_two_turns_that_are_one_row(package: str, make: Any, reward: float | None) -> None:
    pytest.importorskip(package)
    question = [{"role": "user", "content": "What is 6 times 7?"}]
    result, policy = played(make, script=multiplies, raw_prompt=question, reward_model={"ground_truth": "42"})
    assert result.reward == reward and result.messages[-1]["content"] == "It is 42"
    (row,) = rows_of(policy.calls)
    assert [segment.sampled for segment in row.segments] == [True, False, True]
