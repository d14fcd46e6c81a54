"""Metrics of a batch whose tokens older weights than the actor's have sampled.

policy_version, old_log_probs, rollout_log_probs, the actor's version ──► training/off_policy/*
"""

from __future__ import annotations

from hybridflow.algorithms.staleness import mismatch_by_staleness, trajectory_staleness
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.trainer.ppo.data_metrics import add_range
from hybridflow.workers.correction import sampled_rows

PREFIX = "training/off_policy"


def staleness_metrics(batch: DataProto, version: int, *, compares: bool) -> Metrics:
    """Return the staleness of trajectories, and the mismatch of log-probs by staleness; nothing where every
    token is the actor's.

    `version` is the actor's. `compares` says whether old log-probs are those of the actor at the start of the
    step, as they are outside of bypass mode; only then is there a mismatch to measure.
    """
    metrics = Metrics()
    if "policy_version" not in batch:
        return metrics
    samples = ByTrajectory(batch).samples
    rows = samples.batch
    mask = rows["response_mask"] & sampled_rows(samples)[:, None]
    staleness = version - rows["policy_version"].long()
    if not bool((staleness[mask] != 0).any()):
        return metrics
    found = trajectory_staleness(rows["policy_version"], mask, version)
    add_range(metrics, f"{PREFIX}/trajectory_staleness", found.newest)
    add_range(metrics, f"{PREFIX}/trajectory_staleness_worst", found.oldest)
    add_range(metrics, f"{PREFIX}/trajectory_spans", found.spans)
    by_staleness = mismatch_by_staleness(rows["old_log_probs"], rows["rollout_log_probs"], mask, staleness)
    for steps, values in by_staleness.items():
        for name, (numerator, denominator) in values.items():
            if compares or name == "tokens":
                metrics.add_mean(f"{PREFIX}/{name}/{steps}_steps", numerator, denominator)
    return metrics
