"""Joined operations on a CUDA device: the compiled head and joined norms give what the plain ones give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hybridflow.models.attention.kernels import _varlen_groups
from hybridflow.models.heads import log_probs
from hybridflow.models.heads.joined_head import joined_head
from hybridflow.models.norms import join_norms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def numbers(with_entropy: bool) -> list[Tensor]:
    """Log-probs and entropy of 3,000 tokens and the gradients of hidden states and weight, in bfloat16."""
    draw = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(3000, 256, generator=draw, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(30_000, 256, generator=draw, device="cuda") / 16).bfloat16().requires_grad_()
    targets = torch.randint(0, 30_000, (3000,), generator=draw, device="cuda")
    outputs = log_probs.token_log_probs(
        hidden, weight, None, targets, temperature=0.8, with_entropy=with_entropy, chunk_bytes=2**27
    )
    loss = outputs.log_probs.sum() + (outputs.entropy.sum() if outputs.entropy is not None else 0)
    loss.backward()
    found = [outputs.log_probs, *([] if outputs.entropy is None else [outputs.entropy])]
    return [*(each.detach() for each in found), hidden.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_compiled_head_has_the_numbers_of_the_plain_one(
    with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = numbers(with_entropy)
    head = joined_head(torch.device("cuda"), torch.bfloat16)
    assert head is not None and head._works
    monkeypatch.setattr(log_probs, "joined_head", lambda *_: None)
    plain = numbers(with_entropy)
    for number, (mine, other) in enumerate(zip(joined, plain, strict=True)):
        of_outputs = number < len(joined) - 2
        apart = float((mine.float() - other.float()).norm() / other.float().norm())
        assert apart < (1e-5 if of_outputs else 5e-3), (number, apart)


def test_packed_rows_have_a_kernel() -> None:
    assert _varlen_groups(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16) is not None


def test_a_joined_norm_has_the_numbers_and_gradients_of_the_plain_one() -> None:
    plain, joined = (Qwen3RMSNorm(256, eps=1e-6).cuda().bfloat16() for _ in range(2))
    join_norms(joined)
    draw = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for norm in (plain, joined):
            norm.weight.copy_(torch.linspace(0.5, 2, 256))
    given = torch.randn(40, 256, generator=draw, device="cuda").bfloat16()
    found = []
    for norm in (plain, joined):
        states = given.clone().requires_grad_()
        out = norm(states)
        out.float().square().sum().backward()
        found.append([out.detach(), states.grad, norm.weight.grad])
    for mine, other in zip(*found, strict=True):
        apart = float((mine.float() - other.float()).norm() / other.float().norm())
        assert apart < 1e-2, "the plain one rounds twice more"
