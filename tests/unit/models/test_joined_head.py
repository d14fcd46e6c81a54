"""The compiled functions of the output head: the numbers and gradients of the plain way, before compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.models.heads import joined_head, log_probs
from hybridflow.models.heads.log_probs import token_log_probs

VOCABULARY = 50


class Plain(joined_head.JoinedHead):
    """The functions as they are; the second one fails where a test wants it."""

    def __init__(self, fails: str = "") -> None:
        self._works = True
        self.calls = 0

        def counted(function: Any, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                self.calls += 1
                if name == fails:
                    raise RuntimeError("no compiler here")
                return function(*arguments)

            return call

        self._outputs = counted(joined_head.head_outputs, "outputs")
        self._gradient = counted(joined_head.head_gradient, "gradient")


def numbers(head: Plain | None, monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[Tensor]:
    """Log-probs, entropy and sums of squares, and the gradients of hidden states, weight and bias."""
    monkeypatch.setattr(log_probs, "joined_head", lambda *_: head)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 8, generator=draw, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCABULARY, 8, generator=draw, dtype=torch.float64).requires_grad_()
    bias = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (7,), generator=draw)
    outputs = token_log_probs(hidden, weight, bias, targets, chunk_bytes=3 * VOCABULARY * 8, **how)
    loss = (outputs.log_probs * torch.linspace(-1, 2, 7)).sum()
    found = [outputs.log_probs]
    if outputs.entropy is not None:
        loss = loss + (outputs.entropy * torch.linspace(2, -1, 7)).sum()
        found.append(outputs.entropy)
    if outputs.sum_pi_squared is not None:
        found.append(outputs.sum_pi_squared)
    loss.backward()
    return [each.detach() for each in found] + [each.grad for each in (hidden, weight, bias)]  # type: ignore[misc]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("transform", [{}, {"softcap": 3.0}, {"logit_scale": 0.3}])
@pytest.mark.parametrize(
    "wanted", [{}, {"with_entropy": True}, {"with_entropy": True, "with_sum_pi_squared": True}]
)
@pytest.mark.parametrize("kept", [0, 2**20])
def test_numbers_and_gradients_are_those_of_the_plain_way(
    temperature: float,
    transform: dict[str, float],
    wanted: dict[str, bool],
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_probs, "KEPT_BYTES", kept)
    how = {"temperature": temperature, **transform, **wanted}
    head = Plain()
    found = numbers(head, monkeypatch, **how)
    assert head.calls == 6, "three chunks, there and back"
    for mine, other in zip(found, numbers(None, monkeypatch, **how), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fails", ["outputs", "gradient"])
def test_where_compiling_fails_the_plain_way_goes_on(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = Plain(fails)
    found = numbers(head, monkeypatch, with_entropy=True)
    assert "no compiler here" in caplog.text and len(caplog.records) == 1
    for mine, other in zip(found, numbers(None, monkeypatch, with_entropy=True), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_memory_that_ends_is_no_fault_of_the_compiler() -> None:
    head = Plain()

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    head._outputs = full
    with pytest.raises(torch.OutOfMemoryError):
        head.outputs()
    assert head._works


def test_a_logit_of_no_probability_adds_nothing() -> None:
    raw = torch.tensor([[0.0, 1.0, -float("inf")]], dtype=torch.float64)
    target = torch.tensor([1])
    lp, total, entropy, squares = joined_head.head_outputs(raw, target, 1.0, 1.0, None, True, True)
    p = raw.softmax(-1)[0, :2]
    assert entropy is not None and squares is not None
    torch.testing.assert_close(entropy[0], -(p * p.log()).sum())
    torch.testing.assert_close(squares[0], p.square().sum())
    grad = joined_head.head_gradient(raw, target, total, entropy, lp * 0 + 1, lp * 0 + 1, 1.0, 1.0, None)
    assert bool(grad.isfinite().all()) and grad[0, 2] == 0


def test_it_is_for_half_precision_where_triton_runs() -> None:
    assert joined_head.joined_head(torch.device("cpu"), torch.bfloat16) is None
    assert joined_head.joined_head(torch.device("cuda"), torch.float32) is None
    assert joined_head.joined_head(torch.device("cuda"), torch.bfloat16) is not None
