"""How often sampling reads or writes all logits, and that the way with fewer passes gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_native_sampling import numbers_of, plan_of, settings_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.sampling import ChosenTokens, sample

VOCABULARY = 151_936
HOT = {"temperature": 0.7}


class Passes(TorchDispatchMode):
    """Names of the operations that read or write a tensor of at least `size` elements as a whole."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # a view moves nothing, a gather reads a few places of a row
        if not func.is_view and name not in ("gather", "empty_like", "_unsafe_view"):
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
            if any(tensor.numel() >= self.size for tensor in tensors):
                self.names.append(name)
        return out


def sampled(
    logits: Tensor, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool
) -> ChosenTokens:
    """Tokens and log-probs as on a CPU, or by the operations of other devices."""
    monkeypatch.setattr(sampling, "_has_bits_of_training", lambda _: on_cpu)
    monkeypatch.setattr(sampling, "CHUNK_BYTES", 1 << 40)
    numbers = numbers_of(len(params), logits.dtype)
    return sample(logits, plan_of(params), settings_of(params, numbers, logits.shape[1]))


@pytest.mark.parametrize(
    ("params", "elsewhere", "on_cpu"),
    [
        ({}, 2, 5),
        (HOT, 3, 6),
        (HOT | {"top_p": 0.9}, 6, 9),
        (HOT | {"top_k": 20}, 6, 9),
        (HOT | {"top_k": 50, "top_p": 0.95}, 6, 9),
        (HOT | {"min_p": 0.05}, 8, 8),
        ({"temperature": 0.0}, 2, 5),
    ],
    ids=str,
)
def test_passes_over_the_logits(
    params: dict[str, Any], elsewhere: int, on_cpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as peaked as those of a language model: the leaders that are looked at first hold enough
    logits = 9 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    asked = [SamplingParams(8, **params)] * 4
    for count, is_cpu in ((elsewhere, False), (on_cpu, True)):
        with Passes(logits.numel() // 2) as passes:
            sampled(logits, asked, monkeypatch, on_cpu=is_cpu)
        assert len(passes.names) == count, passes.names


@pytest.mark.parametrize("vocabulary", [40, 5000])
def test_fewer_passes_give_the_same_tokens_and_log_probs(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 no draw is so close to the border of two tokens that rounding decides it."""
    kinds: list[dict[str, Any]] = [
        {},
        HOT,
        {"temperature": 0.0},
        HOT | {"top_k": 7},
        HOT | {"top_p": 0.8},
        {"top_k": 90, "top_p": 0.999},
        HOT | {"top_p": 0.99999},
    ]
    batches = [[kind] * 200 for kind in kinds] + [kinds * 30]
    draws = torch.Generator().manual_seed(7)
    for batch in batches:
        logits = 4 * torch.randn(len(batch), vocabulary, generator=draws, dtype=torch.float64)
        asked = [SamplingParams(8, **kind) for kind in batch]
        wanted = sampled(logits, asked, monkeypatch, on_cpu=True)
        found = sampled(logits, asked, monkeypatch, on_cpu=False)
        assert torch.equal(found.tokens, wanted.tokens)
        torch.testing.assert_close(found.log_probs, wanted.log_probs, atol=1e-12, rtol=0)
        torch.testing.assert_close(found.normalizer, wanted.normalizer, atol=1e-12, rtol=0)


def test_log_probs_of_fewer_passes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 4 * torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(2))
    asked = [SamplingParams(8, **HOT)] * 64
    found = sampled(logits, asked, monkeypatch, on_cpu=False)
    exact = (logits.double() / 0.7).log_softmax(-1).gather(-1, found.tokens[:, None])[:, 0]
    # torch adds up a softmax of the CPU in few sums, which is most of the difference
    torch.testing.assert_close(found.log_probs.double(), exact, atol=3e-5, rtol=0)


def test_logits_that_are_not_finite_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller makes an error of a row whose log-prob is not finite."""
    logits = torch.zeros(4, 2000)
    logits[0, 5] = float("nan")
    logits[1, 5] = float("inf")
    logits[2] = -float("inf")
    for params in (SamplingParams(8), SamplingParams(8, top_p=0.9), SamplingParams(8, temperature=0.0)):
        found = sampled(logits, [params] * 4, monkeypatch, on_cpu=False)
        assert found.log_probs.isfinite().tolist() == [False, False, False, True]
