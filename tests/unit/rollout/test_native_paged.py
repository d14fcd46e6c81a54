"""Rows in blocks: what slots give, in the blocks that rows really need, and none of them is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from rollout_models import prompts, requests_for, run, tiny_engine
from test_native_graphs import Again
from test_native_session import alone, finish, limit_memory, random_sequence, same

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import RolloutError
from hybridflow.models.cache import kv_cache
from hybridflow.models.cache.paged_cache import PagedCache
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.build import build_rollout_engine
from hybridflow.rollout.native import engine as engine_module
from hybridflow.rollout.native import graphs
from hybridflow.rollout.native.engine import CacheKind, NativeEngine
from hybridflow.rollout.native.graphs import GraphDecoder

BLOCK = 16


def paged(
    kind: str = "llama", dtype: torch.dtype = torch.float64, block_size: int = BLOCK, **settings: Any
) -> NativeEngine:
    return tiny_engine(kind, dtype, kv_cache="paged", block_size=block_size, **settings)


def cache_of(engine: NativeEngine) -> PagedCache:
    cache = engine._kv_cache()
    assert isinstance(cache, PagedCache)
    return cache


def assert_counted(cache: PagedCache, kept: list[Any]) -> None:
    """Each block has as many who have it as it says, and is free where nobody has."""
    pool = cache.pool
    counts = [1] + [0] * (pool.size - 1)
    for blocks in cache.blocks:
        for block in blocks:
            counts[block] += 1
    assert counts == pool.row_counts and pool.in_rows == sum(count > 0 for count in counts[1:])
    for one in kept:
        for block in one.copy.blocks:
            counts[block] += 1
    assert counts == pool.ref_counts
    assert sorted(pool.free) == [block for block, count in enumerate(counts) if count == 0]
    assert pool.size <= cache.max_blocks


def assert_all_free(engine: NativeEngine) -> None:
    pool = cache_of(engine).pool
    assert len(pool.free) == pool.size - 1 > 0 and not any(cache_of(engine).blocks)


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [("llama", 4), ("llama", 16), ("mistral", 8), ("gemma2", 4), ("gpt_oss", 16), ("deepseek_v3", 8)],
)
def test_tokens_and_log_probs_are_those_of_slots(kind: str, block_size: int) -> None:
    settings: dict[str, Any] = {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 9,
    }  # groups, prompts in pieces, rows that enter as others leave
    shared = tuple(range(3, 30))
    requests = requests_for([*prompts(5), shared, (*shared, 30), (*shared, 31, 32)], n=3, max_tokens=14)
    wanted = run(tiny_engine(kind, torch.float64, **settings), requests)
    engine = paged(kind, block_size=block_size, **settings)
    got = run(engine, requests)
    assert all(same(got[number], wanted[number]) for number in wanted)
    assert engine.stats.prefill_tokens < sum(len(request.prompt_token_ids) for request in requests) / 2
    assert_all_free(engine)


def test_a_group_has_its_prompt_once() -> None:
    engine = paged(max_num_seqs=8)
    session = engine.open()
    session.add(requests_for([tuple(range(3, 3 + 2 * BLOCK + 5))], n=8, max_tokens=30, ignore_eos=True))
    session.step()
    cache = cache_of(engine)
    assert len({tuple(row[:2]) for row in cache.blocks[:8]}) == 1
    assert len({row[2] for row in cache.blocks[:8]}) == 8
    assert cache.pool.size - 1 - len(cache.pool.free) == 2 + 8
    session.close()
    assert_all_free(engine)
    engine.sleep()
    assert engine.cache_bytes == 0


def test_short_rows_beside_a_long_one_take_only_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "AHEAD", 4)
    most: dict[str, int] = {}
    requests = [
        GenerationRequest(
            i, Prompt((3 + i,) * (70 if i == 0 else 5)), SamplingParams(20, ignore_eos=True), seed=i
        )
        for i in range(9)
    ]
    for kind in ("slots", "paged"):
        engine = tiny_engine(dtype=torch.float64, kv_cache=kind, block_size=8)
        limit_memory(engine, 300, monkeypatch)
        run(engine, requests)
        most[kind] = engine.stats.max_rows
    assert most["slots"] < most["paged"] == 9


@pytest.mark.parametrize(
    ("kind", "tokens", "block_size"), [("llama", 144, 8), ("gemma2", 5000, 8), ("mistral", 140, 4)]
)
def test_random_sequences_lose_no_block(
    kind: str, tokens: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "AHEAD", 4)
    oracle = tiny_engine(kind, torch.float64, enable_prefix_caching=False)
    engine = paged(kind, block_size=block_size, max_num_seqs=5, max_num_batched_tokens=24)
    limit_memory(engine, tokens, monkeypatch)
    session = engine.open()
    cache = cache_of(engine)

    def counted() -> None:
        assert_counted(cache, list(session.prefixes._copies))
        running = session.num_running
        assert cache.lengths[:running].tolist() == session.rows.length[:running].tolist()

    known, outputs, made_room = random_sequence(session, random.Random(11), 22, counted)
    assert made_room > 0 or tokens == 5000
    wanted = alone(oracle, list(known.values()))
    assert [number for number in known if not same(outputs[number], wanted[number])] == []
    session.close()
    assert_all_free(engine)


def test_a_prompt_as_long_as_memory_enters_in_pieces_beside_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = paged(max_num_batched_tokens=10, block_size=4)
    limit_memory(engine, 60 + 4, monkeypatch)
    prompt = tuple(range(3, 33))
    requests = [
        GenerationRequest(0, Prompt(prompt), SamplingParams(8, ignore_eos=True), seed=0),
        # all of the memory
        GenerationRequest(
            1, Prompt((*prompt[:21], *range(3, 36))), SamplingParams(6, ignore_eos=True), seed=1
        ),
        GenerationRequest(2, Prompt(prompt[:20]), SamplingParams(40, ignore_eos=True), seed=2),
    ]
    session = engine.open()
    outputs: dict[int, GenerationOutput] = {}
    for request in requests:
        assert session.add([request]) == []
        outputs |= finish(session)
    wanted = alone(tiny_engine(dtype=torch.float64), requests)
    assert all(same(outputs[number], wanted[number]) for number in wanted)
    (refused,) = session.add([GenerationRequest(3, Prompt(prompt * 2), SamplingParams(1), seed=0)])
    assert "gpu_memory_utilization" in (refused.error or "")


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_may_change_while_rows_run(recompute: bool) -> None:
    outputs = []
    requests = requests_for([tuple(range(3, 25)), *prompts(2)], n=2, max_tokens=24, ignore_eos=True)
    for make in (tiny_engine, paged):
        engine = make(
            dtype=torch.float64, recompute_on_update=recompute, max_num_seqs=5, max_num_batched_tokens=40
        )
        session = engine.open()
        session.add(requests)
        for _ in range(6):
            session.step()
        with torch.no_grad():
            for parameter in engine.policy.parameters():
                parameter.mul_(1.1)
        engine.set_version(1)
        outputs.append(finish(session))
        session.close()
    assert_all_free(engine)
    assert all(same(outputs[1][number], outputs[0][number]) for number in outputs[0])
    assert {0, 1} == {version for output in outputs[1].values() for version in output.policy_versions}


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_steps_over_blocks_are_recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LEAST_KEYS", 8)
    settings: dict[str, Any] = {"max_num_seqs": 7, "max_num_batched_tokens": 9}
    requests = requests_for(prompts(7), n=2, max_tokens=18)
    wanted = run(tiny_engine(kind, torch.float64, **settings), requests)
    engine = paged(kind, block_size=8, **settings)
    cache = cache_of(engine)

    class WithTable(Again):
        def addresses(self) -> list[int]:
            return [*super().addresses(), cache.table.data_ptr()]

    engine.graphs = GraphDecoder(engine.policy, WithTable(engine), [1, 2, 4, 8])
    got = run(engine, requests)
    assert engine.graphs.problem is None and engine.graphs.num_recorded < engine.stats.decode_steps
    assert all(same(got[number], wanted[number]) for number in wanted)


def test_exact_mode_gives_the_same_bits() -> None:
    outputs = []
    for engine in (tiny_engine(), paged(dtype=torch.float32)):
        engine.policy.exact = ExactMode(32)
        outputs.append(run(engine, requests_for(prompts(4), n=2, max_tokens=20)))
    for number, output in outputs[0].items():
        assert (output.token_ids, output.log_probs) == (
            outputs[1][number].token_ids,
            outputs[1][number].log_probs,
        )


def test_on_cuda_blocks_are_taken_where_a_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    problem: list[str | None] = [None]
    monkeypatch.setattr(engine_module, "kernel_problem", lambda *facts: problem[0])
    monkeypatch.setattr(PolicyModel, "device", torch.device("cuda"))
    kinds: tuple[CacheKind, ...] = ("auto", "slots", "paged")
    assert [tiny_engine(kv_cache=kind)._chosen({}, {}) for kind in kinds] == [True, False, True]
    exact = tiny_engine()
    exact.policy.exact = ExactMode(32)
    assert not exact._chosen({}, {})
    problem[0] = "no kernel"
    assert [tiny_engine(kv_cache=kind)._chosen({}, {}) for kind in kinds[:2]] == [False, False]
    with pytest.raises(RolloutError, match="kv_cache=paged: no kernel; set it to slots"):
        tiny_engine(kv_cache="paged")._chosen({}, {})


def test_the_key_chooses() -> None:
    policy = tiny_engine().policy
    for kind, is_paged in (("auto", False), ("slots", False), ("paged", True)):
        engine = build_rollout_engine(RolloutConfig(kv_cache=kind), policy, [])
        assert isinstance(engine, NativeEngine) and engine.block_size == 256
        assert isinstance(engine._kv_cache(), PagedCache) == is_paged
