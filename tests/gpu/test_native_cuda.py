"""The native engine on a CUDA device: recorded decode steps give what steps that are not recorded give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from hybridflow.models.attention.paged_kernel import varlen_kernel
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.engine import CacheKind, NativeEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_of(dtype: torch.dtype, device: str = "cuda") -> PreTrainedModel:
    """A random model, always the same for one dtype."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **SIZES, vocab_size=512, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.2
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    return model


def policy_of(dtype: torch.dtype = torch.float64) -> PolicyModel:
    """That model on the device; in double precision rounding changes no greedy token."""
    return PolicyModel(model_of(dtype))


def requests(rows: int, new: int) -> list[GenerationRequest]:
    """Greedy ones, with prompts and responses of several lengths."""
    draw = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 512, (5 + row % 7,), generator=draw).tolist()) for row in range(rows)]
    return [
        GenerationRequest(
            row, Prompt(prompt), SamplingParams(temperature=0.0, max_tokens=new - row), seed=row
        )
        for row, prompt in enumerate(prompts)
    ]


def tokens(engine: NativeEngine, asked: list[GenerationRequest]) -> dict[int, list[int]]:
    outputs = list(engine.generate(asked))
    assert not [output.error for output in outputs if output.error]
    return {output.request_id: output.token_ids for output in outputs}


def train(policy: PolicyModel) -> None:
    """One optimizer step, in place."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    policy.logits(policy.head.weight[:4]).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_greedy_tokens_are_those_without_graphs_after_an_optimizer_step_too() -> None:
    recorded = NativeEngine(policy_of(), eos_token_ids=[], max_num_seqs=6)
    eager = NativeEngine(policy_of(), eos_token_ids=[], max_num_seqs=6, enforce_eager=True)
    asked = requests(9, 150)
    before = tokens(recorded, asked)
    assert before == tokens(eager, asked) and eager.graphs is None
    assert recorded.graphs is not None
    assert recorded.graphs.problem is None
    assert recorded.graphs.num_recorded > 2
    assert tokens(recorded, asked) == before  # slots have their size now, and each bucket its graph
    known = recorded.graphs.num_recorded
    for engine in (recorded, eager):
        train(engine.policy)
        engine.set_version(1)
    after = tokens(recorded, asked)
    assert after == tokens(eager, asked) and after != before
    assert recorded.graphs.num_recorded == known  # the weights are where they were, and so are the slots


@pytest.mark.parametrize("leaders", [8, 256])
def test_recorded_choices_are_those_without_graphs(leaders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few leaders, rows whose leaders do not suffice are taken back."""
    for name, value in {"ONE_LEVEL": 128, "LEADERS": 8, "MANY_LEADERS": leaders, "BLOCK": 16}.items():
        monkeypatch.setattr(sampling, name, value)
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5},
        {"top_k": 40, "top_p": 0.95},
        {"min_p": 0.05},
    ]
    asked = [
        replace(one, sampling=SamplingParams(max_tokens=60 + 5 * row, **kinds[row % len(kinds)]))  # type: ignore[arg-type]
        for row, one in enumerate(requests(18, 60))
    ]
    engine = NativeEngine(policy_of(), eos_token_ids=[7, 9], max_num_seqs=7)
    plain = NativeEngine(
        policy_of(), eos_token_ids=[7, 9], max_num_seqs=7, enforce_eager=True, look_ahead=False
    )
    wanted = tokens(plain, asked)
    for _ in range(2):
        assert tokens(engine, asked) == wanted
        assert engine.sampler is not None and engine.sampler.problem is None
        assert engine.sampler.num_recorded > 2
        engine.sleep()
        engine.wake_up()


NEEDS_BLOCKS = pytest.mark.skipif(
    varlen_kernel() is None, reason="this torch has no attention that reads blocks"
)


@pytest.mark.parametrize(("kind", "graphs"), [("slots", 2), pytest.param("paged", 1, marks=NEEDS_BLOCKS)])
def test_a_graph_for_each_bucket_of_rows_and_in_slots_of_keys_and_no_more(
    kind: CacheKind, graphs: int
) -> None:
    engine = NativeEngine(
        policy_of(torch.bfloat16),
        eos_token_ids=[],
        max_num_seqs=4,
        cudagraph_capture_sizes=[4],
        kv_cache=kind,
    )
    sampling = SamplingParams(max_tokens=180)
    asked = [GenerationRequest(row, Prompt((3 + row, 4, 5, 6)), sampling, seed=row) for row in range(4)]
    for _ in range(2):  # slots grow in the first one, which drops the graphs that it began with
        list(engine.generate(asked))
    assert engine.graphs is not None and engine.graphs.problem is None
    assert engine.graphs.num_graphs == graphs  # in slots: up to 128 keys, and up to 192
    known = engine.graphs.num_recorded
    list(engine.generate(asked))
    assert engine.graphs.num_recorded == known
    list(engine.generate(asked[:3]))  # filled up with a row that is none
    assert engine.graphs.num_recorded == known


def test_sleep_gives_the_memory_of_slots_and_graphs_back() -> None:
    engine = NativeEngine(policy_of(), eos_token_ids=[], max_num_seqs=32)
    asked = requests(32, 200)
    first = tokens(engine, asked)
    engine.sleep()
    asleep = torch.cuda.memory_reserved()
    for _ in range(3):
        engine.wake_up()
        assert tokens(engine, asked) == first
        assert torch.cuda.memory_reserved() > asleep
        engine.sleep()
        assert engine.graphs is not None and engine.graphs.num_graphs == 0 and engine.cache_bytes == 0
        assert torch.cuda.memory_reserved() <= asleep + 2 * 2**20


def test_weights_that_were_moved_are_recorded_anew() -> None:
    engine = NativeEngine(policy_of(), eos_token_ids=[], max_num_seqs=4)
    asked = requests(4, 60)
    first = tokens(engine, asked)
    assert engine.graphs is not None
    known = engine.graphs.num_recorded
    for parameter in engine.policy.parameters():
        parameter.data = parameter.data.clone()
    assert tokens(engine, asked) == first and engine.graphs.num_recorded == 2 * known


@NEEDS_BLOCKS
def test_blocks_that_come_back_at_their_addresses_need_no_graph_anew() -> None:
    engine = NativeEngine(policy_of(torch.bfloat16), eos_token_ids=[], max_num_seqs=8, kv_cache="paged")
    asked = requests(8, 100)
    list(engine.generate(asked))
    assert engine.graphs is not None and engine.graphs.problem is None
    for _ in range(3):
        before = [tensor.data_ptr() for tensor in engine._kv_cache().tensors()]
        known = engine.graphs.num_recorded
        held = torch.cuda.memory_reserved()
        taken = engine.cache_bytes
        engine.sleep()
        assert torch.cuda.memory_reserved() <= held - 0.9 * taken
        engine.wake_up()
        list(engine.generate(asked))
        moved = [tensor.data_ptr() for tensor in engine._kv_cache().tensors()] != before
        assert (engine.graphs.num_recorded > known) == moved


@pytest.mark.parametrize("kind", ["slots", pytest.param("paged", marks=NEEDS_BLOCKS)])
def test_tokens_do_not_depend_on_when_the_host_looks_at_them(kind: CacheKind) -> None:
    outputs = []
    for look_ahead in (False, True):
        engine = NativeEngine(
            policy_of(torch.bfloat16 if kind == "paged" else torch.float64),
            eos_token_ids=[],
            max_num_seqs=6,
            kv_cache=kind,
            look_ahead=look_ahead,
            cudagraph_capture_sizes=[6],
        )
        outputs.append(tokens(engine, requests(6, 150)))
    assert outputs[0] == outputs[1]


@NEEDS_BLOCKS
def test_rows_in_blocks_get_the_log_probs_of_rows_in_slots() -> None:
    asked = [
        GenerationRequest(
            row,
            Prompt(tuple(range(3, 200 + 40 * row))),
            SamplingParams(temperature=0.0, max_tokens=120),
            seed=row,
        )
        for row in range(8)
    ]
    outputs = []
    for kind, eager in (("slots", False), ("paged", True), ("paged", False)):
        engine = NativeEngine(
            policy_of(torch.bfloat16), eos_token_ids=[], max_num_seqs=6, kv_cache=kind, enforce_eager=eager
        )  # type: ignore[arg-type]
        outputs.append({output.request_id: output for output in engine.generate(asked)})
        assert eager or (engine.graphs is not None and engine.graphs.problem is None)
    for other in outputs[1:]:
        for number, output in outputs[0].items():
            mine, theirs = output.token_ids, other[number].token_ids
            assert len(mine) == len(theirs)
            same = next(
                (place for place, pair in enumerate(zip(mine, theirs)) if len({*pair}) > 1), len(mine)
            )
            assert output.log_probs[:same] == pytest.approx(other[number].log_probs[:same], abs=0.1)
            if same < len(mine):  # then both were as probable, but for rounding in bfloat16
                assert output.log_probs[same] == pytest.approx(other[number].log_probs[same], abs=0.1)
    # and all tokens of each way, also those after the first that differs, are what the model says of them in
    # float32: bfloat16 differs from it by up to 0.5 nats here, another token by several
    judge = model_of(torch.bfloat16).float()
    for way in outputs:
        for request in asked:
            output = way[request.request_id]
            ids = torch.tensor([[*request.prompt_token_ids, *output.token_ids]], device="cuda")
            with torch.no_grad():
                logits = judge(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
            wanted = logits.log_softmax(-1)
            chosen = wanted.gather(1, torch.tensor(output.token_ids, device="cuda")[:, None])[:, 0]
            assert output.log_probs == pytest.approx(chosen.tolist(), abs=1.0)
            assert bool((chosen >= wanted.max(-1).values - 1.0).all()), "greedy, but for rounding"


def test_a_model_that_cannot_be_recorded_is_decoded_without(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NativeEngine(policy_of(), eos_token_ids=[], max_num_seqs=4)
    asked = requests(4, 30)
    wanted = tokens(NativeEngine(policy_of(), eos_token_ids=[], max_num_seqs=4, enforce_eager=True), asked)
    decode = engine.policy.decode

    def asks_the_device(*args: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
        states = decode(*args, **keywords)  # type: ignore[arg-type]
        float(states.sum())  # waits for the device, which a recording forbids
        return states

    monkeypatch.setattr(engine.policy, "decode", asks_the_device)
    assert tokens(engine, asked) == wanted
    assert engine.graphs is not None and engine.graphs.problem is not None and engine.graphs.num_graphs == 0
    torch.cuda.synchronize()  # and the device goes on
