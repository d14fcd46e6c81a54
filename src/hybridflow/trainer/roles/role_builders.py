"""Builds the engines and workers of one process of a run, whichever backend the process belongs to.

RunFacts ─► WorkerHost of a process asks for a role ─► engine on the devices of its pool ─► worker
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.config.layout import JUDGE, ROLE_KEYS, engine_keys
from hybridflow.config.megatron import STRATEGIES
from hybridflow.config.model import OptimConfig
from hybridflow.config.needs import (
    has_divergence,
    has_own_reference,
    teacher_reader,
    tells_top_outcomes,
    wants_full_kl,
)
from hybridflow.config.tree import get_value
from hybridflow.controller import RankInfo, WorkerHost
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.distributed.device import resolve_device
from hybridflow.engines import BatchLimits, TrainEngine
from hybridflow.engines.build import build_engine
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.attention.rope import length_limit
from hybridflow.models.files.build import Kind, shape_of
from hybridflow.observability.progress import progress
from hybridflow.trainer.models import end_tokens, model_arguments, naming_model
from hybridflow.trainer.roles.parallel_layout import may_share_prompts, sizes
from hybridflow.workers import (
    ActorWorker,
    CriticWorker,
    ProcessRewardWorker,
    ReferenceWorker,
    RewardModelWorker,
    RolloutWorker,
)
from hybridflow.workers.reference import TEACHER_COLUMN, ReferenceHead
from hybridflow.workers.rollout_build import build_rollout_worker


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that its worker processes need."""

    config: PPOConfig
    total_steps: int
    nonfinite: Path
    """Where the rows of a step that was skipped are written."""
    vocabulary: int
    """Tokens that the actor can sample and the tokenizer knows."""
    end_tokens: tuple[int, ...]


def facts_of(config: PPOConfig, tokenizer: Tokenizer, total_steps: int, nonfinite: Path) -> RunFacts:
    """The facts of a run, read from the model's folder; no weights are loaded."""
    model = config.actor_rollout_ref.model
    vocabulary = min(len(tokenizer), shape_of(model).get_text_config().vocab_size)
    return RunFacts(config, total_steps, nonfinite, vocabulary, tuple(end_tokens(model, tokenizer)))


class RoleBuilders:
    """The factories of one process; roles in it share what they can: the rollout generates with the actor's
    module.
    """

    def __init__(self, facts: RunFacts, process: WorkerHost) -> None:
        self.facts = facts
        self.config = facts.config
        self.process = process
        self.device = resolve_device(self.config.trainer.device)
        self._probed: list[tuple[object, ...]] = []
        """Kind, arguments and layout of each model that a role of this process has loaded and probed."""

    def actor(self, info: RankInfo) -> ActorWorker:
        """Build the policy in training."""
        config = self.config.actor_rollout_ref.actor
        rollout = self.config.actor_rollout_ref.rollout
        trained_steps = max(0, self.facts.total_steps - self.config.trainer.critic_warmup)
        updates = self._updates(config.ppo_mini_batch_size, config.ppo_epochs) * trained_steps
        engine = self._engine("policy", "actor", config.optim, updates, config.grad_clip)
        cap = rollout.log_prob_max_token_len_per_gpu or config.ppo_max_token_len_per_gpu
        limits = BatchLimits(
            cap, rollout.log_prob_micro_batch_size_per_gpu, share_prompts=self._shares_prompts(engine)
        )
        return ActorWorker(
            engine,
            config,
            temperature=rollout.temperature,
            log_prob_limits=limits,
            delta_push=rollout.delta_push,
            distillation=self.config.distillation.distillation_loss if has_divergence(self.config) else None,
        )

    def reference(self, info: RankInfo) -> ReferenceWorker:
        """Build the policy that the run starts from."""
        config = self.config.actor_rollout_ref.ref
        rollout = self.config.actor_rollout_ref.rollout
        cap = (
            config.log_prob_max_token_len_per_gpu
            or self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        )
        limits = BatchLimits(cap, config.log_prob_micro_batch_size_per_gpu)
        own = has_own_reference(self.config)
        adapters = LoraSettings.from_config(self.config.actor_rollout_ref.model) is not None
        if adapters and not own and self.process.has("actor"):
            if wants_full_kl(self.config.actor_rollout_ref.actor):
                self._actor_engine().policy.reference = ReferenceHead(self._actor_engine(), adapted=True)
            limits = replace(limits, share_prompts=self._shares_prompts(self._actor_engine()))
            return ReferenceWorker(
                self._actor_engine(), temperature=rollout.temperature, limits=limits, without_adapters=True
            )
        engine = self._engine("policy", "reference", None, 0, None)
        self._check_vocabulary(engine, "actor_rollout_ref.ref.model")
        if wants_full_kl(self.config.actor_rollout_ref.actor):
            key = "actor_rollout_ref.actor.kl_loss_type=full"
            self._actor_engine().policy.reference = self._head_beside_actor(engine, key, "low_var_kl")
        limits = replace(limits, share_prompts=self._shares_prompts(engine))
        return ReferenceWorker(engine, temperature=rollout.temperature, limits=limits)

    def _shares_prompts(self, engine: TrainEngine) -> bool:
        """Return whether passes of an engine compute a prompt once; a run that decides this itself leaves out
        models whose rotary frequencies change with the length of a row, because rows then share nothing.
        """
        decided = self.config.actor_rollout_ref.actor.use_prefix_grouper is None
        if decided and length_limit(engine.policy.config) is not None:
            return False
        return may_share_prompts(self.config)

    def critic(self, info: RankInfo) -> CriticWorker:
        """Build the value model."""
        config = self.config.critic
        assert config.ppo_mini_batch_size is not None and config.ppo_epochs is not None, "filled by resolve"
        updates = self._updates(config.ppo_mini_batch_size, config.ppo_epochs) * self.facts.total_steps
        engine = self._engine("value", "critic", config.optim, updates, config.grad_clip)
        cap = config.forward_max_token_len_per_gpu or config.ppo_max_token_len_per_gpu
        limits = BatchLimits(cap, config.forward_micro_batch_size_per_gpu)
        scale_factor = self.config.actor_rollout_ref.actor.loss_scale_factor
        return CriticWorker(engine, config, forward_limits=limits, loss_scale_factor=scale_factor)

    def teacher(self, info: RankInfo) -> ReferenceWorker:
        """Build the frozen policy that on-policy distillation learns from."""
        config = self.config.distillation
        if config.teacher_model.path is None:
            raise ConfigError(
                f"{teacher_reader(self.config)} needs a teacher, and distillation.teacher_model.path is "
                "not set: give a Hugging Face folder or hub name of a model with the actor's vocabulary"
            )
        loss = config.distillation_loss
        told = loss.topk if tells_top_outcomes(self.config) else 0
        if told > self.facts.vocabulary:
            raise ConfigError(
                f"distillation.distillation_loss.topk={told}, and there are {self.facts.vocabulary} tokens: "
                f"set it to {self.facts.vocabulary} or less, or loss_mode="
                f"{loss.loss_mode.removesuffix('_topk')}"
            )
        engine = self._engine("policy", "teacher", None, 0, None)
        self._check_vocabulary(engine, "distillation.teacher_model")
        if has_divergence(self.config) and not told:
            self._actor_engine().policy.teacher = self._head_beside_actor(
                engine, f"distillation.distillation_loss.loss_mode={loss.loss_mode}", f"{loss.loss_mode}_topk"
            )
        others = {}
        for name in config.teachers:
            others[name] = self._engine("policy", "teacher", None, 0, None, name)
            self._check_vocabulary(others[name], f"distillation.teachers.{name}")
        limits = BatchLimits(config.log_prob_max_token_len_per_gpu or self._token_cap)
        return ReferenceWorker(
            engine,
            temperature=self._temperature,
            limits=limits,
            column=TEACHER_COLUMN,
            top=(told, self.facts.vocabulary),
            others=others,
        )

    def reward_model(self, info: RankInfo) -> RewardModelWorker:
        """Build the classifier that scores responses."""
        config = self.config.reward.reward_model
        assert config.kind != "generative", "a judge has the place of this role"
        engine = self._engine(config.kind, "reward_model", None, 0, None)
        cap = config.forward_max_token_len_per_gpu
        assert cap is not None, "filled by resolve"
        return RewardModelWorker(engine, limits=BatchLimits(cap, config.micro_batch_size_per_gpu))

    def process_reward(self, info: RankInfo) -> ProcessRewardWorker:
        """Build the implicit process reward model; without its own path it starts as the actor does."""
        config = self.config.reward.process_reward_model
        updates = (
            self._updates(config.ppo_mini_batch_size or self.config.data.train_batch_size, 1)
            * self.facts.total_steps
        )
        engine = self._engine("policy", "process_reward", config.optim, updates, config.grad_clip)
        self._check_vocabulary(engine, "reward.process_reward_model.model")
        limits = BatchLimits(config.ppo_max_token_len_per_gpu or self._token_cap)
        return ProcessRewardWorker(engine, config, temperature=self._temperature, limits=limits)

    def rollout(self, info: RankInfo) -> RolloutWorker:
        """Build generation: with the actor's own module where the actor is in this process, else with weights
        that are sent.
        """
        roles = self.config.actor_rollout_ref
        model = model_arguments(roles.model, self.device)
        if roles.actor.fsdp_config.mixed_precision.param_dtype != "auto":
            # the dtype in which the actor computes
            model["dtype"] = roles.actor.fsdp_config.mixed_precision.param_dtype
        actor_engine = None
        if self.process.has("actor"):
            actor_engine = self._actor_engine()
        return build_rollout_worker(
            roles.rollout,
            actor_engine=actor_engine,
            model=model,
            eos_token_ids=self.facts.end_tokens,
            lora=LoraSettings.from_config(roles.model, seed=self.config.trainer.seed),
            tokenizer=self.config.data.tokenizer,
        )

    def judge(self, info: RankInfo) -> RolloutWorker:
        """Build a rank of a generative reward model, whose weights stay as they are."""
        learned = self.config.reward.reward_model
        keys = learned.rollout
        config = RolloutConfig(
            name=keys.name,
            tensor_model_parallel_size=keys.tensor_model_parallel_size,
            gpu_memory_utilization=keys.gpu_memory_utilization,
            max_num_seqs=keys.max_num_seqs,
            max_num_batched_tokens=keys.max_num_batched_tokens,
        )
        path = str(learned.model.tokenizer_path or learned.model.path)
        loading = progress.phase("loading the model of the judge")
        with loading, naming_model(f"{ROLE_KEYS[JUDGE].model}.path", learned.model.path):
            return build_rollout_worker(
                config,
                actor_engine=None,
                model=model_arguments(learned.model, self.device),
                eos_token_ids=end_tokens(
                    learned.model, load_tokenizer(path, learned.model.trust_remote_code)
                ),
                tokenizer=path,
                frozen=True,
            )

    @property
    def _temperature(self) -> float:
        """Temperature at which all policies of a run give log-probs: the rollout's."""
        return self.config.actor_rollout_ref.rollout.temperature

    @property
    def _token_cap(self) -> int:
        return self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu

    def _actor_engine(self) -> TrainEngine:
        worker = self.process.worker("actor")
        assert isinstance(worker, ActorWorker)
        return worker.engine

    def _head_beside_actor(self, engine: TrainEngine, key: str, other: str) -> ReferenceHead:
        """Return a frozen model's distributions for the actor's updates; ModelError for another head."""
        rows = self._actor_engine().vocabulary
        if rows != engine.vocabulary:
            raise ModelError(
                f"{key} compares whole distributions, and the heads have {rows} and {engine.vocabulary} "
                f"rows: set {other}, or take a model with as large a head"
            )
        return ReferenceHead(engine)

    def _check_vocabulary(self, engine: TrainEngine, key: str) -> None:
        """Raise ModelError for a model that has no log-prob for some token of the actor's; rows of padding
        may be more or fewer.
        """
        theirs = engine.vocabulary
        ours = self.facts.vocabulary
        if theirs < ours:
            raise ModelError(
                f"{key} has a vocabulary of {theirs} tokens and the actor one of {ours}: their token ids "
                "must mean the same, so choose a model of the actor's family"
            )

    def _updates(self, groups: int, epochs: int) -> int:
        return -(-self.config.data.train_batch_size // groups) * epochs

    def _engine(
        self,
        kind: Kind,
        role: str,
        optim: OptimConfig | None,
        updates: int,
        grad_clip: float | None,
        teacher: str | None = None,
    ) -> TrainEngine:
        """The engine of a role, over the processes of its pool; without `optim` it only computes. `teacher`
        names one of distillation.teachers, in the place of the role's own model. A ModelError begins with the
        key of the model.
        """
        fsdp, _, model = engine_keys(self.config, role)
        key = f"{ROLE_KEYS[role].model}.path"
        if teacher is not None:
            key = f"distillation.teachers.{teacher}"
            model = replace(model, path=self.config.distillation.teachers[teacher])
        trainer = self.config.trainer
        lora = None
        if optim is not None:
            lora = LoraSettings.from_config(model, seed=trainer.seed)
        arguments = model_arguments(model, self.device)
        layout = sizes(self.config, role, self.process.place.world_size)
        strategy = "fsdp2"
        if role in STRATEGIES and layout.world_size > 1:
            strategy = get_value(self.config, STRATEGIES[role])
        loaded = (kind, dict(arguments), fsdp.mixed_precision.param_dtype, layout)
        if loaded in self._probed and not model.use_liger:  # of Liger's kernels a probe chooses some
            arguments["probe"] = False
        loading = progress.phase(f"loading the model of the {role.replace('_', ' ')}")
        with loading, naming_model(key, model.path):
            engine = build_engine(
                kind,
                arguments,
                name=role,
                optim=optim,
                total_steps=updates,
                grad_clip=grad_clip,
                max_nonfinite_steps=trainer.max_nonfinite_steps,
                dump_dir=self.facts.nonfinite,
                fsdp=fsdp,
                layout=layout,
                activation_offload=model.enable_activation_offload,
                lora=lora,
                freeze_vision_tower=model.freeze_vision_tower and optim is not None,
                strategy=strategy,
            )
        self._probed.append(loaded)
        return engine
