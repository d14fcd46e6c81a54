"""The numbers that are wanted of a model about rows, as data; `outputs.py` has the call that gives them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridflow.models.heads.divergence import DivergenceSpec

Outputs = dict[str, Tensor]
"""Outputs by the names of the fields of `OutputSpec`: [M] for packed rows, [b, R] for padded ones; several
numbers of a token are one more axis.
"""


@dataclass(frozen=True)
class OutputSpec:
    """The numbers that are wanted of each predicted token.

    `log_probs`, `entropy` and `sum_pi_squared` are asked of a policy, `values` of a value model, and `scores`
    of a reward model.

    Example: `OutputSpec(log_probs=True, entropy=True, temperature=0.8)`.
    """

    log_probs: bool = False
    """Log-probs of the tokens, in nats."""
    entropy: bool = False
    """Entropies of the distributions that the tokens are drawn from, in nats."""
    sum_pi_squared: bool = False
    """Sums of the squared probabilities of these distributions, without gradient."""
    values: bool = False
    """Returns expected in the states in which the tokens are chosen, in units of the reward."""
    routes: bool = False
    """The experts of all tokens, [N, W] int16 for N packed tokens and [b, T, W] for padded rows."""
    scores: bool = False
    """Scores of a reward model: of each token, or of each row, at its last token and 0 at the others."""
    full_kl: bool = False
    """KL divergences from the reference over the whole vocabulary, in nats."""
    divergence: DivergenceSpec | None = None
    """Divergences from the teacher, in nats; None: they are not wanted."""
    top_outcomes: int = 0
    """The number k of most likely tokens that are wanted with their log-probs, [M, 2k + 1]."""
    top_below: int = 0
    """The token ids among which they are: those below this one."""
    temperature: float = 1.0
    """Divisor of the logits before any of a policy's numbers are computed."""
