"""The one log-prob function, from which both training and rollout take the log-prob of a token.

`token_log_probs` goes from hidden states to log-probs, entropy and Σπ² a chunk of tokens at a time, so that
logits [tokens, vocabulary] never exist for a whole large micro-batch. The backward pass has the logits of as
many chunks as `KEPT_BYTES` allow, and computes the others again, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridflow.distributed.accelerators import KEPT_BYTES, features
from hybridflow.models.heads.joined_head import LOWEST, JoinedHead, joined_head

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function of states [..., K], weight [N, K] and bias [N] or None, to [..., N]."""

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class TokenOutputs(NamedTuple):
    """Outputs of a policy for the M predicted tokens, in float32 (float64 for a float64 model)."""

    log_probs: Tensor
    """Log-probs [M] of the temperature-scaled distribution, nats."""
    entropy: Tensor | None
    """Entropy [M] of the same distribution, nats; None unless asked for."""
    sum_pi_squared: Tensor | None = None
    """Σ_v π(v)² [M] of the same distribution, without gradient; None unless asked for."""
    full_kl: Tensor | None = None
    """KL(π ‖ π_ref) [M] over the whole vocabulary, nats; None unless asked for."""
    divergence: Tensor | None = None
    """The divergence from the teacher [M], nats; None unless asked for."""
    top_outcomes: Tensor | None = None
    """The most likely tokens with their log-probs [M, 2k + 1], without gradient; None unless asked for."""

    def first(self, count: int) -> TokenOutputs:
        """Return the outputs for the first `count` tokens."""
        cut = {name: part[:count] for name, part in self._asdict().items() if part is not None}
        return self._replace(**cut)


@dataclass(frozen=True)
class LogitTransform:
    """The transform of the head's output: x -> softcap·tanh(scale·x / softcap), as some models have it, and
    -inf for tokens that are never sampled.
    """

    scale: float = 1.0
    softcap: float | None = None
    forbidden: tuple[int, ...] = ()
    """Token ids without probability: the placeholders of pictures in a prompt. Sampled, they would be read
    as placeholders without a picture.
    """

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> LogitTransform:
        """Read Gemma's softcap, Cohere's scale, and what Granite divides and HyperCLOVA X multiplies by."""
        kind = str(getattr(config, "model_type", ""))
        scale = 1.0
        if kind.startswith("cohere"):
            scale = float(getattr(config, "logit_scale", None) or 1.0)
        elif (scaling := getattr(config, "logits_scaling", None)) is not None:
            scale = 1.0 / float(scaling)
            if kind == "hyperclovax":
                scale = float(scaling)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, raw: Tensor) -> Tensor:
        """Transform head output [..., V] -> logits [..., V] in float32 or better."""
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        for token in self.forbidden:
            logits[..., token] = -float("inf")
        return logits


def log_probs_from_logits(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) at the targets, [M] nats.

    logits [M, V] float32 or better, targets [M] int64.
    """
    # a sum to a single number is split among threads, in another order than that of a row among rows
    if logits.shape[0] == 1:
        return log_probs_from_logits(logits.expand(2, -1), targets.expand(2), temperature)[:1]
    scaled = logits
    if temperature != 1.0:
        scaled = logits / temperature
    return scaled.gather(-1, targets[..., None])[..., 0] - scaled.logsumexp(-1)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    forbidden: tuple[int, ...] = (),
    chunk_bytes: int | None = None,
    chunk_step: int = 1,
    product: Product = linear,
) -> TokenOutputs:
    """Return the log-prob of each target and, on request, entropy and Σπ² of the distribution.

    hidden [M, H], weight [V, H], bias [V] or None, targets [M] int64 -> [M] each, of softmax(z / temperature)
    with z = hidden·weightᵀ + bias after `LogitTransform`. Gradients flow from log-probs and entropy, not from
    Σπ². A logit of -inf has probability 0 and adds nothing. A chunk of tokens holds at most `chunk_bytes` of
    logits (by default what the table of accelerators says), as a multiple of `chunk_step` tokens, and at
    least `chunk_step` tokens. `product` computes hidden·weightᵀ + bias.
    """
    assert temperature > 0, f"temperature {temperature} must be above 0"
    assert hidden.dim() == 2 and targets.shape == hidden.shape[:1], (
        f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not match"
    )
    assert softcap is None or not forbidden, "the slope of a capped logit of -inf would be NaN"
    transform = LogitTransform(logit_scale, softcap, forbidden)
    chunk_bytes = chunk_bytes or features(hidden.device.type).logits_bytes
    chunk = max(1, chunk_tokens(weight.shape[0], hidden.dtype, chunk_bytes) // chunk_step) * chunk_step
    wanted = (with_entropy, with_sum_pi_squared)
    kept = 0
    if torch.is_grad_enabled():
        kept = chunk_tokens(weight.shape[0], hidden.dtype, KEPT_BYTES)
    joined: JoinedHead | None = None
    if chunk_step == 1 and not forbidden:  # exact mode wants the bits of the plain operations
        joined = joined_head(hidden.device, hidden.dtype)
    log_probs, entropy, squares = _TokenLogProbs.apply(
        hidden, weight, bias, targets, temperature, wanted, transform, chunk, kept, joined, product
    )  # type: ignore[no-untyped-call]
    outputs = TokenOutputs(log_probs, None)
    if with_entropy:
        outputs = outputs._replace(entropy=entropy)
    if with_sum_pi_squared:
        outputs = outputs._replace(sum_pi_squared=squares)
    return outputs


def chunk_tokens(vocabulary: int, dtype: torch.dtype, chunk_bytes: int) -> int:
    """Return how many tokens' logits fit into `chunk_bytes`, at least 1."""
    return max(1, chunk_bytes // (vocabulary * torch.promote_types(dtype, torch.float32).itemsize))


class _TokenLogProbs(torch.autograd.Function):
    """Log-probs with their gradient: d logp_t/dz_v = [v = t] − p_v and d H/dz_v = −p_v (log p_v + H).

    z is already divided by the temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        wanted: tuple[bool, bool],
        transform: LogitTransform,
        chunk: int,
        kept: int,
        joined: JoinedHead | None,
        product: Product,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with_entropy, with_squares = wanted
        kind = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(len(hidden), dtype=kind, device=hidden.device)
        entropy, squares = (
            torch.empty(len(hidden) if want else 0, dtype=kind, device=hidden.device) for want in wanted
        )
        ctx.logits = {}  # of a joined head its product
        ctx.totals = {}
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            raw = product(hidden[part], weight, bias)
            found = joined and joined.outputs(
                raw, targets[part], float(temperature), transform.scale, transform.softcap, *wanted
            )
            if found:
                if start + len(raw) <= kept:
                    ctx.logits[start] = raw
                log_probs[part], ctx.totals[start], entropies, sums = found
                if entropies is not None:
                    entropy[part] = entropies
                if sums is not None:
                    squares[part] = sums
                continue
            logits = transform(raw)
            del raw
            if start + len(logits) <= kept:
                ctx.logits[start] = logits
            log_probs[part] = log_probs_from_logits(logits, targets[part], temperature)
            if with_entropy or with_squares:
                log_p = _log_softmax(logits, temperature)
                p = log_p.exp()
                if with_squares:
                    squares[part] = p.square().sum(-1)
                if with_entropy:
                    entropy[part] = -(p * _bounded_(log_p)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.mark_non_differentiable(squares)
        ctx.settings = (temperature, with_entropy, transform, chunk, joined, product)
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        temperature, with_entropy, transform, chunk, joined, product = ctx.settings
        grad_log_probs, grad_entropy, _ = grads
        kind = grad_log_probs.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = (
            torch.zeros(bias.shape, dtype=kind, device=bias.device)
            if bias is not None and wants_bias
            else None
        )
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            kept = ctx.logits.pop(start, None)
            total = ctx.totals.pop(start, None)
            own = (grad_log_probs[part], grad_entropy[part] if with_entropy else None)
            grad: Tensor | None = None
            if total is not None:
                kept = product(hidden[part], weight, bias) if kept is None else kept
                grad = joined.gradient(
                    kept,
                    targets[part],
                    total,
                    entropy[part] if with_entropy else None,
                    *(each if each is None else each.contiguous() for each in own),
                    float(temperature),
                    transform.scale,
                    transform.softcap,
                )
            if grad is None:
                if kept is None or total is not None:
                    kept = transform(product(hidden[part], weight, bias))
                grad = _head_gradient(kept, targets[part], entropy[part], *own, temperature, transform)
            del kept  # the products need memory too
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=kind)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if wants_weight:
                grad_weight = _add_product(grad_weight, grad, hidden[part], kind)
        if wants_weight and grad_weight is None:  # no tokens
            grad_weight = torch.zeros_like(weight)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 8,
        )


def _head_gradient(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    transform: LogitTransform,
) -> Tensor:
    """Return the gradient of the head's product, in float32 or better, by logits [m, V] of it."""
    log_p = _log_softmax(logits, temperature)
    grad = log_p.exp() if grad_entropy is not None else log_p.exp_()
    if grad_entropy is not None:
        grad_z = _bounded_(log_p).add_(entropy[:, None])
        grad_z.mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
        grad.mul_(grad_z).neg_()
    else:
        grad.mul_(-grad_log_probs[:, None])
    grad.scatter_add_(-1, targets[:, None], grad_log_probs[:, None])
    if transform.softcap is not None:
        grad.mul_(1 - (logits / transform.softcap).square_())
    return grad.mul_(transform.scale / temperature)


def _bounded_(log_p: Tensor) -> Tensor:
    """Raise log-probs below `LOWEST` to it, in place, so that p·log p is 0 and not NaN where p is 0.

    Every probability that far down is 0 in float64 already, so no other product changes; NaN stays NaN.
    """
    return log_p.clamp_(min=LOWEST)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1)


def _add_product(total: Tensor | None, grad: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """total [V, H] + gradᵀ [V, m] · hidden [m, H], in `dtype` from the second chunk on: a sum over chunks in
    bfloat16 would lose the small ones. `total` is None before the first.
    """
    if total is None:
        return grad.T @ hidden
    if grad.dtype == dtype:
        return total.addmm_(grad.T, hidden)
    return total.to(dtype).add_(grad.T @ hidden)
