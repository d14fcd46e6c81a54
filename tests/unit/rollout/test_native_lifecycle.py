"""Memory, sleep, weights, modes and interruptions of the native engine."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout_models import Source, prompts, requests_for, run, tiny_engine
from torch import nn

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import RolloutError
from hybridflow.models.cache.kv_cache import LayerShape, SlotCache, slot_capacity
from hybridflow.models.exact_mode import ExactMode
from hybridflow.rollout import memory
from hybridflow.rollout.base import RolloutStats
from hybridflow.rollout.build import build_rollout_engine
from hybridflow.rollout.memory import free_memory
from hybridflow.rollout.native.engine import NativeEngine


def test_the_cache_is_gone_when_the_engine_sleeps() -> None:
    engine = tiny_engine()
    run(engine, requests_for(prompts(4)))
    session = engine.open()
    session.add(requests_for(prompts(2)))
    session.step()
    held = [weakref.ref(memory) for memory in session.cache._memory.values()]
    session.close()
    del session
    gc.disable()  # nothing may wait for it: it comes late, and the memory is wanted now
    try:
        engine.sleep()
        assert [one() for one in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_cache_that_was_used_before_gives_the_same_tokens() -> None:
    engine = tiny_engine(max_num_seqs=6)
    run(engine, requests_for(prompts(8, seed=5), max_tokens=40, ignore_eos=True))
    held = engine.cache_bytes
    requests = requests_for(prompts(6), max_tokens=9)
    assert run(engine, requests) == run(tiny_engine(max_num_seqs=6), requests)
    assert engine.cache_bytes == held


def sized(cache: SlotCache, rows: int, length: int, live: int, longest: int) -> tuple[int, int, int]:
    """Slots, their capacity, and the room of each layer after the cache was asked for rows of a length."""
    running = min(rows, cache.num_slots)
    assert cache.grow(running, rows, length, live=live, longest=longest)
    return cache.num_slots, cache.capacity, cache.room


def test_slots_grow_with_rows_and_lengths_up_to_what_the_memory_holds() -> None:
    shapes = dict.fromkeys(range(2), LayerShape(2, 8, 8, torch.float32))

    def new() -> SlotCache:
        return SlotCache(shapes, max_tokens=1000)

    assert sized(new(), 2, 10, 4, 30) == (4, 16, 4 * 32)  # all that these requests can need
    assert sized(new(), 2, 10, 4, 500) == (4, 16, 4 * 80)
    assert sized(new(), 2, 10, 40, 500) == (40, 16, 1000)
    cache = new()
    cache.resize(4, 128, room=600)
    assert cache.room == 600 and sized(cache, 4, 128, 9, 500) == (4, 128, 600)
    assert sized(cache, 4, 129, 4, 500) == (4, 144, 600)
    assert sized(cache, 4, 112, 5, 500) == (5, 112, 600)  # rows that have become shorter
    cache = new()
    cache.resize(4, 128, room=600)
    assert sized(cache, 4, 161, 4, 500) == (4, 176, 4 * 240)
    assert not cache.grow(4, 4, 241, live=4, longest=500) and cache.capacity == 176
    assert sized(cache, 3, 300, 9, 500) == (3, 320, 960)
    assert cache.problem(960) is None and "gpu_memory_utilization" in (cache.problem(961) or "")
    assert free_memory(torch.device("cpu")) > 2**20
    cache = new()
    cache.capacity_of = ExactMode(96).num_keys
    assert sized(cache, 1, 97, 1, 200) == (1, 192, 192)


def test_as_many_rows_are_admitted_as_fit_with_the_longest() -> None:
    cache = SlotCache({0: LayerShape(1, 2, 2, torch.float32)}, max_tokens=1000)
    cache.plan(2, 40)
    assert cache.admit(5, 30, 90, None, 0) == 5  # 7 slots of 96
    assert cache.admit(5, 30, 20, None, 0) == 3  # 10
    assert cache.admit(1, 30, 20, None, 0) == 0
    cache.plan(2, 300)
    assert cache.admit(5, 30, 20, None, 0) == 1


def test_slots_take_all_the_room_where_parts_of_them_are_read_as_fast() -> None:
    cache = SlotCache({0: LayerShape(1, 8, 8, torch.float32)}, device="meta", max_tokens=1000)
    assert sized(cache, 2, 10, 4, 500) == (4, 80, 4 * 80)
    assert sized(cache, 3, 70, 4, 500) == (4, 80, 320)
    assert sized(cache, 3, 81, 4, 500) == (4, 160, 640)
    assert sized(cache, 4, 200, 4, 500) == (4, 250, 1000)


def test_keys_that_are_attended_over_follow_the_longest_row_alone() -> None:
    capacities = [slot_capacity(length) for length in range(1, 5000)]
    assert capacities == sorted(capacities)
    assert all(length <= wide < length + 16 + length / 8 for length, wide in enumerate(capacities, 1))
    assert len(set(capacities)) < 70


def test_little_memory_means_fewer_rows_and_the_same_tokens() -> None:
    requests = requests_for(prompts(6), n=2, max_tokens=9)
    wanted = run(tiny_engine(dtype=torch.float64), requests)
    per_row = 2 * 2 * 16 * 8 * (max(len(request.prompt_token_ids) for request in requests) + 9)
    engine = tiny_engine(
        dtype=torch.float64, gpu_memory_utilization=4.5 * per_row / free_memory(torch.device("cpu"))
    )
    outputs = run(engine, requests)
    assert engine.stats.max_rows < 8
    assert {i: output.token_ids for i, output in outputs.items()} == {
        i: output.token_ids for i, output in wanted.items()
    }
    with pytest.raises(RolloutError, match="KV cache"):
        list(tiny_engine(gpu_memory_utilization=1e-12).generate(requests))


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
            "total_inactive_file",
        ),
    ],
)
def test_a_container_has_what_its_limit_leaves_and_what_copies_of_files_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, str, str], line: str
) -> None:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    cpu = torch.device("cpu")
    whole = free_memory(cpu)
    (tmp_path / "memory").mkdir()
    for name, text in zip(names, ("max", "700000", f"anon 100000\n{line} 600000\n")):
        (tmp_path / name).write_text(text)
    assert free_memory(cpu) > whole / 2
    (tmp_path / names[0]).write_text("1000000\n")
    assert free_memory(cpu) == 900_000


def test_weights_of_another_name_or_shape_are_refused() -> None:
    engine = tiny_engine()
    with pytest.raises(RolloutError, match="no weight of that name"):
        engine.update_weights([("nonsense.weight", torch.zeros(2))], version=5)
    with pytest.raises(RolloutError, match="its own is"):
        engine.update_weights([("lm_head.weight", torch.zeros(2))], version=5)


def test_generation_runs_without_dropout_and_leaves_modes_and_gradients_as_they_were() -> None:
    engine = tiny_engine()
    wanted = run(engine, requests_for(prompts(3)))
    seen: list[bool] = []
    engine.policy.train()
    engine.policy.hf.model.norm.eval()
    handle = engine.policy.hf.model.layers[0].register_forward_hook(
        lambda module, *_: seen.append(module.training or torch.is_grad_enabled())
    )
    stream = engine.generate(requests_for(prompts(3)))
    first = next(stream)
    assert torch.is_grad_enabled()  # the caller's, between outputs
    assert {first.request_id: first, **{output.request_id: output for output in stream}} == wanted
    handle.remove()
    assert seen and not any(seen)
    assert engine.policy.training
    assert engine.policy.hf.model.layers[1].training
    assert not engine.policy.hf.model.norm.training
    loss = engine.policy.logits(nn.Parameter(torch.ones(1, 1, 32))).sum()
    loss.backward()
    assert engine.policy.head.weight.grad is not None


def test_a_call_that_is_left_early_can_be_followed_by_another() -> None:
    engine = tiny_engine()
    requests = requests_for(prompts(5))
    stream = engine.generate(requests)
    next(stream)
    with pytest.raises(RolloutError, match=r"generate\(\) is running"):
        engine.generate(requests)
    with pytest.raises(RolloutError, match="while generate"):
        engine.sleep()
    stream.close()  # type: ignore[attr-defined]
    assert len(run(engine, requests)) == 5
    early, late = engine.generate(requests), engine.generate(requests)
    next(early)
    with pytest.raises(RolloutError, match=r"generate\(\) is running"):
        next(late)
    assert len(list(early)) == 4


def test_the_configuration_builds_the_engine() -> None:
    policy = tiny_engine().policy
    engine = build_rollout_engine(
        RolloutConfig(max_num_seqs=3, max_num_batched_tokens=99, gpu_memory_utilization=0.25),
        policy,
        [2, 5, 2],
    )
    assert isinstance(engine, NativeEngine) and engine.eos_token_ids == (2, 5)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.gpu_memory_utilization) == (
        3,
        99,
        0.25,
    )


def test_weights_with_a_source_are_there_while_the_engine_is_awake() -> None:
    source = Source()
    engine = tiny_engine(source=source)
    with pytest.raises(RolloutError, match="wake_up"):
        engine.generate(requests_for(prompts(1)))
    engine.set_version(3)
    engine.wake_up()
    engine.wake_up()
    run(engine, requests_for(prompts(2)))
    engine.sleep()
    engine.set_version(4)
    engine.wake_up()
    assert source.events == [3, "released", 4]


def test_stats_of_replicas_and_of_calls_in_a_row() -> None:
    def stats(*counts: int, max_rows: int, seconds: float) -> RolloutStats:
        return RolloutStats(*counts, max_rows=max_rows, seconds=seconds)

    first = stats(10, 4, 5, 9, 1, 2, max_rows=3, seconds=2.0)
    second = stats(20, 6, 7, 11, 0, 3, max_rows=2, seconds=3.0)
    both = stats(30, 10, 12, 20, 1, 5, max_rows=3, seconds=3.0)
    assert RolloutStats.join([first, second], together=True) == both
    assert RolloutStats.join([first, second], together=False) == replace(both, seconds=5.0)
    assert RolloutStats.join([], together=True) == RolloutStats()
    assert RolloutStats.join([first], together=True) == first


def test_requests_are_dealt_by_prompt_and_by_what_they_may_cost() -> None:
    first, second = requests_for([(3, 4, 5)], n=2, max_tokens=7)
    assert first.deal_key == second.deal_key == (3, 4, 5) and first.deal_cost == 10.0
