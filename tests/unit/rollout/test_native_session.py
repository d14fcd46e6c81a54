"""Requests that join, leave and make room while others run: each gets the tokens that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from rollout_models import VOCABULARY, prompts, requests_for, run, tiny_engine, tiny_hf

from hybridflow.errors import RolloutError
from hybridflow.models.cache import kv_cache
from hybridflow.models.cache.kv_cache import bytes_per_token
from hybridflow.models.cache.paged_cache import PagedCache
from hybridflow.models.files.probe import layer_facts
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Medium, Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams, SomeWeights
from hybridflow.rollout.native import engine as engine_module
from hybridflow.rollout.native.engine import CacheKind, NativeEngine
from hybridflow.rollout.native.session import Session


def finish(session: Session) -> dict[int, GenerationOutput]:
    """Step until nothing is left."""
    outputs: dict[int, GenerationOutput] = {}
    while not session.idle:
        outputs |= {output.request_id: output for output in session.step()}
    return outputs


def random_prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, VOCABULARY) for _ in range(length))


def limit_memory(engine: NativeEngine, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slots and kept prefixes hold so many tokens."""
    engine.gpu_memory_utilization = 0.5
    per_token = bytes_per_token(layer_facts(engine.policy)[0])
    monkeypatch.setattr(engine_module, "free_memory", lambda device: 2 * tokens * per_token)


def alone(engine: NativeEngine, requests: list[GenerationRequest]) -> dict[int, GenerationOutput]:
    """What each request gets with nobody else there."""
    return {request.request_id: run(engine, [request])[request.request_id] for request in requests}


def tokens_of(session: Session, request_id: int) -> list[int]:
    """What a request that runs or waits has so far."""
    partials = session.so_far({request_id: 0})
    return partials[0].token_ids if partials else []


def same(output: GenerationOutput, wanted: GenerationOutput) -> bool:
    length = len(output.token_ids) if output.finish_reason == "abort" else len(wanted.token_ids)
    return output.token_ids == wanted.token_ids[:length] and output.log_probs == pytest.approx(
        wanted.log_probs[:length], abs=1e-9
    )


def assert_nothing_is_held(session: Session) -> None:
    assert session.idle and session.num_running == session.num_waiting == 0
    assert not session._live and not session.scheduler._groups and not session.rows.rows
    assert session.cache.room + session.prefixes.num_tokens <= session.cache.max_tokens
    listed = {prefix for prefixes in session.prefixes._by_hash.values() for prefix in prefixes}
    assert all(prefix.rows == 0 and prefix.copy is not None for prefix in listed)


def test_a_session_has_the_engine_for_itself() -> None:
    engine = tiny_engine()
    engine.policy.train()
    session = engine.open()
    assert not engine.policy.training
    for call in (engine.open, engine.sleep, lambda: engine.generate(requests_for(prompts(1)))):
        with pytest.raises(RolloutError, match="session"):
            call()
    request = requests_for(prompts(1))[0]
    session.add([request])
    with pytest.raises(RolloutError, match="unique"):
        session.add([request])
    bad = session.add([GenerationRequest(7, Prompt(()), SamplingParams(5), seed=0)])
    assert [(output.request_id, output.finish_reason) for output in bad] == [(7, "error")]
    session.close()
    session.close()
    assert engine.policy.training
    with pytest.raises(RolloutError, match="closed"):
        session.step()
    engine.sleep()
    with pytest.raises(RolloutError, match="wake_up"):
        engine.open()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_a_prompt_longer_than_the_budget_is_prefilled_while_others_decode(kind: str) -> None:
    draw = random.Random(0)
    long = GenerationRequest(0, Prompt(random_prompt(draw, 75)), SamplingParams(6, ignore_eos=True), seed=5)
    others = [
        GenerationRequest(i, Prompt(random_prompt(draw, 8)), SamplingParams(25, ignore_eos=True), seed=i)
        for i in (1, 2)
    ]
    wanted = alone(tiny_engine(kind, torch.float64), [long, *others])
    engine = tiny_engine(kind, torch.float64, max_num_batched_tokens=16, max_num_seqs=3)
    session = engine.open()
    session.add(others)
    session.step()
    session.add([long])
    counts = []
    while session.num_waiting:
        session.step()
        counts.append(len(tokens_of(session, 1)))
    assert counts == [3, 4, 5, 6, 7]  # 16 tokens of 75 a step, and one for each row
    outputs = finish(session)
    assert all(same(outputs[i], wanted[i]) for i in (0, 1, 2))
    assert engine.stats.prefill_tokens == 75 + 16
    session.close()
    outputs = run(engine, [long, *others])
    assert all(same(outputs[i], wanted[i]) for i in (0, 1, 2))


@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_prompts_share_the_keys_of_what_they_begin_with(kind: str) -> None:
    draw = random.Random(1)
    shared = random_prompt(draw, 30)
    requests = [
        GenerationRequest(i, Prompt(shared + random_prompt(draw, 5 + i)), SamplingParams(7), seed=i)
        for i in range(4)
    ]
    plain = tiny_engine(kind, torch.float64, enable_prefix_caching=False)
    wanted = run(plain, requests)
    assert plain.stats.prefill_tokens == 4 * 30 + 5 + 6 + 7 + 8
    engine = tiny_engine(kind, torch.float64)
    outputs = run(engine, requests)
    assert engine.stats.prefill_tokens == 30 + 5 + 6 + 7 + 8
    assert all(same(outputs[i], wanted[i]) for i in wanted)
    outputs = run(engine, requests)  # nothing is left of the call before
    assert engine.stats.prefill_tokens == 30 + 5 + 6 + 7 + 8


def test_the_next_turn_of_a_conversation_computes_its_new_tokens_only() -> None:
    draw = random.Random(2)
    engine = tiny_engine(dtype=torch.float64)
    session = engine.open()
    prompt = random_prompt(draw, 20)
    session.add([GenerationRequest(0, Prompt(prompt), SamplingParams(8, ignore_eos=True), seed=3)])
    answer = tuple(finish(session)[0].token_ids)
    second = GenerationRequest(1, Prompt(prompt + answer + random_prompt(draw, 4)), SamplingParams(6), seed=4)
    before = engine.stats.prefill_tokens
    session.add([second])
    outputs = finish(session)
    # the last token of the answer was never put through the model
    assert engine.stats.prefill_tokens - before == 1 + 4
    session.add([GenerationRequest(2, second.prompt, second.sampling, seed=4)])
    again = finish(session)[2]
    assert engine.stats.prefill_tokens - before == 1 + 4 + 1
    wanted = alone(tiny_engine(dtype=torch.float64), [second])[1]
    assert same(outputs[1], wanted) and same(again, wanted)
    assert_nothing_is_held(session)


def test_prompts_with_other_pictures_share_what_stands_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy of a model that reads pictures: what refuses them for a model of text is taken out."""
    monkeypatch.setattr("hybridflow.rollout.native.engine.request_problem", lambda *_, **__: None)
    monkeypatch.setattr("hybridflow.models.policy.see", lambda *_: None)
    engine = tiny_engine(dtype=torch.float64)
    session = engine.open()
    ids = random_prompt(random.Random(4), 30)
    number = 0

    def computed(place: int, digest: str, *, runs: bool = False) -> int:
        """Prompt tokens that the next request computes, whose picture stands at `place`."""
        nonlocal number
        number += 1
        before = engine.stats.prefill_tokens
        prompt = Prompt(ids, (Medium(place, 2, digest),))
        session.add([GenerationRequest(number, prompt, SamplingParams(6, ignore_eos=True), seed=number)])
        session.step()
        if not runs:
            finish(session)
        return engine.stats.prefill_tokens - before

    assert computed(18, "a", runs=True) == 30
    assert computed(18, "b", runs=True) == 30 - 18  # the first one's row still runs
    assert computed(18, "a") == 1
    assert computed(18, "b") == 1  # kept now
    assert computed(18, "c") == 30 - 18
    assert computed(17, "a") == 30 - 17  # the same picture a place earlier
    assert computed(2, "b") == 30
    assert_nothing_is_held(session)


@pytest.mark.parametrize("change", ["update_weights", "set_version"])
def test_prefixes_go_when_the_weights_change(change: str) -> None:
    engine = tiny_engine(dtype=torch.float64)
    request = requests_for([random_prompt(random.Random(3), 30)], max_tokens=6)[0]
    session = engine.open()
    session.add([request])
    finish(session)
    engine.set_version(0)  # as it was
    session.add([request])
    finish(session)
    assert engine.stats.prefill_tokens == 31
    engine.policy.hf.model.layers[0].mlp.down_proj.weight.data += 0.2
    engine.update_weights(SomeWeights([]), version=0) if change == "update_weights" else engine.set_version(1)
    session.add([request])
    assert same(finish(session)[0], alone(tiny_like(engine), [request])[0])
    assert engine.stats.prefill_tokens == 61


def tiny_like(engine: NativeEngine) -> NativeEngine:
    """Another engine on the same module."""
    return NativeEngine(engine.policy, eos_token_ids=engine.eos_token_ids)


@pytest.mark.parametrize("recompute", [False, True])
def test_rows_go_on_under_new_weights_with_old_or_new_keys(recompute: bool) -> None:
    draw = random.Random(4)
    engine = tiny_engine(
        dtype=torch.float64, recompute_on_update=recompute, max_num_batched_tokens=16, max_num_seqs=4
    )
    lengths = (6, 11, 40)
    requests = [
        GenerationRequest(
            i, Prompt(random_prompt(draw, lengths[i])), SamplingParams(20, ignore_eos=True), seed=i
        )
        for i in range(3)
    ]
    late = GenerationRequest(3, Prompt((4, 5)), SamplingParams(20, ignore_eos=True), seed=3)
    session = engine.open()
    session.add(requests)
    for _ in range(2):
        session.step()
    assert session.num_running == 2 and session.num_waiting == 1  # the long one is in chunked prefill
    session.add([late])
    session.step()
    assert session.num_running == 3 and session.num_waiting == 1  # a row that is newer than its row
    before = {i: tokens_of(session, i) for i in (0, 1)}
    weight = engine.policy.hf.model.layers[0].self_attn.v_proj.weight
    new = SomeWeights([("model.layers.0.self_attn.v_proj.weight", weight.detach() * -1.5)])
    engine.update_weights(new, version=1)
    outputs = finish(session)
    assert outputs[2].policy_versions == [1] * 20
    for i in (0, 1):
        had = len(before[i])
        assert outputs[i].token_ids[:had] == before[i]
        assert outputs[i].policy_versions == [0] * had + [1] * (20 - had)
        ids = torch.tensor([[*requests[i].prompt_token_ids, *outputs[i].token_ids]])
        with torch.no_grad():
            engine.policy.hf.set_attn_implementation("eager")
            logits = engine.policy.hf(ids, use_cache=False).logits[0, lengths[i] + had - 1 : -1]
            engine.policy.hf.set_attn_implementation("hybridflow")
        of_new_weights = logits.log_softmax(-1).gather(-1, ids[0, lengths[i] + had :, None])[:, 0].tolist()
        assert (outputs[i].log_probs[had:] == pytest.approx(of_new_weights, abs=1e-9)) == recompute
    session.close()
    assert same(outputs[2], alone(tiny_like(engine), requests)[2])  # its prompt began anew
    assert outputs[3].policy_versions == [0, 0] + [1] * 18


def test_requests_are_aborted_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    lengths = (5, 6, 50, 7)
    requests = [
        GenerationRequest(i, Prompt(random_prompt(draw, n)), SamplingParams(9, ignore_eos=True), seed=i)
        for i, n in enumerate(lengths)
    ]
    wanted = alone(tiny_engine(dtype=torch.float64), requests)
    engine = tiny_engine(dtype=torch.float64, max_num_batched_tokens=16, max_num_seqs=3)
    session = engine.open()
    session.add(requests)
    session.step()
    session.step()
    assert (session.num_running, session.num_waiting) == (2, 2)
    aborted = {output.request_id: output for output in session.abort([1, 2, 3, 99])}
    assert set(aborted) == {1, 2, 3} and all(output.finish_reason == "abort" for output in aborted.values())
    assert aborted[1].token_ids == wanted[1].token_ids[:3]
    assert aborted[2].token_ids == aborted[3].token_ids == []
    session.add([requests[2]])
    outputs = finish(session)
    assert same(outputs[0], wanted[0]) and same(outputs[2], wanted[2])
    assert_nothing_is_held(session)


def test_prompts_of_one_pass_go_on_between_the_chunks_of_a_long_one() -> None:
    draw = random.Random(8)
    lengths = {0: 5, 1: 110, 2: 6, 3: 90, 4: 12, 5: 7}
    requests = {
        number: GenerationRequest(number, Prompt(random_prompt(draw, length)), SamplingParams(4), seed=number)
        for number, length in lengths.items()
    }
    engine = tiny_engine(dtype=torch.float64, eos=(), max_num_batched_tokens=16)
    wanted = alone(engine, [*requests.values()])
    session = engine.open()
    session.add([requests[0], requests[1]])
    session.step()  # the first chunk of the long one
    session.add([requests[number] for number in (2, 3, 4, 5)])
    finished: list[int] = []
    outputs: dict[int, GenerationOutput] = {}
    while not session.idle:
        for output in session.step():
            finished.append(output.request_id)
            outputs[output.request_id] = output
    # the second long one begins when the first one is computed, and holds up none that are short
    assert finished == [0, 2, 4, 5, 1, 3]
    assert [number for number in requests if not same(outputs[number], wanted[number])] == []
    assert_nothing_is_held(session)


@pytest.mark.parametrize("kv_cache", ["slots", "paged"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_while_long_prompts_are_computed_gets_what_it_gets_alone(
    seed: int, kv_cache: CacheKind
) -> None:
    draw = random.Random(seed)
    requests = [
        GenerationRequest(
            number,
            Prompt(random_prompt(draw, draw.choice((2, 9, 16, 17, 40, 90)))),
            SamplingParams(draw.randrange(1, 12)),
            seed=number,
        )
        for number in range(24)
    ]
    engine = tiny_engine(
        dtype=torch.float64,
        eos=(),
        max_num_batched_tokens=16,
        max_num_seqs=6,
        kv_cache=kv_cache,
        block_size=8,
    )
    wanted = alone(engine, requests)
    session = engine.open()
    coming = [*requests]
    outputs: dict[int, GenerationOutput] = {}
    while coming or not session.idle:
        if coming and draw.random() < 0.5:
            session.add([coming.pop() for _ in range(min(len(coming), draw.randrange(1, 4)))])
        ended = session.step()
        if session.num_running and draw.random() < 0.1:
            ended += session.abort([session.rows.rows[-1].request.request_id])
        outputs |= {output.request_id: output for output in ended}
    assert len(outputs) == len(requests)
    assert [number for number in range(24) if not same(outputs[number], wanted[number])] == []
    assert_nothing_is_held(session)


def test_a_prompt_that_goes_on_from_that_of_a_group_begins_behind_its_own_end() -> None:
    engine, prompt, sampling = (
        tiny_engine(dtype=torch.float64, max_num_seqs=2),
        tuple(range(3, 23)),
        SamplingParams(5, ignore_eos=True),
    )
    requests = [GenerationRequest(i, Prompt(prompt + (7, 8) * (i == 3)), sampling, seed=i) for i in range(4)]
    wanted, outputs = alone(tiny_engine(dtype=torch.float64), requests), run(engine, requests)
    assert [number for number in wanted if not same(outputs[number], wanted[number])] == []


@pytest.mark.parametrize(
    ("short", "long", "memory"),
    [
        # the prompt in chunks is the longest row, and needs no more than it has while the other decodes
        ((4, 59), (63, 1), 2 * 64),
        # the decoding row becomes longer than both were thought to be when the prompt entered
        ((4, 110), (40, 4), 2 * 80),
    ],
)
def test_a_prompt_in_chunks_and_a_growing_row_share_little_memory(
    monkeypatch: pytest.MonkeyPatch, short: tuple[int, int], long: tuple[int, int], memory: int
) -> None:
    monkeypatch.setattr(kv_cache, "AHEAD", 4)
    draw = random.Random(7)
    first, second = (
        GenerationRequest(number, Prompt(random_prompt(draw, length)), SamplingParams(most), seed=number)
        for number, (length, most) in enumerate((short, long))
    )
    engine = tiny_engine(dtype=torch.float64, eos=(), max_num_batched_tokens=1, kv_cache="slots")
    wanted = alone(engine, [first, second])
    limit_memory(engine, memory, monkeypatch)
    engine.sleep()
    engine.wake_up()
    session = engine.open()
    session.add([first])
    while len(tokens_of(session, 0)) < min(55, short[1] - 20):
        session.step()
    session.add([second])
    session.step()
    preempted = session.num_waiting == 0
    outputs = {}
    while not session.idle:
        outputs |= {output.request_id: output for output in session.step()}
        preempted |= bool(session.num_waiting) and not session.rows.partial
    assert all(same(outputs[number], wanted[number]) for number in (0, 1))
    assert preempted == (memory == 2 * 80) == bool(engine.stats.preemptions)
    session.close()


def test_where_memory_is_short_those_that_come_do_not_drive_out_a_long_prompt_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short prompts with long responses keep coming; the long one got no token in 1500 steps."""
    monkeypatch.setattr(kv_cache, "AHEAD", 4)
    draw = random.Random(1)
    engine = tiny_engine(eos=(), max_num_batched_tokens=16, kv_cache="slots")
    limit_memory(engine, 200, monkeypatch)
    engine.sleep()
    engine.wake_up()
    session = engine.open()

    def keep_coming(number: int) -> None:
        while session.scheduler.num_waiting < 3:
            number += 1
            prompt = Prompt(random_prompt(draw, 8))
            session.add([GenerationRequest(number, prompt, SamplingParams(120), seed=number)])

    keep_coming(0)
    session.step()
    session.add([GenerationRequest(0, Prompt(random_prompt(draw, 100)), SamplingParams(3), seed=0)])
    finished: list[int] = []
    for step in range(300):
        keep_coming(10 * (step + 1))
        finished += [output.request_id for output in session.step()]
        if 0 in finished:
            break
    assert 0 in finished and len(finished) > 2 and engine.stats.preemptions
    session.close()


def test_rows_make_room_and_go_on_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(6)
    requests = [
        GenerationRequest(i, Prompt(random_prompt(draw, 4)), SamplingParams(100, ignore_eos=True), seed=i)
        for i in range(4)
    ]
    wanted = run(tiny_engine(dtype=torch.float64), requests)
    engine = tiny_engine(dtype=torch.float64)
    limit_memory(engine, 320, monkeypatch)
    session = engine.open()
    session.add(requests)
    most = left = 0
    outputs: dict[int, GenerationOutput] = {}
    while not session.idle:
        before = session.num_running
        outputs |= {output.request_id: output for output in session.step()}
        left += session.num_running < before and not outputs
        most = max(most, session.num_running)
        assert session.cache.room + session.prefixes.num_tokens <= 320
        if left == 1 and not outputs:
            running = [row.request.request_id for row in session.rows.rows]
            number = next(i for i in range(4) if i not in running)
            assert len(tokens_of(session, number)) > 50  # what it had is not lost
    assert most == 4 and left > 0
    assert all(same(outputs[i], wanted[i]) for i in range(4))
    assert_nothing_is_held(session)
    # 128 tokens do fit, as one row
    assert session.add([GenerationRequest(9, Prompt((5,) * 120), SamplingParams(8), seed=0)]) == []
    session.close()
    limit_memory(engine, 100, monkeypatch)
    engine.sleep()
    engine.wake_up()
    session = engine.open()
    (refused,) = session.add([GenerationRequest(9, Prompt((5,) * 120), SamplingParams(8), seed=0)])
    assert refused.finish_reason == "error" and "gpu_memory_utilization" in (refused.error or "")


def test_slots_are_as_long_as_the_longest_row_in_use() -> None:
    engine = NativeEngine(PolicyModel(tiny_hf(max_position_embeddings=4096)), eos_token_ids=[])
    short = requests_for(prompts(4), max_tokens=4)
    could_be_long = GenerationRequest(
        99, Prompt((5, 6)), SamplingParams(4000, stop_token_ids=tuple(range(VOCABULARY))), seed=0
    )
    run(engine, [*short, could_be_long])
    cache = engine._cache
    assert cache is not None and (cache.capacity, cache.num_slots, cache.room) == (16, 5, 5 * 80)
    run(engine, requests_for(prompts(1), max_tokens=200))
    assert cache is engine._cache and cache.capacity >= 200


@pytest.mark.parametrize("kv_cache", ["slots", "paged"])
def test_what_is_not_finite_does_not_stay_behind(kv_cache: CacheKind) -> None:
    engine = tiny_engine(kv_cache=kv_cache, block_size=16)
    requests = requests_for(prompts(3), max_tokens=6, ignore_eos=True)
    session = engine.open()
    session.add(requests[:2])
    session.step()
    weight = engine.policy.hf.model.layers[0].self_attn.k_proj.weight.data
    saved = weight.clone()
    weight.fill_(float("nan"))
    outputs = session.step()
    assert {output.finish_reason for output in outputs} == {"error"}
    assert all("not finite" in str(output.error) for output in outputs)
    weight.copy_(saved)
    if isinstance(session.cache, PagedCache):
        assert all(stored.isfinite().all() for stored in session.cache.keys.values())
    session.add(requests[2:])
    assert finish(session)[2].token_ids == run(tiny_engine(), requests)[2].token_ids


def random_sequence(
    session: Session, draw: random.Random, count: int, after_each: Callable[[], None]
) -> tuple[dict[int, GenerationRequest], dict[int, GenerationOutput], int]:
    """Add, abort and step at random; return requests, outputs, and how often a row had made room."""
    known: dict[int, GenerationRequest] = {}
    outputs: dict[int, GenerationOutput] = {}
    pool = [random_prompt(draw, length) for length in (18, 30, 50)]
    made_room = 0
    while len(known) < count or not session.idle:
        action = draw.random()
        if action < 0.2 and len(known) < count:
            prompt = draw.choice(pool)[: draw.choice([99, 25, 2])]
            prompt += random_prompt(draw, draw.choice([0, 3, 11, 40]))
            for _ in range(draw.choice([1, 1, 3])):
                sampling = SamplingParams(draw.randrange(1, 40), ignore_eos=draw.random() < 0.7)
                request = GenerationRequest(len(known), Prompt(prompt), sampling, seed=draw.randrange(1000))
                known[len(known)] = request
                assert session.add([request]) == []
            if draw.random() < 0.2:
                pool.append(prompt)
        elif action < 0.24 and known:
            done = session.abort({draw.randrange(len(known)), len(known) - 1})
            outputs |= {output.request_id: output for output in done}
        else:
            outputs |= {output.request_id: output for output in session.step()}
        made_room += any(len(one.partial_response) for one in session.scheduler.waiting)
        after_each()
    assert set(outputs) == set(known)
    assert {"length", "abort"} <= {output.finish_reason for output in outputs.values()}
    return known, outputs, made_room


@pytest.mark.parametrize(("kind", "tokens"), [("llama", 160), ("gemma2", 5000), ("gpt_oss", 180)])
def test_random_sequences_give_what_each_request_gets_alone(
    kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = tiny_engine(kind, torch.float64, enable_prefix_caching=False)
    engine = tiny_engine(kind, torch.float64, max_num_seqs=5, max_num_batched_tokens=24)
    limit_memory(engine, tokens, monkeypatch)
    monkeypatch.setattr(kv_cache, "AHEAD", 4)
    monkeypatch.setattr(kv_cache, "KEYS", 2)
    session = engine.open()

    def within_memory() -> None:
        assert session.num_running <= 5
        assert session.cache.room + session.prefixes.num_tokens <= session.cache.max_tokens

    known, outputs, made_room = random_sequence(session, random.Random(7), 24, within_memory)
    assert made_room > 0 or kind != "llama"
    wanted = alone(oracle, list(known.values()))
    assert [i for i in known if not same(outputs[i], wanted[i])] == []
    assert_nothing_is_held(session)
    if tokens == 5000:  # nothing that could be shared had to make room
        prompt_tokens = sum(len(request.prompt_token_ids) for request in known.values())
        assert engine.stats.prefill_tokens < 0.8 * prompt_tokens
