"""Mistakes in the user's environment, tools and agents are told before a run loads anything heavy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.agent.early_checks import check_agents
from hybridflow.config import PPOConfig
from hybridflow.errors import ConfigError
from hybridflow.trainer.evaluation.main import Subject, evaluate

MINE = """
from hybridflow.agent.agent_loop import AgentLoopBase
from hybridflow.tools import tool

class Guess:
    def reset(self, row): ...
    def step(self, text): ...

class WithoutRow(Guess):
    def reset(self): ...

class WithoutText(Guess):
    def step(self): ...

class Untyped(Guess):
    @tool
    def look(self, where): ...

class Agent:
    def __init__(self, tokenizer, size=1): ...
    async def run(self, episode, policy): ...

class Alone(Agent):
    async def run(self, episode): ...

class Idle:
    pass

class Loop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs): ...

class Bare(AgentLoopBase):
    async def run(self): ...

def play(base_url, row): ...
def solo(base_url): ...
number = 3
"""
TOOLS = "from hybridflow.tools import tool\n@tool\ndef price(item): ...\n"
ENTRY = "tools:\n- class_name: hybridflow.tools.bm25.NoSuchTool\n"


def config(environment: str | None = None, **rollout: Any) -> PPOConfig:
    plain = PPOConfig()
    roles = plain.actor_rollout_ref
    agent = {name: value for name, value in rollout.items() if hasattr(roles.rollout.agent, name)}
    tools = {name: value for name, value in rollout.items() if name not in agent}
    changed = replace(
        roles.rollout,
        agent=replace(roles.rollout.agent, **agent),
        multi_turn=replace(roles.rollout.multi_turn, **tools),
    )
    return replace(
        plain,
        data=replace(plain.data, environment=environment),
        actor_rollout_ref=replace(roles, rollout=changed),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("tools.py").write_text(TOOLS)
    Path("tools.yaml").write_text(ENTRY)
    Path("broken.py").write_text("def broken(:\n")
    return tmp_path


@pytest.mark.parametrize("name", ["Guess", "Agent", "Loop", "play"])
def test_what_is_right_passes(folder: Path, name: str) -> None:
    if name == "Guess":
        check_agents(config(f"mine.py:{name}"))
    else:
        check_agents(config(default_agent_loop=f"mine.py:{name}"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"environment": "nowhere.py:Guess"}, "data.environment: no file nowhere.py"),
        ({"environment": "mine.py:Gess"}, "has no name 'Gess'; it defines: .*Guess"),
        ({"environment": "broken.py:Guess"}, r"SyntaxError.*broken.py:1\)"),
        (
            {"environment": "mine.py:WithoutRow"},
            r"got WithoutRow.reset\(self\), wanted def reset",
        ),
        ({"environment": "mine.py:WithoutText"}, r"wanted def step\(self, text\)"),
        (
            {"environment": "mine.py:Untyped"},
            "/mine.py: tool Untyped.look, argument .*where.: it has no type",
        ),
        ({"default_agent_loop": "mine.py:Alone"}, r"wanted async def run\(self, episode, policy\)"),
        ({"default_agent_loop": "mine.py:Agent", "options": {"sise": 2}}, "unexpected keyword.*sise"),
        ({"default_agent_loop": "mine.py:Idle"}, r"is no class with `async def run\(self, episode"),
        (
            {"default_agent_loop": "mine.py:Bare"},
            r"wanted async def run\(self, sampling_params",
        ),
        ({"default_agent_loop": "mine.py:solo"}, r"got solo\(base_url\), wanted def run\(base_url, row\)"),
        ({"default_agent_loop": "mine.py:number"}, "names a int, wanted a function or a class"),
        ({"function_tool_path": "tools.py"}, r"/tools.py: tool price, argument 'item': it has no type"),
        ({"tool_config_path": "tools.yaml"}, "has no name 'NoSuchTool'"),
        ({"command": ["no-such-agent"]}, "there is no command 'no-such-agent'"),
    ],
)
def test_a_mistake_is_named(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_agents(config(**keys))


def test_an_evaluation_names_it_before_it_loads_a_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"SyntaxError.*broken.py:1\)"):
        evaluate(config(environment="broken.py:Guess"), Subject("no such model"))
