"""verl's core functions, called with plain tensors as its trainer calls them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl.utils.torch_functional as functional
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig

from hybridflow.invariants.adapter import NotOffered, TrainerAdapter, resumed_rates

LOSSES = {"ppo": "vanilla", "gspo": "gspo"}


def _version() -> str:
    try:
        return version("verl")
    except PackageNotFoundError:  # a folder in PYTHONPATH
        return ""


class VerlTrainer(TrainerAdapter):
    """Functions of `verl.trainer.ppo.core_algos`, `torch_functional` and `metric_utils`.

    Groups are labelled by an array of objects, as its trainer does, and the estimators are those of its
    configuration's names (`grpo`, not `grpo_vectorized`).
    """

    version = _version()

    def advantages(
        self,
        name: str,
        rewards: Tensor,
        mask: Tensor,
        groups: Sequence[Hashable],
        *,
        values: Tensor,
        baselines: Tensor,
        gamma: float,
        lam: float,
    ) -> Tensor:
        labels = np.empty(len(groups), dtype=object)
        for row, label in enumerate(groups):  # in one assignment, tuples would become a matrix
            labels[row] = label
        estimate = core_algos.get_adv_estimator_fn("grpo" if name == "dr_grpo" else name)
        columns: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask.long()}
        if name == "gae":
            columns |= {"values": values, "gamma": gamma, "lam": lam}
        elif name == "remax":
            columns["reward_baselines"] = baselines
        elif name == "reinforce_plus_plus":
            columns["config"] = SimpleNamespace(gamma=gamma)
        else:
            columns["index"] = labels
        if name in ("grpo", "dr_grpo"):
            columns["norm_adv_by_std_in_grpo"] = name == "grpo"
        found: Tensor = estimate(**columns)[0]
        return found

    def policy_loss(
        self,
        name: str,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        mode: str,
        whole: Tensor,
        parts: int,
        clip: tuple[float, float],
    ) -> Tensor:
        if name not in LOSSES or (name == "gspo" and mode != "seq-mean-token-mean"):  # it reads no mode
            raise NotOffered
        config = _config(clip_ratio_low=clip[0], clip_ratio_high=clip[1])
        counts = {"dp_size": 1, "batch_num_tokens": whole.sum(), "global_batch_size": len(whole)}
        config.global_batch_info.update(counts)
        function = core_algos.get_policy_loss_fn(LOSSES[name])
        loss: Tensor = function(old_log_prob, log_prob, advantages, mask, mode, config)[0]
        return loss

    def kl(self, name: str, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        # as apply_kl_penalty of its trainer does
        found: Tensor = core_algos.kl_penalty(log_prob, ref_log_prob, name) * mask
        return found

    def value_loss(
        self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
    ) -> Tensor:
        loss: Tensor = core_algos.compute_value_loss(values, returns, old_values, mask.long(), clip)[0]
        return loss

    def whiten(self, values: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = functional.masked_whiten(values, mask.long())
        return found

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        found: Tensor = functional.logprobs_from_logits(logits, tokens)
        return found

    def entropy(self, logits: Tensor) -> Tensor:
        found: Tensor = functional.entropy_from_logits(logits)
        return found

    def response_mask(self, responses: Sequence[Sequence[int]], *, eos: int, pad: int) -> Tensor:
        width = max(map(len, responses))
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in responses])
        mask: Tensor = functional.get_response_mask(ids, eos).bool()
        return mask

    def learning_rates(self, total: int, resumes: Sequence[int]) -> Sequence[float]:
        def new() -> tuple[torch.optim.Optimizer, Any]:
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
            return optimizer, functional.get_cosine_schedule_with_warmup(optimizer, 0, total)

        return resumed_rates(new, total, resumes)

    def mean_metric(self, values: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
        # as ppo_loss of its workers does: a number for each micro-batch, then the mean of these
        found = Metric(AggregationType.MEAN)
        config = _config()
        for each, mask in zip(values, masks, strict=True):
            zeros = torch.zeros_like(each)
            loss = core_algos.get_policy_loss_fn("vanilla")
            found.append(loss(zeros, -each, zeros, mask, "token-mean", config)[1]["actor/ppo_kl"])
        return float(found.aggregate())

    def mean_length(self, response_mask: Tensor, loss_mask: Tensor) -> float:
        zeros = torch.zeros(response_mask.shape)
        names = ("token_level_scores", "token_level_rewards", "advantages", "returns")
        columns = dict.fromkeys(names, zeros) | {"response_mask": loss_mask.long()}
        columns["responses"] = torch.ones(response_mask.shape, dtype=torch.int64)
        columns["prompts"] = torch.ones(len(zeros), 1, dtype=torch.int64)
        columns["attention_mask"] = torch.cat([columns["prompts"], response_mask.long()], dim=1)
        metrics = compute_data_metrics(DataProto.from_dict(columns), use_critic=False)
        return float(metrics["response_length/mean"])


Adapter = VerlTrainer


def _config(**changes: Any) -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **changes)
