"""Tokens as text while they come: whole characters, stop texts cut off, names and bytes of single tokens,
formats of tool calls.
"""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import TOKENIZER, ids
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hybridflow.rollout.server.text import BYTE_OF, Detokenizer, StopCutter, TokenNames
from hybridflow.tools.parsers import TOOL_PARSERS, ToolCall, parser_of_template

TEXTS = ("plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧 and 🏳️‍🌈", "a\ufffdb", "")


@pytest.fixture(scope="module")
def by_bytes() -> PreTrainedTokenizerFast:
    """A token for each byte, as byte-level BPE without merges."""
    backend = Tokenizer(BPE({letter: place for place, letter in enumerate(sorted(BYTE_OF))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.fixture(scope="module")
def fallback() -> PreTrainedTokenizerFast:
    """Words with a sign for the space before them, and bytes for what has none, as SentencePiece's."""
    words = ["<unk>", "▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def fed(
    tokenizer: PreTrainedTokenizerFast, token_ids: list[int], seed: int, prompt: list[int] | None = None
) -> list[str]:
    """Pieces of text, for pieces of one to four tokens."""
    draw, reader, pieces, place = random.Random(seed), Detokenizer(tokenizer, prompt or []), [], 0
    while place < len(token_ids):
        size = draw.randint(1, 4)
        pieces.append(reader.add(token_ids[place : place + size]))
        place += size
    return [*pieces, reader.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_no_character_is_split(by_bytes: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = by_bytes(text)["input_ids"]
    assert len(token_ids) == len(text.encode())
    for seed in range(10):
        pieces = fed(by_bytes, token_ids, seed)
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=60), st.integers(0, 1000))
def test_any_bytes_give_the_text_of_the_whole(
    by_bytes: PreTrainedTokenizerFast, token_ids: list[int], seed: int
) -> None:
    assert "".join(fed(by_bytes, token_ids, seed)) == by_bytes.decode(
        token_ids, clean_up_tokenization_spaces=False
    )


def test_bytes_of_sentencepiece_and_the_space_after_the_prompt(fallback: PreTrainedTokenizerFast) -> None:
    euro = [4 + byte for byte in "€é".encode()]
    for seed in range(5):
        assert "".join(fed(fallback, [1, 2, *euro, 3], seed)) == "Hello world€é!"
        assert "".join(fed(fallback, [2, *euro], seed, prompt=[1])) == " world€é"
    assert "".join(fed(fallback, [1, *euro[:2]], 0)) == "Hello\ufffd\ufffd", "a character that never ended"


def test_long_responses_are_read_in_a_window(by_bytes: PreTrainedTokenizerFast) -> None:
    reader, longest = Detokenizer(by_bytes), 0
    decode = reader._decode

    def watched(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    reader._decode = watched  # type: ignore[method-assign]
    text = "words and 語 " * 100
    assert "".join(reader.add([token]) for token in by_bytes(text)["input_ids"]) == text and longest < 20


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    tokens = [*ids("ab"), TOKENIZER.eos_token_id]
    assert Detokenizer(TOKENIZER).add(tokens) == "ab"
    assert Detokenizer(TOKENIZER, skip_special_tokens=False).add(tokens) == "ab<|im_end|>"


@settings(deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(0, 100),
)
def test_stop_texts_cut_at_the_first(text: str, stops: list[str], seed: int) -> None:
    draw, cutter, shown, place = random.Random(seed), StopCutter(stops), "", 0
    while place < len(text) and cutter.found is None:
        size = draw.randint(1, 5)
        shown += cutter.add(text[place : place + size])
        place += size
    shown += cutter.end()
    places = [text.find(stop) for stop in stops if stop in text]
    assert cutter.found in stops if places else cutter.found is None
    if cutter.found is not None:
        assert text.startswith(shown + cutter.found) and not any(stop in shown for stop in stops)
    else:
        assert shown == text


def test_names_of_tokens(by_bytes: PreTrainedTokenizerFast, fallback: PreTrainedTokenizerFast) -> None:
    euro = by_bytes("€")["input_ids"]
    names = TokenNames(by_bytes)
    assert (
        bytes(byte for token in euro for byte in names.bytes(token)).decode() == "€"
        and names.text(euro[0]) == "\ufffd"
    )
    assert TokenNames(fallback).bytes(4 + 0xE2) == [0xE2]
    assert TokenNames(TOKENIZER).bytes(TOKENIZER.eos_token_id) == list(b"<|im_end|>")


CALLS = {
    "hermes": (
        'Look: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call> '
        '<tool_call>{"name": "now"}</tool_call>',
        ["Look: ", ToolCall("add", '{"a": 1, "b": "x"}'), " ", ToolCall("now", "{}")],
    ),
    "qwen3_coder": (
        "Look: "
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n</function>\n</tool_call>",
        ["Look: ", ToolCall("add", '{"a": 1, "b": "x\\ny"}')],
    ),
    "llama3_json": (
        '{"name": "add", "parameters": {"a": 1, "b": "x"}}; {"name": "now", "parameters": {}}',
        [ToolCall("add", '{"a": 1, "b": "x"}'), ToolCall("now", "{}")],
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|> to=functions.now<|channel|>commentary json'
        "<|message|>{}",
        [
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary ",
            ToolCall("add", '{"a": 1, "b": "x"}'),
            " ",
            ToolCall("now", "{}"),
        ],
    ),
    "deepseek": (
        "Look: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ["Look: ", ToolCall("add", '{"a": 1, "b": "x"}'), ToolCall("now", "{}")],
    ),
    "glm": (
        "Look: <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>x\ny</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        ["Look: ", ToolCall("add", '{"a": 1, "b": "x\\ny"}'), "\n", ToolCall("now", "{}")],
    ),
    "kimi": (
        "Look: <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": "x"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [
            "Look: ",
            ToolCall("add", '{"a": 1, "b": "x"}', "functions.add:0"),
            ToolCall("now", "{}", "functions.now:1"),
        ],
    ),
    "mistral": (
        'Look: [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}, "id": "abcdefghi"}]</s>'
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now{}',
        [
            "Look: ",
            ToolCall("add", '{"a": 1, "b": "x"}', "abcdefghi"),
            ToolCall("add", '{"a": 1}', "abcdefghi"),
            ToolCall("now", "{}"),
            ToolCall("now", "{}"),
        ],
    ),
    "python": (
        "Look: ```python\nprint(1)\n``` and ```python\nx = 2",
        [
            "Look: ",
            ToolCall("python", '{"code": "print(1)\\n"}'),
            " and ",
            ToolCall("python", '{"code": "x = 2"}'),
        ],
    ),
    "code_interpreter": ("```python\nx\n```", [ToolCall("code_interpreter", '{"code": "x\\n"}')]),
}
NO_CALLS = {
    "hermes": (
        "a <tool_cal> b",
        "<tool_call>{no json}</tool_call>!",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "a <tool",
    ),
    "qwen3_coder": (
        "<tool_call>x</tool_call>",
        "<tool_call><function=f>junk</function></tool_call>",
        "<tool_call></tool_call>",
    ),
    "llama3_json": (
        '{"a": 1}',
        "{",
        "plain",
        '{"name": "f", "parameters": 3}',
        '{"name": "f", "parameters": {}} and text',
        "<|python",
    ),
    "gpt-oss": (
        "<|channel|>final<|message|>to=func",
        "to=functions.f<|message|>x<|call|>!",
        "to=functions.f is it",
    ),
    "deepseek": (
        "<｜tool▁calls",
        "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "glm": ("<tool_call></tool_call>", "<tool_call>f\n<arg_key>a</arg_key></tool_call>", "<tool_call>f g"),
    "kimi": (
        "<|tool_calls_section_begin|>functions.f:0",
        "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>3<|tool_calls_section_end|>",
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "f"}, 3]',
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS]f",
        "[TOOL",
    ),
    "python": ("```python\n\n```", "```python", "```js\nx\n```"),
    "code_interpreter": ("``",),
}


def parsed(name: str, text: str, size: int) -> list[str | ToolCall]:
    parser = TOOL_PARSERS[name]()
    parts = [
        part for place in range(0, len(text), size) for part in parser.feed(text[place : place + size])
    ] + parser.end()
    joined: list[str | ToolCall] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    text, expected = CALLS[name]
    for size in (1, 2, 7, len(text)):
        assert parsed(name, text, size) == expected
        for plain in NO_CALLS[name]:
            assert parsed(name, plain, size) == [plain]


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
    (call,) = [part for part in parsed(name, TOOL_PARSERS[name]().opening("f") + rest, 3) if part != " "]
    assert isinstance(call, ToolCall) and (call.name, call.arguments) == (wanted.name, wanted.arguments)
    assert TOOL_PARSERS[name]().opening("f").startswith(TOOL_PARSERS[name]().opening(None)[:-1])


PIECES = st.sampled_from(
    [
        piece
        for text, _ in CALLS.values()
        for piece in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|```|\w+|.", text, re.S)
    ]
)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(deadline=None, max_examples=30)
@given(st.lists(PIECES, max_size=12).map("".join), st.integers(1, 5))
def test_any_text_is_read_alike_however_it_is_cut(name: str, text: str, size: int) -> None:
    whole = parsed(name, text, len(text) or 1)
    assert parsed(name, text, size) == whole
    assert any(isinstance(part, ToolCall) for part in whole) or "".join(map(str, whole)) == text


@pytest.mark.parametrize(
    ("name", "text", "malformed"),
    [
        ("hermes", "<tool_call>{no</tool_call> and <tool_call>{", 2),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> <tool_c', 0),
        ("qwen3_coder", "<tool_call>f</tool_call>", 1),
        ("llama3_json", '{"name": "f", "parameters": ', 1),
        ("llama3_json", '{"answer": 1}', 0),
        ("llama3_json", 'It is {"name": "f"', 0),
        ("mistral", "[TOOL_CALLS]f", 1),
        ("python", "```python\n```", 1),
    ],
)
def test_calls_that_cannot_be_read_are_counted(name: str, text: str, malformed: int) -> None:
    for size in (1, len(text)):
        parser = TOOL_PARSERS[name]()
        for place in range(0, len(text), size):
            parser.feed(text[place : place + size])
        parser.end()
        assert parser.malformed == malformed


def test_templates_say_their_format() -> None:
    for name in ("deepseek", "glm", "gpt-oss", "kimi", "mistral"):
        parser = TOOL_PARSERS[name]()
        assert parser.needs_special_tokens
    assert parser_of_template("<tool_call>{name}\n<arg_key>") == "glm"
    assert parser_of_template("[TOOL_CALLS] [") == "mistral"
    assert parser_of_template("... <tool_call>{...}</tool_call>") == "hermes"
    assert parser_of_template("<tool_call><function=x><parameter=y>") == "qwen3_coder"
    assert (
        parser_of_template("<|python_tag|>") == "llama3_json" and parser_of_template("{{ messages }}") is None
    )
