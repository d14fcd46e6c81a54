"""The random numbers and the draws of the native engine."""

from __future__ import annotations

import pytest
import torch

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.native.sampling import SamplingPlan, draw, draw_limited, sample, stream_keys, uniforms


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
    assert abs(torch.corrcoef(torch.stack([table[:-1].flatten(), table[1:].flatten()]))[0, 1]) < 0.01  # neighbouring seeds
    assert abs(torch.corrcoef(torch.stack([table[:, :-1].flatten(), table[:, 1:].flatten()]))[0, 1]) < 0.01  # neighbouring positions
    assert len(numbers.unique()) > (0.99 if dtype == torch.float32 else 1 - 1e-12) * len(numbers)


def test_a_number_depends_on_its_own_seed_and_position_only() -> None:
    seeds, positions = torch.tensor([5, 2**62, 17, 0]), torch.tensor([0, 3, 9, 2])
    together = uniforms(stream_keys(seeds), positions)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(uniforms(stream_keys(seeds[order]), positions[order]), together[order])
    assert torch.equal(uniforms(stream_keys(seeds[1:2]), positions[1:2]), together[1:2])


def test_draws_follow_the_weights_and_never_take_a_token_without_weight() -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    numbers = uniforms(stream_keys(torch.arange(20_000)), torch.zeros(20_000, dtype=torch.int64))
    tokens = draw(weights.expand(20_000, -1), numbers)
    shares = torch.bincount(tokens, minlength=6) / 20_000
    assert torch.allclose(shares, weights, atol=0.012)
    edges = torch.tensor([0.0, 1 - 2.0**-24])
    assert draw(weights.expand(2, -1), edges).tolist() == [1, 4]


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(4000, -1)
    numbers = uniforms(stream_keys(torch.arange(4000)), torch.zeros(4000, dtype=torch.int64))

    def shares(top_k: int, top_p: float) -> list[float]:
        tokens = draw_limited(logits, numbers, torch.full((4000,), top_k), torch.full((4000,), top_p))
        return [round(x, 1) for x in (torch.bincount(tokens, minlength=4) / 4000).tolist()]

    assert shares(4, 0.65) == [0, 0.6, 0, 0.4]  # 0.4 < 0.65, so 0.3 comes in too
    assert shares(1, 1.0) == [0, 1, 0, 0]
    assert shares(3, 1.0) == [0, 0.4, 0.2, 0.3]
    assert shares(4, 1e-6) == [0, 1, 0, 0]
    assert shares(2, 0.5) == [0, 1, 0, 0]  # of the two kept, 0.4/0.7 reaches 0.5


def test_rows_with_different_parameters_share_a_batch() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(8),
        SamplingParams(8, temperature=0.5),
        SamplingParams(8, greedy=True),
        SamplingParams(8, top_k=3, temperature=2.0),
        SamplingParams(8, top_p=0.3),
    ]
    numbers = torch.tensor([0.2, 0.9, 0.5, 0.7, 0.99])

    def columns(rows: list[int]) -> dict[str, torch.Tensor]:
        chosen = [params[row] for row in rows]
        return {
            "uniform": numbers[rows],
            "temperature": torch.tensor([1.0 if p.greedy else p.temperature for p in chosen]),
            "top_k": torch.tensor([p.top_k if p.top_k > 0 else 40 for p in chosen]),
            "top_p": torch.tensor([p.top_p for p in chosen]),
            "greedy": torch.tensor([p.greedy for p in chosen]),
        }

    tokens, log_probs = sample(logits, SamplingPlan.of(params), **columns([0, 1, 2, 3, 4]))
    assert tokens[2] == logits[2].argmax() and tokens[3] in logits[3].topk(3).indices
    for row, one in enumerate(params):
        alone = sample(logits[row : row + 1], SamplingPlan.of([one]), **columns([row]))
        assert alone[0][0] == tokens[row]
        temperature = 1.0 if one.greedy else one.temperature
        assert torch.allclose((logits[row] / temperature).log_softmax(-1)[tokens[row]], log_probs[row])


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_parameters_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(RolloutError, match=next(iter(bad))):
        SamplingParams(**{"max_tokens": 4, **bad})  # type: ignore[arg-type]


def test_a_sum_that_rises_behind_the_last_token_kept_gives_that_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel sums may end above the sum at the last token with weight; a draw close to 1 must not fall behind it."""
    exact = torch.Tensor.cumsum

    def rising(x: torch.Tensor, dim: int) -> torch.Tensor:
        return exact(x, dim) + torch.arange(x.shape[-1]) * 1e-3

    monkeypatch.setattr(torch.Tensor, "cumsum", rising)
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    choice = draw_limited(logits, torch.tensor([1 - 2.0**-24]), torch.tensor([2]), torch.tensor([1.0]))
    assert choice.tolist() == [3]
