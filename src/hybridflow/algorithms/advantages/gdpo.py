"""Several rewards, each normalised on its own before they are added: GDPO, 2601.05242."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_statistics, learned_from, on_every_token
from hybridflow.algorithms.advantages.grpo import against_the_group
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.aggregation import at_least_float32, masked_whiten
from hybridflow.errors import ConfigError


def gdpo(
    reward_components: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    gdpo_reward_weights: Sequence[float] | None = None,
    loss_mask: Tensor | None = None,
) -> Advantages:
    """A = whiten over rows of Σ_k w_k·(s_k − μ_gk)/(σ_gk + 1e-6), on every token of a row; s_k the row's
    reward under key k.

    reward_components [B, K] float, one column a key; response_mask [B, R] bool; group_ids [B] int64, equal
    for the responses of one prompt; w_k from `gdpo_reward_weights`, K numbers (default: 1 each). μ_gk, σ_gk
    are mean and Bessel-corrected deviation over the group's rows with a sampled token. Whitening (mean and
    Bessel variance, rsqrt(var + 1e-8)) is over the rows with a token in `loss_mask` (default:
    `response_mask`), each counted once however long it is, as in the paper. A key that does not vary in a
    group adds 0 there; a group in which none varies gets exactly 0, after whitening too. Raises ConfigError
    for another number of weights.

    Left out: the paper's rewards that count only where another is reached (that is the reward function's),
    and a KL penalty in the reward, which is no component.
    """
    mask = response_mask.bool()
    components = at_least_float32(reward_components)
    counts = mask.any(dim=-1)
    num_keys = components.shape[-1]
    weights = list(gdpo_reward_weights or [1.0] * num_keys)
    if len(weights) != num_keys:
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {num_keys} rewards: give one for "
            "each of algorithm.gdpo_reward_keys, or none for 1 each"
        )
    total = components.new_zeros(len(components))
    varies = torch.zeros_like(counts)
    for weight, scores in zip(weights, components.unbind(-1), strict=True):
        group = group_statistics(scores, counts, group_ids)
        total = total + weight * against_the_group(group, norm_by_std=True)
        varies = varies | group.varies
    learn = learned_from(mask, loss_mask)
    return on_every_token(masked_whiten(total, learn.any(dim=-1)).where(varies, 0.0), learn)
