"""What is measured of a batch where its columns are: how far the policy that sampled it is from the actor.

    old_log_probs, rollout_log_probs ──┬─ LogProbCheck ─► training/rollout_*_diff_*
                                       ├─ bounds       ─► rollout_corr/*
                                       └─ version      ─► training/off_policy/{k3_kl,ratio}/*

Parts of a batch are measured for themselves, each in whole groups, and their metrics add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.rollout_correction import Bounds
from hybridflow.algorithms.staleness import mismatch_by_staleness
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.correction import measure_correction, sampled_rows
from hybridflow.workers.log_prob_check import LogProbCheck, check_same, comparable_tokens, difference

PREFIX = "training/off_policy"


@dataclass(frozen=True)
class OffPolicy:
    """What is to be measured of a batch; what is None is not."""

    check: LogProbCheck | None = None
    """Set where the actor's pass has given the old log-probs: they are compared with the rollout's."""
    bounds: Bounds | None = None
    """The bounds of the ratios; set where a batch is not corrected and the rollout's log-probs say how far
    the rollout is.
    """
    version: int | None = None
    """The actor's version; set where a batch has tokens of older weights, and old log-probs are those of
    the actor.
    """

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be measured."""
        return self == OffPolicy()


def measure_off_policy(batch: DataProto, wanted: OffPolicy) -> Metrics:
    """Return the metrics that are wanted.

    Raises TrainingError in exact mode where the rollout's log-probs are not those of training.
    """
    metrics = Metrics()
    if wanted.is_empty:
        return metrics
    rows = batch.batch
    trained = rows["old_log_probs"]
    rollout = rows["rollout_log_probs"]
    check = wanted.check
    if check is not None:
        if check.exact:
            check_same(batch, rollout, trained, step=check.step, version=check.version)
        compared = comparable_tokens(batch, check.version)
        metrics.update(difference(rollout[compared], trained[compared]))
    if wanted.bounds is not None:
        metrics.update(measure_correction(batch, wanted.bounds))
    if wanted.version is not None:
        mask = rows["response_mask"] & sampled_rows(batch)[:, None]
        staleness = wanted.version - rows["policy_version"].long()
        for steps, values in mismatch_by_staleness(trained, rollout, mask, staleness).items():
            for name, (numerator, denominator) in values.items():
                metrics.add_mean(f"{PREFIX}/{name}/{steps}_steps", numerator, denominator)
    return metrics
