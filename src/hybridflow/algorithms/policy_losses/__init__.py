"""Policy losses by name (`actor.policy_loss.loss_mode`): log-probs and advantages in, a share of the mini-batch loss out.

One signature: `(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None, **its own parameters) -> LossOutput`,
where `loss_agg_mode=None` and `loss_scale_factor=None` are parameters of every loss. To add one: a file with its function, a line in
the table, its keys in the configuration, a test. From outside the project: `path/to/file.py:name`, or `register_policy_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses.vanilla import vanilla
from hybridflow.errors import ConfigError

PolicyLoss = Callable[..., LossOutput]
_Loss = TypeVar("_Loss", bound=PolicyLoss)

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
}


def register_policy_loss(name: str) -> Callable[[_Loss], _Loss]:
    """Make a function of yours a policy loss by name. Raises ConfigError for a name that is taken."""

    def add(function: _Loss) -> _Loss:
        if name in POLICY_LOSSES:
            raise ConfigError(f"policy loss {name!r} exists already: give yours another name than {', '.join(POLICY_LOSSES)}")
        POLICY_LOSSES[name] = function
        return function

    return add


__all__ = ["POLICY_LOSSES", "PolicyLoss", "register_policy_loss", "vanilla"]
