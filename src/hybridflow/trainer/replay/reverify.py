"""Re-scores stored rows without generating: `hybridflow reverify RUN --reward file.py:name`.

    rows/step_N ─► rewards ─► KL penalty ─► advantages ─► loss at the weights that the step began with

Those weights gave the old log-probs, so the loss needs no model: every importance ratio is 1. Groups that
dynamic sampling has dropped are not among the rows.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.algorithms.kl import FixedKLController
from hybridflow.config import PPOConfig
from hybridflow.config.needs import replayed_steps
from hybridflow.episodes.filters import shape_by_keys
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.trackers.jsonl import METRICS_FILE, read_metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.columns import place_scores
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.early_checks import refuse_model
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.result import ScoreRequest
from hybridflow.trainer.ppo.by_source import SourceAdvantages
from hybridflow.trainer.ppo.columns import apply_kl_penalty, leave_out_unpaired
from hybridflow.trainer.replay.kept_rows import HOW_TO_KEEP, KeptRows, KeptStep, config_of
from hybridflow.workers.losses import find_policy_loss, policy_loss
from hybridflow.workers.mini_batches import MiniBatchPlan, add_update, mini_batches

PENALTY = "actor/reward_kl_penalty_coeff"


@dataclass(frozen=True)
class Judged:
    """A step as the run scored it, beside the same rows re-scored."""

    step: int
    num_rows: int
    changed_scores: int
    """Rows whose score is another."""
    scores: tuple[float, float]
    """Mean score of a row: stored, re-scored."""
    advantages: tuple[float, float]
    """Mean size of the advantage of a token that is learned from."""
    losses: tuple[float, float] | None
    """Policy loss under the weights that the step began with; None for a loss that selects tokens."""


def reverify(run: Path, reward: str | None, estimator: str | None, step: int | None) -> list[Judged]:
    """Judge the kept rows of one step, or of all, by another reward function or estimator.

    None: the run's own. Raises ConfigError where the run has a reward model, or the estimator needs
    a column that the rows do not have, and DataError where rows are missing.
    """
    kept = KeptRows(run)
    steps = kept.steps() if step is None else [step]
    if not steps:
        raise ConfigError(f"{run} has no kept rows: {HOW_TO_KEEP}")
    config = reverified_config(run, reward, estimator)
    if replayed_steps(config):
        raise ConfigError(
            f"the run has a replay buffer (algorithm.pf_ppo.max_age={replayed_steps(config)}): advantages "
            "were computed over the rows of several steps together, so one step cannot be judged by itself"
        )
    found = SourceAdvantages(config)
    general = found.estimators[None]
    if reward is not None and "reward_baselines" in general.needs:
        raise ConfigError(
            f"{general.name} needs the reward of greedy responses, which are not kept: choose another "
            "--estimator"
        )
    logged = read_metrics(run / METRICS_FILE)
    with closing(build_reward_manager(config.reward, config.trainer.seed)) as manager:
        judged = []
        for number in steps:
            coefficient = logged.get(number, {}).get(PENALTY, config.algorithm.kl_ctrl.kl_coef)
            judged.append(_judge(kept.read(number), config, found, manager, coefficient))
    return judged


def reverified_config(run: Path, reward: str | None, estimator: str | None) -> PPOConfig:
    """Return the run's configuration with another reward function and estimator."""
    config = config_of(run, trains=False)
    algorithm = config.algorithm
    if estimator is not None:
        algorithm = replace(algorithm, adv_estimator=estimator, by_source={})
    rewards = config.reward
    if reward is not None:
        custom = replace(rewards.custom_reward_function, path=reward)
        rewards = replace(rewards, custom_reward_function=custom, terms=[])
    refuse_model(rewards)
    return replace(config, algorithm=algorithm, reward=rewards)


def _judge(
    kept: KeptStep,
    config: PPOConfig,
    advantages: SourceAdvantages,
    manager: RewardManager,
    coefficient: float,
) -> Judged:
    stored = kept.rows
    if not len(stored):
        return Judged(kept.step, 0, 0, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    anew = stored.select()
    loss = find_policy_loss(config.actor_rollout_ref.actor)
    if (loss.keeps_groups or loss.learns_from is not None) and kept.given_loss_mask is not None:
        anew.batch["loss_mask"] = kept.given_loss_mask
    anew = _rescored(anew, config, manager)
    for name in ("token_level_rewards", "advantages", "returns", "source_weight", "source_kl_coef"):
        if name in anew:
            anew.pop([name])
    anew |= apply_kl_penalty(anew, config.algorithm, FixedKLController(coefficient))[0]
    for estimator in advantages.estimators.values():
        missing = [name for name in estimator.needs if name in _OF_MODELS and name not in anew]
        if missing:
            raise ConfigError(
                f"{estimator.name} needs {', '.join(missing)}, which the rows do not have: choose another "
                "--estimator"
            )
    anew |= advantages(anew)
    leave_out_unpaired(anew, loss)
    scores = [rows.batch["token_level_scores"].sum(-1) for rows in (stored, anew)]
    losses = None
    if loss.select is None:
        losses = (_loss(stored, config, kept.step), _loss(anew, config, kept.step))
    return Judged(
        kept.step,
        len(stored),
        int((scores[0] != scores[1]).sum()),
        (float(scores[0].mean()), float(scores[1].mean())),
        (_size(stored), _size(anew)),
        losses,
    )


_OF_MODELS = ("values", "process_rewards", "teacher_log_probs", "sum_pi_squared", "is_demonstration")
"""Columns that only a model, or the data of such a run, gives."""


def _rescored(rows: DataProto, config: PPOConfig, manager: RewardManager) -> DataProto:
    """Return the rows with `token_level_scores` by the reward function, and what else it has returned."""
    view = ByTrajectory(rows)
    samples = view.samples
    mask = samples.batch["response_mask"]
    with manager.open() as session:
        facts = samples.non_tensor_batch
        for place in range(len(samples)):
            request = ScoreRequest(
                facts["data_source"][place],
                facts["solution_str"][place],
                facts["ground_truth"][place],
                facts["extra_info"][place],
                tuple(samples.batch["responses"][place][mask[place]].tolist()),
                facts["extra_info"][place].get("messages") or (),
            )
            session.add(place, request)
        scored = session.result()
    scores = place_scores(torch.tensor(scored.scores, dtype=torch.float32), mask)
    for place, of_tokens in enumerate(scored.token_scores):
        if of_tokens:
            scores[place][mask[place]] = torch.tensor(of_tokens)
    rows.batch["token_level_scores"] = view.spread(scores)
    for name, values in scored.extras.items():
        if name not in rows or name in rows.non_tensor_batch:
            spread = [values[sample] for sample in view.sample_of_row.tolist()]
            rows = rows.select(None, [other for other in rows.non_tensor_batch if other != name])
            rows |= DataProto.from_dict({}, {name: spread})
    if "overlong_reward" in rows:
        rows.pop([], ["overlong_reward"])
    return shape_by_keys(rows, config)


def _size(rows: DataProto) -> float:
    """Return the mean size of the advantages of tokens that are learned from."""
    mask: Tensor = rows.batch["loss_mask"]
    if not bool(mask.any()):
        return 0.0
    return float(rows.batch["advantages"][mask].abs().mean())


def _loss(rows: DataProto, config: PPOConfig, step: int) -> float:
    """Return the policy loss of all rows as one mini-batch, with the old log-probs as current ones."""
    actor = config.actor_rollout_ref.actor
    base = find_policy_loss(actor)
    groups = len(set(rows.non_tensor_batch["uid"]))
    plan = MiniBatchPlan(groups, 1, False, config.trainer.seed, step)
    metrics = Metrics()
    for mini, scale in mini_batches(rows, plan, metrics, name="actor"):
        outputs = {"log_probs": mini.batch["old_log_probs"]}
        add_update(metrics, policy_loss(actor, scale, base)(outputs, mini)[1])
    return metrics.to_floats().get("actor/pg_loss", 0.0)
