"""The questions that a model is asked about rows, as data, and the call of the module that answers them.

Ask ──answer──► PolicyModel or ValueModel on packed rows ──► {name: [M]}, M predicted tokens
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from hybridflow.models.value import ValueModel
from hybridflow.protocol.packing import PackedBatch

Answers = dict[str, Tensor]
"""Answers by the names of the fields of `Ask`: [M] for packed rows, [b, R] for padded ones."""


@dataclass(frozen=True)
class Ask:
    """The numbers that are wanted of each predicted token.

    `log_probs`, `entropy` and `sum_pi_squared` are asked of a policy, and `values` of a value model.

    Example: `Ask(log_probs=True, entropy=True, temperature=0.8)`.
    """

    log_probs: bool = False
    """Log-probs of the tokens, in nats."""
    entropy: bool = False
    """Entropies of the distributions that the tokens are drawn from, in nats."""
    sum_pi_squared: bool = False
    """Sums of the squared probabilities of these distributions, without gradient."""
    values: bool = False
    """Returns expected in the states in which the tokens are chosen, in units of the reward."""
    temperature: float = 1.0
    """Divisor of the logits before any of a policy's numbers are computed."""


def answer(module: nn.Module, packed: PackedBatch, ask: Ask) -> Answers:
    """Return the answers of `module` for packed rows, each [M] float32 or better."""
    if isinstance(module, ValueModel):
        assert ask == Ask(values=True), f"a value model has values alone, and is asked {ask}"
        return {"values": module(packed)}
    assert ask.log_probs and not ask.values, f"a policy has log-probs and no values, and is asked {ask}"
    outputs = module(
        packed,
        temperature=ask.temperature,
        with_entropy=ask.entropy,
        with_sum_pi_squared=ask.sum_pi_squared,
    )
    return {name: value for name, value in outputs._asdict().items() if value is not None}
