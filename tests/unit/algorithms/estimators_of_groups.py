"""Estimators that need rewards, mask and groups alone, with the values of their keys that tests take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import (
    Advantages,
    gdpo,
    gpg,
    grpo_passk,
    max_rl,
    online_dpo,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
    sppo,
)

Scored = Callable[[Tensor, Tensor, Tensor], Advantages]

BY_SCORE: dict[str, Scored] = {
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
