"""Estimators that need rewards, mask and groups alone, with the values of their keys that tests take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import Advantages
from hybridflow.algorithms.advantages.gdpo import gdpo
from hybridflow.algorithms.advantages.gpg import gpg
from hybridflow.algorithms.advantages.grpo import grpo
from hybridflow.algorithms.advantages.grpo_passk import grpo_passk
from hybridflow.algorithms.advantages.max_rl import max_rl
from hybridflow.algorithms.advantages.online_dpo import online_dpo
from hybridflow.algorithms.advantages.opo import opo
from hybridflow.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from hybridflow.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus_baseline
from hybridflow.algorithms.advantages.rloo import rloo
from hybridflow.algorithms.advantages.sppo import sppo

Scored = Callable[[Tensor, Tensor, Tensor], Advantages]

BY_SCORE: dict[str, Scored] = {
    "grpo": lambda r, m, g: grpo(r, m, g, norm_by_std=True),
    "dr_grpo": lambda r, m, g: grpo(r, m, g, norm_by_std=False),
    "optimal_token_baseline": lambda r, m, g: optimal_token_baseline(
        r, m, g, torch.full_like(r, -0.5), torch.full_like(r, 0.6)
    ),
    "grpo_passk": lambda r, m, g: grpo_passk(r, m, g, norm_by_std=True),
    "gdpo": lambda r, m, g: gdpo(torch.where(m, r, 0.0).sum(-1, keepdim=True), m, g),
    "rloo": rloo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "max_rl": max_rl,
    "sppo": lambda r, m, g: sppo(r, m, g, sppo_eta=1.0, sppo_beta=2.0),
    "online_dpo": online_dpo,
}
