"""Builds the models, engines and workers of a run's roles: the part of the wiring that depends on where they live.

PPOConfig ─► roles that the run needs ─► a factory for each on the local backend ─► Roles
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hybridflow.config import PPOConfig
from hybridflow.config.model import OptimConfig
from hybridflow.controller import LocalBackend, RankInfo
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.distributed.device import resolve_device
from hybridflow.engines import BatchLimits, TrainEngine
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.build import build_policy, build_value
from hybridflow.models.export import save_config, save_hf
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import RolloutEngine
from hybridflow.rollout.build import build_rollout_engine
from hybridflow.trainer.models import end_tokens, model_arguments
from hybridflow.trainer.ppo.roles import Roles, needed_roles
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.workers import (
    ActorGroup,
    ActorWorker,
    CriticGroup,
    CriticWorker,
    ProcessRewardGroup,
    ProcessRewardWorker,
    ReferenceGroup,
    ReferenceWorker,
    RolloutGroup,
    RolloutWorker,
    TeacherGroup,
)
from hybridflow.workers.teacher import TEACHER_COLUMN


@dataclass
class Host:
    """Builds the workers of one process; roles that live here share what they can (the rollout has the actor's module)."""

    config: PPOConfig
    tokenizer: Tokenizer
    total_steps: int
    folder: RunFolder

    def __post_init__(self) -> None:
        self.device = resolve_device(self.config.trainer.device)
        self.backend = LocalBackend(
            lambda host: {
                "actor": self.actor,
                "rollout": self.rollout,
                "reference": self.reference,
                "critic": self.critic,
                "teacher": self.teacher,
                "process_reward": self.process_reward,
            }
        )

    @property
    def policy(self) -> PolicyModel:
        """The actor's module."""
        worker = self.backend.worker("actor")
        assert isinstance(worker, ActorWorker) and isinstance(worker.engine.module, PolicyModel)
        return worker.engine.module

    @property
    def rollout_engine(self) -> RolloutEngine:
        """The engine that generates."""
        worker = self.backend.worker("rollout")
        assert isinstance(worker, RolloutWorker)
        return worker.engine

    def roles(self) -> Roles:
        """The groups of this run; the workers are built here, before the first step."""
        names = needed_roles(self.config)
        for name in names:
            self.backend.worker(name)
        return Roles(
            actor=ActorGroup(self.backend, "actor"),
            rollout=RolloutGroup(self.backend, "rollout"),
            reference=ReferenceGroup(self.backend, "reference") if "reference" in names else None,
            critic=CriticGroup(self.backend, "critic") if "critic" in names else None,
            teacher=TeacherGroup(self.backend, "teacher") if "teacher" in names else None,
            process_reward=ProcessRewardGroup(self.backend, "process_reward") if "process_reward" in names else None,
        )

    def actor(self, info: RankInfo) -> ActorWorker:
        """The policy in training."""
        config, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        trained_steps = max(0, self.total_steps - self.config.trainer.critic_warmup)
        updates = self._updates(config.ppo_mini_batch_size, config.ppo_epochs) * trained_steps
        engine = self._engine(self._policy(), "actor", config.optim, updates, config.grad_clip)
        limits = BatchLimits(
            rollout.log_prob_max_token_len_per_gpu or config.ppo_max_token_len_per_gpu, rollout.log_prob_micro_batch_size_per_gpu
        )
        return ActorWorker(engine, config, temperature=rollout.temperature, log_prob_limits=limits)

    def reference(self, info: RankInfo) -> ReferenceWorker:
        """The policy that the run starts from."""
        config, rollout = self.config.actor_rollout_ref.ref, self.config.actor_rollout_ref.rollout
        engine = self._engine(self._policy().requires_grad_(False), "reference", None, 0, None)
        cap = config.log_prob_max_token_len_per_gpu or self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        limits = BatchLimits(cap, config.log_prob_micro_batch_size_per_gpu)
        return ReferenceWorker(engine, temperature=rollout.temperature, limits=limits)

    def critic(self, info: RankInfo) -> CriticWorker:
        """The value model."""
        config = self.config.critic
        assert config.ppo_mini_batch_size is not None and config.ppo_epochs is not None, "filled by resolve"
        module = build_value(**model_arguments(config.model, self.device))
        updates = self._updates(config.ppo_mini_batch_size, config.ppo_epochs) * self.total_steps
        engine = self._engine(module, "critic", config.optim, updates, config.grad_clip)
        cap, rows = config.forward_max_token_len_per_gpu, config.forward_micro_batch_size_per_gpu
        limits = BatchLimits(cap or config.ppo_max_token_len_per_gpu, rows)
        scale_factor = self.config.actor_rollout_ref.actor.loss_scale_factor
        return CriticWorker(engine, config, forward_limits=limits, loss_scale_factor=scale_factor)

    def teacher(self, info: RankInfo) -> ReferenceWorker:
        """The frozen policy that on-policy distillation learns from."""
        config = self.config.distillation
        if config.teacher_model.path is None:
            raise ConfigError(
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} needs a teacher, and distillation.teacher_model.path is "
                "not set: give a Hugging Face folder or hub name of a model with the actor's vocabulary"
            )
        module = build_policy(**model_arguments(config.teacher_model, self.device)).requires_grad_(False)
        self._check_vocabulary(module, "distillation.teacher_model")
        engine = self._engine(module, "teacher", None, 0, None)
        limits = BatchLimits(config.log_prob_max_token_len_per_gpu or self._token_cap)
        return ReferenceWorker(engine, temperature=self._temperature, limits=limits, column=TEACHER_COLUMN)

    def process_reward(self, info: RankInfo) -> ProcessRewardWorker:
        """The implicit process reward model, which starts as the actor does unless it has a path of its own."""
        config = self.config.reward.process_reward_model
        model = self.config.actor_rollout_ref.model if config.model.path is None else config.model
        module = build_policy(**model_arguments(model, self.device))
        self._check_vocabulary(module, "reward.process_reward_model.model")
        updates = self._updates(config.ppo_mini_batch_size or self.config.data.train_batch_size, 1) * self.total_steps
        engine = self._engine(module, "process_reward", config.optim, updates, config.grad_clip)
        limits = BatchLimits(config.ppo_max_token_len_per_gpu or self._token_cap)
        return ProcessRewardWorker(engine, config, temperature=self._temperature, limits=limits)

    def rollout(self, info: RankInfo) -> RolloutWorker:
        """Generation with the actor's own module: no second copy of the weights."""
        return RolloutWorker(
            build_rollout_engine(self.config.actor_rollout_ref.rollout, self.policy, end_tokens(self.policy, self.tokenizer))
        )

    def write_huggingface(self, target: Path, with_weights: bool) -> None:
        """The actor as a Hugging Face folder: configuration and tokenizer, and the weights if asked."""
        (save_hf if with_weights else save_config)(self.policy, target, self.tokenizer)

    @property
    def _temperature(self) -> float:
        """What all policies of a run are read at: the rollout's."""
        return self.config.actor_rollout_ref.rollout.temperature

    @property
    def _token_cap(self) -> int:
        return self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu

    def _check_vocabulary(self, module: PolicyModel, key: str) -> None:
        """Raise ModelError for a model that has no log-prob for some token of the actor's; rows of padding may be more or fewer."""
        theirs = module.head.weight.shape[0]
        ours = min(len(self.tokenizer), self.policy.head.weight.shape[0])
        if theirs < ours:
            raise ModelError(
                f"{key} has a vocabulary of {theirs} tokens and the actor one of {ours}: their token ids must mean the same, "
                "so choose a model of the actor's family"
            )

    def _policy(self) -> PolicyModel:
        return build_policy(**model_arguments(self.config.actor_rollout_ref.model, self.device))

    def _updates(self, groups: int, epochs: int) -> int:
        return -(-self.config.data.train_batch_size // groups) * epochs

    def _engine(self, module: torch.nn.Module, name: str, optim: OptimConfig | None, updates: int, grad_clip: float | None) -> TrainEngine:
        trainer = self.config.trainer
        return FSDPEngine(
            module,
            name=name,
            optim=optim,
            total_steps=updates,
            grad_clip=grad_clip,
            max_nonfinite_steps=trainer.max_nonfinite_steps,
            dump_dir=self.folder.nonfinite,
        )
