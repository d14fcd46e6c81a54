"""Exact mode: a token's log-prob has the same bits in generation and in training, alone and in company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import zoo

from hybridflow.models.attention.scores import Scores
from hybridflow.models.exact_mode import SUM_STEP, ExactMode, SplitLinear, even_rows, uneven_layer
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.self_check import Mismatch, choose_exact_mode, self_check

LENGTHS = (1, 5, 16, 37, 61, 80, 9, 3)
DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def exact_policy(kind: str, longest: int = 110) -> PolicyModel:
    policy = PolicyModel(zoo.tiny_hf(kind))
    policy.exact = ExactMode.choices(policy.hf.base_model, longest)[-1]
    return policy


def requests(count: int, temperature: float = 1.0) -> list[GenerationRequest]:
    draw = torch.Generator().manual_seed(3)
    made = []
    for row in range(count):
        prompt = tuple(torch.randint(3, zoo.VOCABULARY, (LENGTHS[row % 8],), generator=draw).tolist())
        sampling = SamplingParams(max_tokens=3 + (row * 7) % 20, temperature=temperature, ignore_eos=True)
        made.append(GenerationRequest(row, Prompt(prompt), sampling, seed=1000 * row))
    return made


def generate(
    policy: PolicyModel, asked: Sequence[GenerationRequest], **settings: int
) -> dict[int, GenerationOutput]:
    engine = NativeEngine(policy, eos_token_ids=(2,), **settings)  # type: ignore[arg-type]
    return {output.request_id: output for output in engine.generate(asked)}


def trained(
    policy: PolicyModel,
    asked: Sequence[GenerationRequest],
    outputs: dict[int, GenerationOutput],
    temperature: float,
) -> dict[int, list[float]]:
    """Log-probs by row as an update computes them, all in one micro-batch."""
    responses = [outputs[one.request_id].token_ids for one in asked]
    packed = pack(
        DataProto.from_dict(make_rows([one.prompt_token_ids for one in asked], responses, pad_id=0))
    )
    values = policy.train()(packed, temperature=temperature, with_entropy=True).log_probs
    assert values.requires_grad
    return {
        one.request_id: part.tolist()
        for one, part in zip(asked, values.detach().split([len(row) for row in responses]))
    }


@pytest.mark.usefixtures("two_threads")
def test_two_threads_agree_to_the_bit() -> None:
    check_agreement("llama", num_rows=3)  # spinning threads are slow where cores are shared


@pytest.mark.parametrize("kind", DENSE)
def test_generation_and_training_agree_to_the_bit(kind: str) -> None:
    check_agreement(kind, num_rows=24)


def check_agreement(kind: str, num_rows: int) -> None:
    policy, temperature = exact_policy(kind), 0.7
    asked = requests(num_rows, temperature)
    outputs = generate(policy, asked)
    together = trained(policy, asked, outputs, temperature)
    alone = {
        one.request_id: trained(policy, [one], outputs, temperature)[one.request_id] for one in asked[:4]
    }
    for row, output in outputs.items():
        assert output.log_probs == together[row]
        assert row not in alone or output.log_probs == alone[row]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_row_gives_the_same_tokens_alone_in_another_order_and_after_compaction(kind: str) -> None:
    policy = exact_policy(kind)
    asked = requests(24)
    outputs = generate(policy, asked)
    others = [
        generate(policy, asked[::-1]),
        generate(policy, asked, max_num_seqs=5),  # rows wait, and move up into free slots
        generate(policy, asked[::-1], max_num_seqs=7, max_num_batched_tokens=24),  # prompts in pieces
        *(generate(policy, [one]) for one in asked[:4]),
    ]
    for found in others:
        for row, output in found.items():
            assert (output.token_ids, output.log_probs) == (outputs[row].token_ids, outputs[row].log_probs)


def test_a_prompt_that_begins_like_a_finished_row_reuses_its_keys_and_stays_exact() -> None:
    policy = exact_policy("llama")
    first, other = requests(6)[3], requests(6)[2]
    engine = NativeEngine(policy, eos_token_ids=(2,))

    def run(session_requests: list[GenerationRequest]) -> dict[int, GenerationOutput]:
        session.add(session_requests)
        found = {}
        while not session.idle:
            found |= {output.request_id: output for output in session.step()}
        return found

    session = engine.open()
    begun = run([first])[3]
    longer = (*first.prompt_token_ids, *begun.token_ids, *other.prompt_token_ids)
    again = GenerationRequest(50, Prompt(longer), SamplingParams(max_tokens=12, ignore_eos=True), seed=7)
    reused = run([again])[50]
    prefilled = engine.stats.prefill_tokens
    session.close()
    assert prefilled < len(first.prompt_token_ids) + len(longer)
    fresh = generate(policy, [again])[50]
    assert (reused.token_ids, reused.log_probs) == (fresh.token_ids, fresh.log_probs)
    assert trained(policy, [again], {50: reused}, 1.0)[50] == reused.log_probs


def test_rows_that_join_late_or_were_preempted_stay_exact() -> None:
    policy = exact_policy("llama")
    asked = requests(16)
    outputs = generate(policy, asked)
    engine = NativeEngine(policy, eos_token_ids=(2,), max_num_seqs=6)
    session, waiting, found, steps = engine.open(), list(asked), dict[int, GenerationOutput](), 0
    while waiting or not session.idle:
        session.add(waiting[:2])
        waiting, steps = waiting[2:], steps + 1
        found |= {output.request_id: output for output in session.step()}
        if steps in (3, 6, 9):  # as where memory is short
            with torch.inference_mode():
                session._preempt()
    session.close()
    assert steps > 9 and sorted(found) == list(range(16))
    for row, output in found.items():
        assert (output.token_ids, output.log_probs) == (outputs[row].token_ids, outputs[row].log_probs)


@pytest.mark.parametrize(
    "heads, kv_heads, dim, length, longest",
    [(12, 4, 80, 207, 173), (8, 4, 16, 252, 132), (2, 2, 32, 237, 135)],
)
def test_how_many_keys_there_are_does_not_matter(
    heads: int, kv_heads: int, dim: int, length: int, longest: int
) -> None:
    draw, scores, mode = torch.Generator().manual_seed(1), Scores(), ExactMode(32, 1, 8)
    query, key, value = (
        torch.randn(1, count, length, dim, generator=draw) for count in (heads, kv_heads, kv_heads)
    )
    whole = mode.attend(query, key, value, torch.ones(length, length, dtype=torch.bool).tril(), scores)
    places = torch.tensor([longest - 1, 3, longest // 2])  # of three rows whose new tokens are these
    slots = [torch.zeros(3, kv_heads, 320, dim) for _ in range(2)]
    for slot, states in zip(slots, (key, value), strict=True):
        slot[:, :, :length] = states
    allowed = torch.arange(longest) <= places[:, None]
    found = mode.attend(query[0, :, places].transpose(0, 1)[:, :, None], *slots, allowed[:, None], scores)
    assert torch.equal(found[:, :, 0], whole[0, :, places].transpose(0, 1))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_the_self_check_finds_a_mode_and_leaves_the_policy_as_it_was(kind: str) -> None:
    policy = PolicyModel(zoo.tiny_hf(kind))
    engine = NativeEngine(policy, eos_token_ids=(2,))
    mode = choose_exact_mode(engine, policy, longest=100, temperature=0.7)
    assert isinstance(mode, ExactMode) and policy.exact is None
    assert self_check(engine, policy, longest=100, temperature=0.7) is not None, (
        "fast mode is not exact, so the check sees something"
    )


def test_the_self_check_names_the_first_token_of_a_model_that_mixes_rows() -> None:
    policy = PolicyModel(zoo.tiny_hf("llama"))

    def mix(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-3 * output.mean(tuple(range(output.dim() - 1)), keepdim=True)

    policy.hf.model.layers[0].mlp.register_forward_hook(mix)
    reason = choose_exact_mode(NativeEngine(policy, eos_token_ids=(2,)), policy, longest=64, temperature=1.0)
    assert isinstance(reason, str)
    assert "LlamaForCausalLM" in reason
    assert "token" in reason
    assert "log-prob" in reason


def test_half_precision_is_refused() -> None:
    policy = PolicyModel(zoo.tiny_hf("llama", torch.bfloat16))
    reason = choose_exact_mode(NativeEngine(policy, eos_token_ids=(2,)), policy, longest=64, temperature=1.0)
    assert isinstance(reason, str) and "bfloat16" in reason and "float32" in reason


def test_rows_are_padded_until_every_thread_has_whole_vectors() -> None:
    model = PolicyModel(zoo.tiny_hf("llama")).hf.base_model  # its narrowest layers have 16 and 48 outputs
    assert [even_rows(model, threads) for threads in (1, 2, 3)] == [2, 4, 12]


def test_the_exact_attention_is_the_plain_one() -> None:
    for kind in ("llama", "gemma2", "gpt_oss"):
        policy = PolicyModel(zoo.tiny_hf(kind))
        rows = pack(zoo.tiny_rows())
        fast = policy(rows)
        fast.log_probs.sum().backward()
        wanted = [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]
        policy.zero_grad()
        policy.exact = ExactMode(64, 32)
        exact = policy(rows)
        exact.log_probs.sum().backward()
        torch.testing.assert_close(exact.log_probs, fast.log_probs, rtol=1e-4, atol=1e-4)
        for parameter, grad in zip(
            [p for p in policy.parameters() if p.grad is not None], wanted, strict=True
        ):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [6, 10, 24])
def test_the_place_of_a_query_does_not_matter_for_values_of_any_length(length: int) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 1, 16, generator=draw).expand(1, 4, 29, 16)
    key = torch.randn(1, 4, 29, 16, generator=draw)
    value = torch.randn(1, 4, 29, length, generator=draw)
    every = torch.ones(29, 29, dtype=torch.bool)
    found = ExactMode(64, 32).attend(query, key, value, every, Scores(0, None, None, None, None))
    assert torch.equal(found, found[:, :, :1].expand_as(found))


def test_sums_over_many_numbers_hold_with_two_threads(two_threads: None) -> None:
    """Products over 1,024 numbers, which AVX-512 kernels cut at another place up to 175 rows."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1}
    policy = PolicyModel(zoo.tiny_hf("qwen2", **sizes))
    engine = NativeEngine(policy, eos_token_ids=(2,))
    assert isinstance(choose_exact_mode(engine, policy, longest=79, temperature=1.0), ExactMode)


def test_the_last_modes_split_the_sums_of_wide_layers() -> None:
    whole = ExactMode.choices(torch.nn.Linear(SUM_STEP, 48), 100)
    assert {mode.sum_step for mode in whole} == {0}
    choices = ExactMode.choices(torch.nn.Linear(SUM_STEP + 1, 48), 100)
    assert choices[: len(whole)] == whole
    assert choices[len(whole) :] == [replace(mode, sum_step=SUM_STEP) for mode in whole]
    assert (
        choices[-1].joined(ExactMode(128)).sum_step == ExactMode(128).joined(choices[-1]).sum_step == SUM_STEP
    )


@pytest.mark.parametrize(("width", "parts"), [(768, 1), (896, 2), (2048, 3), (1537, 3)])
def test_split_sums_are_the_products_of_parts(
    monkeypatch: pytest.MonkeyPatch, width: int, parts: int
) -> None:
    widths: list[int] = []
    linear = torch.nn.functional.linear

    def seen(states: torch.Tensor, *layer: torch.Tensor) -> torch.Tensor:
        widths.append(states.shape[-1])
        return linear(states, *layer)

    monkeypatch.setattr("hybridflow.models.exact_mode.linear", seen)
    draw = torch.Generator().manual_seed(0)
    states, weight, bias = (torch.randn(*size, generator=draw) for size in ((2, 3, width), (5, width), (5,)))
    found = ExactMode(32, sum_step=SUM_STEP).product(states.requires_grad_(), weight, bias)
    torch.testing.assert_close(found, linear(states, weight, bias), rtol=1e-4, atol=1e-4)
    grad, wanted = (
        torch.autograd.grad(x.square().sum(), states)[0] for x in (found, linear(states, weight, bias))
    )
    torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-3)
    assert len(widths) == parts and sum(widths) == width and max(widths) <= SUM_STEP
    assert max(widths) % 32 == 0 or parts == 1


def test_exact_mode_splits_the_layers_of_a_model_and_joins_them_again() -> None:
    policy = PolicyModel(zoo.tiny_hf("llama", intermediate_size=1024))
    policy.exact = ExactMode(32, sum_step=SUM_STEP)
    split = [name for name, layer in policy.named_modules() if isinstance(layer, SplitLinear)]
    assert split and all(name.endswith("down_proj") for name in split)
    policy.exact = None
    assert not any(isinstance(layer, SplitLinear) for layer in policy.modules())
    assert not any("exact_mode" in vars(layer) for layer in policy.modules())


def test_a_dense_layer_whose_rows_depend_on_their_number_refuses_a_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels of a library that takes another one below 100 rows."""
    policy = PolicyModel(zoo.tiny_hf("llama"))
    linear = torch.nn.functional.linear

    def cut(states: torch.Tensor, *layer: torch.Tensor) -> torch.Tensor:
        return linear(states, *layer) + (states.shape[1] < 100) * 1e-3

    assert uneven_layer(policy.text, ExactMode(32)) is None
    monkeypatch.setattr("hybridflow.models.exact_mode.linear", cut)
    found = uneven_layer(policy.text, ExactMode(32))
    assert found is not None and "16 and 320 rows" in found
    checked = []
    monkeypatch.setattr("hybridflow.rollout.self_check.self_check", lambda *_, **__: checked.append(1))
    engine = NativeEngine(policy, eos_token_ids=(2,))
    reason = choose_exact_mode(engine, policy, longest=100, temperature=1.0)
    assert isinstance(reason, str) and "a dense layer" in reason
    assert not checked, "no row is generated to check a mode that a layer refuses"


@pytest.mark.parametrize("small", [True, False])
def test_the_check_of_a_large_model_sees_what_that_of_a_small_one_sees(
    monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    monkeypatch.setattr("hybridflow.rollout.self_check.SMALL_MODEL", 10**9 * small)
    policy = PolicyModel(zoo.tiny_hf("llama"))
    engine = NativeEngine(policy, eos_token_ids=(2,))
    assert isinstance(choose_exact_mode(engine, policy, longest=100, temperature=1.0), ExactMode)
    assert self_check(engine, policy, longest=100, temperature=1.0) is not None, "fast mode is not exact"
    generated = policy.decode
    policy.exact = ExactMode.choices(policy.text, 100)[-1]
    assert self_check(engine, policy, longest=100, temperature=1.0) is None
    monkeypatch.setattr(policy, "decode", lambda *step: generated(*step) * (1 + 1e-6))
    found = self_check(engine, policy, longest=100, temperature=1.0)
    assert found is not None and "generated and trained" in found.what


def test_where_kernels_need_more_padding_the_check_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyModel(zoo.tiny_hf("llama"))
    tried = []

    def check(engine: NativeEngine, policy: PolicyModel, **asked: float) -> Mismatch | None:
        assert policy.exact is not None
        tried.append(policy.exact)
        return None if policy.exact.row_step == 32 else Mismatch("here", 0, 0, 0.0, 1.0)

    monkeypatch.setattr("hybridflow.rollout.self_check.self_check", check)
    engine = NativeEngine(policy, eos_token_ids=(2,))
    assert choose_exact_mode(engine, policy, longest=100, temperature=1.0) == ExactMode(128, 32) == tried[-1]
    step = even_rows(policy.hf.base_model)
    assert [(mode.key_step, mode.row_step) for mode in tried] == [(32, step), (128, step), (128, 32)]
    wide = torch.nn.Linear(8, 384)  # whole vectors in any number of rows
    assert [(mode.key_step, mode.row_step, mode.min_queries) for mode in ExactMode.choices(wide, 100)][
        :2
    ] == [(32, 1, 4), (32, 1, 8)]
