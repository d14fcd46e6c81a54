"""Metrics of a batch: scores, rewards, lengths, and the age of the weights that sampled it.

The names are verl's. The mismatch of log-probs by staleness is measured where these are, in
`workers/log_prob_check.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.staleness import tokens_by_staleness, trajectory_staleness
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.trainer.ppo.columns import explained_variance
from hybridflow.workers.correction import sampled_rows
from hybridflow.workers.log_prob_check import PREFIX


def batch_metrics(batch: DataProto, *, has_critic: bool) -> Metrics:
    """Return critic/{score,rewards,advantages,returns}, response_length and prompt_length.

    Scores, rewards, response_length and its clip_ratio are of trajectories; prompt_length is of rows.
    response_length counts what the policy wrote, perf/total_num_tokens all that a model reads. With a critic
    there are also values and explained variance.
    """
    rows = batch.batch
    metrics = Metrics()
    loss_mask = rows["loss_mask"]
    samples = ByTrajectory(batch).samples
    mask = samples.batch["response_mask"]
    sampled = sampled_rows(samples)
    scores = (samples.batch["token_level_scores"] * mask).sum(-1)[sampled]
    add_range(metrics, "critic/score", scores)
    metrics.add_sum("training/num_trajectories", float(sampled.sum()))
    equal, groups = equal_groups(samples.non_tensor_batch["uid"][sampled.numpy()], scores)
    metrics.add_mean("training/zero_variance_groups", float(equal), float(groups))
    add_range(metrics, "critic/rewards", (samples.batch["token_level_rewards"] * mask).sum(-1)[sampled])
    add_range(metrics, "critic/advantages", rows["advantages"][loss_mask])
    add_range(metrics, "critic/returns", rows["returns"][loss_mask])
    if has_critic:
        add_range(metrics, "critic/values", rows["values"][loss_mask])
        metrics.add_mean(
            "critic/vf_explained_var", explained_variance(rows["values"], rows["returns"], loss_mask)
        )
    width = rows["response_mask"].shape[1]
    add_range(metrics, "response_length", mask.sum(-1)[sampled])
    add_range(metrics, "prompt_length", rows["attention_mask"][:, :-width].sum(-1))
    # never an answer of the data
    truncated = sum(reason == "length" for reason in samples.non_tensor_batch["finish_reason"])
    metrics.add_mean("response_length/clip_ratio", float(truncated), float(sampled.sum()))
    metrics.add_sum("perf/total_num_tokens", float(rows["attention_mask"].sum()))
    metrics.add_mean("training/loss_tokens_ratio", float(loss_mask.sum()), float(mask.sum()))
    return metrics


OF_A_SOURCE = {
    "critic/score/": "score/",
    "critic/advantages/": "advantages/",
    "response_length/": "response_length/",
    "training/zero_variance_groups": "zero_variance_groups",
    "training/num_trajectories": "num_trajectories",
}
"""Beginnings of the names of the metrics that `source_metrics` gives, and what it calls them."""


def source_metrics(batch: DataProto) -> Metrics:
    """Return by_source/{source}/…, those of `batch_metrics` that `OF_A_SOURCE` lists, for each data source,
    token_share, the part that its tokens have in the weights of all tokens that are learned from, and where
    sources differ in it kl_coef.
    """
    metrics = Metrics()
    tokens = batch.batch["loss_mask"].sum(-1).double()
    if "source_weight" in batch:
        tokens = tokens * batch.batch["source_weight"]
    sources = batch.non_tensor_batch["data_source"]
    for source in dict.fromkeys(sources):
        own = torch.tensor([each == source for each in sources])
        for name, value in batch_metrics(batch.select_idxs(own), has_critic=False).to_floats().items():
            for begins, short in OF_A_SOURCE.items():
                if name.startswith(begins):
                    metrics.add_last(f"by_source/{source}/{short}{name.removeprefix(begins)}", value)
        metrics.add_mean(f"by_source/{source}/token_share", tokens[own].sum(), tokens.sum())
        if "source_kl_coef" in batch:
            metrics.add_last(f"by_source/{source}/kl_coef", float(batch.batch["source_kl_coef"][own][0]))
    return metrics


def equal_groups(uids: Sequence[str], scores: Tensor) -> tuple[int, int]:
    """Return how many groups of several scores [n] have equal ones, and how many such groups there are."""
    groups: dict[str, list[float]] = {}
    for uid, score in zip(uids, scores.tolist(), strict=True):
        groups.setdefault(uid, []).append(score)
    several = [values for values in groups.values() if len(values) > 1]
    return sum(min(values) == max(values) for values in several), len(several)


def add_range(metrics: Metrics, name: str, values: Tensor) -> None:
    """Add mean, maximum and minimum of `values`; add nothing where there are none."""
    values = values.detach().to(torch.float64)
    if values.numel():
        metrics.add_mean(f"{name}/mean", values.sum(), float(values.numel()))
        metrics.add_max(f"{name}/max", values.max())
        metrics.add_min(f"{name}/min", values.min())


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
