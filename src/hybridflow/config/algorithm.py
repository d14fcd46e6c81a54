"""`algorithm.*`: advantage estimation, the KL terms, which groups and rows are learned from, and rollout
correction.
"""

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
class FilterGroupsConfig:
    enable: bool = key(
        False,
        "dynamic sampling (DAPO): drop groups whose metric does not vary and generate on until the batch is "
        "full",
    )
    metric: str = key(
        "acc",
        "what must vary in a group: acc, score (= seq_reward, seq_final_reward), or a key that the reward "
        "returns",
    )
    max_num_gen_batches: int = key(
        10,
        "stop the run when this many generation batches did not fill one training batch; 0: no limit",
        minimum=0,
    )
    min_mean: float | None = key(None, "also drop groups whose mean metric is below this (PRIME: 0.2)")
    max_mean: float | None = key(None, "also drop groups whose mean metric is above this (PRIME: 0.8)")


@dataclass(frozen=True)
class PFPPOConfig:
    reweight_method: Literal["pow", "max_min", "max_random"] = key(
        "pow", "weight of a row: |score|^p, only the extremes, or the best with 0.4 against 0.1"
    )
    weight_pow: float = key(2.0, "p of pow", minimum=0)


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence"] | None = key(
        None, "importance weights π_old/π_rollout, by token or by sequence; null: none"
    )
    rollout_is_threshold: float | str = key(
        2.0, "a number truncates weights above it; 'lo_hi' sets those outside to 0 (IcePop)"
    )
    rollout_is_batch_normalize: bool = key(False, "divide the weights by their mean after truncation")
    rollout_rs: str | None = key(
        None,
        "rejection: comma list of token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2, seq_max_k3; "
        "null: none",
    )
    rollout_rs_threshold: float | str | None = key(
        None, "one threshold for each option, by comma; k1: 'lo_hi' or u for [1/u, u]; k2, k3: upper bound"
    )
    bypass_mode: bool = key(
        False, "the log-probs of rollout serve as old log-probs: no forward pass for those"
    )
    loss_type: Literal["ppo_clip", "reinforce"] = key(
        "ppo_clip", "loss in bypass mode: ppo_clip (its ratio holds the weights) or reinforce"
    )


@dataclass(frozen=True)
class SPPOConfig:
    eta: float = key(1.0, "step size: what a log-ratio is aimed at is eta · (score − softmean)", above=0)
    beta: float = key(1.0, "sharpness of the softmean of a group's scores", above=0)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = key("gae", "advantage estimator by name, or path.py:name")
    options: dict[str, Any] = key({}, "further keyword arguments of a user's own estimator")
    gamma: float = key(1.0, "discount per token", minimum=0, maximum=1)
    lam: float = key(1.0, "lambda of GAE", minimum=0, maximum=1)
    lam_critic: float | None = key(
        None, "lambda of the critic's returns (VAPO: 1.0); null: lam", minimum=0, maximum=1
    )
    lam_length_alpha: float | None = key(
        None, "length-adaptive lambda of the policy, 1 − 1/(alpha · length) (VAPO: 0.05); null: lam", above=0
    )
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's standard deviation; false: Dr.GRPO")
    gdpo_reward_keys: list[str] = key(
        [], "gdpo: keys of the reward's result that are normalised one by one, for example [acc, format]"
    )
    gdpo_reward_weights: list[float] = key([], "gdpo: weight of each of them; empty: 1 each")
    use_kl_in_reward: bool = key(False, "subtract a KL penalty against the reference from the token rewards")
    kl_penalty: str = key("kl", "KL estimator in the reward: kl|k1, abs, mse|k2, low_var_kl|k3")
    kl_ctrl: KLControlConfig = group(KLControlConfig)
    ref_update_freq: int = key(
        0, "the reference becomes a copy of the actor every so many steps; 0: it stays", minimum=0
    )
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig)
    overlong_filtering: bool = key(False, "leave rows that were cut at max_response_length out of the loss")
    use_pf_ppo: bool = key(False, "resample the rows of a step by their scores, after advantages (PF-PPO)")
    pf_ppo: PFPPOConfig = group(PFPPOConfig)
    sppo: SPPOConfig = group(SPPOConfig)
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig)
