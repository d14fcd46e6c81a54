"""Tokens as text while they come: whole characters, stop texts, names of single tokens, tool calls."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import TOKENIZER, ids, tiny_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hybridflow.data.tokenizer import encode_rendered
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, PartialOutput, SamplingParams
from hybridflow.rollout.server.job import Job, ToolUse
from hybridflow.rollout.server.model import BYTE_OF, Detokenizer, ServedModel, StopCutter, TokenNames
from hybridflow.rollout.server.reading import ChoiceReader
from hybridflow.rollout.server.schema import SamplingBody
from hybridflow.tools.parsers import ToolCall

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
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    both = [start, *ids("a"), start, *ids("b"), TOKENIZER.eos_token_id]
    kept = Detokenizer(TOKENIZER, keep=frozenset({"<|im_start|>"}))
    assert "".join(kept.add([token]) for token in both) == "<|im_start|>a<|im_start|>b"


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
    assert bytes(byte for token in euro for byte in names.bytes(token)).decode() == "€"
    assert names.text(euro[0]) == "\ufffd"
    assert TokenNames(fallback).bytes(4 + 0xE2) == [0xE2]
    assert TokenNames(TOKENIZER).bytes(TOKENIZER.eos_token_id) == list(b"<|im_end|>")


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


def answered(
    parser: str, prompt: str, text: str, size: int, model: ServedModel, **options: Any
) -> list[str | ToolCall]:
    """The parts of a response, which comes in pieces of `size` tokens."""
    tokenizer = model.tokenizer
    job = Job(
        SamplingBody(),
        [Prompt(encode_rendered(tokenizer, prompt))],
        [SamplingParams(512)],
        tools=ToolUse(parser),
        messages=[{"role": "assistant", "content": prompt}],
        template_options={"tools": TOOLS, **options},
    )
    reader = ChoiceReader(job, model, 0)
    new = encode_rendered(tokenizer, text)
    parts: list[str | ToolCall] = []
    for start in range(0, len(new) - size, size):
        some = new[start : start + size]
        parts += reader.read(PartialOutput(0, start, some, [0.0] * len(some))).parts
    whole = GenerationOutput(0, new, [0.0] * len(new), "stop", [0] * len(new))
    joined: list[str | ToolCall] = []
    for part in [*parts, *reader.read(whole).parts]:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            part = f"{joined.pop()}{part}"
        joined.append(part)
    return joined


ADD = ToolCall("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "options", "parts"),
    [
        ("hermes", "a:", f"So {CALL}.", {}, ["So ", ADD, "."]),
        ("hermes", "a:", f"<think>{CALL}</think>{CALL}", {}, [f"<think>{CALL}</think>", ADD]),
        ("hermes", "a:<think>\n", f"{CALL}</think>{CALL}", {}, [f"{CALL}</think>", ADD]),
        ("hermes", "a:<think>\n", CALL, {}, [CALL]),
        ("hermes", "a:<think>\n\n</think>\n\n", CALL, {}, [ADD]),
        ("hermes", "<think>so", f"{CALL}</think>{CALL}", {"continue_final_message": True},
         [f"{CALL}</think>", ADD]),
        ("hermes", "<think></think>so", CALL, {"continue_final_message": True}, [ADD]),
        ("qwen3_coder", "a:", "<function=add><parameter=a>1.10</parameter></function>", {},
         [ToolCall("add", '{"a": "1.10"}')]),
    ],
)  # fmt: skip
def test_calls_of_a_response_are_those_behind_its_thoughts(
    parser: str, prompt: str, text: str, options: dict[str, Any], parts: list[str | ToolCall]
) -> None:
    for size in (1, 3, len(text)):
        assert answered(parser, prompt, text, size, tiny_model(), **options) == parts


def test_tags_that_are_special_tokens_are_found_and_others_are_left_out() -> None:
    """The tokenizer says which tokens are special, whatever the format."""
    tokenizer = create_tiny_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<other>"], special_tokens=True)
    for size in (1, 2, 100):
        parts = answered(
            "hermes", "a<other>:", f"So<other>: {CALL}<other>", size, tiny_model(tokenizer=tokenizer)
        )
        assert parts == ["So: ", ADD]


def test_another_format_is_warned_of_once_a_server(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    written = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "1"}}]'
    for size in (1, 7, 100):
        assert answered("hermes", "a:", written, size, model) == [written]
    assert caplog.text.count("writes tool calls in the format mistral") == 1
    assert "--tool-call-parser mistral" in caplog.text
