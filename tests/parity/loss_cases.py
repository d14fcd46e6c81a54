"""Every policy loss with parameters to prove it at, and what it reads beside log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import reference_losses as reference
import torch
from ragged_batches import Ragged, ragged
from reference_losses import Floats, TokenLoss
from torch import Tensor

from hybridflow.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
FACTOR = 11.0
EXACT = {"rtol": 1e-9, "atol": 1e-9}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("vanilla", {"clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0}),
    ("vanilla", {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}),
    ("vanilla", {"clip_low": 0.1, "clip_high": 0.5, "clip_c": None}),
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("geo_mean", {"clip_low": 0.4, "clip_high": 0.4}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("cispo", {"clip_low": 1.0, "clip_high": 0.28}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.1}),
    ("gpg", {}),
    ("reinforce", {}),
    ("clip_cov", {"clip_low": 0.2, "clip_high": 0.28}),
    ("kl_cov", {"ppo_kl_coef": 0.7}),
    ("dppo_tv", {"clip_low": 0.1, "clip_high": 0.05, "clip_c": 1.5}),
    ("dppo_tv", {"clip_low": 0.2, "clip_high": 0.2, "clip_c": None}),
    ("dppo_kl", {"clip_low": 0.02, "clip_high": 0.01, "clip_c": 1.5}),
    ("dppo_kl", {"clip_low": 0.05, "clip_high": 0.05, "clip_c": None}),
    ("dro", {"dro_beta": 0.3}),
    ("sppo", {}),
    ("dpo", {"dpo_loss": "sigmoid", "dpo_beta": 0.1, "dpo_label_smoothing": 0.0}),
    ("dpo", {"dpo_loss": "sigmoid", "dpo_beta": 0.5, "dpo_label_smoothing": 0.2}),
    ("dpo", {"dpo_loss": "ipo", "dpo_beta": 0.3, "dpo_label_smoothing": 0.0}),
]
NAMES = [f"{name}-{number}" for number, (name, _) in enumerate(CASES)]
SELECTION = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "clip_cov_ratio": 0.15,
    "clip_cov_lb": 0.05,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.15,
}


def far(seed: int) -> Ragged:
    """A ragged batch in which two rows and one token have log-ratios of ±50 and one row has not moved."""
    b = ragged(seed)
    x = b.log_prob.clone()
    for row, moved in ((3, 50.0), (4, -50.0), (5, 0.0)):
        x[row] = torch.where(b.mask[row], b.old_log_prob[row] + moved, x[row])
    x[6, 0] = torch.where(b.mask[6, 0], b.old_log_prob[6, 0] + 50.0, x[6, 0])
    return replace(b, log_prob=x)


def columns(record: PolicyLoss, b: Ragged, seed: int = 0) -> dict[str, Tensor]:
    """What a loss may read of a whole mini-batch beside what all losses read."""
    found = {"ref_log_prob": b.ref_log_prob, "group_ids": b.groups}
    if record.select is not None:
        rng = torch.Generator().manual_seed(seed)
        parameters = record.select_arguments(SELECTION)
        found |= record.select(b.log_prob, b.old_log_prob, b.advantages, b.mask, rng, **parameters)
    return {key: value for key, value in found.items() if key in record.keywords}


def floats(b: Ragged, of_batch: dict[str, Tensor]) -> Floats:
    selected = [column for name, column in of_batch.items() if name.endswith("_selected")]
    return Floats(
        b.mask.tolist(),
        b.old_log_prob.tolist(),
        b.ref_log_prob.tolist(),
        b.advantages.tolist(),
        b.groups.tolist(),
        selected[0].tolist() if selected else [],
    )


def reference_of(name: str) -> Callable[..., TokenLoss]:
    """The slow reference of a loss; two of them have two names."""
    found: Callable[..., TokenLoss] = getattr(
        reference, {"gmpo": "geo_mean", "gpg": "reinforce"}.get(name, name)
    )
    return found


def with_gradient(x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def same_value_and_gradient(
    x: Tensor, found: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor]
) -> None:
    for a, b in zip(with_gradient(x, found), with_gradient(x, expected), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


assert {name for name, _ in CASES} == set(POLICY_LOSSES), "each loss of the table is proven"
