"""Metrics of a batch whose tokens older weights than the actor's have sampled.

policy_version, the actor's version ──► training/off_policy/{trajectory_*,tokens}

The mismatch of log-probs by staleness is measured where these are (`workers/off_policy.py`).
"""

from __future__ import annotations

from hybridflow.algorithms.staleness import tokens_by_staleness, trajectory_staleness
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.trainer.ppo.data_metrics import add_range
from hybridflow.workers.correction import sampled_rows
from hybridflow.workers.off_policy import PREFIX


def staleness_metrics(batch: DataProto, version: int) -> Metrics:
    """Return the staleness of trajectories and tokens; nothing where every token is the actor's.

    `version` is the actor's.
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
    for steps, (numerator, denominator) in tokens_by_staleness(mask, staleness).items():
        metrics.add_mean(f"{PREFIX}/tokens/{steps}_steps", numerator, denominator)
    return metrics
