"""An advantage estimator or a policy loss on a batch so small that its numbers can be checked by hand.

    algorithm ──Trial──► the rows with what it gives for them, and what must not change it

Two prompts have three responses each, of three, two and one tokens. The first prompt's responses score 1, 0
and 0, the second one's 1, 1 and 1. The function is called as a run calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config import PPOConfig
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.protocol import DataProto
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.columns import estimate_advantages, find_estimator, identify, select_tokens
from hybridflow.workers.losses import find_policy_loss, policy_loss

PROMPTS = ("a", "a", "a", "b", "b", "b")
SCORES = (1.0, 0.0, 0.0, 1.0, 1.0, 1.0)
LENGTHS = (3, 2, 1, 3, 2, 1)
OLD_LOG_PROB = -1.0
"""nats, of every token."""
RATIOS = (1.0, 1.5, 0.5, 1.0, 1.1, 0.9)
"""Importance ratio of every token of a row, where a loss is tried."""
ADVANTAGES = (-1.0, 1.0, 1.0, 1.0, -1.0, -1.0)
"""Advantage of every token of a row, where a loss is tried."""
JUNK = 7.0
"""The value outside of the mask, where it must change nothing."""
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Check:
    """A change that must not alter a result, and by how much it did."""

    meaning: str
    problem: str
    """Empty where nothing changed."""


@dataclass(frozen=True)
class Trial:
    """The result of a function on the rows, and the checks of it."""

    summary: str
    columns: dict[str, list[str]]
    """A text for each row of the batch."""
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return not any(check.problem for check in self.checks)


def try_estimator(config: PPOConfig) -> Trial:
    """Return the result of the estimator `algorithm.adv_estimator`. Raises what it raises."""
    estimator = find_estimator(config.algorithm)
    batch = small_batch()
    given = _copy(batch)

    def advantages(rows: DataProto) -> Tensor:
        found: Tensor = estimate_advantages(rows, config, estimator).batch["advantages"]
        return found

    found = advantages(given)
    mask = batch.batch["response_mask"]
    order = [3, 5, 1, 0, 4, 2]
    renamed = _copy(batch)
    renamed.non_tensor_batch["uid"] = np.array(["z" if uid == "a" else "y" for uid in PROMPTS], dtype=object)
    checks = [
        _same("junk outside of response_mask", lambda: advantages(_spoilt(batch)), found),
        _same("another order of the rows", lambda: advantages(batch.select_idxs(order)), found[order]),
        _same("other names of the prompts", lambda: advantages(renamed), found),
        _unchanged(given, batch),
        _holds("tokens outside of response_mask get 0", bool((found[~mask] == 0).all()), _listed(found)),
        _holds("every number is finite", bool(found.isfinite().all()), _listed(found)),
    ]
    columns = _rows() | {
        "score": [f"{score:g}" for score in SCORES],
        "advantages": _listed(found, mask),
    }
    return Trial("Each token's advantage, by the scores of the responses:", columns, checks)


def try_loss(config: PPOConfig) -> Trial:
    """Return the result of the loss `policy_loss.loss_mode`. Raises what it raises, ConfigError among it."""
    actor = config.actor_rollout_ref.actor
    base = find_policy_loss(actor)
    batch = small_batch()
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.tensor(ADVANTAGES)[:, None] * mask
    current = batch.batch["old_log_probs"] + torch.tensor(RATIOS).log()[:, None]
    batch.batch["group_ids"] = identify(batch).batch["group_ids"]
    if base.select is not None:
        draw = generator(0, "selected tokens", 0)
        batch |= select_tokens(batch, actor, base, current, draw)
    function = policy_loss(actor, LossScale.count(mask), base)

    def loss_and_gradient(rows: DataProto, log_prob: Tensor) -> tuple[float, Tensor]:
        leaf = log_prob.clone().requires_grad_()
        loss, _ = function({"log_probs": leaf}, rows)
        if not loss.requires_grad:
            raise ConfigError(
                "the loss has no gradient: torch can derive nothing of it by log_prob; is that detached, or "
                "turned into numbers?"
            )
        try:
            (gradient,) = torch.autograd.grad(loss, leaf)
        except RuntimeError as error:
            raise ConfigError(
                f"torch cannot derive the loss by log_prob (a loss calls no backward itself): {error}"
            ) from error
        return float(loss.detach()), gradient

    given = _copy(batch)
    loss, gradient = loss_and_gradient(given, current)

    def in_parts() -> Tensor:
        parts = [(batch.select_idxs(rows), current[list(rows)]) for rows in (range(3), range(3, 6))]
        return torch.tensor(sum(loss_and_gradient(*part)[0] for part in parts))

    def of_spoilt() -> Tensor:
        return torch.tensor(loss_and_gradient(_spoilt(batch), current.where(mask, JUNK))[0])

    whole = torch.tensor(loss)
    checks = [
        _same("a cut into two micro-batches", in_parts, whole),
        _same("junk outside of response_mask", of_spoilt, whole),
        _unchanged(given, batch),
        _holds("every number is finite", math.isfinite(loss) and bool(gradient.isfinite().all()), str(loss)),
        _holds(
            "tokens outside of response_mask have no gradient", not gradient[~mask].any(), _listed(gradient)
        ),
        _holds("some token has a gradient", bool(gradient.any()), "0 for all"),
    ]
    columns = _rows() | {
        "ratio": [f"{ratio:g}" for ratio in RATIOS],
        "advantage": [f"{advantage:g}" for advantage in ADVANTAGES],
        "gradient × tokens": _listed(gradient * float(mask.sum()), mask),
    }
    return Trial(
        f"The loss is {loss:.6g}. The gradient is that by each token's log_prob, times the {int(mask.sum())} "
        "tokens of the batch:",
        columns,
        checks,
    )


def small_batch() -> DataProto:
    """Return the rows, with every column that a run may have: 6 rows of up to 3 tokens."""
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(3)[None] < lengths[:, None]
    scores = torch.zeros(6, 3)
    scores[range(6), lengths - 1] = torch.tensor(SCORES)
    log_probs = torch.full((6, 3), OLD_LOG_PROB) * mask
    tensors = {
        "row_id": torch.arange(6),
        "response_mask": mask,
        "loss_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "process_rewards": scores,
        "old_log_probs": log_probs,
        "rollout_log_probs": log_probs,
        "ref_log_prob": log_probs,
        "teacher_log_probs": log_probs,
        "rollout_is_weights": mask.float(),
        "entropys": mask * 1.0,
        "sum_pi_squared": mask * 0.5,
        "values": mask * 0.5,
        "reward_baselines": torch.full((6,), 0.5),
        "is_demonstration": torch.zeros(6, dtype=torch.bool),
        "positive": torch.tensor(SCORES) > 0,
    }
    return DataProto.from_dict(tensors, {"uid": np.array(PROMPTS, dtype=object)})


def _copy(batch: DataProto) -> DataProto:
    return batch.select_idxs(range(len(batch)))


def _spoilt(batch: DataProto) -> DataProto:
    """Return the batch with junk in every real column outside of the mask."""
    mask = batch.batch["response_mask"]
    spoilt = _copy(batch)
    for name, column in batch.batch.items():
        if column.shape == mask.shape and column.is_floating_point():
            spoilt.batch[name] = column.where(mask, JUNK)
    return spoilt


def _same(meaning: str, compute: Callable[[], Tensor], wanted: Tensor) -> Check:
    meaning = f"{meaning} changes nothing"
    try:
        found = compute()
    except HybridFlowError as error:
        return Check(meaning, str(error))
    if torch.allclose(found, wanted, rtol=0, atol=TOLERANCE):
        return Check(meaning, "")
    return Check(meaning, f"wanted {_plain(wanted)}, got {_plain(found)}")


def _unchanged(given: DataProto, before: DataProto) -> Check:
    """Check that a function has left its columns alone, which others read after it."""
    changed: list[str] = []
    for name in before.batch.keys():  # noqa: SIM118  a TensorDict goes through its rows
        now: Tensor = given.batch[name]
        then: Tensor = before.batch[name]
        if not torch.equal(now, then):
            changed.append(str(name))
    return _holds("the columns stay as they are", not changed, f"other values in {', '.join(changed)}")


def _holds(meaning: str, holds: bool, found: Any) -> Check:
    return Check(meaning, "" if holds else f"got {found}")


def _plain(values: Tensor) -> str:
    if values.dim() == 0:
        return f"{float(values):.6g}"
    return "; ".join(_listed(values))


def _rows() -> dict[str, list[str]]:
    return {"prompt": list(PROMPTS), "tokens": [str(length) for length in LENGTHS]}


def _listed(values: Tensor, mask: Tensor | None = None) -> list[str]:
    """Return the values [B, R] of each row as text, those of its tokens where a mask says which they are."""
    rows: Sequence[Tensor] = values.unbind(0)
    if mask is not None:
        rows = [row[own] for row, own in zip(values, mask)]
    return [" ".join(f"{value:.4g}" for value in row.tolist()) for row in rows]
