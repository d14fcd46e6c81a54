"""Responses that end with a text: found in the token that completes it, whatever tokens it is spread over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from rollout_models import EOS, prompts, requests_for, run, tiny_engine

from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.native.responses import StopTexts

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b" a",
    b"b c",
    b"\n",
    b"\n\n",
    b"END",
    b"EN",
    b"D",
    b"Dx",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
]
PIECES += ["😀".encode()[:2], "😀".encode()[2:], b"", b" ", b"c"]


def byte_decode(ids: Sequence[int]) -> str:
    """Tokens that are bytes: characters may be cut anywhere, as in byte-level tokenizers."""
    return b"".join(PIECES[token % len(PIECES)] for token in ids).decode(errors="replace")


def piece_decode(ids: Sequence[int]) -> str:
    """Tokens that carry their leading space, which the first one of a text loses."""
    words = ["▁a", "▁b", "ab", "▁", "▁end", "x", "."]
    return "".join(words[token % len(words)] for token in ids).replace("▁", " ").removeprefix(" ")


def first_stop(
    decode: object, tokens: list[int], stop: tuple[str, ...], min_tokens: int = 0
) -> tuple[int, str] | None:
    """(how many tokens, which text): the whole response decoded again after each token."""
    assert callable(decode)
    before = ""
    for length in range(1, len(tokens) + 1):
        text = decode(tokens[:length])
        known = len(before.rstrip("\ufffd"))
        ends = [
            (text.find(one, max(0, known - len(one) + 1)) + len(one), order, one)
            for order, one in enumerate(stop)
        ]
        ends = [end for end in ends if text.find(end[2], max(0, known - len(end[2]) + 1)) >= 0]
        if ends and length > min_tokens:
            return length, min(ends)[2]
        before = text
    return None


@pytest.mark.parametrize("decode", [byte_decode, piece_decode])
@pytest.mark.parametrize(
    "stop",
    [
        ("END",),
        ("\n\n", "ab"),
        ("é",),
        ("😀", "b c"),
        ("a a b a",),
        (" ",),
        ("a.", "end"),
        ("ababababab",),
        ("c", "D", "bé"),
    ],
)
def test_the_first_completed_text_is_found(decode: object, stop: tuple[str, ...]) -> None:
    assert callable(decode)
    choice = torch.Generator().manual_seed(0)
    found = occurs = 0
    for case in range(60):
        tokens = torch.randint(0, len(PIECES) if case % 2 else 3, (40,), generator=choice).tolist()
        texts, wanted, got = StopTexts(decode), first_stop(decode, tokens, stop), None
        for length in range(1, len(tokens) + 1):
            if (
                texts.may_complete(tokens[length - 1], stop)
                and (text := texts.completed(tokens[:length], stop)) is not None
            ):
                got = (length, text)
                break
        assert got == wanted, (case, decode(tokens))
        found, occurs = found + (wanted is not None), occurs + any(text in decode(tokens) for text in stop)
    assert (found > 0) == (occurs > 0)


def test_a_stop_text_whose_first_character_is_cut_by_the_first_look_is_found() -> None:
    face, rest, nothing, b, space, c = 15, 16, 17, 1, 18, 19
    tokens = [face, rest, *[nothing] * 4, b, space, c]
    # the last tokens that could hold the text begin inside of its first character, which is then two broken
    # ones
    assert byte_decode(tokens[1:]) == "\ufffd\ufffdb c"
    assert StopTexts(byte_decode).completed(tokens, ("😀b c",)) == "😀b c"


def test_single_tokens_are_decoded_once_and_most_tokens_need_no_look() -> None:
    calls = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(list(ids))
        return byte_decode(ids)

    texts = StopTexts(decode)
    assert [texts.may_complete(token, ("END", "\n")) for token in (0, 1, 6, 8, 9, 10, 13)] == [
        False,
        False,
        True,
        True,
        False,
        True,
        True,
    ]
    assert len(calls) == 7
    assert texts.may_complete(8, ("END", "\n")) and texts.may_complete(9, ("N",)) and len(calls) == 7


@pytest.mark.parametrize("max_num_seqs", [40, 3])
def test_responses_end_at_their_stop_texts(max_num_seqs: int) -> None:
    """Requests without stop texts, cut behind the token that completes one; rows without any go on."""
    kinds = [("END", "c"), (), ("\n",), ("é", "b a"), ("D",)]
    free = requests_for(prompts(20), n=2, max_tokens=20, temperature=1.5)
    wanted = run(tiny_engine(max_num_seqs=max_num_seqs), free)
    engine = tiny_engine(max_num_seqs=max_num_seqs, decode=byte_decode)
    asked = []
    for number, request in enumerate(free):
        params = SamplingParams(20, temperature=1.5, stop=kinds[number % 5], min_tokens=0)
        asked.append(type(request)(request.request_id, request.prompt, params, request.seed))
    outputs, ended = run(engine, asked), 0
    for request in asked:
        output, whole = outputs[request.request_id], wanted[request.request_id].token_ids
        found = first_stop(byte_decode, whole, request.sampling.stop)
        length, text = found or (len(whole), None)
        assert output.token_ids == whole[:length] and len(output.log_probs) == length
        at_end = output.token_ids[-1] == EOS
        assert output.stop_reason == (EOS if at_end else text)
        assert output.finish_reason == ("stop" if at_end or text else "length")
        ended += text is not None and not at_end
    assert ended > 8


def test_a_text_that_is_complete_before_min_tokens_ends_nothing() -> None:
    engine = tiny_engine(decode=byte_decode, eos=())
    for min_tokens in (0, 6):
        outputs = run(
            engine,
            requests_for(
                prompts(16),
                sampling=SamplingParams(24, temperature=1.5, stop=("b", "\n"), min_tokens=min_tokens),
            ),
        )
        for output in outputs.values():
            found = first_stop(byte_decode, output.token_ids, ("b", "\n"), min_tokens)
            assert found == (
                None if output.finish_reason == "length" else (len(output.token_ids), output.stop_reason)
            )
        lengths = [len(output.token_ids) for output in outputs.values()]
        assert min(lengths) > min_tokens and min(lengths) < 24
