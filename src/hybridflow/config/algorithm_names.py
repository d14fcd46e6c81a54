"""Facts about the maths that the checks need without importing torch: names, needs and vetted defaults, as
data.

`tests/architecture/test_names_agree.py` keeps it in step with the tables of `hybridflow.algorithms`.
"""

from __future__ import annotations

from typing import NamedTuple


class EstimatorFacts(NamedTuple):
    """Needs of an advantage estimator besides scores."""

    critic: bool = False
    group: bool = False
    """Whether it needs two or more responses to each prompt."""
    reference: bool = False
    teacher: bool = False
    process_rewards: bool = False


class LossFacts(NamedTuple):
    """Defaults of a policy loss where the configuration sets none."""

    agg_mode: str = "token-mean"
    """Value of `actor.loss_agg_mode` in its paper."""
    clip: tuple[float, float] | None = None
    """(clip_ratio_low, clip_ratio_high) of its paper, where they are not PPO's."""
    reference: bool = False
    clip_c: float | None = None
    """`actor.clip_ratio_c` of its paper, where it is not PPO's."""


ESTIMATORS: dict[str, EstimatorFacts] = {
    "gae": EstimatorFacts(critic=True),
    "grpo": EstimatorFacts(group=True),
    "grpo_passk": EstimatorFacts(group=True),
    "gdpo": EstimatorFacts(group=True),
    "rloo": EstimatorFacts(group=True),
    "reinforce_plus_plus": EstimatorFacts(),
    "reinforce_plus_plus_baseline": EstimatorFacts(group=True),
    "remax": EstimatorFacts(),
    "opo": EstimatorFacts(group=True),
    "gpg": EstimatorFacts(group=True),
    "optimal_token_baseline": EstimatorFacts(group=True),
    "tir_optimal_token_baseline": EstimatorFacts(group=True),
    "max_rl": EstimatorFacts(group=True),
    "prime": EstimatorFacts(group=True, reference=True, process_rewards=True),
    "sppo": EstimatorFacts(group=True),
    "online_dpo": EstimatorFacts(group=True, reference=True),
    "spin": EstimatorFacts(reference=True),
    "on_policy_distillation": EstimatorFacts(teacher=True),
}

POLICY_LOSSES: dict[str, LossFacts] = {
    "vanilla": LossFacts(),
    "gspo": LossFacts("seq-mean-token-mean", (3e-4, 4e-4)),
    "sapo": LossFacts("seq-mean-token-mean"),
    "geo_mean": LossFacts("seq-mean-token-mean", (0.4, 0.4)),
    "gmpo": LossFacts("seq-mean-token-mean", (0.4, 0.4)),
    "cispo": LossFacts("token-mean", (1.0, 0.28)),
    "gpg": LossFacts(),
    "reinforce": LossFacts(),
    "clip_cov": LossFacts(),
    "kl_cov": LossFacts(),
    "dppo_tv": LossFacts(clip_c=20.0),
    "dppo_kl": LossFacts(clip_c=20.0),
    "dro": LossFacts(),
    "sppo": LossFacts("seq-mean-token-sum"),
    "dpo": LossFacts("seq-mean-token-sum", reference=True),
}

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
