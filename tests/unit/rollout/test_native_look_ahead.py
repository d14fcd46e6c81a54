"""Tokens that the host sees one step late: each request gets what it gets without, to the bit.

The tests of other files that are imported here run once more, with look-ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import test_native_paged
import test_native_session
import torch
from rollout_models import EOS, prompts, requests_for, run, tiny_engine
from test_native_begun import (
    test_cut_preempted_and_continued_it_has_the_bits_of_an_undisturbed_request,  # noqa: F401
    test_what_was_begun_keeps_its_versions_and_the_rest_has_the_new_one,  # noqa: F401
)
from test_native_paged import (  # noqa: F401
    test_a_prompt_as_long_as_memory_enters_in_pieces_beside_what_is_kept,
    test_exact_mode_gives_the_same_bits,
    test_weights_may_change_while_rows_run,
)
from test_native_parameters import (  # noqa: F401
    test_min_tokens_holds_back_every_end,
    test_tokens_log_probs_and_top_log_probs_are_the_slow_ones,
    test_what_a_request_asks_for_changes_no_other_request,
    test_what_ended_a_response,
)
from test_native_session import (  # noqa: F401
    finish,
    test_prefixes_go_when_the_weights_change,
    test_rows_make_room_and_go_on_where_memory_ends,
    test_the_next_turn_of_a_conversation_computes_its_new_tokens_only,
)
from test_native_stop_texts import (  # noqa: F401
    test_a_text_that_is_complete_before_min_tokens_ends_nothing,
    test_responses_end_at_their_stop_texts,
)

from hybridflow.models.exact_mode import ExactMode
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.native.responses import Row
from hybridflow.rollout.native.session import Session


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NativeEngine.__init__.__kwdefaults__, "look_ahead", True)


def test_random_sequences_give_what_each_request_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    test_native_session.test_random_sequences_give_what_each_request_gets_alone("llama", 160, monkeypatch)


def test_random_sequences_lose_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    test_native_paged.test_random_sequences_lose_no_block("mistral", 140, 4, monkeypatch)


def of_many_kinds() -> list[GenerationRequest]:
    """Requests that use each parameter, and end in each way, many of them at the same time as others."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"min_tokens": 9, "stop_token_ids": tuple(range(3, 20))},
        {"stop": ("x3x", "7"), "top_log_probs": 3},
        {"repetition_penalty": 1.3, "logit_bias": ((EOS, 3.0),), "ignore_eos": False},
        {"top_p": 0.8, "top_k": 9, "top_log_probs": 2},
        {"max_tokens": 1},
        {"max_tokens": 30, "ignore_eos": True, "repetition_penalty": 1.1},
    ]
    return [
        GenerationRequest(
            number, Prompt(prompt), SamplingParams(**{"max_tokens": 20, **kinds[number % 8]}), number
        )
        for number, prompt in enumerate(prompts(24, seed=3))
    ]


def few_leaders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the leaders seldom suffice; the list gets the number of rows that are taken back together."""
    for name, value in {"ONE_LEVEL": 8, "BLOCK": 8, "LEADERS": 2, "MANY_LEADERS": 5}.items():
        monkeypatch.setattr(sampling, name, value)
    together: list[int] = []
    own = Session._take_back

    def take_back(session: Session, rows: Sequence[Row]) -> None:
        together.append(len(rows))
        own(session, rows)

    monkeypatch.setattr(Session, "_take_back", take_back)
    return together


def that_limit_tokens(max_tokens: int = 20) -> list[GenerationRequest]:
    """Requests whose leaders may not suffice, beside others, which end in each way."""
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_p": 0.7, "ignore_eos": True},
        {"top_p": 0.95, "temperature": 2.0, "ignore_eos": True},
        {"top_k": 4, "top_p": 0.99, "stop_token_ids": (5, 9, 30)},
        {"top_k": 12, "min_p": 0.01},
        {"top_p": 0.9, "repetition_penalty": 1.2, "stop": ("x3x", "7")},
        {"temperature": 0.0, "ignore_eos": True},
        {"top_p": 0.8, "min_tokens": 9, "top_log_probs": 2},
        {"top_k": 2},
        {},
    ]
    return [
        GenerationRequest(
            number, Prompt(prompt), SamplingParams(**{"max_tokens": max_tokens, **kinds[number % 10]}), number
        )
        for number, prompt in enumerate(prompts(30, seed=4))
    ]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_rows_that_fell_short_get_the_tokens_of_the_whole_vocabulary(
    kind: Any, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit in exact mode; else a row's numbers may depend on the rows beside it in their last bits."""
    together = few_leaders(monkeypatch)
    outputs = []
    for look_ahead in (False, True):
        engine = tiny_engine(
            dtype=torch.float32 if exact else torch.float64,
            max_num_seqs=7,
            max_num_batched_tokens=10,
            kv_cache=kind,
            block_size=8,
            look_ahead=look_ahead,
            decode=lambda ids: "".join(f"x{token}" for token in ids),
        )
        if exact:
            engine.policy.exact = ExactMode(64)
        outputs.append(run(engine, that_limit_tokens()))
        assert engine.stats.generated_tokens == sum(len(one.token_ids) for one in outputs[-1].values())
        assert bool(together) == look_ahead
    if exact:
        assert outputs[0] == outputs[1]
    for number, one in outputs[0].items():
        other = outputs[1][number]
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-12)
    assert len(together) > 20 and max(together) > 2
    assert {one.finish_reason for one in outputs[0].values()} == {"stop", "length"}


def test_rows_that_fell_short_make_room_and_are_aborted_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory ends, rows are preempted between; an abort gives what the host has."""
    together = few_leaders(monkeypatch)
    requests = that_limit_tokens(40)
    wanted = run(tiny_engine(dtype=torch.float64, look_ahead=False), requests)
    engine = tiny_engine(dtype=torch.float64, kv_cache="paged", block_size=4, max_num_seqs=8)
    monkeypatch.setattr("hybridflow.rollout.native.engine.free_memory", lambda device: 2 * 40 * 4 * 512)
    session = engine.open()
    session.add([one for one in requests if not one.sampling.stop])
    outputs = [output for _ in range(12) for output in session.step()]
    assert len(together) > 2
    outputs += session.abort([0, 3])
    while not session.idle:
        outputs += session.step()
    assert engine.stats.preemptions > 0
    session.close()
    for output in outputs:
        tokens = wanted[output.request_id].token_ids
        if output.finish_reason == "abort":
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert output.token_ids == tokens


def test_a_row_that_falls_short_often_is_taken_back_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    together = few_leaders(monkeypatch)
    hot = SamplingParams(100, top_p=0.99, temperature=5.0, ignore_eos=True)
    engine = tiny_engine(dtype=torch.float64)
    outputs = run(engine, requests_for(prompts(1), sampling=hot))
    assert len(outputs[0].token_ids) == 100
    assert sum(together) == 8 + 100 // 32 + 1
    together.clear()
    run(engine, requests_for(prompts(2), sampling=SamplingParams(30, top_k=30, ignore_eos=True)))
    assert not together  # more than the leaders that are looked at


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_outputs_are_equal_to_the_bit(kind: Any) -> None:
    outputs = []
    for look_ahead in (False, True):
        engine = tiny_engine(
            max_num_seqs=6,
            max_num_batched_tokens=10,
            kv_cache=kind,
            block_size=8,
            look_ahead=look_ahead,
            decode=lambda ids: "".join(f"x{token}" for token in ids),
        )
        engine.policy.exact = ExactMode(64)
        outputs.append(run(engine, of_many_kinds()))
        counted = sum(len(output.token_ids) for output in outputs[-1].values())
        assert engine.stats.generated_tokens == counted  # tokens that are forgotten are not counted
    assert outputs[0] == outputs[1]
    assert {output.finish_reason for output in outputs[0].values()} == {"stop", "length"}


def test_a_row_that_ends_is_found_one_step_late() -> None:
    short, long = requests_for(prompts(2), max_tokens=30, ignore_eos=True)
    session = tiny_engine(dtype=torch.float64).open()
    short = GenerationRequest(0, short.prompt, SamplingParams(4, ignore_eos=True), seed=0)
    session.add([short, long])
    ended = [[output.request_id for output in session.step()] for _ in range(5)]
    # the first step gives two tokens: those of the prompts, and those of the first decode step
    assert ended == [[], [], [], [0], []]
    assert session.num_running == 1
    session.close()


def test_no_step_is_begun_when_all_rows_have_all_their_tokens() -> None:
    steps = []
    for look_ahead in (False, True):
        engine = tiny_engine(look_ahead=look_ahead)
        run(engine, requests_for(prompts(4), max_tokens=7, ignore_eos=True))
        steps.append(engine.stats.decode_steps)
    assert steps == [6, 6]


def test_a_request_that_has_ended_unseen_comes_back_when_it_is_aborted() -> None:
    request, other = requests_for(prompts(2), max_tokens=3, ignore_eos=True)
    wanted = run(tiny_engine(dtype=torch.float64), [request, other])[0]
    session = tiny_engine(dtype=torch.float64).open()
    session.add([request, other])
    assert session.step() == session.step() == []  # all three tokens are there, the host has seen two
    assert session.abort([0]) == [wanted]
    assert [output.request_id for output in session.step()] == [1]
    assert session.idle
    session.close()


def test_what_is_not_finite_ends_a_step_late_and_does_not_stay() -> None:
    engine = tiny_engine(kv_cache="paged", block_size=8)
    requests = requests_for(prompts(3), max_tokens=6, ignore_eos=True)
    wanted = run(tiny_engine(), requests)[2]
    session = engine.open()
    session.add(requests[:2])
    session.step()
    weight = engine.policy.hf.model.layers[0].self_attn.k_proj.weight.data
    saved = weight.clone()
    weight.fill_(float("nan"))
    assert session.step() == []
    assert {output.finish_reason for output in session.step()} == {"error"}
    weight.copy_(saved)
    assert all(stored.isfinite().all() for stored in session.cache.keys.values())
    session.add(requests[2:])
    assert finish(session)[2].token_ids == wanted.token_ids
    session.close()
