"""Facts about the maths that are needed without torch, as data: names, formulas, needs, vetted defaults.

In a formula `{gamma}` stands for the argument `gamma`, and `{norm_by_std:this|that}` for what holds with and
without the argument `norm_by_std`. `tests/architecture/test_names_agree.py` compares everything here with the
functions of `hybridflow.algorithms`, their signatures and their docstrings.
"""

from __future__ import annotations

from typing import NamedTuple


class EstimatorFacts(NamedTuple):
    """The facts of an advantage estimator: its formula, and what it reads."""

    formula: str
    papers: tuple[str, ...]
    """Their numbers at arxiv.org."""
    reads: tuple[str, ...]
    """Its arguments, in the order of its signature: columns of the batch, and parameters that keys set."""
    group: bool = False
    """Whether it needs two or more responses to each prompt."""
    scores_from_zero: bool = False
    """Whether a score below 0 is an error."""

    @property
    def critic(self) -> bool:
        """Whether it reads the values of a critic."""
        return "values" in self.reads

    @property
    def teacher(self) -> bool:
        """Whether it reads the log-probs of a teacher."""
        return "teacher_log_probs" in self.reads

    @property
    def process_rewards(self) -> bool:
        """Whether it reads the rewards of a process reward model."""
        return "process_rewards" in self.reads

    @property
    def token_rewards(self) -> bool:
        """Whether it reads the token rewards, and with them a KL penalty in the reward."""
        return "token_level_rewards" in self.reads

    @property
    def actor_pass(self) -> bool:
        """Whether it reads what only a pass of the actor over the batch can give."""
        return "sum_pi_squared" in self.reads

    @property
    def greedy_rows(self) -> int:
        """Greedy responses to each prompt that are generated besides, and are not learned from."""
        return int("reward_baselines" in self.reads)

    @property
    def demonstration_rows(self) -> int:
        """Rows of each prompt that are the data's own answer: learned from, and not generated."""
        return int("is_demonstration" in self.reads)


class LossFacts(NamedTuple):
    """The facts of a policy loss: its formula, and its defaults where the configuration sets none."""

    formula: str
    papers: tuple[str, ...]
    reads: tuple[str, ...] = ()
    """Its keyword-only arguments and those of its `select`, without the aggregation that every loss takes."""
    agg_mode: str = "token-mean"
    """Value of `actor.loss_agg_mode` in its paper."""
    clip: tuple[float, float] | None = None
    """(clip_ratio_low, clip_ratio_high) of its paper, where they are not PPO's."""
    clip_c: float | None = None
    """`actor.clip_ratio_c` of its paper, where it is not PPO's."""
    select_formula: str = ""
    """What its `select` takes of a mini-batch, for a loss that must see the whole of it first."""
    has_ratio: bool = True
    """Whether its tokens are weighted by the ratio of the policy to the old one."""
    lowest_ratio: bool = False
    """Whether 1 − clip_ratio_low is the smallest ratio that it lets through."""
    estimators: tuple[str, ...] = ()
    """The estimators that it goes with, and that go with no other loss; none: it goes with all others."""

    @property
    def reference(self) -> bool:
        """Whether it reads the log-probs of a reference policy."""
        return "ref_log_prob" in self.reads

    @property
    def pairs(self) -> bool:
        """Whether it compares the rows of a prompt with each other."""
        return "group_ids" in self.reads


REWARDS = ("token_level_rewards", "response_mask")
GROUPS = (*REWARDS, "group_ids")
TOKEN_BASELINE = (*GROUPS, "old_log_probs", "sum_pi_squared", "rollout_is_weights")
S = "s = Σ_t r_t over sampled tokens"

ESTIMATORS: dict[str, EstimatorFacts] = {
    "gae": EstimatorFacts(
        "δ_t = r_t + {gamma}·V_next − V_t; L_t = δ_t + {gamma}·λ_t·L_next, right to left; A = whiten(L); "
        "returns = L + V, L with λ_t = {lam_critic} there; "
        "λ_t = {lam_length_alpha:1 − 1/({lam_length_alpha}·len), clamped to [0, 1]|{lam}}",
        ("1506.02438", "2504.05118"),
        (
            *("token_level_rewards", "values", "response_mask"),
            *("gamma", "lam", "lam_critic", "lam_length_alpha", "loss_mask"),
        ),
    ),
    "grpo": EstimatorFacts(
        f"A = {{norm_by_std:(s − μ_g)/(σ_g + 1e-6)|s − μ_g}}, on every token of a row; {S}",
        ("2402.03300", "2503.20783"),
        (*GROUPS, "norm_by_std"),
        group=True,
    ),
    "grpo_passk": EstimatorFacts(
        "A = {norm_by_std:(s_1st − s_2nd)/(σ_g + 1e-6)|s_1st − s_2nd}, on every token of the group's best "
        "row; 0 on all others",
        ("2503.19595",),
        (*GROUPS, "norm_by_std"),
        group=True,
    ),
    "gdpo": EstimatorFacts(
        "A = whiten over rows of Σ_k w_k·(s_k − μ_gk)/(σ_gk + 1e-6), on every token of a row; s_k the row's "
        "reward under key k",
        ("2601.05242",),
        ("reward_components", "response_mask", "group_ids", "gdpo_reward_weights", "loss_mask"),
        group=True,
    ),
    "rloo": EstimatorFacts(
        "A = {n}/({n} − 1)·(s − μ_g) on every token of a row, which is s minus the mean score of the group's "
        "other rows",
        ("2402.14740",),
        GROUPS,
        group=True,
    ),
    "reinforce_plus_plus": EstimatorFacts(
        "G_t = r_t + {gamma}·G_next, right to left over sampled tokens; A = whiten(G); returns = G",
        ("2501.03262",),
        (*REWARDS, "gamma", "loss_mask"),
    ),
    "reinforce_plus_plus_baseline": EstimatorFacts(
        f"A = whiten(s − μ_g), where s − μ_g stands on every token of a row; {S}",
        ("2501.03262",),
        (*GROUPS, "loss_mask"),
        group=True,
    ),
    "remax": EstimatorFacts(
        "A_t = Σ_{{t' ≥ t}} r_t' − b on each sampled token; b the score of the greedy response to the same "
        "prompt; returns = Σ_{{t' ≥ t}} r_t'",
        ("2310.10505",),
        (*REWARDS, "reward_baselines"),
    ),
    "opo": EstimatorFacts(
        "A = s − Σ_j len_j·s_j / Σ_j len_j on every token of a row, the sums over the group's rows; " + S,
        ("2505.23585",),
        GROUPS,
        group=True,
    ),
    "gpg": EstimatorFacts(
        f"A = α·(s − μ_g) on every token of a row; α = rows / rows in groups whose scores vary; {S}",
        ("2504.02546",),
        GROUPS,
        group=True,
    ),
    "optimal_token_baseline": EstimatorFacts(
        "w_t = 1 − 2π_t + Σ_v π(v)²; W_t = Σ_{{t' ≤ t}} w_t'; B_t = Σ_j G_jt·W_jt / Σ_j W_jt over the group; "
        "A_t = G_t − B_t; returns = G",
        ("2602.07078",),
        TOKEN_BASELINE,
        group=True,
    ),
    "tir_optimal_token_baseline": EstimatorFacts(
        "w_k = 1 − 2π_k + Σ_v π(v)²; W_k = Σ_{{k' ≤ k}} w_k'; B_k = Σ_j G_jk·W_jk / Σ_j W_jk over the group; "
        "A_k = G_k − B_k; returns = G",
        ("2602.07078",),
        TOKEN_BASELINE,
        group=True,
    ),
    "max_rl": EstimatorFacts(
        f"A = (s − μ_g)/μ_g on every token of a row where μ_g > 0, else 0; {S}",
        ("2602.02710",),
        GROUPS,
        group=True,
        scores_from_zero=True,
    ),
    "prime": EstimatorFacts(
        "p_t = {n}/({n} − 1)·q_t − Σ_j q̄_j/({n} − 1); o = {n}/({n} − 1)·(s − μ_g) on the last token; "
        "G_t = Σ_{{t' ≥ t}} ({process_coef}·p_t' + {outcome_coef}·o_t'); A = whiten(G); returns = G",
        ("2502.01456",),
        ("process_rewards", *GROUPS, "process_coef", "outcome_coef", "loss_mask"),
        group=True,
    ),
    "sppo": EstimatorFacts(
        "A = {sppo_eta}·(s − softmean_β) on every token of a row; softmean_β = (1/{sppo_beta})·log mean_j "
        "exp({sppo_beta}·s_j) over the group; s = Σ_t r_t",
        ("2405.00675",),
        (*GROUPS, "sppo_eta", "sppo_beta"),
        group=True,
    ),
    "online_dpo": EstimatorFacts(
        "A = +1 on every token of the group's best row, −1 on the worst, 0 on all others; best and worst by "
        + S,
        ("2402.04792",),
        (*GROUPS, "row_id"),
        group=True,
    ),
    "spin": EstimatorFacts(
        "A = +1 on every token of the data's own answer, −1 on every sampled response to the same prompt; 0 "
        "in a group without both",
        ("2401.01335",),
        ("response_mask", "is_demonstration", "group_ids"),
    ),
    "on_policy_distillation": EstimatorFacts(
        "A_t = logπ_teacher,t − logπ_student,t on each sampled token; no score is asked for",
        ("2306.13649",),
        ("old_log_probs", "teacher_log_probs", "response_mask"),
    ),
}

CLIP = ("clip_low", "clip_high")
RATIO = "ρ = exp(clamp(logπ − logπ_old, ±20))"
CLIPPED = "max(−A·ρ, −A·clip(ρ, 1 − {clip_low}, 1 + {clip_high}))"
COVARIANCE = "cov = (A − Ā)·(logπ − mean logπ)"
GMPO = LossFacts(
    "−Ā·exp(mean_t d_t) for a row, on each of its tokens; d_t = min(logρ_t, {clip_high}) for Ā > 0, "
    "max(logρ_t, −{clip_low}) for Ā ≤ 0",
    ("2507.20673",),
    CLIP,
    "seq-mean-token-mean",
    clip=(0.4, 0.4),
)
REINFORCE = LossFacts("−A·logπ", ("2504.02546",), has_ratio=False)

POLICY_LOSSES: dict[str, LossFacts] = {
    "vanilla": LossFacts(
        f"{CLIPPED}, for A < 0 at most −A·{{clip_c}}; {RATIO}",
        ("1707.06347", "2503.14476", "1912.09729"),
        (*CLIP, "clip_c"),
        lowest_ratio=True,
    ),
    "gspo": LossFacts(
        "max(−A·s_t, −A·clip(s_t, 1 − {clip_low}, 1 + {clip_high})), s_t = sg[s_i]·π_t/sg[π_t], "
        "s_i = exp(mean_t(logπ − logπ_old)) over the row",
        ("2507.18071",),
        CLIP,
        "seq-mean-token-mean",
        clip=(3e-4, 4e-4),
        lowest_ratio=True,
    ),
    "sapo": LossFacts(
        "−A·f(ρ), f(ρ) = (4/τ)·sigmoid(τ·(ρ − 1)), τ = {tau_pos} for A > 0 and {tau_neg} for A ≤ 0; " + RATIO,
        ("2511.20347",),
        ("tau_pos", "tau_neg"),
        "seq-mean-token-mean",
    ),
    "geo_mean": GMPO,
    "gmpo": GMPO,
    "cispo": LossFacts(
        f"−sg[clip(ρ, 1 − {{clip_low}}, 1 + {{clip_high}})]·A·logπ; {RATIO}; sg stops the gradient",
        ("2506.13585",),
        CLIP,
        clip=(1.0, 0.28),
    ),
    "gpg": REINFORCE,
    "reinforce": REINFORCE,
    "clip_cov": LossFacts(
        f"{CLIPPED}, 0 on selected tokens; {RATIO}",
        ("2505.22617",),
        ("clip_cov_selected", *CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
        select_formula="A random max(1, int({clip_cov_ratio}·tokens)) of the tokens with {clip_cov_lb} < "
        "cov < {clip_cov_ub} that are not clipped already; " + COVARIANCE,
        lowest_ratio=True,
    ),
    "kl_cov": LossFacts(
        f"−A·ρ, + {{ppo_kl_coef}}·|logρ| on selected tokens; {RATIO}",
        ("2505.22617",),
        ("kl_cov_selected", "ppo_kl_coef", "kl_cov_ratio"),
        select_formula=f"The max(1, int({{kl_cov_ratio}}·tokens)) tokens of highest {COVARIANCE}, of equals "
        "the first",
    ),
    "dppo_tv": LossFacts(
        "−A·sg[min(ρ, {clip_c})]·logπ; 0 where A > 0 and π − π_old > {clip_high}, and where A ≤ 0 and "
        "π − π_old < −{clip_low}",
        ("2602.04879",),
        (*CLIP, "clip_c"),
        clip_c=20.0,
    ),
    "dppo_kl": LossFacts(
        "−A·sg[min(ρ, {clip_c})]·logπ; 0 where D > {clip_high} for A > 0 and π > π_old, where D > {clip_low} "
        "for A ≤ 0 and π < π_old",
        ("2602.04879",),
        (*CLIP, "clip_c"),
        clip_c=20.0,
    ),
    "dro": LossFacts(
        "−(A·logπ − ½·{dro_beta}·(logπ − logπ_old)²)", ("2405.19107",), ("dro_beta",), has_ratio=False
    ),
    "sppo": LossFacts(
        "(Δ − A)² for a row, Δ = Σ_t (logπ − logπ_old) over its tokens, A = η·(s − softmean) from the "
        "estimator `sppo`",
        ("2405.00675",),
        agg_mode="seq-mean-token-sum",
        has_ratio=False,
        estimators=("sppo",),
    ),
    "dpo": LossFacts(
        "mean of −logσ({dpo_beta}·(Δ⁺ − Δ⁻)) over a group's pairs of a row with A > 0 and one with A < 0; "
        "Δ = Σ_t (logπ − logπ_ref) over a row",
        ("2402.04792", "2401.01335", "2305.18290", "2310.12036"),
        ("ref_log_prob", "group_ids", "trajectory_id", "dpo_loss", "dpo_beta", "dpo_label_smoothing"),
        "seq-mean-token-sum",
        has_ratio=False,
        estimators=("online_dpo", "spin"),
    ),
}

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
