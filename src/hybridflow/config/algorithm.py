"""`algorithm.*`: advantages, the KL terms, which groups and rows are learned from, rollout correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import at_most, excludes, group, key, read_by, surprises

ADAPTIVE = read_by(".type=adaptive", "a fixed coefficient stays as it is")


@dataclass(frozen=True)
class KLControlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = key(
        "fixed", "How the coefficient of the KL in the reward moves: fixed, or adaptive towards target_kl."
    )
    kl_coef: float = key(
        0.001, "Coefficient of the KL in the reward; the adaptive one starts there.", minimum=0
    )
    horizon: int = key(
        10_000,
        "Rows over which the adaptive coefficient follows the target; more rows move it more slowly.",
        ADAPTIVE,
        minimum=1,
    )
    target_kl: float = key(
        0.1, "KL that the adaptive coefficient aims at, in nats a token.", ADAPTIVE, above=0
    )


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling: which groups are kept."""

    enable: bool = key(
        False,
        "Dynamic sampling (DAPO): drop groups whose metric does not vary, and generate more until the batch "
        "is full.",
        excludes(
            "actor_rollout_ref.rollout.n<2",
            "it keeps groups that vary, and a group of one response does not",
            way="actor_rollout_ref.rollout.n to 2 or more",
        ),
    )
    metric: str = key(
        "acc",
        "Metric that must vary within a group: acc, score (also called seq_reward or seq_final_reward), or "
        "a key that the reward returns.",
    )
    max_num_gen_batches: int = key(
        10,
        "Stop the run with an error when this many generation batches did not fill one training batch; 0: "
        "no limit.",
        minimum=0,
    )
    min_mean: float | None = key(
        None,
        "Drop groups whose mean metric is below this too (PRIME: 0.2); null: keep them.",
        at_most(".max_mean", "so no group would be kept"),
    )
    max_mean: float | None = key(
        None, "Drop groups whose mean metric is above this too (PRIME: 0.8); null: keep them."
    )


@dataclass(frozen=True)
class PFPPOConfig:
    """Resampling of rows by their scores (PF-PPO)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = key(
        "pow",
        "Weight with which a row is drawn again: pow is |score|^weight_pow, max_min takes the extremes "
        "only, max_random takes the best with weight 0.4 and the others with 0.1.",
    )
    weight_pow: float = key(
        2.0, "Exponent of the score in reweight_method=pow.", read_by(".reweight_method=pow"), minimum=0
    )
    max_age: int = key(
        0,
        "Steps for which rows stay in the replay buffer: each step draws as many rows as it has itself, from "
        "its own and those of so many steps before; 0: no buffer. Above 0 the importance ratio has to be the "
        "one to the policy that sampled the row: set algorithm.rollout_correction.bypass_mode=true, or "
        "rollout_is (or rollout_rs).",
        excludes(
            "trainer.num_collectors",
            "rows of earlier steps are kept in the driver and in checkpoints, and collectors keep theirs "
            "elsewhere",
        ),
        excludes("actor_rollout_ref.rollout.skip.action=repeat", "it gives the same rows again as new ones"),
        minimum=0,
    )


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction of the difference between the policy that generated and the one that trains."""

    rollout_is: Literal["token", "sequence"] | None = key(
        None,
        "Weight the loss by the importance ratio of the trained policy to the one that generated, for each "
        "token or each sequence; null: no weights.",
        surprises(
            ".loss_type=ppo_clip",
            "the weights are not used: in bypass mode its ratio is already that of the policy "
            "to the rollout; loss_type=reinforce uses them",
        ),
    )
    rollout_is_threshold: float | str = key(
        2.0,
        "One number truncates importance weights above it; 'lo_hi' sets weights outside these bounds to 0 "
        "(IcePop).",
        read_by(".rollout_is=token|sequence"),
    )
    rollout_is_batch_normalize: bool = key(
        False,
        "Divide the importance weights by their mean over the batch, after truncation.",
        read_by(".rollout_is=token|sequence"),
    )
    rollout_rs: str | None = key(
        None,
        "Rejection of tokens or rows whose ratio is off: a comma list of token_k1..k3, seq_sum_k1..k3, "
        "seq_mean_k1..k3, seq_max_k2, seq_max_k3; null: none.",
    )
    rollout_rs_threshold: float | str | None = key(
        None,
        "One threshold for each option of rollout_rs, separated by commas. For k1 it is 'lo_hi', or u for "
        "[1/u, u]; for k2 and k3 it is an upper bound.",
        read_by(".rollout_rs"),
    )
    bypass_mode: bool = key(
        False, "Use the log-probs of generation as old log-probs, which saves the forward pass for them."
    )
    loss_type: Literal["ppo_clip", "reinforce"] = key(
        "ppo_clip",
        "Loss in bypass mode: ppo_clip, whose ratio already holds the importance weights, or reinforce.",
        read_by(".bypass_mode"),
    )

    @property
    def corrects(self) -> bool:
        """Whether there are weights or rejection."""
        return bool(self.rollout_is or self.rollout_rs)


@dataclass(frozen=True)
class SPPOConfig:
    """The targets of self-play preference optimisation."""

    eta: float = key(
        1.0,
        "Step size: the log-ratio of a response is aimed at eta · (score − softmean of the group).",
        above=0,
        argument="sppo_eta",
        symbol="η",
    )
    beta: float = key(
        1.0, "Sharpness of the softmean of a group's scores.", above=0, argument="sppo_beta", symbol="β"
    )


@dataclass(frozen=True)
class SourceConfig:
    """An entry of `algorithm.by_source`: what differs for the rows of a data source; null: the run's value.

    Every key but the last two is one of `algorithm`, by its name there.
    """

    adv_estimator: str | None = key(None, "Advantage estimator of these rows.")
    options: dict[str, Any] | None = key(None, "Further keyword arguments of an estimator of your own.")
    gamma: float | None = key(None, "Discount of later rewards, for each token.", minimum=0, maximum=1)
    norm_adv_by_std_in_grpo: bool | None = key(None, "Divide by the standard deviation of the group.")
    gdpo_reward_keys: list[str] | None = key(None, "gdpo: keys of the reward's result.")
    gdpo_reward_weights: list[float] | None = key(None, "gdpo: weight of each of these keys.")
    kl_loss_coef: float | None = key(None, "Coefficient of the KL in the loss of these rows.", minimum=0)
    weight: float = key(1.0, "Weight of these rows in the mean that the loss is.", above=0)


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, KL penalties, and the groups and rows that are learned from."""

    adv_estimator: str = key(
        "gae", "Advantage estimator: a name such as grpo, gae or rloo, or your own as path.py:name."
    )
    options: dict[str, Any] = key({}, "Further keyword arguments of an estimator of your own.")
    gamma: float = key(1.0, "Discount of later rewards, for each token.", minimum=0, maximum=1, symbol="γ")
    lam: float = key(
        1.0,
        "Lambda of GAE: 1 has the least bias, smaller values less variance.",
        minimum=0,
        maximum=1,
        symbol="λ",
    )
    lam_critic: float | None = key(
        None,
        "Lambda of the returns that the critic learns (VAPO: 1.0); null: lam.",
        minimum=0,
        maximum=1,
        symbol="λ_critic",
        otherwise="lam",
    )
    lam_length_alpha: float | None = key(
        None,
        "Lambda of the policy that depends on the response's length in tokens, 1 − 1/(alpha · length) "
        "(VAPO: 0.05); null: lam.",
        above=0,
        symbol="α",
    )
    norm_adv_by_std_in_grpo: bool = key(
        True,
        "Divide advantages by the standard deviation of their group; false: only subtract the mean "
        "(Dr.GRPO).",
        argument="norm_by_std",
    )
    gdpo_reward_keys: list[str] = key(
        [],
        "gdpo: keys of the reward's result that are normalised one by one, for example [acc, format].",
        argument="reward_components",
    )
    gdpo_reward_weights: list[float] = key(
        [], "gdpo: weight of each of these keys; empty: 1 each.", symbol="w"
    )
    use_kl_in_reward: bool = key(
        False,
        "Subtract a KL penalty against the reference policy from the reward of each token.",
        surprises("actor_rollout_ref.actor.use_kl_loss", "the KL is charged twice"),
    )
    kl_penalty: str = key(
        "kl",
        "Estimator of the KL in the reward: kl (k1), abs, mse (k2) or low_var_kl (k3).",
        read_by(".use_kl_in_reward", "there is no KL penalty in this run's rewards"),
    )
    kl_ctrl: KLControlConfig = group(
        KLControlConfig, read_by(".use_kl_in_reward", "there is no KL penalty in this run's rewards")
    )
    ref_update_freq: int = key(
        0,
        "The reference becomes a copy of the actor each time this many steps have passed; 0: it stays as it "
        "is.",
        excludes(
            "actor_rollout_ref.model.lora_rank or actor_rollout_ref.model.lora_adapter_path",
            "the reference is the actor without its adapter and has no weights of its own to renew",
        ),
        surprises(
            "reward.process_reward_model.enable",
            "it moves the reference that the process reward model is "
            "compared with, whose rewards jump at each copy",
        ),
        minimum=0,
    )
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig, read_by(".filter_groups.enable"))
    overlong_filtering: bool = key(
        False, "Leave responses that were cut at data.max_response_length out of the loss."
    )
    use_pf_ppo: bool = key(
        False, "Draw the rows of a step again by their scores, after advantages are computed (PF-PPO)."
    )
    pf_ppo: PFPPOConfig = group(PFPPOConfig, read_by(".use_pf_ppo"))
    sppo: SPPOConfig = group(SPPOConfig)
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig)
    by_source: dict[str, Any] = key(
        {},
        "Other algorithms for the rows of some data sources: by the data source, adv_estimator, options, "
        "gamma, norm_adv_by_std_in_grpo, gdpo_reward_keys, gdpo_reward_weights, kl_loss_coef, and the weight "
        "of the rows in the loss (1), for example {openai/gsm8k: {adv_estimator: rloo, weight: 2}}. All "
        "other rows have the keys of algorithm.",
        excludes(".use_pf_ppo", "it draws rows of all sources by one scale of scores"),
        excludes(".kl_ctrl.type=adaptive", "one coefficient would follow the KL of all sources"),
        excludes("critic.enable", "a critic learns one kind of returns, and sources have several"),
    )
