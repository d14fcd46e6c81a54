"""Recorded decode steps, by a recorder that runs the function again and sees that nothing has moved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rollout_models import VOCABULARY, prompts, requests_for, run, tiny_engine, tiny_hf
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.models.attention.scores import Scores
from hybridflow.models.cache.kv_cache import KVCache, LayerShape, SlotCache
from hybridflow.models.cache.paged_cache import PagedCache
from hybridflow.models.flat_decoder import FlatDecoder
from hybridflow.models.policy import PolicyModel, run_backbone
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.build import build_rollout_engine
from hybridflow.rollout.native import graphs, sampling
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.native.graphs import (
    GraphDecoder,
    GraphSampler,
    capture_sizes,
    decode_rows,
    graph_decoder,
    key_bucket,
)

SIZES = [1, 2, 4, 8]


class Again:
    """A recording is the call itself, on the same memory; each gives one tensor, filled anew."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine, self.replays = engine, 0

    def addresses(self) -> list[int]:
        cache = self.engine._kv_cache()
        held = [
            *cache.keys.values(),
            *cache.values.values(),
            *self.engine.policy.parameters(),
            *self.engine.policy.buffers(),
        ]
        return [tensor.data_ptr() for tensor in held]

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        output, known = run(), self.addresses()

        def replay() -> Tensor:
            assert self.addresses() == known, "a graph would read and write where nothing is any longer"
            self.replays += 1
            output.copy_(run())
            # what is on its way to the host, which on a CPU is the tensor itself, does not change any longer
            return output.clone() if output.dtype == torch.int64 else output

        return replay

    def forget(self) -> None:
        pass


def recorded(
    kind: str = "llama", *, sizes: list[int] = SIZES, most: int = 64, recorder: Any = Again, **settings: Any
) -> NativeEngine:
    """A native engine whose steps are recorded."""
    engine = tiny_engine(kind, torch.float64, **settings)
    engine._kv_cache()
    engine.graphs = GraphDecoder(engine.policy, recorder(engine), sizes, most)
    of_choices = recorder(engine)
    of_choices.addresses = list  # they read nothing of the model and its cache
    engine.sampler = GraphSampler(of_choices, sizes)  # of sessions that look ahead
    return engine


def tokens(outputs: dict[int, GenerationOutput]) -> dict[int, list[int]]:
    assert not any(output.error for output in outputs.values())
    return {number: output.token_ids for number, output in outputs.items()}


class OnCuda(SlotCache):
    """Slots of the sizes that they have on CUDA."""

    _follows = False


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.rollout.native.engine.SlotCache", OnCuda)
    monkeypatch.setattr(graphs, "LEAST_KEYS", 8)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_the_tokens_are_those_of_steps_that_are_not_recorded(kind: str) -> None:
    # rows enter as others leave, prompts in pieces
    settings: dict[str, Any] = {"max_num_seqs": 7, "max_num_batched_tokens": 9}
    requests = requests_for(prompts(9), n=2, max_tokens=25)
    engine = recorded(kind, **settings)
    assert tokens(run(engine, requests)) == tokens(
        run(tiny_engine(kind, torch.float64, **settings), requests)
    )
    assert engine.graphs is not None and engine.graphs.problem is None
    assert 3 < engine.graphs.num_graphs <= engine.graphs.num_recorded < engine.stats.decode_steps
    assert engine.graphs._recorder.replays > engine.graphs.num_recorded  # type: ignore[attr-defined]


def test_a_prompt_in_chunked_prefill_is_safe_from_recorded_rows_beside_it_that_are_filled_up() -> None:
    wanted = tokens(
        run(
            tiny_engine(dtype=torch.float64),
            requests_for([*prompts(3), tuple(range(3, 43))], max_tokens=30, ignore_eos=True),
        )
    )
    engine = recorded(max_num_seqs=8, max_num_batched_tokens=6)
    with_pieces = engine.open()
    requests = requests_for([*prompts(3), tuple(range(3, 43))], max_tokens=30, ignore_eos=True)
    outputs: dict[int, GenerationOutput] = {}
    with_pieces.add(requests[:3])
    with_pieces.step()
    with_pieces.add(requests[3:])
    while not with_pieces.idle:
        outputs.update({output.request_id: output for output in with_pieces.step()})
    with_pieces.close()
    assert tokens(outputs) == wanted and engine.graphs is not None and engine.graphs.num_recorded > 0


class Lengths(Again):
    """Remembers the lengths of all rows of a bucket at each replay."""

    def __init__(self, engine: NativeEngine) -> None:
        super().__init__(engine)
        self.seen: list[tuple[int, list[int]]] = []
        self.rows = 8

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = super().record(run)

        def watched() -> Tensor:
            states = replay()
            assert self.engine.graphs is not None
            self.seen.append((self.rows, self.engine.graphs._lengths[: len(states)].tolist()))
            return states

        return watched


def test_rows_that_fill_a_bucket_up_are_empty_whatever_was_there_before() -> None:
    engine = recorded(recorder=Lengths, max_num_seqs=8)
    session = engine.open()
    # eight rows of which one after the other leaves: the bucket of 8 is used with 7, 6 and 5 rows too
    session.add([*requests_for(prompts(8), max_tokens=12, ignore_eos=True)])
    assert engine.graphs is not None
    recorder: Any = engine.graphs._recorder
    for leaving in range(4):
        session.step()
        recorder.rows = session.num_running
        session.step()
        session.abort([leaving])
        recorder.rows = session.num_running
    session.close()
    filled = [(rows, lengths) for rows, lengths in recorder.seen if rows < len(lengths)]
    assert {rows for rows, _ in filled} >= {5, 6, 7}
    for rows, lengths in filled:
        assert all(lengths[:rows]) and not any(lengths[rows:]), (rows, lengths)


def test_graphs_outlive_a_change_of_weights_and_not_a_move_of_them() -> None:
    engine, plain = recorded(max_num_seqs=4), tiny_engine(dtype=torch.float64, max_num_seqs=4)
    requests = requests_for(prompts(4), max_tokens=12, ignore_eos=True)
    before = tokens(run(engine, requests))
    assert engine.graphs is not None
    first = engine.graphs.num_recorded
    for policy in (engine.policy, plain.policy):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
        policy.logits(policy.head.weight.new_ones(1, 1, 32)).pow(2).sum().backward()
        optimizer.step()
    for one in (engine, plain):
        one.set_version(1)
    after = tokens(run(engine, requests))
    assert after == tokens(run(plain, requests)) != before
    assert engine.graphs.num_recorded == first
    for parameter in engine.policy.parameters():
        parameter.data = parameter.data.clone()
    assert tokens(run(engine, requests)) == after
    assert engine.graphs.num_recorded == 2 * first
    engine.sleep()
    assert engine.graphs.num_graphs == 0
    engine.wake_up()
    assert tokens(run(engine, requests)) == after and engine.graphs.num_recorded == 3 * first


def test_slots_that_grow_take_the_graphs_with_them() -> None:
    engine = recorded(max_num_seqs=4)
    for length in (5, 60):
        requests = requests_for(prompts(4), max_tokens=length, ignore_eos=True)
        assert tokens(run(engine, requests)) == tokens(
            run(tiny_engine(dtype=torch.float64, max_num_seqs=4), requests)
        )
    assert engine.graphs is not None and engine.graphs.num_graphs < engine.graphs.num_recorded


def attend_over_blocks(query: Tensor, keys: Tensor, values: Tensor, *bounds: Any, **how: Any) -> Tensor:
    """Attend as the kernel of CUDA does: lengths and blocks come in tensors, whatever the bounds say."""
    rows = []
    for row, length in enumerate(how["seqused_k"].tolist()):
        blocks = how["block_table"][row].long()
        key, value = (x[blocks].flatten(0, 1)[:length].transpose(0, 1) for x in (keys, values))
        attended = scaled_dot_product_attention(
            query[row][:, None], key, value, scale=how["scale"], enable_gqa=how["enable_gqa"]
        )
        rows.append(attended[:, 0])
    return torch.stack(rows)


class WithTable(Again):
    """Watches all that a step over blocks reads."""

    def addresses(self) -> list[int]:
        return [*super().addresses(), *(tensor.data_ptr() for tensor in self.engine._kv_cache().tensors())]


def blocks_as_on_cuda(
    monkeypatch: pytest.MonkeyPatch, memory: Callable[[PagedCache], None] = lambda cache: None
) -> NativeEngine:
    """An engine whose blocks are taken at once and read by a kernel; `memory` is told each new cache."""
    make = NativeEngine._new_cache

    def made(engine: NativeEngine, *facts: Any) -> KVCache:
        cache = make(engine, *facts)
        if isinstance(cache, PagedCache):
            cache.kernel = attend_over_blocks
            cache.reads_lengths = True
            memory(cache)
        return cache

    monkeypatch.setattr(NativeEngine, "_new_cache", made)
    monkeypatch.setattr("hybridflow.rollout.native.engine.free_memory", lambda device: 2**20)
    return recorded(kv_cache="paged", block_size=8, reserve_cache=True, max_num_seqs=8, recorder=WithTable)


def test_blocks_are_taken_once_and_a_graph_serves_rows_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_engine(dtype=torch.float64)
    engine = blocks_as_on_cuda(monkeypatch)
    cache = engine._kv_cache()
    held, place = engine.cache_bytes, cache.place
    assert held > 2**18
    for length in (5, 60):  # rows come and go, and use each of the sizes
        requests = requests_for(prompts(9), max_tokens=length)
        assert tokens(run(engine, requests)) == tokens(run(plain, requests))
    assert engine.graphs is not None and engine.graphs.problem is None
    assert engine.graphs.num_recorded == engine.graphs.num_graphs <= len(SIZES)
    assert (engine.cache_bytes, engine._kv_cache().place) == (held, place)
    assert engine.stats.decode_steps > 30


def test_graphs_outlive_sleep_where_the_memory_comes_back_at_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches: list[PagedCache] = []  # alive, so that no other cache gets their memory

    def same_memory(cache: PagedCache) -> None:
        if len(caches) % 2:
            for name in ("keys", "values"):
                for layer, stored in getattr(caches[-1], name).items():
                    getattr(cache, name)[layer] = stored.zero_()
            cache.table = caches[-1].table.zero_()
        caches.append(cache)

    engine = blocks_as_on_cuda(monkeypatch, same_memory)
    requests = requests_for(prompts(4), max_tokens=12, ignore_eos=True)
    wanted = tokens(run(engine, requests))
    assert engine.graphs is not None
    first = engine.graphs.num_recorded
    for comes_back, recordings in ((True, first), (False, 2 * first), (True, 2 * first)):
        engine.sleep()
        assert engine.cache_bytes == 0
        engine.wake_up()
        assert tokens(run(engine, requests)) == wanted
        assert engine.graphs.num_recorded == recordings, comes_back


MIXTURES: dict[str, list[dict[str, Any]]] = {
    "drawn": [{}],
    "temperature": [{"temperature": 0.7}],
    "greedy": [{"temperature": 0.0}],
    "top-p": [{"top_p": 0.8}],
    "all": [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9, "temperature": 2.0},
        {"top_k": 2},
        {"top_k": 12, "top_p": 0.95},
        {"min_p": 0.05, "stop_token_ids": tuple(range(20, 40))},
    ],
}


def mixture(name: str, count: int = 16) -> list[GenerationRequest]:
    """Requests of several lengths, whose parameters take turns; one has a long prompt."""
    kinds = MIXTURES[name]
    whole = [*prompts(count - 1), tuple(range(3, 43))]
    return [
        GenerationRequest(
            number,
            Prompt(prompt),
            SamplingParams(
                **{"max_tokens": 10 + number, "stop_token_ids": (7, 11), **kinds[number % len(kinds)]}
            ),
            number,
        )
        for number, prompt in enumerate(whole)
    ]


@pytest.mark.parametrize(
    ("name", "leaders"),  # only what limits the tokens looks at leaders
    [*((name, 5) for name in MIXTURES), ("top-p", 1024), ("all", 1024)],
)
def test_recorded_choices_are_those_of_steps_that_are_not_recorded(
    name: str, leaders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows enter as others leave, one prompt in pieces beside them, and rows whose leaders do not suffice."""
    for key, value in {"ONE_LEVEL": 8, "BLOCK": 8, "LEADERS": 2, "MANY_LEADERS": leaders}.items():
        monkeypatch.setattr(sampling, key, min(value, VOCABULARY))
    settings: dict[str, Any] = {"max_num_seqs": 7, "max_num_batched_tokens": 9}
    wanted = run(tiny_engine(dtype=torch.float64, **settings), mixture(name))
    engine = recorded(look_ahead=True, **settings)
    assert engine.sampler is not None
    for _ in range(2):  # another session, whose table lies elsewhere
        found = run(engine, mixture(name))
        for number, one in wanted.items():
            other = found[number]
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-12)
    sampler = engine.sampler
    assert sampler.problem is None and 3 < sampler.num_recorded < engine.stats.decode_steps / 2
    assert sampler._recorder.replays > sampler.num_recorded  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "params",
    [{"min_tokens": 9}, {"top_log_probs": 2}, {"repetition_penalty": 1.2}, {"logit_bias": ((5, 2.0),)}],
    ids=str,
)
def test_what_few_requests_ask_for_is_chosen_without_a_recording(params: dict[str, Any]) -> None:
    requests = requests_for(prompts(4), max_tokens=12, **params)
    engine = recorded(look_ahead=True)
    found = run(engine, requests)
    assert tokens(found) == tokens(run(tiny_engine(dtype=torch.float64), requests))
    assert engine.sampler is not None and engine.sampler.num_recorded == 0
    assert engine.graphs is not None and engine.graphs.num_recorded > 0


def test_recorded_choices_outlive_the_weights_and_go_with_sleep_and_wider_rows() -> None:
    engine = recorded(look_ahead=True, max_num_seqs=4)
    sampler = engine.sampler
    assert sampler is not None
    requests = requests_for(prompts(4), max_tokens=9, ignore_eos=True)
    wanted = tokens(run(engine, requests))
    assert tokens(run(engine, requests)) == wanted and sampler.num_recorded == 1
    engine.policy.head.weight.data = engine.policy.head.weight.data.clone()
    engine.set_version(1)
    assert tokens(run(engine, requests)) == wanted and sampler.num_recorded == 1
    engine.sleep()
    assert not sampler._graphs and not sampler._buffers
    engine.wake_up()
    assert tokens(run(engine, requests)) == wanted and sampler.num_recorded == 2
    unused = set(range(3, VOCABULARY)).difference(*wanted.values())
    many = requests_for(prompts(4), max_tokens=9, ignore_eos=True, stop_token_ids=tuple(unused))
    assert len(unused) > 8 and tokens(run(engine, many)) == wanted and sampler.num_recorded == 3
    few = requests[:2]
    assert tokens(run(engine, few)) == {number: wanted[number] for number in range(2)}
    assert sampler.num_recorded == 4  # for two rows, in the same buffers
    assert tokens(run(engine, requests)) == wanted and sampler.num_recorded == 4


def test_few_graphs_are_kept_and_rows_beyond_the_largest_go_without() -> None:
    engine = recorded(sizes=[1, 2], most=1, max_num_seqs=2)
    requests = requests_for(prompts(4), max_tokens=40)
    assert tokens(run(engine, requests)) == tokens(run(tiny_engine(dtype=torch.float64), requests))
    assert engine.graphs is not None and engine.graphs.num_graphs == 1 < engine.graphs.num_recorded
    engine = recorded(sizes=[2], max_num_seqs=4)
    run(engine, requests_for(prompts(4), max_tokens=10, ignore_eos=True))
    assert engine.graphs is not None and engine.graphs.num_recorded == 0


class Fails(Again):
    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")


class Lies(Again):
    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        first = run().clone()
        return lambda: first * 1.001


@pytest.mark.parametrize(
    ("recorder", "told"), [(Fails, "not permitted when stream is capturing"), (Lies, "gave other states")]
)
def test_what_cannot_be_recorded_is_said_once_and_done_without(
    recorder: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = recorded(recorder=recorder)
    requests = requests_for(prompts(6), max_tokens=15)
    with caplog.at_level(logging.WARNING):
        assert tokens(run(engine, requests)) == tokens(run(tiny_engine(dtype=torch.float64), requests))
        run(engine, requests)
    lines = [record.getMessage() for record in caplog.records if record.name == graphs.__name__]
    assert len(lines) == 1 and told in lines[0] and "rollout.enforce_eager=true" in lines[0]
    assert engine.graphs is not None
    assert engine.graphs.num_graphs == 0
    assert told in (engine.graphs.problem or "")


class FailsToChoose(Again):
    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if run().dtype == torch.int64:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(run)


class LiesAboutTokens(Again):
    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if run().dtype == torch.int64:
            wrong = run() + 1
            return lambda: wrong
        return super().record(run)


@pytest.mark.parametrize(
    ("recorder", "told"), [(FailsToChoose, "not permitted"), (LiesAboutTokens, "chose other tokens")]
)
def test_a_choice_that_cannot_be_recorded_leaves_the_steps_recorded(
    recorder: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = recorded(recorder=recorder, look_ahead=True)
    requests = requests_for(prompts(6), max_tokens=15)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert tokens(run(engine, requests)) == tokens(run(tiny_engine(dtype=torch.float64), requests))
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("hybridflow")]
    assert told in line and "rollout.enforce_eager=true" in line
    assert engine.graphs is not None and engine.graphs.problem is None and engine.graphs.num_graphs > 0


def test_what_is_not_finite_does_not_stay_in_slots_that_were_filled_up() -> None:
    engine = recorded(max_num_seqs=8)
    requests = requests_for(prompts(8), max_tokens=12, ignore_eos=True)
    wanted = tokens(run(tiny_engine(dtype=torch.float64, max_num_seqs=8), requests))
    session = engine.open()
    session.add(requests[:5])  # in a graph of eight rows
    session.step()
    weight = engine.policy.hf.model.layers[0].self_attn.v_proj.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    broken = [output for _ in range(2) for output in session.step()]
    assert len(broken) == 5 and all(output.error for output in broken)
    weight.copy_(kept)
    session.add(requests)
    outputs: dict[int, GenerationOutput] = {}
    while not session.idle:
        outputs.update({output.request_id: output for output in session.step()})
    session.close()
    assert tokens(outputs) == wanted


def test_rows_that_fill_a_graph_up_write_one_finite_token_and_to_free_slots_only() -> None:
    # a window of five tokens, which must not hide all that a row sees
    engine = recorded("mistral", sizes=[8])
    cache = SlotCache(dict.fromkeys(range(2), LayerShape(2, 8, 8, torch.float64)), 7, 64)
    assert engine.graphs is not None
    engine._cache = cache
    # the padding token's is 0, and would leave no trace
    engine.policy.hf.get_input_embeddings().weight.data[0] = 1
    for turn in range(2):
        with torch.no_grad():
            # the fourth row's prompt is in chunked prefill: its next token is the eleventh
            lengths = torch.tensor([20, 9, 3, 11]) + turn * torch.tensor([1, 1, 1, 0])
            engine.graphs(cache, torch.tensor([5, 6, 7]), lengths, 20 + turn)
    assert engine.graphs.num_recorded == 1 and engine.graphs._recorder.replays == 2  # type: ignore[attr-defined]
    for stored in (*cache.keys.values(), *cache.values.values()):
        written = stored.abs().sum((1, 3)) > 0  # [slots, capacity]
        assert written.nonzero().tolist() == [
            [0, 20],
            [0, 21],
            [1, 9],
            [1, 10],
            [2, 3],
            [2, 4],
            [3, 11],
            *([slot, 0] for slot in range(4, 7)),
        ]
        assert stored.isfinite().all()


class HostSeen(TorchDispatchMode):
    """Notes operations that touch a tensor outside of the device; on the meta device, asking for a value is
    an error anyway.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(
            isinstance(leaf, Tensor) and leaf.device.type != "meta"
            for leaf in tree_leaves((args, kwargs, out))
        ):
            self.names.append(str(func))
        return out


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma2"])
def test_a_step_needs_nothing_of_the_host_so_it_can_be_recorded(kind: str) -> None:
    policy = PolicyModel(tiny_hf(kind, torch.bfloat16).to("meta"))
    cache = SlotCache(dict.fromkeys(range(2), LayerShape(2, 8, 8, torch.bfloat16)), 4, 64, "meta")
    tokens, lengths = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    base = policy.hf.base_model
    flat = FlatDecoder.of(base, {layer: Scores(layer) for layer in range(2)})
    assert (flat is None) == (kind == "gemma2")
    # the choice in the first step asks for values, and is made before
    for policy._decoder in filter(None, (partial(run_backbone, base), flat)):
        with HostSeen() as seen, torch.no_grad():
            states = decode_rows(policy, cache, tokens, lengths, 31, 32)
        assert tuple(states.shape) == (3, 32) and not seen.names


def test_buckets_are_few() -> None:
    assert capture_sizes(256) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert capture_sizes(5) == [1, 2, 4, 5] and capture_sizes(1) == [1]
    assert [key_bucket(keys) for keys in (1, 8, 9, 13, 17, 25, 33)] == [8, 8, 12, 16, 24, 32, 48]


def test_the_keys_reach_the_engine_which_records_on_cuda_only() -> None:
    engine = tiny_engine()
    config = RolloutConfig(enforce_eager=True, cudagraph_capture_sizes=[2, 3])
    built = build_rollout_engine(config, engine.policy, [2])
    assert isinstance(built, NativeEngine)
    assert (built.enforce_eager, built.cudagraph_capture_sizes) == (
        True,
        [2, 3],
    )
    run(engine, requests_for(prompts(2)))
    assert engine.graphs is None
    assert graph_decoder(engine.policy, max_rows=4, enforce_eager=False, sizes=None, ranks=1) is None
