"""The language-model loss on correct responses: VAPO's positive-example loss (2504.05118)."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale, masked_sum


def positive_example_loss(log_prob: Tensor, mask: Tensor, positive: Tensor, scale: LossScale) -> Tensor:
    """Σ −logπ over the tokens of right rows, divided by `scale.num_positive_tokens`.

    Returns a micro-batch's share, 0-d with gradient. log_prob [B, R] float, nats; mask [B, R] bool, the
    tokens to learn from; positive [B] bool, true where the response was right. 0 (with a zero gradient) where
    the mini-batch has no such token. Its weight, 0.1 in the paper, is `actor.positive_lm_loss_coef`.

    Left out: nothing.
    """
    total = masked_sum(scale.by_weight(-log_prob), mask.bool() & positive.bool().unsqueeze(-1))
    return total / scale.num_positive_tokens if scale.num_positive_tokens else total * 0.0
