"""Tokens that the host sees one step late: each request gets what it gets without, to the bit.

The tests of other files that are imported here run once more, with look-ahead.
"""

from __future__ import annotations

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
from test_native_engine import test_reasons_to_stop  # noqa: F401
from test_native_paged import (  # noqa: F401
    test_a_prompt_as_long_as_memory_enters_in_pieces_beside_what_is_kept,
    test_exact_mode_gives_the_same_bits,
    test_weights_may_change_while_rows_run,
)
from test_native_parameters import (  # noqa: F401
    test_min_tokens_holds_back_every_end,
    test_tokens_log_probs_and_top_log_probs_are_the_slow_ones,
    test_what_a_request_asks_for_changes_no_other_request,
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

from hybridflow.models.exact import ExactMode
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine


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
