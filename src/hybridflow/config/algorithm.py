"""`algorithm.*`: advantage estimation and the KL terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import group, key


@dataclass(frozen=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = key("fixed", "how the coefficient of KL-in-reward moves")
    kl_coef: float = key(0.001, "coefficient, or where the adaptive one starts", minimum=0)
    horizon: int = key(10_000, "rows over which the adaptive coefficient follows the target", minimum=1)
    target_kl: float = key(0.1, "KL that the adaptive coefficient aims at, in nats a token", above=0)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = key("gae", "advantage estimator by name (gae, grpo), or path.py:name")
    options: dict[str, Any] = key({}, "further keyword arguments of a user's own estimator")
    gamma: float = key(1.0, "discount per token", minimum=0, maximum=1)
    lam: float = key(1.0, "lambda of GAE", minimum=0, maximum=1)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's standard deviation; false: Dr.GRPO")
    use_kl_in_reward: bool = key(False, "subtract a KL penalty against the reference from the token rewards")
    kl_penalty: str = key("kl", "KL estimator in the reward: kl|k1, abs, mse|k2, low_var_kl|k3")
    kl_ctrl: KLControlConfig = group(KLControlConfig)
