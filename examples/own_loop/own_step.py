"""A training step of your own in the library's trainer: brief answers are worth more.

hybridflow train --recipe grpo trainer.step_class=examples/own_loop/own_step.py:BriefStep …
"""

from __future__ import annotations

from hybridflow import DataProto, PPOConfig
from hybridflow.observability.metrics import Metrics
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.ppo.step import PPOStep

PRICE = 0.001
"""Taken from the score for each token that the policy has sampled."""


class BriefStep(PPOStep):
    """PPOStep with a price on every sampled token."""

    def __call__(self, batch: DataProto, step: int) -> tuple[DataProto, Metrics]:
        """Take the price from the scores of a batch [B, R], and learn as ever; an empty batch passes on."""
        price = 0.0
        if len(batch):
            prices = PRICE * batch.batch["response_mask"].float()
            batch.batch["token_level_scores"] = batch.batch["token_level_scores"] - prices
            price = float(prices.sum(-1).mean())
        batch, metrics = super().__call__(batch, step)
        metrics.add_mean("training/price/mean", price)
        return batch, metrics


def train(config: PPOConfig) -> dict[str, float]:
    """Build the parts of a run, change one of them, and train; return the metrics of the last validation."""
    with build(config) as trainer:
        trainer.after_update = lambda batch: print("rows learned from:", len(batch))
        return trainer.fit()
