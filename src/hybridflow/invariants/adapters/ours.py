"""This library through the code that a run goes through: rows and configurations in, columns and losses out.

It is the one module of the room that imports other rooms.
"""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridflow import __version__
from hybridflow.algorithms.aggregation import LossScale, masked_whiten
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.value_loss import value_loss
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig, PolicyLossConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.model import OptimConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.loader import ShuffledSampler, StatefulLoader
from hybridflow.data.sft import encode_conversation
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.invariants.adapter import TrainerAdapter
from hybridflow.models.files.build import build_policy
from hybridflow.models.heads.log_probs import token_log_probs
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model, create_tiny_tokenizer
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.trainer.ppo.columns import estimate_advantages, find_estimator
from hybridflow.trainer.ppo.data_metrics import batch_metrics
from hybridflow.workers.losses import find_policy_loss, policy_loss, sft_loss

ESTIMATORS = {"dr_grpo": "grpo"}
LOSSES = {"ppo": "vanilla"}
WHOLE = BatchLimits(max_tokens=1000)
PEAK = 1e-3
"""Learning rate that is small enough for steps of a random model to stay finite."""


class OurTrainer(TrainerAdapter):
    """Estimators, losses, engine, loader and metrics of this library."""

    version = __version__

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
        algorithm = AlgorithmConfig(
            adv_estimator=ESTIMATORS.get(name, name),
            gamma=gamma,
            lam=lam,
            norm_adv_by_std_in_grpo=name == "grpo",
        )
        columns = {
            "token_level_rewards": rewards,
            "response_mask": mask,
            "loss_mask": mask,
            "values": values,
            "reward_baselines": baselines,
        }
        batch = DataProto.from_dict(columns, {"uid": groups})
        config = replace(PPOConfig(), algorithm=algorithm)
        found: Tensor = estimate_advantages(batch, config, find_estimator(algorithm)).batch["advantages"]
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
        keys: dict[str, Any] = {"loss_agg_mode": mode, "clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
        config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=LOSSES.get(name, name)), **keys)
        return _loss(config, log_prob, old_log_prob, advantages, mask, whole)[0]

    def kl(self, name: str, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        return kl_estimate(log_prob, ref_log_prob, name, mask)

    def value_loss(
        self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
    ) -> Tensor:
        scale = LossScale.count(mask)
        return value_loss(values, old_values, returns, mask, scale, clip_range=clip).loss

    def whiten(self, values: Tensor, mask: Tensor) -> Tensor:
        return masked_whiten(values, mask)

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        rows = logits.flatten(0, 1)
        head = torch.eye(logits.shape[-1])
        return token_log_probs(rows, head, None, tokens.flatten()).log_probs.view(tokens.shape)

    def entropy(self, logits: Tensor) -> Tensor:
        rows = logits.flatten(0, 1)
        banned = rows.isinf().all(0)  # a head has finite weights: it leaves words out by name
        found = token_log_probs(
            rows.where(~banned, 0.0),
            torch.eye(logits.shape[-1]),
            None,
            torch.zeros(len(rows), dtype=torch.int64),
            with_entropy=True,
            forbidden=tuple(banned.nonzero().flatten().tolist()),
        ).entropy
        assert found is not None, "it was asked for"
        return found.view(logits.shape[:-1])

    def response_mask(self, responses: Sequence[Sequence[int]], *, eos: int, pad: int) -> Tensor:
        return make_rows([[3]] * len(responses), responses, pad)["response_mask"]

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> Sequence[tuple[str, int]]:
        tokenizer = create_tiny_tokenizer()
        ids, mask = encode_conversation(ChatTemplate(tokenizer), messages)
        return [(str(tokenizer.decode([token])), learned) for token, learned in zip(ids, mask, strict=True)]

    def packed_positions(self, lengths: Sequence[int]) -> Sequence[int]:
        rows = DataProto.from_dict(make_rows([[3]] * len(lengths), [[4] * (each - 1) for each in lengths], 0))
        positions: list[int] = pack(rows).position_ids.tolist()
        return positions

    def packed_outputs(self, rows: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        engine = FSDPEngine(_tiny_policy(), name="actor", optim=None)
        outputs = engine.forward(_rows(rows), OutputSpec(log_probs=True, entropy=True), WHOLE)
        both = torch.stack([outputs["log_probs"], outputs["entropy"]], dim=-1)
        return [values[: len(row) - 1] for row, values in zip(rows, both, strict=True)]

    def learning_rates(self, total: int, resumes: Sequence[int]) -> Sequence[float]:
        policy = _tiny_policy()
        optim = OptimConfig(lr=PEAK, lr_scheduler_type="cosine")

        def new_engine() -> FSDPEngine:
            return FSDPEngine(policy, name="actor", optim=optim, total_steps=total)

        engine = new_engine()
        rows = _rows([[3, 4, 5]])
        loss = sft_loss(LossScale.count(rows.batch["loss_mask"]))
        rates = []
        for step in range(1, total + 1):
            metrics = engine.train_mini_batch(rows, OutputSpec(log_probs=True), loss, WHOLE)
            rates.append(metrics.to_floats()["actor/lr"] / PEAK)
            if step in resumes:
                state = engine.state_dict()
                engine = new_engine()
                engine.load_state_dict(state)
        return rates

    def data_order(
        self, num_rows: int, batch_size: int, batches: int, resumes: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        rows = range(num_rows)

        def new_loader() -> StatefulLoader[int]:
            return StatefulLoader(rows, ShuffledSampler(rows, seed=1), batch_size, drop_last=True)

        loader = new_loader()
        source = loader.endless()
        found = []
        for number in range(1, batches + 1):
            found.append(next(source))
            if number in resumes:
                state = loader.state_dict()
                loader = new_loader()
                loader.load_state_dict(state)
                source = loader.endless()
        return found

    def mean_metric(self, values: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
        step = Metrics()
        for each, mask in zip(values, masks, strict=True):  # ppo_kl is the mean of old less new log-probs
            zeros = torch.zeros_like(each)
            step.update(_loss(ActorConfig(), -each, zeros, zeros, mask, torch.cat(list(masks), dim=1))[1])
        return step.to_floats()["actor/ppo_kl"]

    def mean_length(self, response_mask: Tensor, loss_mask: Tensor) -> float:
        zeros = torch.zeros(response_mask.shape)
        names = ("token_level_scores", "token_level_rewards", "advantages", "returns")
        columns = dict.fromkeys(names, zeros) | {"response_mask": response_mask, "loss_mask": loss_mask}
        columns["attention_mask"] = torch.cat([torch.ones(len(zeros), 1).bool(), response_mask], dim=1)
        texts = {"uid": ["a"] * len(zeros), "finish_reason": ["stop"] * len(zeros)}
        metrics = batch_metrics(DataProto.from_dict(columns, texts), has_critic=False)
        return metrics.to_floats()["response_length/mean"]


Adapter = OurTrainer


def _loss(
    config: ActorConfig, log_prob: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, whole: Tensor
) -> tuple[Tensor, Metrics]:
    """Return the share of a micro-batch in the actor's loss, and its metrics."""
    columns = {"old_log_probs": old, "advantages": advantages, "response_mask": mask, "loss_mask": mask}
    function = policy_loss(config, LossScale.count(whole), find_policy_loss(config))
    return function({"log_probs": log_prob}, DataProto.from_dict(columns))


def _tiny_policy() -> PolicyModel:
    """Return a policy of two small layers, with the same weights in every call."""
    sizes: dict[str, Any] = {"hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 48}
    with tempfile.TemporaryDirectory() as folder:
        return build_policy(create_tiny_model(folder, **sizes), device="cpu", probe=False)


def _rows(rows: Sequence[Sequence[int]]) -> DataProto:
    """Return rows of ids, the first of which is the prompt, with all others to learn."""
    columns = make_rows([list(row[:1]) for row in rows], [list(row[1:]) for row in rows], 0)
    return DataProto.from_dict({**columns, "loss_mask": columns["response_mask"]})
