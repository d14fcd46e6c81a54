"""SimPO (2405.14734): no reference; means over tokens instead of sums, and a margin."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.masked import at_least_float32
from hybridflow.errors import ConfigError


def simpo(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
) -> Tensor:
    """The loss of each pair, [K] float: −logσ(β·S_chosen/len_chosen − β·S_rejected/len_rejected − γ).

    chosen_log_prob, rejected_log_prob [K] float, nats: S = Σ_t logπ over a response's tokens; the lengths [K]
    int count those tokens (0 counts as 1). β: `beta`; γ: `margin`. 2405.14734, equation 6, whose runs take β
    in 2 to 2.5 and γ in 0.3 to 1.6. Raises ConfigError for a beta that is not above 0.

    Left out: nothing; the margin is the paper's γ itself, not its ratio to β.
    """
    if not beta > 0:
        raise ConfigError(f"SimPO got beta {beta}: set it above 0, 2.0 for example")
    chosen = at_least_float32(chosen_log_prob) / chosen_length.clamp(min=1)
    rejected = at_least_float32(rejected_log_prob) / rejected_length.clamp(min=1)
    return -logsigmoid(beta * (chosen - rejected) - margin)
