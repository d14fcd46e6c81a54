"""The loss of a reward model on pairs (InstructGPT, 2203.02155), with Llama 2's margin (2307.09288)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.masked import at_least_float32


def bradley_terry(
    chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | float | None = None
) -> Tensor:
    """The loss of each pair, [K] float: −logσ(s_chosen − s_rejected − m).

    chosen_scores, rejected_scores [K] float: the reward model's score of each response. m: `margin`, a number
    or [K] float, larger where the preference was stronger (2307.09288, equation 2); None: 0. 2203.02155,
    equation 1; weights of pairs are the caller's.

    Left out: rankings of more than two responses, which are pairs to the caller.
    """
    difference = at_least_float32(chosen_scores) - at_least_float32(rejected_scores)
    return -logsigmoid(difference if margin is None else difference - margin)
