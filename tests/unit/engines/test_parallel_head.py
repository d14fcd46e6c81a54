"""Log-probs from a head that is cut among ranks, against the whole head in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridflow.engines.megatron import parallel_head
from hybridflow.engines.megatron.parallel_head import HeadCut, parallel_log_probs
from hybridflow.models.output_spec import OutputSpec
from ranks import Ranks

SPEC = OutputSpec(log_probs=True, entropy=True, sum_pi_squared=True, temperature=0.7)
TOKENS = 11
"""Odd: the last of two ranks has a row that is no token's."""


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    weight = torch.randn(TOKENS, 5, generator=draw, dtype=torch.float64)
    targets = torch.tensor([0, 5, 6, 10, 3, 3, 9])
    return states, weight, targets, torch.randn(2, 7, generator=draw, dtype=torch.float64)


def cut_head(rank: int, chunk: int) -> list[Tensor]:
    parallel_head.chunk_tokens = lambda *sizes: chunk  # type: ignore[assignment]
    states, weight, targets, slopes = drawn()
    rows = -(-TOKENS // 2)
    own = torch.full((rows, 5), 1e3, dtype=torch.float64)  # padding must not be read
    part = weight[rank * rows : (rank + 1) * rows]
    own[: len(part)] = part
    states.requires_grad_()
    own.requires_grad_()
    cut = HeadCut(torch.distributed.group.WORLD, rank * rows, len(part))
    found = parallel_log_probs(states, own, targets, SPEC, cut)
    assert found.entropy is not None and found.sum_pi_squared is not None
    (found.log_probs * slopes[0] + found.entropy * slopes[1]).sum().backward()
    assert own.grad is not None and states.grad is not None
    return [
        *(each.detach() for each in (found.log_probs, found.entropy, found.sum_pi_squared)),
        states.grad,
        own.grad[: len(part)],
    ]


@pytest.mark.parametrize("chunk", [3, 100])
def test_it_is_the_whole_head(two_ranks: Ranks, chunk: int) -> None:
    states, weight, targets, slopes = drawn()
    states.requires_grad_()
    weight.requires_grad_()
    log_p = (states @ weight.T / SPEC.temperature).log_softmax(-1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (log_probs * slopes[0] + entropy * slopes[1]).sum().backward()
    first, second = two_ranks.run(cut_head, chunk)
    two_ranks.stop()  # its chunks are changed
    for found in (first, second):
        for got, want in zip(
            found[:4], (log_probs, entropy, log_p.exp().square().sum(-1), states.grad), strict=True
        ):
            assert torch.allclose(got, want.detach(), rtol=1e-12, atol=1e-12)
    assert torch.allclose(torch.cat([first[4], second[4]]), weight.grad, rtol=1e-12, atol=1e-12)
