"""Drawing the rows to learn from by their scores: policy filtration, PF-PPO (Zhang et al., 2409.06957)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import at_least_float32
from hybridflow.algorithms.catalog import RESAMPLING
from hybridflow.errors import ConfigError


def resample_rows(
    scores: Tensor,
    *,
    method: str,
    weight_pow: float,
    generator: torch.Generator,
    num_draws: int | None = None,
) -> Tensor:
    """P(row) = w/Σw, drawn B times with replacement.

    w follows from the scores s by `method`, a name of `catalog.RESAMPLING`. scores [B] float, before any KL
    penalty; p = `weight_pow`, at least 0; the result [B] int64, or [num_draws], holds positions in the batch,
    and the caller moves every field of a row with it. Scores may be those of several steps, from a replay
    buffer: the weights are over all of them. `generator` is a CPU generator and the only source of
    randomness. Where all weights are 0 (`pow` with scores of 0) every row is as likely. Raises ConfigError
    for another method.

    Left out: the paper filters by the rank of a response among those of its prompt; here the scores of all
    rows decide.
    """
    if not scores.numel():
        return torch.empty(0, dtype=torch.int64)
    s = at_least_float32(scores).double().cpu()
    if method == "pow":
        # relative to the largest, so that no power overflows or vanishes for all rows
        weights = (s.abs() / s.abs().max().clamp(min=torch.finfo(s.dtype).tiny)).pow(weight_pow)
    elif method == "max_min":
        weights = ((s == s.max()) | (s == s.min())).double()
    elif method == "max_random":
        weights = torch.where(s == s.max(), 0.4, 0.1).double()
    else:
        raise ConfigError(
            f"unknown algorithm.pf_ppo.reweight_method {method!r}: choose from {', '.join(RESAMPLING)}"
        )
    if not weights.any():
        weights = torch.ones_like(weights)
    draws = len(s) if num_draws is None else num_draws
    return torch.multinomial(weights, draws, replacement=True, generator=generator)
