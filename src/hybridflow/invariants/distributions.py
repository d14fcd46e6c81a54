"""Properties of KL estimates, log-probs, entropies and whitening. References are computed in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridflow.invariants.checking import AdapterCall, close, finite, holds, same, that

KL = "k1 k2 k3"
ALL = torch.ones(1, 4, dtype=torch.bool)
POLICY = torch.tensor([[1.0, -0.5, 0.2, -2.0]])
"""Logits of a policy over four words."""
REFERENCE = torch.tensor([[0.3, 0.4, -1.0, 0.1]]).log_softmax(-1)


@holds("kl", "formula by Schulman, 2020", KL)
def equal_policies_have_no_kl(call: AdapterCall) -> None:
    """The estimate is exactly 0 where both policies give a token the same log-prob."""
    same(call(REFERENCE, REFERENCE, ALL), torch.zeros(1, 4))


@holds("kl", "OpenRLHF #1335, TRL #3015, TRL #6637", KL)
def a_far_reference_stays_finite(call: AdapterCall) -> None:
    """Differences of 5 to 10,000 nats, up or down, have a finite value and gradient, in bfloat16 as well."""
    for dtype in (torch.float32, torch.bfloat16):
        for apart in (5.0, 12.0, 89.0, 200.0, 1e4):
            for now, reference in ((-1.0 - apart, -1.0), (-1.0, -1.0 - apart)):
                tensors = [torch.tensor([[each]], dtype=dtype) for each in (now, reference)]
                finite(*call.gradient(*tensors, ALL[:, :1]))


@holds("kl", "TRL #6637", "k2 k3")
def a_far_token_is_pulled_back(call: AdapterCall) -> None:
    """A token that is 5 nats from the reference still has a gradient towards it."""
    for now, reference, sign in ((-6.0, -1.0, -1.0), (-1.0, -6.0, 1.0)):
        _, gradient = call.gradient(torch.tensor([[now]]), torch.tensor([[reference]]), ALL[:, :1])
        wanted = "a gradient below 0" if sign < 0 else "a gradient above 0"
        that(float(gradient) * sign > 0, gradient, wanted)


@holds("kl", "formula by Schulman, 2020", "k1 k3")
def the_mean_estimate_is_the_kl(call: AdapterCall) -> None:
    """The expectation of the estimate under the policy is the KL divergence."""
    log_prob = POLICY.log_softmax(-1)
    exact = POLICY.double().log_softmax(-1)
    wanted = (exact.exp() * (exact - REFERENCE.double())).sum()
    close((log_prob.exp() * call(log_prob, REFERENCE, ALL)).sum(), wanted, rtol=1e-4)


@holds("kl", "formula by Schulman, 2020", "k2")
def its_mean_gradient_is_that_of_the_kl(call: AdapterCall) -> None:
    """The expectation of the gradient of k2 under the policy is the gradient of the KL divergence."""
    logits = POLICY.double().requires_grad_()
    exact = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((exact.exp() * (exact - REFERENCE.double())).sum(), logits)
    log_prob = POLICY.log_softmax(-1)
    _, slope = call.gradient(log_prob, REFERENCE, ALL)
    weighted = log_prob.exp() * slope  # by each log-prob; d logπ_i / d z_j = [i = j] − π_j
    close(weighted - log_prob.exp() * weighted.sum(), wanted, rtol=1e-4)


@holds("kl", "formula by Schulman, 2020", "k2 k3")
def a_small_kl_is_not_rounded_away(call: AdapterCall) -> None:
    """Differences of a thousandth to a tenth of a nat give the value of float64 to 2 %, and never below 0."""
    for apart in (0.001, -0.001, 0.01, -0.01, 0.1, -0.1):
        now = torch.tensor([[-1.0 + apart]])
        reference = torch.tensor([[-1.0]])
        log_ratio = reference.double() - now.double()
        wanted = 0.5 * log_ratio**2 if call.kind == "k2" else log_ratio.expm1() - log_ratio
        close(call(now, reference, ALL[:, :1]), wanted, rtol=0.02, atol=0.0)


@holds("kl", "OpenRLHF #1240", KL)
def junk_behind_the_mask_reaches_no_kl(call: AdapterCall) -> None:
    """NaN or infinity outside of the mask is 0 in the estimate and in the gradient."""
    mask = torch.tensor([[1, 0, 1, 1]]).bool()
    log_prob = POLICY.log_softmax(-1)
    value, gradient = call.gradient(log_prob, REFERENCE, mask)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for tensors in (
            (log_prob.where(mask, bad), REFERENCE),
            (log_prob, REFERENCE.where(mask, bad)),
        ):
            found, slope = call.gradient(*tensors, mask)
            close(found, value * mask)
            close(slope, gradient * mask)


@holds("log_probs", "TRL #3681")
def log_probs_of_large_logits(call: AdapterCall) -> None:
    """Logits of 10,000 and with an offset of 1,000 give the log-probs of float64, of the response's width."""
    logits = torch.tensor([[[1e4, 0.0, -1e4], [1000.5, 1000.0, 1001.0]], [[0.0, 0.0, 0.0], [-3.0, 2.0, 5.0]]])
    tokens = torch.tensor([[1, 0], [2, 1]])
    wanted = logits.double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    close(call(logits, tokens), wanted, rtol=1e-4, atol=1e-4)


@holds("entropy", "TRL #7221, SkyRL #2259")
def a_forbidden_word_has_no_entropy(call: AdapterCall) -> None:
    """A word with the logit −inf adds nothing: one of three forbidden leaves log 2, not NaN."""
    logits = torch.tensor([[[1.0, -torch.inf, 1.0], [0.0, -torch.inf, 0.0]]])
    close(call(logits), torch.full((1, 2), math.log(2)), rtol=1e-4)


@holds("entropy", "formula of the entropy")
def entropy_is_that_of_float64(call: AdapterCall) -> None:
    """Entropy is −Σ p·log p: log V for equal logits, near 0 for a certain word, the same with an offset."""
    logits = torch.tensor([[[0.0] * 5, [50.0, 0.0, 0.0, 0.0, 0.0], [100.5, 100.0, 99.0, 101.0, 98.0]]])
    exact = logits.double().log_softmax(-1)
    close(call(logits), -(exact.exp() * exact).sum(-1), rtol=1e-3, atol=1e-4)


@holds("whiten", "NeMo-RL #4158")
def equal_numbers_whiten_to_nothing(call: AdapterCall) -> None:
    """Numbers that are all equal become 0, without a residue of rounding."""
    mask = torch.ones(1, 7, dtype=torch.bool)
    for value in (0.1, 1 / 3, 1000.1):
        close(call(torch.full((1, 7), value), mask), torch.zeros(1, 7), atol=1e-2)


@holds("whiten", "verl #6348")
def an_offset_whitens_away(call: AdapterCall) -> None:
    """Numbers around 1,000 whiten to the values of float64."""
    values = 1000.0 + torch.tensor([[0.0, 0.25, 0.5], [1.0, 0.125, 2.0]])
    close(call(values, torch.ones(2, 3, dtype=torch.bool)), _whitened(values), rtol=1e-3)


@holds("whiten", "OpenRLHF #1240")
def junk_behind_the_mask_whitens_nothing(call: AdapterCall) -> None:
    """NaN or infinity outside of the mask does not change the numbers within."""
    values = torch.tensor([[0.0, 1.0, 3.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    wanted = _whitened(values[mask])
    for junk in (9.0, torch.nan, torch.inf):
        close(call(values.where(mask, junk), mask)[mask], wanted, rtol=1e-4)


@holds("whiten", "formula of whitening")
def one_number_whitens_to_nothing(call: AdapterCall) -> None:
    """A single token in the mask becomes 0, and is no error."""
    close(call(torch.tensor([[3.0, 5.0]]), torch.tensor([[True, False]]))[0, 0], torch.tensor(0.0))


def _whitened(values: Tensor) -> Tensor:
    exact = values.double()
    return (exact - exact.mean()) / exact.std()
