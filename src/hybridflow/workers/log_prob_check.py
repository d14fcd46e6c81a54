"""The comparison of log-probs of generation and of training: what is measured, and the alarm of exact mode.

an update's first forward, under the weights that generated ──look_first──► its log-probs against
old_log_probs, entropy; then the loss

`measure_off_policy` compares where the columns of a batch are:

    old_log_probs, rollout_log_probs ──┬─ LogProbCheck ─► training/rollout_*_diff_*
                                       ├─ bounds       ─► rollout_corr/*
                                       └─ version      ─► training/off_policy/{k3_kl,ratio}/*

Parts of a batch are measured for themselves, each in whole groups, and their metrics add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridflow.algorithms.aggregation import masked_sum
from hybridflow.algorithms.rollout_correction import Bounds
from hybridflow.algorithms.staleness import mismatch_by_staleness
from hybridflow.distributed.shards import Box
from hybridflow.errors import TrainingError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.correction import correction_means, measure_correction, rows_of_version, sampled_rows

APART = "training/rollout_log_probs_diff_max"
"""Metric: the largest difference of a sampled token's log-probs, in nats."""


@dataclass(frozen=True)
class LogProbCheck:
    """The check on the first forward of an update, in steps whose `old_log_probs` are the rollout's."""

    step: int
    version: int
    """The actor's version: rows with a token of another one are not compared."""
    exact: bool
    """True in exact mode, where both are expected to be equal to the bit."""
    stops: bool = True
    """In exact mode: True if a difference ends the run, False if it is only measured."""


def comparable_tokens(batch: DataProto, version: int) -> Tensor:
    """Return [B, R] bool: the sampled tokens of the rows that the actor's present version sampled."""
    mask: Tensor = batch.batch["response_mask"] & rows_of_version(batch, version)[:, None]
    return mask


def difference(rollout: Tensor, trained: Tensor) -> Metrics:
    """Measure how far log-probs of generation and of training are apart, both [N] in nats.

    The result is empty for no tokens.
    """
    metrics = Metrics()
    if rollout.numel() == 0:
        return metrics
    log_difference = (rollout - trained).abs()
    apart = (rollout.exp() - trained.exp()).abs()
    metrics.add_max(APART, log_difference.max())
    metrics.add_max("training/rollout_probs_diff_max", apart.max())
    metrics.add_mean("training/rollout_probs_diff_mean", apart.sum(), float(apart.numel()))
    return metrics


def check_same(rows: DataProto, rollout: Tensor, trained: Tensor, *, step: int, version: int) -> None:
    """Raise TrainingError where log-probs [B, R] of the actor's present version are not equal to the bit.

    The message names the first token that differs.
    """
    wrong = (rollout != trained) & comparable_tokens(rows, version)
    if not bool(wrong.any()):
        return
    row, token = (int(place) for place in wrong.nonzero()[0])
    row_id = row
    if "row_id" in rows:
        row_id = int(rows.batch["row_id"][row])
    uid = ""
    if "uid" in rows.non_tensor_batch:
        uid = f" of prompt {rows.non_tensor_batch['uid'][row]}"
    ours = f"{float(rollout[row, token]):.9g}"
    theirs = f"{float(trained[row, token]):.9g}"
    raise TrainingError(
        f"exact mode, step {step}: row {row_id}{uid}, response token {token} has log-prob {ours} from the "
        f"rollout and {theirs} from training ({int(wrong.sum())} tokens of {int(wrong.any(-1).sum())} rows "
        "differ). Nothing was learned from this mini-batch. Either the rollout has other weights than the "
        "trainer, which is an error to find, or this machine computes a row differently in another batch: "
        "actor_rollout_ref.rollout.exact=false lets a run live with that"
    )


def check_same_weights(
    actor: Sequence[Mapping[str, tuple[Box, int]]], replicas: Sequence[Mapping[str, int]], step: int
) -> None:
    """Raise TrainingError where a replica has generated with other weights than the actor's, by checksums.

    `actor` has the part of each weight that each of its ranks holds; equal parts are copies. Checksums see
    every bit of a weight. Log-probs would miss its lowest bits, as far as they are rounded away.
    """
    for name in actor[0]:
        ours = sum(dict(rank[name] for rank in actor).values()) % 2**64
        for rank, sums in enumerate(replicas):
            if sums.get(name, 0) % 2**64 != ours:
                raise TrainingError(
                    f"exact mode, step {step}: rollout rank {rank} has generated with another "
                    f"{name.removeprefix('hf.')} than the trainer "
                    f"holds (checksum {sums.get(name, 0) % 2**64:016x}, wanted {ours:016x}). Its "
                    "weights were the trainer's when "
                    "they arrived, so something has written to them since. Nothing was learned from this step"
                )


def look_first(outputs: Mapping[str, Tensor], micro: DataProto, watch: LogProbCheck) -> Metrics:
    """Check the log-probs and the entropy of a micro-batch, [B, R] each, of an update's first forward."""
    sampled = comparable_tokens(micro, watch.version)
    trained = outputs["log_probs"].detach()
    rollout = micro.batch["old_log_probs"]
    if watch.exact and watch.stops:
        check_same(micro, rollout, trained, step=watch.step, version=watch.version)
    metrics = difference(rollout[sampled], trained[sampled])
    if watch.exact:
        metrics.add_sum("training/rollout_rows_checked", float(sampled.any(-1).sum()))
        if bool(sampled.any()):
            ratio = (trained - rollout)[sampled].exp()
            metrics.add_min("training/first_ratio_min", ratio.min())
            metrics.add_max("training/first_ratio_max", ratio.max())
    learned = sampled & micro.batch["loss_mask"]
    if not watch.exact:  # in exact mode the step has measured it over the whole batch
        metrics.update(correction_means(trained, rollout, learned))
    if bool(learned.any()):
        metrics.add_mean(
            "actor/entropy", masked_sum(outputs["entropy"].detach(), learned), float(learned.sum())
        )
    return metrics


PREFIX = "training/off_policy"


@dataclass(frozen=True)
class OffPolicy:
    """Which off-policy metrics of a batch to compute; None disables one."""

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
    """Return the requested metrics.

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
