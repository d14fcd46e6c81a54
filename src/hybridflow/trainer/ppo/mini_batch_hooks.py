"""Decisions that are taken over a whole mini-batch under the current weights.

They are rejection in bypass mode, and the selection of tokens by a loss.

    mini-batch ──current log-probs──► correct_rollout (bypass mode) ──► select_tokens (clip_cov, kl_cov) ──►
    mini-batch with columns

Mini-batches are formed on the driver, so the whole of one is seen here and nothing has to be reduced over
ranks.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.policy_losses import PolicyLoss
from hybridflow.config import PPOConfig
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.columns import leave_out_unpaired, select_tokens
from hybridflow.workers import ActorGroup
from hybridflow.workers.correction import correct_rollout
from hybridflow.workers.mini_batches import Prepare


def mini_batch_hook(actor: ActorGroup, config: PPOConfig, loss: PolicyLoss, step: int) -> Prepare | None:
    """Return the hook that this run's mini-batches need, or None where they need none."""
    correction = config.algorithm.rollout_correction
    corrects = correction.bypass_mode and correction.corrects
    if not corrects and loss.select is None:
        return None

    def prepare(mini: DataProto, number: int) -> tuple[DataProto, Metrics]:
        metrics = Metrics()
        current = mini  # before the first update of a step the old log-probs are those of now
        if number > 0 or correction.bypass_mode:
            current = actor.log_probs(mini, with_entropy=False)
        now: Tensor = current.batch["old_log_probs"]
        if corrects:
            found = correct_rollout(mini, correction, now)
            metrics.update(found.metrics)
            # ppo_clip: the ratio to the rollout policy holds the weights already
            if found.weights is not None and correction.loss_type == "reinforce":
                mini |= DataProto.from_dict({"rollout_is_weights": found.weights})
            if found.keep is not None:
                mini.narrow_loss_mask(found.keep)
                leave_out_unpaired(mini, loss)
        if loss.select is not None:
            rng = generator(config.trainer.seed, "select_tokens", step, number)
            mini |= select_tokens(mini, config.actor_rollout_ref.actor, loss, now, rng)
        return mini, metrics

    return prepare
