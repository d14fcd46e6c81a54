"""Formats of tool calls: what is read in a text, however it is cut, and in how much time."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import CLOSINGS, OPENINGS, TOOLS, Case, cases, found, glm, qwen, said, tool, write

from hybridflow.tools.parsers import KNOWN_TAGS, TOOL_PARSERS, ToolCall, parser_of_template
from hybridflow.tools.parsers.base import CallParser
from hybridflow.tools.parsers.response import (
    ends_in_thinking,
    leaves_thinking,
    other_format,
    read_response,
    unread_message,
)
from hybridflow.tools.parsers.typed import fits, value_of
from hybridflow.tools.schemas import schema_with

CASES = cases()
SHORT = 1000
LONG = 640_000


def fed(parser: CallParser, text: str, size: int) -> list[str | ToolCall]:
    """What a parser makes of a text in pieces of `size` characters; neighbouring texts are one."""
    parts = [part for at in range(0, len(text), size) for part in parser.feed(text[at : at + size])]
    return said(*parts, *parser.end())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table(case: Case) -> None:
    """Whole, and in pieces of 1 to 11 characters; a long text in those of 11."""
    sizes = range(11 if len(case.text) > SHORT else 1, 12)
    for size in (len(case.text) or 1, *sizes):
        parser = TOOL_PARSERS[case.format](TOOLS, in_thinking=case.in_thinking)
        assert fed(parser, case.text, size) == case.parts
        assert parser.malformed == len(case.problems), parser.problems
        assert all(part in problem for part, problem in zip(case.problems, parser.problems, strict=True))
        for part in parser.problems:
            part.encode()


def test_every_format_has_its_share_of_the_table() -> None:
    counts = {name: sum(case.format == name for case in CASES) for name in TOOL_PARSERS}
    assert min(counts.values()) >= 15 and sum(counts.values()) >= 600
    assert len({str(case) for case in CASES}) == len(CASES)


PIECES = [
    piece for case in CASES for piece in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|```|\w+|.", case.text[:500], re.S)
]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(sorted(set(PIECES))), max_size=16).map("".join), st.integers(1, 11))
def test_any_text_is_read_alike_however_it_is_cut(name: str, text: str, size: int) -> None:
    parser = TOOL_PARSERS[name](TOOLS)
    whole = fed(parser, text, len(text) or 1)
    other = TOOL_PARSERS[name](TOOLS)
    assert fed(other, text, size) == whole and other.problems == parser.problems
    assert any(isinstance(part, ToolCall) for part in whole) or "".join(map(str, whole)) == text


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_no_text_is_held_back_that_can_be_said(name: str) -> None:
    """Each letter of plain text comes at once, and a call with the last letter of its JSON's closing tag."""
    parser = TOOL_PARSERS[name](TOOLS)
    for letter in "It is 3 + 4 = 7, isn't it?":
        assert parser.feed(letter) == [letter]
    if name != "gpt-oss":  # whose recipients stand in heads
        call = write(name, "f", a=1, b="x")
        made = [part for letter in call for part in parser.feed(letter)]
        if name in ("llama3_json", "mistral", "python", "code_interpreter"):
            made += parser.feed("\n.")
        assert found(name, "f", a=1, b="x") in made


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("size", [2 * LONG, 37])
def test_a_long_call_that_does_not_end_takes_no_time(name: str, size: int) -> None:
    """640 kB take a tenth of a second of the processor; growing with the square they took half a minute."""
    cut = write(name, "g", b="QQ").partition("QQ")[0]
    text = cut + "x" * LONG
    parser = TOOL_PARSERS[name](TOOLS)
    begun = time.process_time()
    (part,) = fed(parser, text, size)
    assert time.process_time() - begun < 8
    if isinstance(part, str):
        assert part == text and parser.malformed == 1
    else:
        assert part == ToolCall(name, json.dumps({"code": "x" * LONG}))  # a block without its fence


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_each_letter_is_read_a_few_times_at_most(name: str) -> None:
    """Also in texts in which a careless reader begins again and again."""
    cut = write(name, "g", b="QQ").partition("QQ")[0]
    closed = cut + CLOSINGS.get(name, "```")
    units = {
        "calls that begin in calls": cut,
        "calls that do not end in their tags": closed + "".join(TOOL_PARSERS[name].stops[:1]),
        "tags": OPENINGS.get(name, "<|channel|>"),
        "quotes in a call": '" ',
        "letters of tags": "<",
        "thoughts": "<think>",
        "parameters in a value": "<parameter=zz>\n<function=q>\n",
        "open parameters": "<tool_call><function=g><parameter=zz>\n</tool_call>",
        "open values": "<tool_call>g<arg_key>b</arg_key><arg_value></tool_call>",
        "brackets": '{"name": ',
    }
    for title, unit in units.items():
        text = cut + unit * (40_000 // len(unit))
        parser = TOOL_PARSERS[name](TOOLS)
        fed(parser, text, 1000)
        assert parser._source.num_read <= 6 * len(text), title


@pytest.mark.parametrize(
    ("name", "text", "is_whole"),
    [
        ("hermes", '<tool_call>{"name": "now"}', True),
        ("llama3_json", '{"name": "now"}', True),
        ("mistral", "[TOOL_CALLS]now{}", True),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}", True),
        ("kimi", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}", True),
        ("gpt-oss", "to=functions.now<|message|>{}", True),
        ("qwen3_coder", "<tool_call><function=now></function>", True),
        # more arguments, or more code, may have followed
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>", False),
        ("qwen3_coder", "<tool_call><function=now>", False),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", False),
        ("glm", "<tool_call>now", False),
        ("python", "```python\nx = 1", False),
    ],
)
def test_a_call_at_a_limit_is_read_if_it_is_certainly_whole(name: str, text: str, is_whole: bool) -> None:
    assert read_response(name, text, TOOLS).calls
    read = read_response(name, text, TOOLS, cut=True)
    assert len(read.calls) == is_whole and len(read.problems) == 1 - is_whole


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_the_opening_makes_a_call(name: str) -> None:
    rest = {
        "hermes": '{"a": 1}}',
        "qwen3_coder": "<parameter=a>\n1\n</parameter>\n</function>",
        "llama3_json": '{"a": 1}}',
        "gpt-oss": '{"a": 1}',
        "deepseek": '{"a": 1}<｜tool▁call▁end｜>',
        "glm": "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
        "kimi": '{"a": 1}<|tool_call_end|>',
        "mistral": '{"a": 1}}]',
        "python": "a = 1",
        "code_interpreter": "a = 1",
    }[name]
    wanted = ToolCall("f", '{"a": 1}')
    if rest == "a = 1":
        wanted = ToolCall(name, '{"code": "a = 1"}')
    for tools in ([], TOOLS):
        parser = TOOL_PARSERS[name](tools)
        parts = fed(parser, parser.opening("f") + rest, 3)
        (call,) = [part for part in parts if part != " "]
        assert isinstance(call, ToolCall) and (call.name, call.arguments) == (wanted.name, wanted.arguments)
        assert parser.opening("f").startswith(parser.opening(None)[:-1])


def test_templates_say_their_format() -> None:
    assert parser_of_template("<tool_call>{name}\n<arg_key>") == "glm"
    assert parser_of_template("[TOOL_CALLS] [") == "mistral"
    assert parser_of_template("... <tool_call>{...}</tool_call>") == "hermes"
    assert parser_of_template("<tool_call><function=x><parameter=y>") == "qwen3_coder"
    assert parser_of_template("<|python_tag|>") == "llama3_json"
    assert parser_of_template("{{ messages }}") is None


def test_the_example_of_each_format_is_a_call_in_it() -> None:
    for name, kind in TOOL_PARSERS.items():
        written = kind.example.replace("NAME", '"f"' if '"name": NAME' in kind.example else "f").replace(
            "…", '"a": 1'
        )
        assert read_response(name, written, TOOLS).calls, name


# Whole responses


def test_a_thought_that_ends_without_a_beginning_began_in_the_prompt() -> None:
    draft = write("hermes", "delete_all")
    call = write("hermes", "now")
    read = read_response("hermes", f"Maybe {draft}? No.</think>{call}", TOOLS)
    assert [each.name for each in read.calls] == ["now"] and read.text == f"Maybe {draft}? No.</think>"
    read = read_response("hermes", write("hermes", "g", b="</think>") + call, TOOLS)
    assert [each.name for each in read.calls] == ["g", "now"], "a tag in a text is none"
    read = read_response("hermes", f"<think>a</think>{call}</think>", TOOLS)
    assert [each.name for each in read.calls] == ["now"]


@pytest.mark.parametrize(
    ("prompt", "answer", "within"),
    [
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", "", False),
        ("<|start|>assistant<|channel|>analysis<|message|>", "", True),
        ("", "<think>so", True),
        ("", "<think>so</think> it", False),
        ("", "it", False),
    ],
)
def test_where_a_response_begins(prompt: str, answer: str, within: bool) -> None:
    assert ends_in_thinking(prompt) == (within and not answer)
    assert leaves_thinking(answer) == (within and bool(answer))


def as_llama(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "parameters": arguments})


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_another_format_is_told_by_its_calls(name: str) -> None:
    fenced = ("python", "code_interpreter")
    for other in TOOL_PARSERS:
        text = f"So:\n{write(other, 'f', a=1, b='x')}"
        if other == "llama3_json":
            text = as_llama("f", a=1)
        read = read_response(name, text, TOOLS)
        if other == name or (other in fenced and name in fenced):
            assert read.calls
            continue
        assert not read.calls, (name, other)
        found_format = other_format(name, text, TOOLS, problems=bool(read.problems))
        assert found_format == (None if other in fenced else other)
        for thought in (f"<think>{text}</think>So.", f"{text}</think>So."):
            assert other_format(name, thought, TOOLS) in (None, "gpt-oss")


@pytest.mark.parametrize(
    ("text", "problems", "wanted"),
    [
        ("[TOOL_CALLS]f{a: 1}", False, "mistral"),
        ("[TOOL_CALLS]nobody{}", False, "mistral"),
        ("<tool_call>{f}</tool_call>", True, None),
        ('{"name": "Ada", "parameters": {"age": 3}}', False, None),
        ('{"name": "Ada", "age": 3}', False, None),
        ("3 < 4", False, None),
    ],
)
def test_another_format_is_not_guessed(text: str, problems: bool, wanted: str | None) -> None:
    assert other_format("hermes", text, TOOLS, problems=problems) == wanted


def test_what_a_model_is_told() -> None:
    problems = [f"it is number {number}" for number in range(5)]
    told = unread_message(problems, "CALL")
    assert told.splitlines() == [
        "The tool call could not be read: it is number 0.",
        "The tool call could not be read: it is number 1.",
        "The tool call could not be read: it is number 2.",
        "2 more could not be read.",
        "Write a call as CALL",
    ]


# Schemas


def test_schemas_of_any_form_take_values_without_end_or_error() -> None:
    """A server is given schemas by anybody: those that ask for themselves, and those that are none."""
    chain: dict[str, object] = {f"s{at}": {"$ref": f"#/$defs/s{at + 1}"} for at in range(5000)}
    doubling = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(64)}
    root = {"$defs": {**chain, **doubling, "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "null"}]}}}
    assert fits(None, {"$ref": "#/$defs/self"}, root) and not fits("x", {"$ref": "#/$defs/self"}, root)
    assert fits("x", {"$ref": "#/$defs/s0"}, root) and fits("x", {"$ref": "#/$defs/d0"}, root)
    for schema in ({"type": 5}, {"enum": 5}, {"anyOf": 5}, {"$ref": 5}, {"$ref": "#/nowhere"}, True, None):
        assert fits("x", schema, {})
    assert not fits("x", False, {})
    assert not fits(True, {"type": "integer"}, {})
    assert not fits(True, {"const": 1}, {})
    for parameters in (None, {}, {"properties": 5}, {"properties": {"a": 5}}, {"additionalProperties": 5}):
        assert value_of("1", "a", parameters) == 1  # type: ignore[arg-type]
    assert value_of("1", "a", {"additionalProperties": {"type": "string"}}) == "1"


def test_tools_may_be_objects_of_pydantic_and_bare_functions() -> None:
    for tools in (
        [schema_with("g", "", b={"type": "string"})],
        [tool("g", b={"type": "string"})["function"]],
        [5, {"function": 5}, tool("g", b={"type": "string"})],
    ):
        for name, text in (("qwen3_coder", qwen("g", b="1.10")), ("glm", glm("g", b="1.10"))):
            assert read_response(name, text, tools).calls == [ToolCall("g", '{"b": "1.10"}')]


def test_tags_that_are_special_tokens_stay_in_the_text() -> None:
    tags = {tag for kind in TOOL_PARSERS.values() for tag in kind().tags}
    assert tags == KNOWN_TAGS and "</think>" in tags


def test_random_letters_in_a_call_are_read_alike_however_they_are_cut() -> None:
    draw = random.Random(7)
    letters = ['"', "\\", "{", "}", "[", "]", "<", ">", "`", "\n", "a", "1", ":", ","]
    for name in TOOL_PARSERS:
        cut = write(name, "g", b="QQ").partition("QQ")[0]
        for _ in range(200):
            text = cut + "".join(draw.choices(letters, k=40))
            whole = fed(TOOL_PARSERS[name](TOOLS), text, len(text))
            assert whole == fed(TOOL_PARSERS[name](TOOLS), text, draw.randint(1, 11))


@pytest.mark.parametrize("properties", [5, True, None, ["b"], "b", {"b": True}, {"b": {"type": {}}}])
def test_properties_that_are_no_schemas_say_nothing(properties: object) -> None:
    tools = [{"type": "function", "function": {"name": "g", "parameters": {"properties": properties}}}]
    for name, text in (("qwen3_coder", qwen("g", b="x <function=h> y")), ("glm", glm("g", b="x"))):
        assert read_response(name, text, tools).calls or "<parameter=" in text
    within = qwen("g", b="x <parameter=q> y")
    assert read_response("qwen3_coder", within, tools).text in ("", within)


def test_a_call_before_the_end_of_a_thought_without_beginning_is_none_whatever_comes() -> None:
    text = f"{write('hermes', 'now')}</think><think>so</think> and </think>"
    assert read_response("hermes", text, TOOLS).calls == []


@pytest.mark.parametrize(
    ("name", "tag"),
    [("hermes", "</think>"), ("kimi", "<|tool_call_end|>"), ("gpt-oss", "<|end|><|channel|>")],
)
def test_many_tags_at_once_take_no_time(name: str, tag: str) -> None:
    """200 000 of them took half a minute of the processor, growing with the square; now it is a second."""
    begun = time.process_time()
    assert read_response(name, tag * 200_000, TOOLS).text == tag * 200_000
    assert time.process_time() - begun < 15
