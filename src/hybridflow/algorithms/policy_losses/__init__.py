"""Policy losses by name (`actor.policy_loss.loss_mode`): log-probs and advantages in, a share of the
mini-batch loss out.

One signature: `(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None, **its own
parameters) -> LossOutput`, where `loss_agg_mode=None` and `loss_scale_factor=None` are parameters of every
loss here. All are given by name, so a loss of a user's own leaves out what it does not read. To add one: a
file with its function, a line in the table, its keys in the configuration, a test. From outside the project:
`path/to/file.py:name`, or `register_policy_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, get_args

from hybridflow.algorithms.aggregation import LossAggMode, LossOutput
from hybridflow.algorithms.policy_losses.cispo import cispo
from hybridflow.algorithms.policy_losses.dpo import dpo, in_a_pair
from hybridflow.algorithms.policy_losses.dppo import dppo_kl, dppo_tv
from hybridflow.algorithms.policy_losses.dro import dro
from hybridflow.algorithms.policy_losses.entropy_cov import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from hybridflow.algorithms.policy_losses.geo_mean import geo_mean
from hybridflow.algorithms.policy_losses.gspo import gspo
from hybridflow.algorithms.policy_losses.reinforce import reinforce
from hybridflow.algorithms.policy_losses.sapo import sapo
from hybridflow.algorithms.policy_losses.sppo import sppo
from hybridflow.algorithms.policy_losses.types import PolicyLoss
from hybridflow.algorithms.policy_losses.vanilla import vanilla
from hybridflow.errors import ConfigError

_Loss = TypeVar("_Loss", bound=Callable[..., LossOutput])

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(vanilla),
    "gspo": PolicyLoss(gspo, "seq-mean-token-mean"),
    "sapo": PolicyLoss(sapo, "seq-mean-token-mean"),
    "geo_mean": PolicyLoss(geo_mean, "seq-mean-token-mean"),
    "gmpo": PolicyLoss(geo_mean, "seq-mean-token-mean"),
    "cispo": PolicyLoss(cispo),
    "gpg": PolicyLoss(reinforce),
    "reinforce": PolicyLoss(reinforce),
    "clip_cov": PolicyLoss(clip_cov, select=select_clip_cov),
    "kl_cov": PolicyLoss(kl_cov, select=select_kl_cov),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "dro": PolicyLoss(dro),
    "sppo": PolicyLoss(sppo, "seq-mean-token-sum"),
    "dpo": PolicyLoss(dpo, "seq-mean-token-sum", keeps_groups=True, learns_from=in_a_pair),
}


def register_policy_loss(
    name: str, *, agg_mode: str = "token-mean", keeps_groups: bool = False
) -> Callable[[_Loss], _Loss]:
    """Make a function of yours a policy loss by name; it gets what its arguments name.

    `agg_mode`: how entropy and KL are summed beside it where the run sets none; `keeps_groups`: it needs the
    rows of a prompt in one micro-batch, without the tokens whose advantage is 0. A run takes it as
    `path/to/file.py:function`, with what is said here. Raises ConfigError for a name that is taken and for an
    unknown mode.
    """
    if agg_mode not in get_args(LossAggMode):
        raise ConfigError(
            f"policy loss {name!r}: unknown agg_mode {agg_mode!r}: choose from "
            f"{', '.join(get_args(LossAggMode))}"
        )

    def add(function: _Loss) -> _Loss:
        if name in POLICY_LOSSES:
            raise ConfigError(
                f"policy loss {name!r} exists already: give yours another name than "
                f"{', '.join(POLICY_LOSSES)}"
            )
        POLICY_LOSSES[name] = PolicyLoss(function, agg_mode, keeps_groups=keeps_groups)
        return function

    return add


__all__ = [
    "POLICY_LOSSES",
    "PolicyLoss",
    "cispo",
    "clip_cov",
    "dpo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gspo",
    "kl_cov",
    "register_policy_loss",
    "reinforce",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
    "sppo",
    "vanilla",
]
