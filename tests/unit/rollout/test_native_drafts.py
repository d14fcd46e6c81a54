"""Speculation: whatever is drafted, each request gets what it gets without drafts.

The tests of other files that are imported here run once more, with drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import EOS, VOCABULARY, prompts, run, tiny_engine
from test_native_begun import (
    test_cut_preempted_and_continued_it_has_the_bits_of_an_undisturbed_request,  # noqa: F401
)
from test_native_parameters import (  # noqa: F401
    test_min_tokens_holds_back_every_end,
    test_tokens_log_probs_and_top_log_probs_are_the_slow_ones,
    test_what_ended_a_response,
)
from test_native_routes import test_routes_are_those_of_training_at_no_extra_pass  # noqa: F401
from test_native_stop_texts import test_responses_end_at_their_stop_texts  # noqa: F401

from hybridflow.config.actor_rollout_ref import RolloutConfig, SpeculativeConfig
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutStats, SamplingParams
from hybridflow.rollout.build import build_rollout_engine
from hybridflow.rollout.native import drafts
from hybridflow.rollout.native.drafts import Drafter, DraftSettings, DraftSource
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.server import build as server_build
from hybridflow.rollout.server.build import ServeSettings

SETTINGS = DraftSettings(num_draft_tokens=6, max_tokens=64)


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NativeEngine.__init__.__kwdefaults__, "drafts", SETTINGS)


def of_many_kinds(count: int) -> list[GenerationRequest]:
    """Requests that use each parameter and end in each way; low temperatures repeat themselves."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.3},
        {"temperature": 0.0},
        {"temperature": 0.4, "min_tokens": 9, "stop_token_ids": tuple(range(3, 20))},
        {"temperature": 0.3, "stop": ("x3x", "7"), "top_log_probs": 3},
        {"temperature": 0.2, "repetition_penalty": 1.05, "logit_bias": ((EOS, 3.0),)},
        {"temperature": 0.5, "top_p": 0.8, "top_k": 9, "top_log_probs": 2},
        {"max_tokens": 1},
        {"temperature": 0.0, "max_tokens": 33, "ignore_eos": True, "repetition_penalty": 1.02},
        {"temperature": 0.3, "min_p": 0.05, "ignore_eos": True},
    ]
    few = [Prompt(prompt) for prompt in prompts(count // 4, seed=3)]
    return [
        GenerationRequest(
            number, few[number % len(few)], SamplingParams(**{"max_tokens": 24, **kinds[number % 9]}), number
        )
        for number in range(count)
    ]


def with_and_without(
    requests: Sequence[GenerationRequest], settings: DraftSettings = SETTINGS, **changes: Any
) -> tuple[dict[int, GenerationOutput], dict[int, GenerationOutput], RolloutStats]:
    """Return the outputs of an engine in exact mode without and with drafts, and the statistics with them."""
    outputs = []
    for drafted in (None, settings):
        engine = tiny_engine(drafts=drafted, **changes)
        engine.policy.exact = ExactMode.choices(engine.policy.hf.base_model, 80)[-1]
        outputs.append(run(engine, list(requests)))
    return outputs[0], outputs[1], engine.stats


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_tokens_and_log_probs_are_those_without_drafts(kind: str) -> None:
    changes = {"kind": kind, "max_num_seqs": 10, "decode": lambda ids: "".join(f"x{one}" for one in ids)}
    plain, drafted, stats = with_and_without(of_many_kinds(36), **changes)
    assert drafted == plain
    assert stats.accepted_draft_tokens > 15, "texts of low temperature repeat themselves"
    assert stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.parametrize(("cache", "share"), [("slots", 0.0), ("slots", 0.5), ("paged", 0.5), ("paged", 0.9)])
def test_drafts_of_any_quality_change_no_bit(
    cache: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = of_many_kinds(27)
    changes = {"kv_cache": cache, "max_num_seqs": 7, "decode": lambda ids: "".join(f"x{one}" for one in ids)}
    plain, _, _ = with_and_without(requests, **changes)
    draw = random.Random(0)

    def propose(self: Drafter, rows: Any, responses: Any, room: Sequence[int], *_: int) -> list[list[int]]:
        found = []
        for row, most in zip(rows, room):
            right = plain[row.request.request_id].token_ids[int(responses.known[row.slot]) :]
            count = draw.randrange(0, 1 + min(6, max(0, most)))
            padded_out = [*right, *[draw.randrange(VOCABULARY) for _ in range(count)]][:count]
            found.append([one if draw.random() < share else draw.randrange(VOCABULARY) for one in padded_out])
        return found

    monkeypatch.setattr(Drafter, "propose", propose)
    monkeypatch.setattr(Drafter, "learn", lambda *_: None)
    _, drafted, stats = with_and_without(requests, **changes)
    assert drafted == plain
    assert stats.draft_tokens > 150
    least = {0.0: 0, 0.5: 50, 0.9: 150}[share]
    assert stats.accepted_draft_tokens >= least


def test_without_exact_mode_tokens_are_the_same_and_log_probs_within_roundings() -> None:
    requests = of_many_kinds(36)
    decode: Callable[[Sequence[int]], str] = lambda ids: "".join(f"x{one}" for one in ids)  # noqa: E731
    outputs = [
        run(tiny_engine(dtype=torch.float64, decode=decode, drafts=drafted), requests)
        for drafted in (None, SETTINGS)
    ]
    for number, plain in outputs[0].items():
        assert outputs[1][number].token_ids == plain.token_ids
        assert outputs[1][number].log_probs == pytest.approx(plain.log_probs, abs=1e-9)


def test_a_run_that_is_repeated_makes_the_same_passes() -> None:
    stats = []
    for _ in range(2):
        engine = tiny_engine(max_num_seqs=6)
        run(engine, [one for one in of_many_kinds(30) if not one.sampling.stop])
        stats.append(
            (engine.stats.decode_steps, engine.stats.draft_tokens, engine.stats.accepted_draft_tokens)
        )
    assert stats[0] == stats[1] and stats[0][1] > 0


def test_accepted_tokens_take_no_steps_of_their_own() -> None:
    request = GenerationRequest(0, Prompt((5, 6, 7)), SamplingParams(max_tokens=100, greedy=True), 0)
    steps = {}
    for drafted in (None, SETTINGS):
        engine = tiny_engine(drafts=drafted)
        tokens = run(engine, [request])[0].token_ids
        stats = engine.stats
        assert stats.generated_tokens == len(tokens)
        steps[drafted] = stats.decode_steps
    assert steps[SETTINGS] + stats.accepted_draft_tokens == steps[None]
    assert stats.as_metrics()["rollout/draft_acceptance"] == stats.accepted_draft_tokens / stats.draft_tokens
    joined = RolloutStats.join([stats, stats], together=True)
    assert joined.draft_tokens == 2 * stats.draft_tokens


def source_of(tokens: Sequence[int], prompt: int = 0) -> DraftSource:
    source = DraftSource(list(tokens[:prompt]), drafts.NGrams(), 0.5, prompt)
    source.extend(tokens[prompt:])
    return source


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),
        ([1, 2, 8, 1, 2, 9, 7, 1, 2], [9, 7, 1]),  # what came last
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], [8, 6, 1]),  # of more equal tokens
        ([1, 2, 3, 4], []),
        ([1, 2, 1, 2], [1, 2, 1]),  # what repeats goes on
        ([7, 7, 7], [7, 7, 7]),
        ([7], []),
    ],
)
def test_what_followed_the_newest_tokens_is_drafted(tokens: list[int], drafted: list[int]) -> None:
    assert source_of(tokens).draft(3) == drafted


def test_another_response_to_the_prompt_is_a_source() -> None:
    first = source_of([1, 2, 10, 11, 12, 13], prompt=2)
    other = DraftSource([1, 2], first.group, 0.5, 2)
    other.extend([10, 11])
    assert other.draft(4) == [12, 13]


def engine_rows(engine: NativeEngine, count: int, tokens: int) -> Any:
    session = engine.open()
    for number in range(count):
        sampling = SamplingParams(max_tokens=tokens, greedy=True)
        session.add([GenerationRequest(number, Prompt((5 + number, 6, 7)), sampling, 0)])
    return session


def test_a_full_pass_gets_no_drafts() -> None:
    counts = []
    for most in (4, 12):
        engine = tiny_engine(drafts=DraftSettings(max_tokens=most))
        session = engine_rows(engine, 5, 60)
        while not session.idle:
            session.step()
        counts.append(engine.stats.draft_tokens)
        session.close()
    assert counts[0] == 0 < counts[1]


def test_what_is_seldom_right_is_seldom_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: DraftSource, most: int) -> list[int]:
        return [VOCABULARY - 1] * most

    monkeypatch.setattr(DraftSource, "draft", wrong)
    engine = tiny_engine()
    sampling = SamplingParams(max_tokens=110, ignore_eos=True, logit_bias=((VOCABULARY - 1, -float("inf")),))
    run(engine, [GenerationRequest(0, Prompt((5, 6, 7)), sampling, 0)])
    assert engine.stats.accepted_draft_tokens == 0
    assert 0 < engine.stats.draft_tokens < 40, "tried at first, and again now and then"


def test_keys_and_the_servers_option_reach_the_engine(tmp_path: Path) -> None:
    keys = SpeculativeConfig(enable=True, num_draft_tokens=3, max_tokens=9)
    policy = tiny_engine().policy
    drafted = [
        build_rollout_engine(RolloutConfig(speculative=one), policy, [EOS]).drafts  # type: ignore[attr-defined]
        for one in (keys, SpeculativeConfig())
    ]
    assert drafted == [DraftSettings(3, 9), None]
    model = create_tiny_model(tmp_path / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1)
    tokenizer = load_tokenizer(model)
    for speculate in (True, False):
        settings = ServeSettings(str(model), "tiny", speculate=speculate)
        engine = server_build._engine(settings, "cpu", [EOS], tokenizer)
        assert (engine.drafts == DraftSettings()) == speculate


def test_sources_go_with_their_rows() -> None:
    engine = tiny_engine()
    session = engine_rows(engine, 3, 20)
    session.step()
    session.step()
    drafter = session._drafter
    assert len(drafter._sources) == 3 and len(drafter._groups) == 3
    while not session.idle:
        session.step()
    assert not drafter._sources and not drafter._groups
    session.close()
