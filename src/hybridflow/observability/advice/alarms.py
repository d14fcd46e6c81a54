"""Rules about runs that go wrong. Each has its threshold beside it and names the keys that change it.

A rule whose metrics are absent says nothing.
"""

from __future__ import annotations

import math

from hybridflow.observability.advice.history import Advice, History, Rule

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

MIN_ENTROPY = 1e-3
"""Nats per token below which a policy no longer explores: e^0.001 is 1.001 choices a token."""
COLLAPSED = 0.02
"""Part of its first entropy to which the entropy falls in a collapse, where the score has not risen."""
MAX_TRUNCATED = 0.25
MAX_ZERO_VARIANCE = 0.5
MAX_FAILED = 0.05
MAX_LOG_PROB_DIFF = 1e-2
MAX_CORRECTED_KL = 0.1
"""Nats a token; weights rounded to fp8, with rounded inputs, gave 0.04 on a real model."""
MISMATCH_GROWTH = 3.0
LEAST_MISMATCH = 1e-3
"""Mean difference of probabilities below which its growth does not matter."""
MAX_KL = 0.5
"""Nats per token between the policy and the one that sampled, or the reference, in a blow-up."""
KL_GROWTH = 10.0
MAX_LENGTH_RATIO = 3.0
MAX_REPETITION = 0.3
MAX_DIVERGENCE = 0.05
"""Part of the largest score by which the training score has risen and the held-out one has fallen."""


def entropy_collapse(run: History) -> Advice | None:
    """Find a policy that no longer explores."""
    entropy = run.now.get("actor/entropy")
    if entropy is None:
        return None
    keys = (f"{ACTOR}.optim.lr", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.entropy_coeff")
    way_out = "lower the learning rate, raise the upper clip bound or add an entropy bonus"
    if entropy < MIN_ENTROPY:
        text = f"entropy has collapsed: actor/entropy is {entropy:.2g} nats a token: {way_out}"
        return Advice("entropy", text, keys)
    change = run.change("actor/entropy")
    if change is None or change[1] >= COLLAPSED * change[0] or _score_rose(run):
        return None
    text = f"entropy has collapsed: from {change[0]:.2g} to {change[1]:.2g} nats a token: {way_out}"
    return Advice("entropy", text, keys)


def equal_rewards(run: History) -> Advice | None:
    """Find a step that has nothing to learn from."""
    low = run.now.get("critic/score/min")
    if low is None or low != run.now.get("critic/score/max"):
        return None
    return Advice(
        "rewards",
        f"all rewards of this step are {low:g}, so there is nothing to learn from: check the reward "
        "function and the difficulty of the data, or sample more responses to a prompt",
        (f"{ROLLOUT}.n",),
    )


def zero_variance(run: History) -> Advice | None:
    """Find data that is too easy or too hard for groups to teach anything."""
    share = run.recent("training/zero_variance_groups")
    if share is None or share <= MAX_ZERO_VARIANCE:
        return None
    return Advice(
        "zero_variance",
        f"{share:.0%} of the groups have equal scores and teach nothing: filter them, sample more "
        "responses to a prompt, or take data of another difficulty",
        ("algorithm.filter_groups.enable", f"{ROLLOUT}.n", "data.train_files"),
    )


def truncated(run: History) -> Advice | None:
    """Find responses that are cut."""
    share = run.now.get("response_length/clip_ratio", 0.0)
    if share <= MAX_TRUNCATED:
        return None
    return Advice(
        "truncated",
        f"{share:.0%} of the responses were cut at a limit",
        (
            "data.max_response_length",
            f"{ROLLOUT}.max_model_len",
            f"{ROLLOUT}.multi_turn.max_assistant_turns",
        ),
    )


def mismatch(run: History) -> Advice | None:
    """Find generation and training that disagree about log-probs."""
    keys = ("algorithm.rollout_correction.rollout_is", f"{ROLLOUT}.dtype", f"{ROLLOUT}.exact")
    corrected = bool(run.now.get("rollout_corr/corrected"))
    apart = run.now.get("rollout_corr/k3_kl", 0.0)
    if corrected and apart > MAX_CORRECTED_KL:
        return Advice(
            "log_probs",
            f"generation and training are {apart:.2g} nats a token apart, more than importance weights can "
            "bridge: look for other weights, another dtype, or too coarse rounding",
            (f"{ROLLOUT}.quantization", *keys[1:]),
        )
    worst = run.now.get("training/rollout_log_probs_diff_max", 0.0)
    if worst > MAX_LOG_PROB_DIFF and not corrected:
        return Advice(
            "log_probs",
            f"log-probs of generation and training differ by up to {worst:.2g} nats: use the same dtype "
            "for both, or correct for it",
            keys,
        )
    change = run.change("training/rollout_probs_diff_mean")
    if change is None or change[1] <= max(MISMATCH_GROWTH * change[0], LEAST_MISMATCH):
        return None
    return Advice(
        "log_probs",
        f"the mean difference between probabilities of generation and training has grown from "
        f"{change[0]:.2g} to {change[1]:.2g}: use the same dtype for both, or correct for it",
        keys,
    )


def kl_blow_up(run: History) -> Advice | None:
    """Find a policy that runs away from the one that sampled, or from the reference."""
    for name, keys in (
        ("actor/ppo_kl", (f"{ACTOR}.optim.lr", f"{ACTOR}.clip_ratio", f"{ACTOR}.ppo_epochs")),
        ("actor/kl_loss", (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.optim.lr")),
        ("actor/reward_kl_penalty", ("algorithm.kl_ctrl.kl_coef", f"{ACTOR}.optim.lr")),
    ):
        change = run.change(name)
        if change is not None and change[1] > max(KL_GROWTH * abs(change[0]), MAX_KL):
            return Advice(
                "kl", f"KL has blown up: {name} went from {change[0]:.2g} to {change[1]:.2g} nats", keys
            )
    return None


def length_blow_up(run: History) -> Advice | None:
    """Find responses that grow, or repeat themselves, without being better for it."""
    keys = (
        "reward.reward_kwargs.overlong_buffer_cfg.enable",
        "data.max_response_length",
        f"{ACTOR}.loss_agg_mode",
    )
    repetition = run.recent("reward_watch/repetition")
    if repetition is not None and repetition > MAX_REPETITION:
        return Advice(
            "length", f"responses repeat themselves: {repetition:.0%} of their runs of tokens", keys
        )
    change = run.change("response_length/mean")
    if change is None or change[1] <= MAX_LENGTH_RATIO * change[0] or _score_rose(run):
        return None
    return Advice(
        "length",
        f"responses have grown from {change[0]:.0f} to {change[1]:.0f} tokens, and the score has not risen",
        keys,
    )


def failures(run: History) -> Advice | None:
    """Find trajectories and rewards that fail."""
    finished = run.now.get("training/num_trajectories", 0.0)
    failed = run.total("training/num_failed/")
    errors = run.now.get("reward/num_errors", 0.0)
    if failed > MAX_FAILED * (finished + failed):
        return Advice(
            "failures",
            f"{failed:.0f} of {finished + failed:.0f} trajectories have failed; failures.json in the run "
            "folder has the first of each cause",
            (f"{ROLLOUT}.agent.retries.infrastructure", f"{ROLLOUT}.agent.deadline"),
        )
    if errors > MAX_FAILED * finished:
        return Advice(
            "failures",
            f"the reward of {errors:.0f} of {finished:.0f} trajectories has failed",
            ("reward.timeout", "reward.on_error"),
        )
    return None


def hacking(run: History) -> Advice | None:
    """Find a score that rises in training while the held-out one falls."""
    best: dict[str, tuple[float, float | None]] = {}
    latest: dict[str, tuple[float, float | None]] = {}
    largest = 0.0
    for held_out, training in run.validations():
        for name, value in held_out.items():
            largest = max(largest, abs(value), abs(training or 0.0))
            latest[name] = (value, training)
            if name not in best or value > best[name][0]:
                best[name] = (value, training)
    for name, (value, training) in latest.items():
        before, training_before = best[name]
        if training is None or training_before is None:
            continue
        least = MAX_DIVERGENCE * largest
        if before - value > least and training - training_before > least:
            return Advice(
                "hacking",
                f"the policy may please the reward and nothing else: {name} fell from {before:.3g} to "
                f"{value:.3g} while the training score rose from {training_before:.3g} to {training:.3g}",
                ("algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss", "reward.custom_reward_function.path"),
            )
    return None


def skipped_steps(run: History) -> Advice | None:
    """Find optimizer steps that were not taken."""
    for name, value in run.now.items():
        if name.endswith("/num_skipped_steps") and value > 0:
            role = name.split("/")[0]
            return Advice(
                "skipped_steps",
                f"{value:g} optimizer step(s) of {role} were skipped because the loss or gradient was not "
                "finite",
                (f"{ACTOR}.optim.lr", f"{ACTOR}.grad_clip", "trainer.max_nonfinite_steps"),
            )
    return None


def not_finite(run: History) -> Advice | None:
    """Find metrics that are no numbers."""
    broken = [name for name, value in run.now.items() if not math.isfinite(value)]
    if not broken:
        return None
    return Advice("not_finite", f"{len(broken)} metrics are not finite: {', '.join(broken[:5])}", ())


def _score_rose(run: History) -> bool:
    change = run.change("critic/score/mean")
    return change is not None and change[1] > change[0] + MAX_DIVERGENCE * abs(change[0])


ALARMS: tuple[Rule, ...] = (
    not_finite,
    skipped_steps,
    failures,
    equal_rewards,
    zero_variance,
    truncated,
    entropy_collapse,
    kl_blow_up,
    length_blow_up,
    mismatch,
    hacking,
)
