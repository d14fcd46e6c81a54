"""Where batches come from in the synchronous schedule: prompts, generation with the current weights, scores.

prompts ──requests──► rollout ──outputs──► collate ──► DataProto ──score──► DataProto with token_level_scores
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.agent import build_requests, collate
from hybridflow.config import PPOConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.rewards.manager import RewardManager
from hybridflow.rollout.base import SamplingParams
from hybridflow.trainer.ppo.scoring import score
from hybridflow.workers import RolloutGroup


class Trajectories:
    """Turns prompts into scored trajectories, for training and for validation."""

    def __init__(self, rollout: RolloutGroup, rewards: RewardManager, tokenizer: Tokenizer, config: PPOConfig, timer: Timer) -> None:
        self.rollout, self.rewards, self.tokenizer, self.config, self.timer = rollout, rewards, tokenizer, config, timer

    def for_training(self, prompts: Sequence[PromptRow], step: int) -> tuple[DataProto, Metrics]:
        """`rollout.n` responses of each prompt, sampled with the weights of step `step - 1`."""
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams(
            max_tokens=self.config.data.max_response_length,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            greedy=not rollout.do_sample,
            ignore_eos=rollout.ignore_eos,
        )
        batch, metrics = self._make(prompts, sampling, n=rollout.n, purpose="rollout", step=step, version=step - 1)
        metrics.update(self.rollout.stats().as_metrics())
        return batch, metrics

    def for_validation(self, prompts: Sequence[PromptRow], step: int, first_row: int = 0) -> tuple[DataProto, Metrics]:
        """`val_kwargs.n` responses of each prompt, by `val_kwargs`, with the weights of step `step`; rows are numbered from `first_row`."""
        rollout = self.config.actor_rollout_ref.rollout
        val = rollout.val_kwargs
        greedy = not val.do_sample or val.temperature == 0.0
        sampling = SamplingParams(
            max_tokens=self.config.data.max_response_length,
            temperature=1.0 if greedy else val.temperature,
            top_k=val.top_k,
            top_p=val.top_p,
            greedy=greedy,
            ignore_eos=rollout.ignore_eos,
        )
        return self._make(prompts, sampling, n=val.n, purpose="validation", step=step, version=step, first_row=first_row)

    def _make(
        self, prompts: Sequence[PromptRow], sampling: SamplingParams, *, n: int, purpose: str, step: int, version: int, first_row: int = 0
    ) -> tuple[DataProto, Metrics]:
        requests = build_requests(prompts, sampling, n=n, seed=self.config.trainer.seed, purpose=purpose, step=step, first_row=first_row)
        timers = ("val_gen", "val_reward") if purpose == "validation" else ("gen", "reward")  # a step's own do not include validation
        with self.timer(timers[0]):
            outputs = self.rollout.generate(requests.requests, policy_version=version)
        batch = collate(requests, outputs, self.tokenizer, step=step)
        with self.timer(timers[1]):
            return score(batch, self.rewards)
