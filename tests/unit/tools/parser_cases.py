"""Texts that models write, and what is to be read in them: one table for all formats of tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridflow.tools.parsers import TOOL_PARSERS, ToolCall

Part = str | ToolCall


def tool(name: str, more: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **(more or {})}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TABLE = yaml.safe_load(Path(__file__).with_name("calls.yaml").read_text(encoding="utf-8"))
TEXT = {"type": "string"}
TOOLS = [
    tool("f", a={"type": "integer"}, b=TEXT),
    tool("g", b=TEXT),
    tool("now"),
    tool("delete_all"),
    tool(
        "typed",
        {"$defs": {"Place": {"type": "string"}, "Level": {"enum": [1, 2]}}},
        text=TEXT,
        choice={"enum": ["1", "two"]},
        level={"enum": [1, 2, "auto"]},
        fixed={"const": 3},
        number={"type": "number"},
        integer={"type": "integer"},
        flag={"type": "boolean"},
        items={"type": "array"},
        thing={"type": "object"},
        maybe_text={"type": ["string", "null"]},
        any_text={"anyOf": [{"type": "string"}, {"type": "null"}]},
        maybe_integer={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        either={"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
        place={"$ref": "#/$defs/Place"},
        all_levels={"allOf": [{"$ref": "#/$defs/Level"}]},
        elsewhere={"$ref": "https://example.org/schema"},
        free={"description": "anything"},
    ),
    tool("python", code=TEXT),
    tool("code_interpreter", code=TEXT),
]


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    title: str
    format: str
    text: str
    parts: list[Part]
    """Plain text and calls in their order; neighbouring texts are one."""
    problems: list[str] = field(default_factory=list)
    """A part of the reason for each call that cannot be read."""
    in_thinking: bool = False

    def __str__(self) -> str:
        return f"{self.format}-{self.title}".replace(" ", "_")


def read(name: str, call_id: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), call_id)


# How each format writes a call, given the JSON text of its arguments, and what it ends with

JSON_WRITERS: dict[str, Callable[[str, str], str]] = {
    "hermes": lambda name, arguments: (
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    ),
    "llama3_json": lambda name, arguments: f'<|python_tag|>{{"name": "{name}", "parameters": {arguments}}}',
    "mistral": lambda name, arguments: f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]',
    "deepseek": lambda name, arguments: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": lambda name, arguments: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "gpt-oss": lambda name, arguments: (
        f"<|channel|>to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    ),
}
OPENINGS = {
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "kimi": "<|tool_calls_section_begin|>",
    "qwen3_coder": "<tool_call>",
    "glm": "<tool_call>",
    "python": "```python",
}
"""Tags that begin a call, so that a mention of one is a call that cannot be read."""
CLOSINGS = {
    "hermes": "</tool_call>",
    "llama3_json": ";",
    "mistral": "</s>",
    "deepseek": "<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_end|>",
    "gpt-oss": "<|call|>",
    "qwen3_coder": "</parameter>",
    "glm": "</arg_value>",
    "python": "```",
}


def qwen(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def reads(format: str, title: str, text: str, *parts: Part) -> Case:
    return Case(title, format, text, [*parts])


def unread(format: str, title: str, text: str, *problems: str) -> Case:
    """A text that stays as it is: with calls that cannot be read, or without any."""
    return Case(title, format, text, [text], [*problems])


def write(format: str, name: str, **arguments: Any) -> str:
    """A call as the format writes it; gpt-oss's begins on a channel, so that it may stand behind text."""
    if format in ("python", "code_interpreter"):
        return f"```python\n{arguments['b']}\n```"
    if format in ("qwen3_coder", "glm"):
        texts = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()
        }
        return (qwen if format == "qwen3_coder" else glm)(name, **texts)
    return JSON_WRITERS[format](name, json.dumps(arguments, ensure_ascii=False))


def found(format: str, name: str, **arguments: Any) -> ToolCall:
    """The call that `write` writes."""
    if format in ("python", "code_interpreter"):
        return read(format, code=f"{arguments['b']}\n")
    return read(name, name if format == "kimi" else "", **arguments)


def before(format: str) -> str:
    """The plain text that stays of a call's head."""
    return "<|channel|>" if format == "gpt-oss" else ""


def said(*parts: Part) -> list[Part]:
    """Parts with neighbouring texts joined, and without empty ones."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part:
            joined.append(part)
    return joined


STRINGS = {
    "braces that do not match": "mkdir -p t/{a,b",
    "brackets that do not match": "]}[{",
    "quotes and backslashes in a text": 'say "hi" \\ \\" \\',
    "lines in a text": "one\n\ntwo\tthree",
    "a text in other letters": "naïve 日本語 👩‍👧 \u2028",
    "tags of other formats in a text": "[ARGS]{} <function> <|im_end|> to=functions.f",
    "thinking in a text": "<think>no</think> yes </think>",
    "JSON in a text": '{"name": "delete_all", "arguments": {}}',
    "an empty text": "",
}


def in_every_format() -> Iterator[Case]:
    for format in TOOL_PARSERS:
        one = write(format, "f", a=1, b="x")
        call = found(format, "f", a=1, b="x")
        other = write(format, "g", b="y = 2")
        second = found(format, "g", b="y = 2")
        head = before(format)
        draft = write(format, "delete_all", b="delete_all()")
        cut = one[: one.index("x")]
        yield Case("plain text", format, "It is 3 < 4, {so} [it] is.", ["It is 3 < 4, {so} [it] is."])
        yield Case("nothing", format, "", [])
        yield Case("white space", format, " \n ", [" \n "])
        yield Case("a call", format, one, said(head, call))
        yield Case("text and a call", format, f"Look:\n{one}", said("Look:\n", head, call))
        yield Case("text behind a call", format, f"{one}\nI wait.", said(head, call, "\nI wait."))
        yield Case("two calls", format, f"{one}\n{other}", said(head, call, "\n", head, second))
        if format == "llama3_json":
            yield Case("two calls in one block", format, f"{one}; {other[14:]}", [call, second])
        if format not in ("python", "code_interpreter"):
            name = write(format, "now")
            yield Case("a call without arguments", format, name, said(head, found(format, "now")))
            yield Case("a call that is cut", format, cut, [cut], ["closed"])
            for title, text in STRINGS.items():
                written = write(format, "g", b=text)
                yield Case(title, format, written, said(head, found(format, "g", b=text)))
            for title, text in (
                ("the closing tag in a text", f"the {CLOSINGS[format]} ends it"),
                ("the opening tag in a text", f"the {OPENINGS.get(format, 'to=functions.g')} begins it"),
            ):
                written = write(format, "g", b=text)
                yield Case(title, format, written, said(head, found(format, "g", b=text)))
            example = write(format, "delete_all")
            if format != "gpt-oss":
                example = f"Write\n{write(format, 'delete_all', b='all')}\nfor it"
            written = write(format, "g", b=example)
            yield Case("a call within a text", format, written, said(head, found(format, "g", b=example)))
        if format == "gpt-oss":
            continue  # it thinks on a channel of its own
        thought = f"<think>I could\n{draft}\nbut no.</think>\n"
        yield Case("a draft in thinking", format, f"{thought}No.", [f"{thought}No."])
        yield Case("a draft in thinking, then a call", format, thought + one, [thought, call])
        mention = f"<think>I need {OPENINGS.get(format, '```python')} here.</think>"
        yield Case("a tag in thinking, then a call", format, mention + one, [mention, call])
        yield Case(
            "open thinking with a call", format, f"<think>so\n{one}", [f"<think>so\n{one}"], ["no end"]
        )
        yield Case("open thinking", format, mention[:-8], [mention[:-8]])
        begun = f"Hm.\n{draft}\nNo.</think>"
        yield Case("thinking in the prompt", format, begun + one, [begun, call], in_thinking=True)
        yield Case("open thinking of the prompt", format, one, [one], ["no end"], in_thinking=True)
        if format in OPENINGS and format != "python":
            text = f"The tag {OPENINGS[format]} begins it. "
            yield Case("a tag in plain text, then a call", format, text + one, [text, call], [""])
            bad = f"{OPENINGS[format]} ?! "
            yield Case("a call, then one that is none", format, f"{one} {bad}", [call, f" {bad}"], [""])


# Objects of which it is asked whether they are calls: (title, object, calls or the reason why there is none)

F = read("f", a=1)
OBJECTS: list[tuple[str, str, list[ToolCall] | str]] = [
    ("arguments", '{"name": "f", "arguments": {"a": 1}}', [F]),
    ("parameters", '{"name": "f", "parameters": {"a": 1}}', [F]),
    ("arguments first", '{"arguments": {"a": 1}, "name": "f"}', [F]),
    ("no spaces", '{"name":"f","arguments":{"a":1}}', [F]),
    ("line ends", '{\n  "name": "f",\n  "arguments": {\n    "a": 1\n  }\n}', [F]),
    ("an id and a type", '{"id": "c1", "type": "function", "name": "f", "arguments": {}}', [read("f", "c1")]),
    ("OpenAI's form", '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', [F]),
    (
        "OpenAI's form with text",
        '{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}, "id": "c1"}',
        [read("f", "c1", a=1)],
    ),
    ("arguments as text", '{"name": "f", "arguments": "{\\"a\\": 1}"}', [F]),
    ("arguments as another text", '{"name": "f", "arguments": "a=1"}', "JSON is wrong"),
    ("arguments as a text of a list", '{"name": "f", "arguments": "[1]"}', "no JSON object"),
    ("a line end in a string", '{"name": "g", "arguments": {"b": "x\ny"}}', [read("g", b="x\ny")]),
    ("args", '{"name": "f", "args": {"a": 1}}', "'args'"),
    ("argument", '{"name": "f", "argument": {"a": 1}}', "'argument'"),
    ("params", '{"name": "f", "params": {"a": 1}}', "'params'"),
    ("input", '{"name": "f", "input": {"a": 1}}', "'input'"),
    ("arguments and one outside", '{"name": "f", "arguments": {"a": 1}, "b": "x"}', "'b'"),
    ("arguments and a thought", '{"name": "f", "arguments": {"a": 1}, "thought": "?"}', "'thought'"),
    ("arguments and parameters", '{"name": "f", "arguments": {}, "parameters": {"a": 1}}', "both"),
    ("arguments twice", '{"name": "f", "arguments": {"a": 1}, "arguments": {}}', "'arguments' twice"),
    ("an argument twice", '{"name": "f", "arguments": {"a": 1, "a": 2}}', "'a' twice"),
    ("arguments that are a list", '{"name": "f", "arguments": [1]}', "no JSON object"),
    ("arguments that are null", '{"name": "f", "arguments": null}', "no JSON object"),
    ("NaN", '{"name": "f", "arguments": {"a": NaN}}', "NaN"),
    ("a number with E", '{"name": "f", "arguments": {"a": 2E+3}}', [read("f", a=2000.0)]),
    ("a number without end", '{"name": "f", "arguments": {"a": 1e999}}', "too large"),
    ("a number of many digits", f'{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}', "JSON is wrong"),
    ("deep brackets", f'{{"name": "f", "arguments": {{"a": {"[" * 20000}{"]" * 20000}}}}}', "deeply"),
    ("half a pair", '{"name": "g", "arguments": {"b": "\\ud800"}}', [ToolCall("g", '{"b": "\\ud800"}')]),
    ("a comma too many", '{"name": "f", "arguments": {"a": 1,}}', "JSON is wrong"),
    ("a brace too few", '{"name": "f", "arguments": {"a": 1}', ""),
    ("a quote too few", '{"name": "f", "arguments": {"b": "x}}', ""),
    ("closed too early", '{"name": "f", "arguments": {"a": 1}}, "b": "x"}', "goes on"),
    ("a brace too many", '{"name": "f", "arguments": {"a": 1}}}', "goes on"),
    ("Python's quotes", '{"name": "f", "arguments": {\'a\': 1}}', '"\'"'),
]
NO_CALLS: list[tuple[str, str, str]] = [
    # objects that llama3_json takes for answers
    ("tool_name", '{"tool_name": "f", "arguments": {"a": 1}}', "'tool_name'"),
    ("tool", '{"tool": "f", "arguments": {"a": 1}}', "'tool'"),
    ("a function as text", '{"function": "f", "arguments": {"a": 1}}', "'function'"),
    ("a name that is a number", '{"name": 3, "arguments": {"a": 1}}', "name"),
    ("no name", '{"arguments": {"a": 1}}', "no name"),
    ("a name that is no tool's and another key", '{"name": "Ada", "age": 3}', "'age'"),
]  # fmt: skip


def objects() -> Iterator[Case]:
    for title, text, wanted in [*OBJECTS, *NO_CALLS]:
        for format, opening, closing in (
            ("hermes", "<tool_call>", "</tool_call>"),
            ("llama3_json", "", ""),
            ("llama3_json", "<|python_tag|>", ""),
            ("mistral", "[TOOL_CALLS] ", ""),
        ):
            if isinstance(wanted, list):
                yield Case(f"{opening}{title}", format, opening + text + closing, list(wanted))
                continue
            is_answer = not opening and any(title == other for other, _, _ in NO_CALLS)
            problems = [] if is_answer else [wanted]
            whole = opening + text + closing
            yield Case(f"{opening}{title}", format, whole, [whole], problems)


def bare_arguments() -> Iterator[Case]:
    """Arguments that stand by themselves, behind a name."""
    writers = {name: JSON_WRITERS[name] for name in ("deepseek", "kimi", "gpt-oss")}
    writers["mistral"] = lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}"
    for format, writer in writers.items():
        for title, arguments, wanted in (
            ("arguments as text", '"{\\"a\\": 1}"', F),
            ("spaced arguments", '\n{ "a" : 1 }\n', F),
            ("arguments that are a list", "[1]", ""),
            ("arguments that are null", "null", ""),
            ("no arguments", "", ""),
            ("an argument twice", '{"a": 1, "a": 2}', "twice"),
            ("NaN", '{"a": NaN}', "NaN"),
            ("closed too early", '{"a": 1}, "b": "x"}', "goes on"),
            ("a comma too many", '{"a": 1,}', "JSON is wrong"),
            ("words", "a=1", ""),
        ):
            text = writer("f", arguments)
            if isinstance(wanted, ToolCall):
                call = ToolCall(wanted.name, wanted.arguments, "f" if format == "kimi" else "")
                yield Case(f"{title} behind a name", format, text, said(before(format), call))
            else:
                yield Case(f"{title} behind a name", format, text, [text], [wanted])


def values() -> Iterator[Case]:
    pairs = [(argument, *pair) for argument, rows in TABLE["values"].items() for pair in rows]
    for argument, text, value in pairs:
        for format, writer in (("qwen3_coder", qwen), ("glm", glm)):
            call = read("typed", **{argument: value})
            yield Case(f"{argument} {text}", format, writer("typed", **{argument: text}), [call])
    for format, writer in (("qwen3_coder", qwen), ("glm", glm)):
        call = read("nobody", a=1, b="1.10", c="x")
        yield Case("an unknown tool", format, writer("nobody", a="1", b="1.10", c="x"), [call])


QWEN_EXAMPLES = f"One:\n{qwen('delete_all')}\nTwo:\n{qwen('delete_all')}\nso"
GLM_EXAMPLES = f"One:\n{glm('delete_all')}\nTwo:\n{glm('delete_all')}\nso"
ANALYSIS = "<|channel|>analysis<|message|>"
DRAFT = "to=functions.delete_all<|channel|>commentary json<|message|>{}"
COMPUTED = [
    *(
        unread(
            "qwen3_coder",
            f"examples in a call with a parameter twice, {place}",
            qwen("g", b="1").replace("</function>", f"{more}</function>"),
            "twice",
        )
        for place, more in {
            "before": f"<parameter=c>\n{QWEN_EXAMPLES}\n</parameter>\n<parameter=b>2</parameter>\n",
            "behind": f"<parameter=b>2</parameter>\n<parameter=c>\n{QWEN_EXAMPLES}\n</parameter>\n",
        }.items()
    ),
    *(
        Case(
            "examples in an open value, then a call",
            format,
            writer("g", b=f"{examples}")[: -len(closing)] + f"{rest}{writer('now')}",
            [writer("g", b=f"{examples}")[: -len(closing)] + rest, read("now")],
            ["not closed"],
        )
        for format, writer, examples, closing, rest in (
            (
                "qwen3_coder",
                qwen,
                QWEN_EXAMPLES,
                "</parameter>\n</function>\n</tool_call>",
                "</function></tool_call>",
            ),
            ("glm", glm, GLM_EXAMPLES, "</arg_value>\n</tool_call>", "</tool_call>"),
        )
    ),
    unread(
        "glm",
        "examples in a call with an argument twice",
        glm("g", b="1", c=GLM_EXAMPLES).replace(">c<", ">b<")[:-12]
        + f"<arg_key>d</arg_key><arg_value>{GLM_EXAMPLES}</arg_value></tool_call>",
        "twice",
    ),
    reads(
        "deepseek",
        "with fences",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        F,
        read("now"),
    ),
    *(
        unread(
            format,
            f"a call in a text, then {title}",
            JSON_WRITERS[format](
                "g", json.dumps({"b": JSON_WRITERS[format]("delete_all", "{}") * 2})[:-1] + more
            ),
            problem,
        )
        for format in ("deepseek", "kimi", "gpt-oss")
        for title, more, problem in (
            ("a literal of Python", ', "a": True}', "'T'"),
            ("a comma too many", ",}", "JSON is wrong"),
            ("a text behind its end", '}, "a": 1}', "goes on"),
        )
    ),
    reads(
        "kimi",
        "two calls in a section",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        read("f", "functions.f:0", a=1),
        read("now", "functions.now:1"),
    ),
    reads(
        "gpt-oss",
        "a draft in thinking, then a call",
        f"{ANALYSIS}Maybe {DRAFT}?<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f<|message|>{"a": 1}',
        f"{ANALYSIS}Maybe {DRAFT}?<|end|><|start|>assistant<|channel|>commentary ",
        F,
    ),
]


def written_out() -> Iterator[Case]:
    """The rows of calls.yaml."""
    for format in sorted(TABLE.keys() - {"values"}):
        for title, text, *more in TABLE[format]:
            parts: list[Part] = [text]
            if more and isinstance(more[0], list):
                parts = [part if isinstance(part, str) else call_of(part) for part in more.pop(0)]
            yield Case(title, format, text, parts, more)


def call_of(entry: dict[str, dict[str, Any]]) -> ToolCall:
    """The call of {name: arguments} or {name id: arguments}."""
    ((key, arguments),) = entry.items()
    name, _, call_id = key.partition(" ")
    return read(name, call_id, **arguments)


def cases() -> list[Case]:
    """All cells of the table."""
    return [*in_every_format(), *objects(), *bare_arguments(), *values(), *COMPUTED, *written_out()]
