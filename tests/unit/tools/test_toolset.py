"""The tools of a run and of one trajectory: loading, calling, limits, rewards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.config.agent import MultiTurnConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import LocalHosts
from hybridflow.tools.base import ToolAnswer, ToolFailed
from hybridflow.tools.parsers import ToolCall
from hybridflow.tools.toolset import OpenTools, Toolset, _integers_as_texts, cut

SHOP = str(Path(__file__).with_name("shop.py"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(1)
    yield hosts
    hosts.close()


def tool_file(tmp_path: Path, *entries: dict[str, Any]) -> str:
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return str(path)


HERE = LocalHosts()


def ask(toolset: Toolset, *turns: list[ToolCall], hosts: Any = HERE, **kwargs: Any) -> tuple[Any, ...]:
    """Return the answers of each turn, the tools, and their reward."""

    async def episode() -> tuple[list[list[ToolAnswer]], OpenTools, float]:
        tools = await toolset.open(hosts, kwargs)
        answers = [await tools.call(turn) for turn in turns]
        return answers, tools, await tools.close()

    return asyncio.run(episode())


@pytest.mark.parametrize("in_process", [False, True])
def test_calls_of_a_turn_are_answered_in_their_order(hosts: Hosts, in_process: bool) -> None:
    toolset = Toolset.load(MultiTurnConfig(function_tool_path=SHOP, max_parallel_calls=5))
    turn = [
        ToolCall("add", '{"a": 2, "b": 3}'),
        ToolCall("echo", '{"text": 7}'),  # an integer has one text
        ToolCall("add", '{"a": 2}'),
        ToolCall("thread", "{}"),
        ToolCall("echo", r'{"text": "\ud800"}'),  # half a surrogate pair
    ]
    (answers,), _, reward = ask(toolset, turn, hosts=LocalHosts() if in_process else hosts)
    assert answers == [
        ToolAnswer("5", 0.5),
        ToolAnswer('{"text": "7"}'),
        ToolAnswer("3", 0.5),
        ToolAnswer("False"),
        ToolAnswer('{"text": "?"}'),
    ]
    assert reward == 0.0


@pytest.mark.parametrize(
    ("call", "problem", "words"),
    [
        (ToolCall("subtract", "{}"), "unknown", "There is no tool 'subtract'. The tools are: add, echo"),
        (ToolCall("add", '{"a": '), "malformed", "are no JSON"),
        (ToolCall("add", "[1]"), "malformed", "are no JSON object"),
        (ToolCall("add", "{}"), "malformed", "'a' is a required property"),
        (ToolCall("add", '{"a": "two"}'), "malformed", "'two' is not of type 'integer'"),
        (ToolCall("add", '{"a": 1, "c": 1}'), "malformed", "'c' was unexpected"),
        (ToolCall("echo", '{"text": 1.1}'), "malformed", "1.1 is not of type 'string'"),  # it may be 1.10
        (ToolCall("echo", '{"text": true}'), "malformed", "True is not of type 'string'"),
        (ToolCall("fail", "{}"), "raised", "fail failed: KeyError: 'nothing here'"),
    ],
)
def test_a_call_that_fails_is_an_answer(hosts: Hosts, call: ToolCall, problem: str, words: str) -> None:
    toolset = Toolset.load(MultiTurnConfig(function_tool_path=SHOP, max_tool_response_length=1000))
    ((answer,),), _, _ = ask(toolset, [call], hosts=hosts)
    assert answer.problem == problem
    assert words in answer.text


@pytest.mark.parametrize("in_process", [False, True])
def test_a_call_past_its_deadline_and_calls_beyond_the_limit_are_answers(
    hosts: Hosts, in_process: bool
) -> None:
    toolset = Toolset.load(MultiTurnConfig(function_tool_path=SHOP), 0.0)
    turn = [ToolCall("hang", "{}"), ToolCall("add", '{"a": 1}')]
    (answers,), _, _ = ask(toolset, turn, hosts=LocalHosts() if in_process else hosts)
    assert [answer.problem for answer in answers] == ["deadline", "too_many"]
    assert "a turn may have 1" in answers[1].text


@pytest.mark.parametrize("in_process", [False, True])
def test_verls_tool_keeps_its_state_over_a_trajectory_and_gives_a_reward(
    hosts: Hosts, tmp_path: Path, in_process: bool
) -> None:
    entry = {"class_name": f"{SHOP}:Basket", "config": {"in_process": in_process}}
    toolset = Toolset.load(MultiTurnConfig(tool_config_path=tool_file(tmp_path, entry), max_parallel_calls=5))
    kwargs = {
        "create_kwargs": {"wanted": 4},
        "execute_kwargs": {"suffix": "s"},
        "calc_reward_kwargs": {"bonus": 1.0},
        "release_kwargs": None,
    }
    turn = [ToolCall("basket", '{"item": "egg"}')]
    answers, _, reward = ask(toolset, turn, turn, hosts=hosts, basket=kwargs)
    assert answers == [
        [ToolAnswer("eggs", 0.0, {"items": 1.0})],
        [ToolAnswer("eggs eggs", 0.0, {"items": 2.0})],
    ]
    assert reward == 2 / 4 + 1.0
    shared = toolset.specs["basket"].shared
    assert (shared is not None) == in_process
    assert shared is None or (shared.items == {} and shared.wanted)  # type: ignore[attr-defined]


def test_a_tool_that_cannot_begin_or_score_fails_the_trajectory_and_is_released(tmp_path: Path) -> None:
    broken = {"class_name": f"{SHOP}:Basket", "config": {"broken": True, "in_process": True}}
    toolset = Toolset.load(MultiTurnConfig(tool_config_path=tool_file(tmp_path, broken)))
    with pytest.raises(ToolFailed, match="basket could not end: ValueError: no scales"):
        ask(toolset)
    assert toolset.specs["basket"].shared.items == {}  # type: ignore[union-attr]
    with pytest.raises(ToolFailed, match="basket could not begin"):
        ask(toolset, basket={"create_kwargs": {"instance_id": 3}})


def test_a_lost_process_fails_the_trajectory_and_is_nothing_that_the_model_reads(hosts: Hosts) -> None:
    toolset = Toolset.load(MultiTurnConfig(function_tool_path=SHOP, max_parallel_calls=5))
    with pytest.raises(ToolFailed, match=r"die: its process was lost: .* exit code 3") as caught:
        ask(toolset, [ToolCall("die", "{}")], hosts=hosts)
    assert caught.value.cause == "infrastructure"


def test_a_thread_that_hangs_does_not_keep_the_interpreter() -> None:
    toolset = Toolset.load(MultiTurnConfig(function_tool_path=SHOP, max_parallel_calls=5))
    (answers,), _, _ = ask(toolset, [ToolCall("daemon", "{}")])
    assert answers == [ToolAnswer("true")]


class Door:
    """A tool of one trajectory alone, as an environment has them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.schema = {"type": "function", "function": {"name": name, "parameters": {}}}

    async def open(self, create_kwargs: Any) -> None: ...

    async def call(self, arguments: dict[str, Any], deadline_s: float, call_id: str) -> ToolAnswer:
        return ToolAnswer("open", 0.25)

    async def close(self, score: bool = False) -> float:
        return 2.0 * score


def test_an_integer_is_a_text_where_a_schema_wants_one() -> None:
    text = {"type": "string"}
    properties = {
        "zip": {"type": ["string", "null"]},
        "code": {"anyOf": [text, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
        "either": {"type": ["string", "integer"]},
        "any": True,
    }
    schema = {"type": "object", "properties": properties, "$defs": {"Place": text}}
    arguments = dict.fromkeys(properties, 90210)
    assert _integers_as_texts(arguments, schema) == {
        "zip": "90210",
        "code": "90210",
        "place": "90210",
        "either": 90210,
        "any": 90210,
    }


def test_tools_of_a_trajectory_join_those_of_the_run() -> None:
    toolset = Toolset.load(MultiTurnConfig(function_tool_path=SHOP, max_parallel_calls=5))

    async def episode(name: str) -> tuple[list[ToolAnswer], float]:
        tools = await toolset.open(HERE, further=[Door(name)])
        return await tools.call([ToolCall(name, "{}"), ToolCall("add", '{"a": 1}')]), await tools.close()

    answers, reward = asyncio.run(episode("door"))
    assert answers == [ToolAnswer("open", 0.25), ToolAnswer("2", 0.5)]
    assert reward == 2.0
    with pytest.raises(ConfigError, match=r"have the same names: \['add'\]"):
        asyncio.run(episode("add"))


def test_keyword_arguments_of_another_form_are_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match=r"got .*wanted \{tool: \{create_kwargs"):
        ask(Toolset.load(MultiTurnConfig(function_tool_path=SHOP)), basket={"create_kwargs": "wanted=4"})


def test_the_schema_of_the_file_wins_and_joins_functions(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "cart", "description": "Cart."}}
    entry = {"class_name": f"{SHOP}:Basket", "tool_schema": schema}
    toolset = Toolset.load(
        MultiTurnConfig(tool_config_path=tool_file(tmp_path, entry), function_tool_path=SHOP)
    )
    _, tools, _ = ask(toolset)
    assert [each["function"]["name"] for each in tools.schemas] == [
        "add",
        "echo",
        "fail",
        "hang",
        "thread",
        "die",
        "daemon",
        "cart",
    ]
    assert tools.schemas[-1] == schema


BASKET = {"class_name": f"{SHOP}:Basket"}
WRONG_SCHEMA = {"function": {"name": "basket", "parameters": {"type": "object", "required": "item"}}}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "no list `tools`"),
        ([{"config": {}}], "wanted a class_name"),
        ([{"class_name": f"{SHOP}:Basket", "kind": 1}], "unknown keys"),
        ([{"class_name": f"{SHOP}:Trolley"}], "has no name 'Trolley'"),
        ([{"class_name": f"{SHOP}:add"}], "wanted a subclass of"),
        ([{"class_name": "verl.tools.gone.GoneTool"}], "nothing here takes its place"),
        ([{"class_name": "hybridflow.tools.base_tool.BaseTool"}], "has no tool_schema"),
        ([BASKET | {"tool_schema": WRONG_SCHEMA}], "tool_schema is none of OpenAI's form"),
        ([BASKET | {"config": {"type": "remote"}}], "wanted native"),
        ([BASKET, BASKET], "two tools are called 'basket'"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(
    tmp_path: Path, entries: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Toolset.load(MultiTurnConfig(tool_config_path=tool_file(tmp_path, *entries)))


def test_a_file_that_is_missing_or_marks_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no file"):
        Toolset.load(MultiTurnConfig(tool_config_path="missing.yaml"))
    with pytest.raises(ConfigError, match="no file"):
        Toolset.load(MultiTurnConfig(function_tool_path="missing.py"))
    with pytest.raises(ConfigError, match="marks no function"):
        Toolset.load(MultiTurnConfig(function_tool_path=__file__))


def test_long_answers_are_cut_at_the_side_that_verl_names() -> None:
    assert cut("abcdef", 6, "left") == "abcdef"
    assert cut("abcdef", 4, "left") == "abcd...(truncated)"
    assert cut("abcdef", 4, "right") == "(truncated)...cdef"
    assert cut("abcdef", 4, "middle") == "ab...(truncated)...ef"
    assert cut("abcdef", 0, "right") == "(truncated)..."


def test_the_page_about_tools_works_as_it_stands(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs" / "agents" / "tools.md"
    for name, content in re.findall(r"```\w+\n# (\S+)\n(.*?)```", page.read_text(), re.DOTALL):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    toolset = Toolset.load(
        MultiTurnConfig(tool_config_path="tools.yaml", function_tool_path="my_tools.py", max_parallel_calls=2)
    )
    turn = [ToolCall("price", '{"item": "egg"}'), ToolCall("basket", '{"item": "egg"}')]
    (answers,), _, reward = ask(toolset, turn, hosts=hosts, basket={"create_kwargs": {"wanted": 2}})
    assert answers == [ToolAnswer("1 egg: 3 coins"), ToolAnswer("egg", 0.0, {"items": 1.0})]
    assert reward == 0.5
