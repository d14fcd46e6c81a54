"""The random numbers and the draws of the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybridflow.errors import RolloutError
from hybridflow.models.heads.log_probs import log_probs_from_logits
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.sampling import (
    BEYOND,
    LEADERS,
    ONE_LEVEL,
    RowSettings,
    SamplingPlan,
    draw,
    largest,
    needs_of,
    probability_floor,
    sample,
    sampling_problem,
    stream_keys,
    uniforms,
)


def test_splitmix_gives_the_published_numbers() -> None:
    # first outputs of splitmix64 from state 1234567 (the reference implementation's test vector)
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    step = torch.tensor([0x9E3779B97F4A7C15 - 2**64])
    states = torch.tensor([1234567]) + torch.arange(3) * step
    assert [value % 2**64 for value in stream_keys(states).tolist()] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_uniform_over_seeds_and_positions(dtype: torch.dtype) -> None:
    keys = stream_keys(torch.arange(400)).repeat_interleave(500)
    numbers = uniforms(keys, torch.arange(500).repeat(400), dtype)
    assert numbers.dtype == dtype and numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers.float(), bins=100, min=0, max=1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom: mean 99, standard deviation 14
    table = numbers.view(400, 500).double()
    # neighbouring seeds
    assert abs(torch.corrcoef(torch.stack([table[:-1].flatten(), table[1:].flatten()]))[0, 1]) < 0.01
    # neighbouring positions
    assert abs(torch.corrcoef(torch.stack([table[:, :-1].flatten(), table[:, 1:].flatten()]))[0, 1]) < 0.01
    assert len(numbers.unique()) > (0.99 if dtype == torch.float32 else 1 - 1e-12) * len(numbers)


def test_a_number_depends_on_its_own_seed_and_position_only() -> None:
    seeds, positions = torch.tensor([5, 2**62, 17, 0]), torch.tensor([0, 3, 9, 2])
    together = uniforms(stream_keys(seeds), positions)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(uniforms(stream_keys(seeds[order]), positions[order]), together[order])
    assert torch.equal(uniforms(stream_keys(seeds[1:2]), positions[1:2]), together[1:2])


def numbers_of(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return uniforms(stream_keys(torch.arange(count)), torch.zeros(count, dtype=torch.int64), dtype)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_draws_follow_the_weights_and_never_take_a_token_without_weight(has_zeros: bool) -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    tokens = draw(weights.expand(20_000, -1), numbers_of(20_000), has_zeros=has_zeros)
    shares = torch.bincount(tokens, minlength=6) / 20_000
    assert torch.allclose(shares, weights, atol=0.012)
    edges = torch.tensor([0.0, 1 - 2.0**-24])
    assert draw(weights.expand(2, -1), edges, has_zeros=has_zeros).tolist() == [1, 4]


@pytest.mark.parametrize("vocabulary", [ONE_LEVEL + 1, 3000, 64 * 40])
def test_draws_from_a_large_vocabulary_are_those_of_one_running_sum(vocabulary: int) -> None:
    """Block by block, a number falls on the token whose stretch of the float64 running sum it is in, up to
    float32's rounding.
    """
    choice = torch.Generator().manual_seed(1)
    weights = torch.rand(vocabulary, generator=choice).pow(12)
    weights[torch.rand(vocabulary, generator=choice) < 0.3] = 0
    weights[128:192] = 0  # a whole block without weight
    numbers = torch.cat([numbers_of(4000), torch.tensor([0.0, 1 - 2.0**-24])])
    tokens = draw(weights.expand(len(numbers), -1), numbers)
    assert (weights[tokens] > 0).all()
    sums = weights.double().cumsum(0) / weights.double().sum()
    before = torch.cat([torch.zeros(1, dtype=torch.float64), sums[:-1]])
    assert (numbers >= before[tokens] - 3e-7).all() and (numbers < sums[tokens] + 3e-7).all()
    exact = torch.searchsorted(sums, numbers.double(), right=True)
    assert (exact == tokens).double().mean() > 0.999


def test_a_sum_that_rises_behind_the_last_token_with_weight_gives_that_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parallel sums may end above the sum at the last token with weight; a draw near 1 stays before."""
    exact = torch.Tensor.cumsum

    def rising(x: torch.Tensor, dim: int) -> torch.Tensor:
        return exact(x, dim) + torch.arange(x.shape[-1]) * 1e-3

    monkeypatch.setattr(torch.Tensor, "cumsum", rising)
    last = torch.tensor([1 - 2.0**-24])
    assert draw(torch.tensor([[0.0, 0.4, 0.0, 0.3, 0.0]]), last).tolist() == [3]
    large = torch.zeros(1, 2000)
    large[0, [70, 900]] = torch.tensor([0.4, 0.3])
    assert draw(large, last).tolist() == [900]


SAMPLINGS = [
    SamplingParams(8),
    SamplingParams(8, temperature=0.5),
    SamplingParams(8, greedy=True),
    SamplingParams(8, top_k=3, temperature=2.0),
    SamplingParams(8, top_p=0.3),
    SamplingParams(8, top_p=0.95, top_k=30),
    SamplingParams(8, min_p=0.2, temperature=1.5),
    SamplingParams(8, min_p=0.01, top_k=50, top_p=0.8),
    SamplingParams(8, top_k=100_000),
    SamplingParams(8, top_k=1),
    SamplingParams(8, top_p=1e-6),
    SamplingParams(8, top_p=0.9999, temperature=3.0),
]


def plan_of(params: Sequence[SamplingParams]) -> SamplingPlan:
    return SamplingPlan([needs_of(one) for one in params])


def settings_of(params: Sequence[SamplingParams], numbers: torch.Tensor, vocabulary: int) -> RowSettings:
    kind = numbers.dtype
    return RowSettings(
        numbers,
        torch.tensor([1.0 if one.takes_argmax else one.temperature for one in params], dtype=kind),
        torch.tensor([one.top_k if one.top_k > 0 else vocabulary for one in params]),
        torch.tensor([one.top_p for one in params], dtype=kind),
        torch.tensor([one.min_p for one in params], dtype=kind),
        torch.tensor([one.takes_argmax for one in params]),
    )


def reference_kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [V] that min-p, then top-k, then top-p leave, in float64, one token after the other."""
    p = (logits.double() / params.temperature).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    order = [token for token in order if p[token] >= params.min_p * p[order[0]]]
    if params.top_k > 0:
        order = order[: params.top_k]
    whole, held, kept = sum(p[token] for token in order), 0.0, []
    for token in order:
        if held >= params.top_p * whole and params.top_p < 1:
            break
        held += p[token]
        kept.append(token)
    left = torch.zeros(len(p), dtype=torch.float64)
    left[kept] = torch.tensor(p, dtype=torch.float64)[kept]
    return left / left.sum()


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(40, torch.float32), (40, torch.float64), (1500, torch.float32), (5000, torch.float32)],
)
def test_each_row_of_a_mixed_batch_is_drawn_from_what_its_own_parameters_leave(
    vocabulary: int, dtype: torch.dtype
) -> None:
    rows = 12 * len(SAMPLINGS)
    logits = 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0), dtype=dtype)
    params = SAMPLINGS * 12
    numbers = numbers_of(rows, dtype)
    tokens, log_probs, *_ = sample(logits, plan_of(params), settings_of(params, numbers, vocabulary))
    for row, one in enumerate(params):
        token, temperature = int(tokens[row]), 1.0 if one.takes_argmax else one.temperature
        if one.takes_argmax:
            assert token == int(logits[row].argmax())
        else:
            kept = reference_kept(logits[row], one)
            assert kept[token] > 0
            assert (
                float(kept[:token].sum()) - 1e-6
                <= float(numbers[row])
                <= float(kept[: token + 1].sum()) + 1e-6
            )
        assert log_probs[row] == pytest.approx(
            float((logits[row].double() / temperature).log_softmax(-1)[token]), abs=2e-6
        )


@pytest.mark.parametrize("vocabulary", [40, 5000])
def test_a_row_is_sampled_alone_as_it_is_among_others(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 2 * len(SAMPLINGS)
    logits = 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3))
    params, numbers = SAMPLINGS * 2, numbers_of(rows)
    together = sample(logits, plan_of(params), settings_of(params, numbers, vocabulary))
    for size in (1, 2, 5):
        monkeypatch.setattr(sampling, "CHUNK_BYTES", size * vocabulary * 4)
        parts = sample(logits, plan_of(params), settings_of(params, numbers, vocabulary))
        assert all(torch.equal(one, other) for one, other in zip(together[:3], parts[:3]))
    for row, one in enumerate(params):
        alone = sample(
            logits[row : row + 1],
            plan_of([one]),
            settings_of([one], numbers[row : row + 1], vocabulary),
        )
        assert alone.tokens[0] == together.tokens[row] and alone.log_probs[0] == together.log_probs[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [5, 262, 5001])
def test_log_probs_are_those_of_training_to_the_bit(
    vocabulary: int, temperature: float, dtype: torch.dtype
) -> None:
    logits = 4 * torch.randn(60, vocabulary, generator=torch.Generator().manual_seed(2), dtype=dtype)
    for one in (
        SamplingParams(8, temperature=temperature),
        SamplingParams(8, temperature=temperature, min_p=0.1, top_k=9, top_p=0.7),
    ):
        params = [one] * 60
        found = sample(
            logits,
            plan_of(params),
            settings_of(params, numbers_of(60, dtype), vocabulary),
            lambda z, rows: z * 0.9,
        )
        assert torch.equal(found.log_probs, log_probs_from_logits(logits, found.tokens, temperature))
        assert torch.equal(found.normalizer, (logits / temperature).logsumexp(-1))


def test_the_tail_is_cut_where_top_k_top_p_and_min_p_say() -> None:
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]])

    def left(top_k: int = 4, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
        one = SamplingParams(8, top_k=top_k, top_p=top_p, min_p=min_p)
        numbers = torch.linspace(0, 0.9999, 200)
        tokens = sample(
            p.log().expand(200, -1), plan_of([one] * 200), settings_of([one] * 200, numbers, 4)
        ).tokens
        return sorted(set(tokens.tolist()))

    assert left(top_p=0.65) == [1, 3]  # 0.4 < 0.65, so 0.3 comes in too
    assert left(top_k=1) == left(top_p=1e-6) == left(min_p=1.0) == [1]
    assert left(top_k=3) == [1, 2, 3]
    assert left(top_k=2, top_p=0.5) == [1]  # of the two kept, 0.4/0.7 reaches 0.5
    assert left(min_p=0.6) == [1, 3] and left(min_p=0.4) == [1, 2, 3]
    assert left(min_p=0.6, top_p=0.6) == [1, 3]  # 0.4 of 0.7 does not reach 0.6
    equal = torch.zeros(1, 1)
    assert probability_floor(equal + 1, torch.tensor([1]), torch.tensor([0.5])).tolist() == [1.0]


def test_where_the_leaders_suffice_nothing_behind_them_is_looked_at() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(40, 3000, generator=generator)
    top_k = torch.randint(1, LEADERS + 1, (40,), generator=generator)
    top_p = torch.rand(40, generator=generator).clamp_(min=0.01)
    top_p[:9] = 1.0
    wanted = probability_floor(weights, top_k, top_p)
    assert torch.equal(probability_floor(weights, top_k, top_p, beyond=False), wanted)
    limits = ((5, 0.9), (64, 1.0), (-1, 0.9), (65, 1.0))
    needs = [needs_of(SamplingParams(4, top_k=most, top_p=share)) for most, share in limits]
    assert [bool(each & BEYOND) for each in needs] == [False, False, True, True]


@pytest.mark.parametrize("count", [3, 64, 6000])
def test_the_largest_of_a_row(count: int) -> None:
    # with equal ones
    weights = torch.rand(7, 6000, generator=torch.Generator().manual_seed(0)).mul(500).floor()
    assert torch.equal(largest(weights, count), weights.sort(descending=True).values[:, :count])
    assert torch.equal(
        largest(weights[:, :5997], count)[:, :64],
        weights[:, :5997].sort(descending=True).values[:, : min(count, 64)],
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logit_bias": ((9, 1.0),)}, "logit_bias holds token id 9, and the model's vocabulary is 0..8"),
        ({"logit_bias": ((3, float("inf")),)}, "or -inf to forbid"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias of token 3 is nan"),
        (
            {"logit_bias": tuple((token, -float("inf")) for token in range(8)), "min_tokens": 2},
            "forbid every token",
        ),
        ({"top_log_probs": 10}, "top_log_probs=10"),
        ({"stop": ("a",)}, "without `decode`"),
    ],
)
def test_what_cannot_be_sampled_is_said(change: dict[str, Any], says: str) -> None:
    params = SamplingParams(4, **change)
    assert says in str(sampling_problem(params, vocabulary=9, end_tokens=(8,), can_decode=False))
    assert sampling_problem(SamplingParams(4), vocabulary=9, end_tokens=(8,), can_decode=False) is None
    assert (
        sampling_problem(SamplingParams(4, stop=("a",)), vocabulary=9, end_tokens=(8,), can_decode=True)
        is None
    )


@pytest.mark.parametrize(
    "bad",
    [{"max_tokens": 0}, {"temperature": -1.0}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.5}],
)
def test_parameters_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(RolloutError, match=next(iter(bad))):
        SamplingParams(**{"max_tokens": 4, **bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_log_probs_of_a_large_vocabulary_are_those_of_training_with_threads_too(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch splits the sum of a single long row over its threads, so no row may be alone in its part."""
    monkeypatch.setattr(sampling, "CHUNK_BYTES", 0)
    threads = torch.get_num_threads()
    logits = 4 * torch.randn(count, 40_000, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(8)] * count
    try:
        torch.set_num_threads(2)
        found = sample(logits, plan_of(params), settings_of(params, numbers_of(count), 40_000))
        assert torch.equal(found.log_probs, log_probs_from_logits(logits, found.tokens))
    finally:
        torch.set_num_threads(threads)
