"""The one place that wires a PPO run: a prepared configuration in, a trainer ready to `fit` out.

config ─► tokenizer, data ─► models ─► engines ─► workers on a backend ─► Roles ─► PPOStep, Trajectories, Validator ─► SyncTrainer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridflow.checkpoint.layout import ACTOR, CRITIC
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig
from hybridflow.config.model import OptimConfig
from hybridflow.config.show import to_yaml
from hybridflow.controller import LocalBackend, RankInfo
from hybridflow.data.build import build_prompt_data
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.distributed.device import resolve_device, set_threads
from hybridflow.engines import BatchLimits, TrainEngine
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import ConfigError
from hybridflow.models.build import build_policy, build_value
from hybridflow.models.export import save_config, save_hf
from hybridflow.models.policy import PolicyModel
from hybridflow.observability.timing import Timer
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rollout.base import RolloutEngine
from hybridflow.rollout.build import build_rollout_engine
from hybridflow.trainer.models import end_tokens, model_arguments
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.trainer.ppo.sample_log import SampleLog
from hybridflow.trainer.ppo.state import RunState
from hybridflow.trainer.ppo.step import PPOStep
from hybridflow.trainer.ppo.sync import SyncTrainer
from hybridflow.trainer.ppo.trajectories import Trajectories
from hybridflow.trainer.ppo.validation import Validator
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.trainer.run_trackers import run_trackers
from hybridflow.workers import (
    ActorGroup,
    ActorWorker,
    CriticGroup,
    CriticWorker,
    ReferenceGroup,
    ReferenceWorker,
    RolloutGroup,
    RolloutWorker,
)
from hybridflow.workers.bridge import kl_controller


@contextmanager
def build(config: PPOConfig) -> Iterator[SyncTrainer]:
    """Everything a run needs; what holds processes, files or the run folder is let go at the end, whatever happens."""
    set_threads(config.trainer.num_threads)
    folder = RunFolder(config.trainer.default_local_dir)
    with folder.held():
        yield from _build(config, folder)


def _build(config: PPOConfig, folder: RunFolder) -> Iterator[SyncTrainer]:
    folder.write_config(to_yaml(config))
    tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
    data = build_prompt_data(config.data, tokenizer, config.trainer.seed)
    if data.train_loader is None:
        raise ConfigError("there is nothing to train on: set data.train_files or data.task.name")
    loader = data.train_loader
    total_steps = config.trainer.total_training_steps or len(loader) * config.trainer.total_epochs
    if total_steps <= config.trainer.critic_warmup:
        raise ConfigError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} leaves none of the run's {total_steps} steps for the actor: "
            "set it lower, or raise trainer.total_epochs"
        )
    with closing(build_reward_manager(config.reward, config.trainer.seed)) as rewards:
        host = Host(config, tokenizer, total_steps, folder)
        roles, controller = host.roles(), kl_controller(config.algorithm)
        state = RunState(
            roles=roles,
            loader=loader,
            kl_controller=controller,
            contents={ACTOR: config.actor_rollout_ref.actor.checkpoint, CRITIC: config.critic.checkpoint},
            write_huggingface=host.write_huggingface,
            total_steps=total_steps,
            seed=config.trainer.seed,
        )
        store = CheckpointStore(folder.path, keep=config.trainer.max_ckpt_to_keep)
        done = state.resume(store, config.trainer.resume_mode, config.trainer.resume_from_path)
        with run_trackers(config, folder, total_steps, done) as trackers:
            timer = Timer()
            samples = SampleLog(folder.path, config, tokenizer, total_steps, trackers, done)
            trajectories = Trajectories(roles.rollout, rewards, tokenizer, config, timer)
            yield SyncTrainer(
                config=config,
                data=data,
                loader=loader,
                trajectories=trajectories,
                step=PPOStep(roles, config, controller, timer),
                validator=Validator(data.val_dataset, trajectories, samples, config) if data.val_dataset else None,
                state=state,
                store=store,
                trackers=trackers,
                samples=samples,
                timer=timer,
                total_steps=total_steps,
                tokenizer=tokenizer,
                rollout_engine=host.rollout_engine,
            )


@dataclass
class Host:
    """Builds the workers of one process; roles that live here share what they can (the rollout has the actor's module)."""

    config: PPOConfig
    tokenizer: Tokenizer
    total_steps: int
    folder: RunFolder

    def __post_init__(self) -> None:
        self.device = resolve_device(self.config.trainer.device)
        factories = {"actor": self.actor, "rollout": self.rollout, "reference": self.reference, "critic": self.critic}
        self.backend = LocalBackend(factories)

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
        actor, algorithm = self.config.actor_rollout_ref.actor, self.config.algorithm
        needs_reference = actor.use_kl_loss or algorithm.use_kl_in_reward
        names = ["actor", "rollout", *(["reference"] if needs_reference else []), *(["critic"] if self.config.critic.enable else [])]
        for name in names:
            self.backend.worker(name)
        return Roles(
            actor=ActorGroup(self.backend, "actor"),
            rollout=RolloutGroup(self.backend, "rollout"),
            reference=ReferenceGroup(self.backend, "reference") if "reference" in names else None,
            critic=CriticGroup(self.backend, "critic") if "critic" in names else None,
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
        """The frozen policy that the run starts from."""
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

    def rollout(self, info: RankInfo) -> RolloutWorker:
        """Generation with the actor's own module: no second copy of the weights."""
        return RolloutWorker(
            build_rollout_engine(self.config.actor_rollout_ref.rollout, self.policy, end_tokens(self.policy, self.tokenizer))
        )

    def write_huggingface(self, target: Path, with_weights: bool) -> None:
        """The actor as a Hugging Face folder: configuration and tokenizer, and the weights if asked."""
        (save_hf if with_weights else save_config)(self.policy, target, self.tokenizer)

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
