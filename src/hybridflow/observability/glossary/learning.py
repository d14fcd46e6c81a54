"""Entries of the glossary: what a training step of the PPO family measures."""

from __future__ import annotations

from hybridflow.observability.glossary.entry import MetricEntry

LEARNING: dict[str, tuple[MetricEntry, ...]] = {
    "Training": (
        MetricEntry("training/global_step", "Number of the step, from 1.", "steps"),
        MetricEntry("training/epoch", "Passes over the data that were complete before this step.", "passes"),
        MetricEntry("training/num_gen_batches", "Generation batches that the step took.", "batches", "lower"),
        MetricEntry(
            "training/rollouts_from_dump", "Step whose dumped rollouts this step trained on.", "steps"
        ),
        MetricEntry(
            "training/filtered_groups_ratio",
            "Part of the generated groups that dynamic sampling left out.",
            "fraction",
            "lower",
        ),
        MetricEntry(
            "training/unfiltered_score/mean", "Mean score before dynamic sampling.", "reward", "higher"
        ),
        MetricEntry(
            "training/num_failed/{cause}",
            "Trajectories that failed, by their cause.",
            "trajectories",
            "lower",
            ("report", "health"),
        ),
        MetricEntry(
            "training/num_small_groups",
            "Groups left out because failures left them too few trajectories.",
            "groups",
            "lower",
        ),
        MetricEntry(
            "training/num_trajectories",
            "Trajectories that were sampled and have not failed.",
            "trajectories",
            "",
            ("health",),
        ),
        MetricEntry(
            "training/zero_variance_groups",
            "Part of the groups whose scores are all equal, so that they teach nothing.",
            "fraction",
            "lower",
            ("health",),
        ),
        MetricEntry(
            "training/loss_tokens_ratio", "Part of the sampled tokens that the step learned from.", "fraction"
        ),
        MetricEntry(
            "training/overlong_filtered_ratio",
            "Part of the trajectories left out of the loss because they were cut at the length limit.",
            "fraction",
            "lower",
        ),
        MetricEntry(
            "training/overlong_reward/mean",
            "Mean penalty on responses close to the limit.",
            "reward",
            "higher",
        ),
        MetricEntry("training/reward_baseline/mean", "Mean score of the greedy responses (ReMax).", "reward"),
        MetricEntry(
            "training/rollout_log_probs_diff_max",
            "Largest difference between the log-probs of generation and of training of one token.",
            "nats",
            "lower",
            ("report", "health"),
        ),
        MetricEntry(
            "training/rollout_probs_diff_max",
            "Largest difference between the probabilities of generation and of training of one token.",
            "probability",
            "lower",
        ),
        MetricEntry(
            "training/rollout_probs_diff_mean",
            "Mean difference between the probabilities of generation and of training.",
            "probability",
            "lower",
            ("health",),
        ),
        MetricEntry(
            "training/old_log_probs_from_rollout",
            "1 where the rollout's log-probs served as old ones, 0 where a pass computed them.",
            "1",
        ),
        MetricEntry(
            "training/rollout_rows_checked",
            "Rows compared to let the log-probs of generation serve as old ones.",
            "rows",
        ),
        MetricEntry(
            "training/first_ratio_min", "Smallest importance ratio of the first mini-batch; 1 if exact.", "1"
        ),
        MetricEntry(
            "training/first_ratio_max", "Largest importance ratio of the first mini-batch; 1 if exact.", "1"
        ),
    ),
    "Staleness": (
        MetricEntry(
            "training/off_policy/trajectory_staleness/{stat}",
            "Steps between the newest weights that sampled a trajectory and those that it trains.",
            "steps",
            "lower",
        ),
        MetricEntry(
            "training/off_policy/trajectory_staleness_worst/{stat}",
            "Steps between the oldest weights that sampled a trajectory and those that it trains; "
            "trainer.async.max_staleness bounds it, and algorithm.pf_ppo.max_age more with a replay buffer.",
            "steps",
            "lower",
        ),
        MetricEntry(
            "training/off_policy/trajectory_spans/{stat}",
            "Steps between the oldest and the newest weights that sampled a trajectory.",
            "steps",
        ),
        MetricEntry(
            "training/off_policy/tokens/{age}_steps", "Part of the sampled tokens that is so old.", "fraction"
        ),
        MetricEntry(
            "training/off_policy/k3_kl/{age}_steps",
            "KL (k3) between the policy that sampled tokens of this age and the one at the start of the "
            "step.",
            "nats",
            "lower",
        ),
        MetricEntry(
            "training/off_policy/ratio/{age}_steps",
            "Mean importance ratio of the policy at the start of the step to the one that sampled tokens of "
            "this age.",
            "1",
        ),
    ),
    "Replay buffer": (
        MetricEntry(
            "training/replay/drawn_again",
            "Part of the drawn trajectories that are rows of earlier steps (algorithm.pf_ppo.max_age).",
            "fraction",
        ),
        MetricEntry(
            "training/replay/bytes",
            "Tensors that the buffer holds for later steps in the driver's memory.",
            "bytes",
            "lower",
        ),
    ),
    "Scores and lengths": (
        MetricEntry(
            "critic/score/{stat}",
            "Score of a trajectory as the reward gave it.",
            "reward",
            "higher",
            ("line", "report", "health", "reward watch"),
        ),
        MetricEntry(
            "critic/rewards/{stat}",
            "Reward of a trajectory: its score less the KL penalty, where the reward has one.",
            "reward",
            "higher",
            ("line", "report"),
        ),
        MetricEntry("critic/advantages/{stat}", "Advantage of a token that is learned from.", "1"),
        MetricEntry("critic/returns/{stat}", "Return of a token that is learned from.", "reward"),
        MetricEntry("critic/values/{stat}", "Value that the critic gave to a token.", "reward"),
        MetricEntry(
            "response_length/{stat}",
            "Tokens that the policy sampled.",
            "tokens",
            "",
            ("line", "report", "health"),
        ),
        MetricEntry(
            "response_length/clip_ratio",
            "Part of the responses that were cut at a limit.",
            "fraction",
            "lower",
            ("report", "health"),
        ),
        MetricEntry("prompt_length/{stat}", "Tokens of the prompt.", "tokens"),
    ),
    "Updates of a role": (
        MetricEntry("{role}/num_updates", "Optimizer steps that were taken.", "optimizer steps"),
        MetricEntry(
            "{role}/num_skipped_steps",
            "Optimizer steps that were skipped because the loss or the gradient was not finite.",
            "optimizer steps",
            "lower",
            ("health",),
        ),
        MetricEntry(
            "{role}/num_empty_mini_batches",
            "Mini-batches with nothing to learn from.",
            "mini-batches",
            "lower",
        ),
        MetricEntry("{role}/grad_norm", "Norm of the gradient before clipping.", "1", "", ("report",)),
        MetricEntry("{role}/lr", "Learning rate of the last optimizer step.", "1", "", ("report",)),
    ),
    "Experts of a role": (
        MetricEntry(
            "{role}/moe/load_entropy",
            "Entropy of the experts' load as a part of the largest one, mean over the sparse layers; 1: an "
            "even load.",
            "fraction",
            "higher",
            ("report",),
        ),
        MetricEntry(
            "{role}/moe/load_max",
            "Load of the busiest expert of any layer, in units of an even load. No token is ever dropped.",
            "ratio",
            "lower",
            ("report",),
        ),
        MetricEntry(
            "{role}/moe/idle_experts", "Experts of all layers that no token went to.", "experts", "lower"
        ),
        MetricEntry(
            "{role}/moe/balance_loss",
            "Auxiliary loss without its weight; as large as the experts of a token where the load is even.",
            "loss",
            "lower",
        ),
        MetricEntry(
            "{role}/moe/without_route",
            "Part of the tokens without a route to replay, whose routers chose; the last token of a row has "
            "none from generation.",
            "fraction",
            "lower",
        ),
        MetricEntry(
            "{role}/moe/flips",
            "Part of the choices of experts that live routers would have made otherwise than replayed.",
            "fraction",
            "lower",
            ("report",),
        ),
    ),
    "Actor": (
        MetricEntry("actor/pg_loss", "Policy loss, the mean over mini-batches.", "1", "", ("report",)),
        MetricEntry(
            "actor/entropy",
            "Mean entropy of the policy on sampled tokens; with a replay buffer also on those of its rows.",
            "nats/token",
            "",
            ("line", "report", "health"),
        ),
        MetricEntry("actor/entropy_loss", "Entropy as the loss aggregates it.", "nats"),
        MetricEntry(
            "actor/kl_loss",
            "KL to the reference as the loss aggregates it.",
            "nats",
            "lower",
            ("line", "report", "health"),
        ),
        MetricEntry("actor/kl_coef", "Weight of the KL term in the loss.", "1"),
        MetricEntry(
            "actor/reward_kl_penalty",
            "Mean KL to the reference that is taken from the reward.",
            "nats/token",
            "lower",
            ("line", "report", "health"),
        ),
        MetricEntry("actor/reward_kl_penalty_coeff", "Weight of the KL penalty in the reward.", "1"),
        MetricEntry(
            "actor/ppo_kl",
            "Mean of log π_old − log π over the tokens of the updates.",
            "nats",
            "",
            ("line", "report", "health"),
        ),
        MetricEntry(
            "actor/pg_clipfrac",
            "Part of the tokens whose importance ratio the loss clips.",
            "fraction",
            "",
            ("report",),
        ),
        MetricEntry(
            "actor/pg_clipfrac_lower",
            "Part of the tokens with negative advantage that dual clip bounds.",
            "fraction",
            "",
            ("report",),
        ),
        MetricEntry(
            "actor/pg_clipfrac_upper",
            "Part of the tokens whose weight a trust-region loss bounds.",
            "fraction",
            "",
            ("report",),
        ),
        MetricEntry("actor/cov_clipfrac", "Part of the tokens that clip_cov or kl_cov selected.", "fraction"),
        MetricEntry("actor/pg_gate", "Mean slope of SAPO's gate: 1 holds back nothing.", "1"),
        MetricEntry("actor/dro_penalty", "Mean of ½·β·(log π − log π_old)².", "nats²"),
        MetricEntry(
            "actor/dpo_accuracy",
            "Part of the pairs of online DPO that the policy orders right.",
            "fraction",
            "higher",
        ),
        MetricEntry("actor/dpo_margin", "Mean margin of the pairs of online DPO, times β.", "nats", "higher"),
        MetricEntry(
            "actor/sppo_error", "Mean distance of a row's log-ratio from its target.", "nats", "lower"
        ),
        MetricEntry(
            "actor/positive_lm_loss", "Loss of likelihood on right responses (VAPO).", "nats", "lower"
        ),
    ),
    "Critic and process reward model": (
        MetricEntry("critic/vf_loss", "Clipped value loss.", "reward²", "lower", ("report",)),
        MetricEntry("critic/vf_clipfrac", "Part of the tokens whose value the loss clips.", "fraction"),
        MetricEntry("critic/vpred_mean", "Mean value in the updates.", "reward"),
        MetricEntry(
            "critic/vf_explained_var", "Part of the returns' variance that the values explain.", "1", "higher"
        ),
        MetricEntry("process_reward/loss", "Cross-entropy of the outcomes.", "nats", "lower"),
        MetricEntry(
            "process_reward/accuracy", "Part of the outcomes that it tells right.", "fraction", "higher"
        ),
        MetricEntry(
            "process_reward/probability", "Mean probability that it gives to success.", "probability"
        ),
    ),
    "Rollout correction": (
        MetricEntry(
            "rollout_corr/corrected",
            "1 where the run has importance weights or rejection.",
            "1",
            feeds=("health",),
        ),
        MetricEntry("rollout_corr/kl", "Mean of log π_rollout − log π_old over tokens.", "nats"),
        MetricEntry(
            "rollout_corr/k3_kl",
            "The same KL by the estimate k3, which is never negative.",
            "nats",
            "lower",
            ("health",),
        ),
        MetricEntry("rollout_corr/chi2_token", "χ² divergence over tokens.", "1", "lower"),
        MetricEntry("rollout_corr/chi2_seq", "χ² divergence over whole rows.", "1", "lower"),
        MetricEntry("rollout_corr/training_ppl", "Perplexity of the responses under the actor.", "1"),
        MetricEntry("rollout_corr/rollout_ppl", "Perplexity of the responses under the rollout.", "1"),
        MetricEntry("rollout_corr/log_ppl_diff", "Difference of the two log-perplexities.", "nats/token"),
        MetricEntry("rollout_corr/ppl_ratio", "Quotient of the two perplexities.", "1"),
        MetricEntry("rollout_corr/rollout_is_mean", "Mean importance weight.", "1"),
        MetricEntry(
            "rollout_corr/rollout_is_std", "Standard deviation of the importance weights.", "1", "lower"
        ),
        MetricEntry("rollout_corr/rollout_is_min", "Smallest importance weight.", "1"),
        MetricEntry("rollout_corr/rollout_is_max", "Largest importance weight.", "1"),
        MetricEntry(
            "rollout_corr/rollout_is_eff_sample_size",
            "Effective part of the samples, 1 where all weights are equal.",
            "fraction",
            "higher",
        ),
        MetricEntry(
            "rollout_corr/rollout_is_ratio_fraction_high",
            "Part of the importance ratios above the upper threshold.",
            "fraction",
            "lower",
        ),
        MetricEntry(
            "rollout_corr/rollout_is_ratio_fraction_low",
            "Part of the importance ratios below the lower threshold.",
            "fraction",
            "lower",
        ),
        MetricEntry(
            "rollout_corr/rollout_rs_masked_fraction", "Part of the tokens rejected.", "fraction", "lower"
        ),
        MetricEntry(
            "rollout_corr/rollout_rs_seq_masked_fraction",
            "Part of the rows of which some token was rejected.",
            "fraction",
            "lower",
        ),
    ),
}
