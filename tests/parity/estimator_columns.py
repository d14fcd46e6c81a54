"""Everything that any estimator may ask for, by name, on one ragged batch with junk outside the mask."""

from __future__ import annotations

from typing import Any

import torch
from ragged_batches import ragged
from torch import Tensor

ROWS, WIDTH = 16, 6
ALONE, EQUAL = (15,), (12, 13, 14)


def every_column(seed: int, *, signed: bool = True) -> dict[str, Any]:
    """Groups of 1 to 6 rows; row 0 empty, row 1 of one token, row 15 alone in its group, rows 12 to 14 equal
    in score and not in length, rows 3 and 4 with scores of thousands. With `signed` false no score is below
    0.
    """
    b, g = ragged(seed, ROWS, WIDTH), torch.Generator().manual_seed(1000 + seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask, rewards = b.mask.clone(), b.rewards.clone()
    junk = torch.where(torch.rand(ROWS, WIDTH, generator=g) < 0.5, torch.nan, torch.inf).double()
    mask[12:16, 0] = mask[3, 2] = mask[4, 5] = True
    rewards[mask & ~b.mask] = 0.5
    rewards[3], rewards[4] = rewards[3] * 1e3, rewards[4] * -1e3
    for row in EQUAL:
        rewards[row] = junk[row]
        rewards[row, mask[row]] = 0.0
        rewards[row, 0] = 0.1
    if not signed:
        rewards = rewards.abs()
    group_ids = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4]) * 100 - 7
    group_ids[:12] = group_ids[:12][torch.randperm(12, generator=g)]
    log_probs = torch.where(mask, -randn(ROWS, WIDTH).abs(), junk)
    probability = log_probs.exp()
    share = torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64)
    components = torch.stack(
        [torch.where(mask, rewards, 0.0).sum(-1), (randn(ROWS) > 0).double(), randn(ROWS) * 50], dim=-1
    )
    components[12:15] = torch.tensor([0.1, 1.0, -3.0])
    components[~mask.any(-1)] = torch.nan
    learn = (torch.rand(ROWS, WIDTH, generator=g) < 0.8) & mask
    learn[5] = False
    return {
        "token_level_rewards": torch.where(mask, rewards, junk),
        "response_mask": mask,
        "loss_mask": learn,
        "group_ids": group_ids,
        "row_id": torch.randperm(ROWS, generator=g) * 3,
        "values": torch.where(mask, randn(ROWS, WIDTH), junk),
        "old_log_probs": log_probs,
        "teacher_log_probs": torch.where(mask, log_probs + randn(ROWS, WIDTH), junk),
        "sum_pi_squared": torch.where(mask, probability.square() + share * (1 - probability).square(), junk),
        "rollout_is_weights": torch.where(mask, randn(ROWS, WIDTH).exp(), junk),
        "process_rewards": torch.where(mask, randn(ROWS, WIDTH), junk),
        "reward_baselines": randn(ROWS),
        "reward_components": components,
        "is_demonstration": torch.rand(ROWS, generator=g) < 0.4,
        "gamma": 0.97,
        "lam": 0.9,
        "norm_by_std": True,
        "gdpo_reward_weights": [1.0, 2.0, 0.5],
        "process_coef": 5.0,
        "outcome_coef": 3.0,
        "sppo_eta": 1.5,
        "sppo_beta": 0.02,
    }
