"""Tokens as text while they come: whole characters, stop texts cut off, names and bytes of single tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import TOKENIZER, ids
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hybridflow.rollout.server.text import BYTE_OF, Detokenizer, StopCutter, TokenNames

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
    assert (
        bytes(byte for token in euro for byte in names.bytes(token)).decode() == "€"
        and names.text(euro[0]) == "\ufffd"
    )
    assert TokenNames(fallback).bytes(4 + 0xE2) == [0xE2]
    assert TokenNames(TOKENIZER).bytes(TOKENIZER.eos_token_id) == list(b"<|im_end|>")
