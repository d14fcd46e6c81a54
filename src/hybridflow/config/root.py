"""The two roots, a PPO-family run and a supervised fine-tuning run, and the small blocks below them:
`critic.*`, the value model of PPO, and `global_profiler.*`, what is recorded of some steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.algorithms.catalog import LossAggMode
from hybridflow.config.actor_rollout_ref import ActorRolloutRefConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.cluster import RayConfig
from hybridflow.config.data import DataConfig, SFTDataConfig
from hybridflow.config.model import (
    CheckpointContentsConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
    ShardedLearnerConfig,
)
from hybridflow.config.reward import RewardConfig
from hybridflow.config.schema import divides, excludes, group, key, needs, read_by
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig

SECOND = (2,)
"""The steps that are recorded where none are named: the first one has what is done once."""
ProfilerTool = Literal["phases", "torch", "torch_memory", "nsys"]
DEVICE_TOOLS = ("torch_memory", "nsys")
"""Tools that record a device, where its kind has them."""


@dataclass(frozen=True)
class CriticConfig(ShardedLearnerConfig):
    """The value model: its batches, loss, optimizer and sharding."""

    strategy: Literal["fsdp", "fsdp2", "megatron"] = key(
        "fsdp2",
        "Training engine of the critic, with the values of actor_rollout_ref.actor.strategy; the actor's may "
        "be another.",
    )
    enable: bool | None = key(None, "Build a critic; null: when the advantage estimator needs one.")
    model: ModelConfig = group(ModelConfig)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    ppo_mini_batch_size: int | None = key(
        None,
        "Prompts in one optimizer step of the critic, each with all of its responses; null: as many as the "
        "actor's.",
        divides("data.train_batch_size"),
        minimum=1,
    )
    ppo_max_token_len_per_gpu: int = key(
        32_768, "Largest number of tokens in one forward and backward pass, never exceeded.", minimum=1
    )
    forward_micro_batch_size_per_gpu: int | None = key(
        None,
        "Largest number of rows in one forward pass for values; null: ppo_micro_batch_size_per_gpu.",
        minimum=1,
    )
    forward_max_token_len_per_gpu: int | None = key(
        None,
        "Largest number of tokens in one forward pass for values; null: ppo_max_token_len_per_gpu.",
        minimum=1,
    )
    ppo_epochs: int | None = key(
        None, "Passes of the critic over the responses of each step; null: as many as the actor's.", minimum=1
    )
    shuffle: bool | None = key(
        None, "Deal the groups into mini-batches in a seeded random order; null: as the actor does."
    )
    cliprange_value: float = key(
        0.5, "How far a value may move from its old one before the loss stops rewarding the move.", above=0
    )
    loss_agg_mode: LossAggMode = key("token-mean", "How the losses of the tokens become one number.")


@dataclass(frozen=True)
class ProfilerConfig:
    """Profiles of single steps."""

    tool: ProfilerTool | None = key(
        None,
        "phases records the parts of a step and each call of each rank, in one trace; torch adds torch's "
        "profiler on the ranks, torch_memory a history of device memory; nsys opens the range that Nsight "
        "Systems captures. null: nothing.",
    )
    steps: list[int] | None = key(
        None, "Steps that are recorded, from 1; null: the second one, after whatever is done once.", minimum=1
    )
    ranks: list[int] | None = key(
        None, "Ranks of each role on which tools other than phases record; null: rank 0."
    )
    save_path: str | None = key(None, "Folder of the traces; null: profile/ in the run folder.")


NO_DIVERGENCE = read_by(
    ".loss_mode!=k1", "k1 is the estimator on_policy_distillation and has no loss of its own"
)
OF_TOP_K = read_by(
    ".loss_mode=forward_kl_topk|reverse_kl_topk|jsd_topk",
    "the other losses read the whole vocabulary, or no divergence",
)
WHOLE_HEADS = tuple(
    excludes(
        f"actor_rollout_ref.actor.fsdp_config.{name}_parallel_size>1",
        "a divergence is computed where the head is whole on each rank",
        at="!=k1",
    )
    for name in ("tensor", "pipeline")
)


@dataclass(frozen=True)
class DistillationLossConfig:
    """The loss of distillation: a divergence between the whole distributions of student and teacher."""

    loss_mode: Literal[
        "k1", "forward_kl", "reverse_kl", "jsd", "forward_kl_topk", "reverse_kl_topk", "jsd_topk"
    ] = key(
        "k1",
        "Divergence in the actor's loss: forward_kl is KL(teacher ‖ student), reverse_kl KL(student ‖ "
        "teacher), jsd lies between them (jsd_beta), each over the whole vocabulary or with _topk over the "
        "teacher's most likely tokens; k1: none, adv_estimator=on_policy_distillation alone reads the "
        "teacher.",
        *WHOLE_HEADS,
    )
    topk: int = key(
        128,
        "The teacher's most likely tokens that a loss_mode with _topk compares.",
        OF_TOP_K,
        minimum=1,
    )
    tail: Literal["bucket", "renormalize"] = key(
        "bucket",
        "What becomes of the tokens outside of the top k: bucket counts them together as one more token; "
        "renormalize leaves them out and compares both distributions among the k alone.",
        OF_TOP_K,
    )
    jsd_beta: float = key(
        0.5,
        "The teacher's part in the mixture that jsd compares with: near 0 it acts as forward_kl, near 1 as "
        "reverse_kl.",
        read_by(".loss_mode=jsd|jsd_topk", "the other losses have no mixture"),
        above=0,
        below=1,
    )
    distillation_loss_coef: float = key(1.0, "Weight of the divergence in the loss.", NO_DIVERGENCE, above=0)
    loss_max_clamp: float | None = key(
        None,
        "Largest divergence of a token, in nats: a token above it counts as much and has no gradient; null: "
        "no limit.",
        NO_DIVERGENCE,
        above=0,
    )
    use_task_rewards: bool = key(
        True,
        "Keep the policy loss on the estimator's advantages beside the divergence; false: the divergence "
        "takes its place.",
        NO_DIVERGENCE,
    )
    use_policy_gradient: bool | None = key(
        None,
        "What a script of verl says of loss_mode, which is a policy gradient for k1 and differentiated "
        "itself otherwise; null: that.",
        needs(".loss_mode=k1", "a divergence is differentiated itself", at="=true"),
        needs(".loss_mode!=k1", "k1 is a policy gradient", at="=false"),
    )


@dataclass(frozen=True)
class DistillationConfig:
    """The teacher of on-policy distillation."""

    enabled: bool | None = key(
        None,
        "Whether the run has a teacher; null: it has one where adv_estimator or distillation_loss.loss_mode "
        "reads one.",
    )
    teacher_model: ModelConfig = group(ModelConfig)
    teachers: dict[str, str] = key(
        {},
        "Further teachers: by the data source of the rows that they teach, Hugging Face folders or hub "
        "names, for example {openai/gsm8k: PATH}. All other rows have teacher_model, whose dtype and further "
        "keys are those of every teacher.",
    )
    distillation_loss: DistillationLossConfig = group(DistillationLossConfig)
    lmbda: float = key(
        1.0,
        "GKD's λ: the share of prompts, drawn by seed, to which the student answers itself; to the others it "
        "is taught along the data's own answer (data.demonstration_key).",
        needs(".distillation_loss.loss_mode!=k1", "k1 learns from sampled tokens alone", at="<1"),
        needs(
            ".distillation_loss.use_task_rewards=false",
            "no policy has sampled the data's answers, so a policy loss cannot learn from them",
            at="<1",
        ),
        needs("actor_rollout_ref.rollout.n=1", "the data has one answer to a prompt", at="<1"),
        excludes("algorithm.adv_estimator=spin|remax", "it has other rows in each group", at="<1"),
        excludes("algorithm.filter_groups.enable", "a group of one answer has no variance", at="<1"),
        excludes("algorithm.use_pf_ppo", "rows of the data are not drawn again", at="<1"),
        minimum=0,
        maximum=1,
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Largest number of tokens in one forward pass of the teacher; null: the actor's limit.",
        minimum=1,
    )


@dataclass(frozen=True)
class PPOConfig:
    """A run of the PPO family: the tree that verl's users type."""

    data: DataConfig = group(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig)
    critic: CriticConfig = group(CriticConfig)
    reward: RewardConfig = group(RewardConfig)
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    distillation: DistillationConfig = group(DistillationConfig)
    trainer: TrainerConfig = group(TrainerConfig)
    global_profiler: ProfilerConfig = group(ProfilerConfig)
    ray_kwargs: RayConfig = group(RayConfig)


@dataclass(frozen=True)
class SFTEngineConfig(FSDPConfig):
    """The training engine of a supervised run."""

    strategy: Literal["fsdp", "fsdp2", "megatron"] = key(
        "fsdp2",
        "Training engine: fsdp2 is PyTorch's, with all layouts; megatron is megatron-core where it is "
        "installed and there are several processes, and fsdp2 elsewhere; fsdp is another name of fsdp2.",
    )
    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that share the tokens of each row (Ulysses sequence parallelism), for long rows.", minimum=1
    )


@dataclass(frozen=True)
class SFTConfig:
    """A supervised fine-tuning run."""

    data: SFTDataConfig = group(SFTDataConfig)
    model: ModelConfig = group(ModelConfig)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    checkpoint: CheckpointContentsConfig = group(
        CheckpointContentsConfig, save_contents=["model", "optimizer", "extra", "hf_model"]
    )
    engine: SFTEngineConfig = group(SFTEngineConfig)
    trainer: SFTTrainerConfig = group(SFTTrainerConfig)
    global_profiler: ProfilerConfig = group(ProfilerConfig)
    ray_kwargs: RayConfig = group(RayConfig)
