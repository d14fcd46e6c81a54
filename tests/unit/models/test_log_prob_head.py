"""The chunked log-prob head against a plain log_softmax in float64."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.distributed.accelerators import features
from hybridflow.models.heads import log_probs as heads
from hybridflow.models.heads.log_probs import (
    LogitTransform,
    chunk_tokens,
    log_probs_from_logits,
    token_log_probs,
)

M, H, V = 23, 8, 31


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((M, H), (V, H), (V,))
    )
    targets = torch.randint(0, V, (M,), generator=draw)
    return (
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        bias.to(dtype).requires_grad_(),
        targets,
    )


def _plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    transform: LogitTransform,
) -> tuple[Tensor, Tensor]:
    z = hidden @ weight.T + (0 if bias is None else bias)
    z = z * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 3.0)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows_per_chunk", [1, 5, 1000])
def test_values_and_gradients(
    temperature: float, transform: LogitTransform, with_bias: bool, rows_per_chunk: int
) -> None:
    weights = torch.linspace(-1, 2, M, dtype=torch.float64)
    results = []
    for chunked in (True, False):
        hidden, weight, bias, targets = _inputs()
        used_bias = bias if with_bias else None
        if chunked:
            log_probs, entropy, *_ = token_log_probs(
                hidden, weight, used_bias, targets, temperature=temperature, with_entropy=True,
                softcap=transform.softcap, logit_scale=transform.scale, chunk_bytes=rows_per_chunk * V * 8,
            )  # fmt: skip
            assert entropy is not None
        else:
            log_probs, entropy = _plain(hidden, weight, used_bias, targets, temperature, transform)
        (weights * log_probs + 0.7 * weights.flip(0) * entropy).sum().backward()
        results.append([log_probs, entropy, hidden.grad, weight.grad] + ([bias.grad] if with_bias else []))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_without_entropy_and_in_float32() -> None:
    hidden, weight, _, targets = _inputs(torch.float32)
    log_probs, entropy, *_ = token_log_probs(hidden, weight, None, targets, chunk_bytes=V * 4 * 7)
    assert entropy is None and log_probs.dtype == torch.float32
    log_probs.sum().backward()
    plain = _inputs()
    _plain(plain[0], plain[1], None, targets, 1.0, LogitTransform())[0].sum().backward()
    assert hidden.grad is not None
    assert plain[0].grad is not None
    assert weight.grad is not None
    assert plain[1].grad is not None
    torch.testing.assert_close(hidden.grad.double(), plain[0].grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weight.grad.double(), plain[1].grad, atol=1e-5, rtol=1e-5)


def test_bfloat16_gives_float32_log_probs_and_bfloat16_gradients() -> None:
    hidden, weight, bias, targets = _inputs(torch.bfloat16)
    out = token_log_probs(hidden, weight, bias, targets, with_entropy=True, with_sum_pi_squared=True)
    assert out.entropy is not None and out.sum_pi_squared is not None
    assert out.log_probs.dtype == out.entropy.dtype == out.sum_pi_squared.dtype == torch.float32
    assert bool((out.sum_pi_squared > 1 / V).all()) and bool((out.sum_pi_squared <= 1).all())
    (out.log_probs.sum() + out.entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16 and hidden.grad.isfinite().all()


def test_no_tokens() -> None:
    hidden, weight, bias, targets = _inputs()
    log_probs, entropy, *_ = token_log_probs(hidden[:0], weight, bias, targets[:0], with_entropy=True)
    assert entropy is not None and log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_same_function_as_from_logits() -> None:
    hidden, weight, bias, targets = _inputs(torch.float32)
    log_probs, *_ = token_log_probs(hidden, weight, bias, targets, temperature=0.8)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    assert torch.equal(log_probs, log_probs_from_logits(logits, targets, 0.8))


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("rows_per_chunk", [1, 5, 1000])
def test_sum_of_squared_probabilities(with_entropy: bool, rows_per_chunk: int) -> None:
    """In float64 as by a plain softmax, without gradient; other outputs and gradients stay."""
    transform, results = LogitTransform(0.5, 3.0), []
    for asked in (True, False):
        hidden, weight, bias, targets = _inputs()
        out = token_log_probs(
            hidden, weight, bias, targets, temperature=0.6,
            with_entropy=with_entropy, with_sum_pi_squared=asked,
            softcap=transform.softcap, logit_scale=transform.scale, chunk_bytes=rows_per_chunk * V * 8,
        )  # fmt: skip
        (out.log_probs.sum() + (0 if out.entropy is None else out.entropy.sum())).backward()
        results.append((out, hidden.grad, weight.grad))
        if not asked:
            assert out.sum_pi_squared is None
            continue
        p = torch.softmax(transform(hidden.detach() @ weight.detach().T + bias.detach()) / 0.6, -1)
        assert out.sum_pi_squared is not None and not out.sum_pi_squared.requires_grad
        torch.testing.assert_close(out.sum_pi_squared, p.square().sum(-1), atol=1e-14, rtol=1e-12)
    (with_it, *ours), (without, *theirs) = results
    assert torch.equal(with_it.log_probs, without.log_probs)
    assert (with_it.entropy is None) == (not with_entropy)
    assert with_it.entropy is None or torch.equal(with_it.entropy, without.entropy)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class _Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor made inside has."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, *(x.numel() for x in _tensors(out)), 0)
        return out


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for item in out:
            yield from _tensors(item)


def test_logits_of_all_tokens_never_exist() -> None:
    tokens, width, vocabulary = 3000, 4, 2000
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=draw).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    budget = 50 * vocabulary * 4
    assert chunk_tokens(vocabulary, torch.float32, budget) == 50
    with _Largest() as mode:
        log_probs, entropy, *_ = token_log_probs(
            hidden, weight, None, targets, with_entropy=True, chunk_bytes=budget
        )
        assert entropy is not None
        (log_probs + entropy).sum().backward()
    assert hidden.grad is not None and mode.largest == 50 * vocabulary


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 3.0)])
def test_kept_logits_give_the_bits_of_computed_ones(
    monkeypatch: pytest.MonkeyPatch, transform: LogitTransform
) -> None:
    results = []
    products = []
    chunk_bytes = 5 * V * 4
    for kept in (0, 2 * chunk_bytes, 5 * chunk_bytes):
        monkeypatch.setattr("hybridflow.models.heads.log_probs.KEPT_BYTES", kept)
        hidden, weight, bias, targets = _inputs(torch.float32)
        with _Products() as counted:
            log_probs, entropy, *_ = token_log_probs(
                hidden, weight, bias, targets, temperature=0.6, with_entropy=True,
                softcap=transform.softcap, logit_scale=transform.scale, chunk_bytes=chunk_bytes,
            )  # fmt: skip
            assert entropy is not None
            (log_probs - 0.01 * entropy).sum().backward()
        products.append(counted.count)
        results.append([log_probs, entropy, hidden.grad, weight.grad, bias.grad])
    assert products == [20, 18, 15]  # five chunks: a product forward, two backward, one for what is not kept
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def test_nothing_is_kept_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = []
    gather = log_probs_from_logits

    def watched(logits: Tensor, *rest: Any) -> Tensor:
        assert sum(reference() is not None for reference in alive) <= 1, "logits of an earlier chunk are kept"
        alive.append(weakref.ref(logits))
        return gather(logits, *rest)

    monkeypatch.setattr("hybridflow.models.heads.log_probs.log_probs_from_logits", watched)
    hidden, weight, bias, targets = _inputs()
    with torch.no_grad():
        token_log_probs(hidden, weight, bias, targets, chunk_bytes=5 * V * 8)
    assert len(alive) == 5


def test_a_token_that_the_policy_rules_out() -> None:
    """A logit of -inf has probability 0: it adds nothing to the entropy, and its gradient is 0."""
    hidden, weight, bias, targets = _inputs(torch.float32)
    with torch.no_grad():
        bias[4] = float("-inf")
    targets = targets.where(targets != 4, torch.tensor(5))
    got = token_log_probs(hidden, weight, bias, targets, temperature=0.7, with_entropy=True, chunk_bytes=900)
    assert got.entropy is not None
    (got.entropy.sum() + got.log_probs.sum()).backward()
    others = [v for v in range(V) if v != 4]
    small = [x.detach().clone().requires_grad_() for x in (hidden, weight[others], bias[others])]
    without = token_log_probs(
        small[0], small[1], small[2], targets - (targets > 4).long(), temperature=0.7, with_entropy=True
    )
    assert without.entropy is not None
    (without.entropy.sum() + without.log_probs.sum()).backward()
    torch.testing.assert_close(got.entropy, without.entropy)
    torch.testing.assert_close(hidden.grad, small[0].grad)
    assert bias.grad is not None and bias.grad[4] == 0 and bool(bias.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_ordinary_rows_keep_their_bits(dtype: torch.dtype, scale: float) -> None:
    """Entropy and gradients are those of the formula as it is written, to the bit, where all logits are
    finite; `scale` 300 makes probabilities that are 0 in float32.
    """
    hidden, weight, bias, targets = _inputs(dtype)
    logits = (linear(hidden, weight, bias).float() * scale).detach()
    log_p = torch.log_softmax(logits / 0.7, dim=-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    got = token_log_probs(
        hidden, weight, bias, targets, temperature=0.7, with_entropy=True, logit_scale=scale
    )
    assert got.entropy is not None and got.entropy.equal(entropy)
    up = torch.linspace(-1, 2, M)
    ((got.entropy + got.log_probs) * up).sum().backward()
    grad = -(p * ((log_p + entropy[:, None]) * up[:, None] + up[:, None]))
    grad.scatter_add_(-1, targets[:, None], up[:, None])
    assert hidden.grad is not None
    assert hidden.grad.equal((grad * (scale / 0.7)).to(dtype) @ weight)


class _Passes(TorchDispatchMode):
    """Counts the operations that make or change a tensor of one shape, by name."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(x.shape == self.shape for x in _tensors(out)):
            self.names.append(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 46), ("cuda", 3)])
def test_chunks_by_device(device: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is a pass over the gradient of the head; on the meta device, told that it is another."""
    monkeypatch.setattr(heads, "features", lambda _: features(device))
    tokens, width, vocabulary = 5000, 64, 151_936
    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta").requires_grad_()
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, device="meta").requires_grad_()
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    log_probs, *_ = token_log_probs(hidden, weight, None, targets)
    with _Passes((vocabulary, width)) as counted:
        log_probs.sum().backward()
    assert counted.names.count("mm") == chunks
    assert counted.names.count("_to_copy") == 2, "to float32 for the sum, and back for the result"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows_per_chunk", [4, 7, 1000])
def test_the_gradient_of_the_head_has_the_bits_of_a_sum_over_chunks(
    dtype: torch.dtype, rows_per_chunk: int
) -> None:
    """A sum in float32 that begins with zeros; one chunk alone needs no sum and no float32."""
    hidden, weight, _, targets = _inputs(dtype)
    kind = torch.promote_types(dtype, torch.float32)
    log_probs, *_ = token_log_probs(
        hidden, weight, None, targets, temperature=0.7, chunk_bytes=rows_per_chunk * V * kind.itemsize
    )
    with _Passes((V, H)) as counted:
        log_probs.sum().backward()
    total = torch.zeros(V, H, dtype=kind)
    for rows in hidden.detach().split(rows_per_chunk):
        wanted = targets[: len(rows)]
        targets = targets[len(rows) :]
        logits = (rows @ weight.detach().T).to(kind)
        grad = torch.log_softmax(logits / 0.7, -1).exp().mul_(-torch.ones(len(rows), 1, dtype=kind))
        grad.scatter_add_(-1, wanted[:, None], torch.ones(len(rows), 1, dtype=kind))
        part = grad.mul_(1 / 0.7).to(dtype)
        if kind == dtype:
            total.addmm_(part.T, rows)
        else:
            total += part.T @ rows
    assert weight.grad is not None and torch.equal(weight.grad, total.to(dtype))
    if rows_per_chunk == 1000:
        assert [name for name in counted.names if name != "detach"] == ["mm"]
