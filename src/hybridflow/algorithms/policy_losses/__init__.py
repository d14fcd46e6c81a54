"""Policy losses by name (`actor.policy_loss.loss_mode`): log-probs and advantages in, a share of the
mini-batch loss out.

One form: `(inputs: LossInputs, *, its own parameters, loss_agg_mode) -> LossOutput`, with the defaults of its
paper. Parameters and further columns are given by name, so a loss of a user's own leaves out what it does not
read; it takes `inputs`, or names single tensors of them as verl's losses do. To add one: a file with its
function, a line in `catalog.py`, its keys in the configuration, a test. From outside the project:
`path/to/file.py:name`, or `register_policy_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hybridflow.algorithms import catalog
from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.catalog import AGGREGATIONS, FunctionTable, load
from hybridflow.algorithms.policy_losses.inputs import LossInputs
from hybridflow.algorithms.policy_losses.types import PolicyLoss
from hybridflow.errors import ConfigError

_Loss = TypeVar("_Loss", bound=Callable[..., LossOutput])


def _loaded(name: str) -> PolicyLoss:
    facts = catalog.POLICY_LOSSES[name]
    return PolicyLoss(
        load(facts.path()),
        facts.agg_mode,
        select=load(facts.path(facts.select)) if facts.select else None,
        keeps_groups=facts.keeps_groups,
        learns_from=load(facts.path(facts.learns_from)) if facts.learns_from else None,
    )


POLICY_LOSSES: FunctionTable[PolicyLoss] = FunctionTable("policy loss", catalog.POLICY_LOSSES, _loaded)


def register_policy_loss(
    name: str, *, agg_mode: str = "token-mean", keeps_groups: bool = False
) -> Callable[[_Loss], _Loss]:
    """Make a function of yours a policy loss by name; it gets what its arguments name.

    `agg_mode`: how entropy and KL are summed beside it where the run sets none; `keeps_groups`: it needs the
    rows of a prompt in one micro-batch, without the tokens whose advantage is 0. A run takes it as
    `path/to/file.py:function`, with what is said here. Raises ConfigError for a name that is taken and for an
    unknown mode.
    """
    if agg_mode not in AGGREGATIONS:
        raise ConfigError(
            f"policy loss {name!r}: unknown agg_mode {agg_mode!r}: choose from {', '.join(AGGREGATIONS)}"
        )

    def add(function: _Loss) -> _Loss:
        POLICY_LOSSES.add(name, PolicyLoss(function, agg_mode, keeps_groups=keeps_groups))
        return function

    return add


__all__ = ["POLICY_LOSSES", "LossInputs", "PolicyLoss", "register_policy_loss"]
