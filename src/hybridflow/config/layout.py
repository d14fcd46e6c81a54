"""The processes of a run, the pools of its roles, and the layout of a model over them, by the keys alone.

Each role has its keys as dotted paths: those of its model, its layout and its updates.
`trainer/roles/roles.py` has the classes of the same roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.config.root import PPOConfig
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig
from hybridflow.config.tree import get_value

ACTOR = "actor_rollout_ref.actor"
COLLECTORS = "collectors"
"""The name of the pool of `trainer.num_collectors`."""
JUDGE = "judge"
"""The role of a generative reward model. In a pool that no other role has, each replica is started by itself,
so that a run outlives the loss of one.
"""

VALIDATION = "validation"
"""The role of the replica of `trainer.val_in_background`, and its pool where no other is named."""


@dataclass(frozen=True)
class RoleKeys:
    """The blocks of keys of one role."""

    model: str
    """The block of its model."""
    layout: str = ACTOR
    """The block that says how the model is spread over ranks; by default as the actor is."""
    updates: str = ""
    """The block of its mini-batches, its optimizer and its checkpoint; '' for a role that does not learn."""


ROLE_KEYS: Mapping[str, RoleKeys] = {
    "actor": RoleKeys("actor_rollout_ref.model", updates=ACTOR),
    "rollout": RoleKeys("actor_rollout_ref.model"),
    VALIDATION: RoleKeys("actor_rollout_ref.model"),
    "reference": RoleKeys("actor_rollout_ref.ref.model", layout="actor_rollout_ref.ref"),
    "critic": RoleKeys("critic.model", layout="critic", updates="critic"),
    "teacher": RoleKeys("distillation.teacher_model"),
    "reward_model": RoleKeys("reward.reward_model.model", layout="reward.reward_model"),
    JUDGE: RoleKeys("reward.reward_model.model", layout="reward.reward_model"),
    "process_reward": RoleKeys("reward.process_reward_model.model", updates="reward.process_reward_model"),
}


def engine_keys(config: PPOConfig, role: str) -> tuple[FSDPConfig, int, ModelConfig]:
    """Return (sharding, ranks that share the tokens of a row, model) of a role that has an engine."""
    keys = ROLE_KEYS[role]
    layout = get_value(config, keys.layout)
    return layout.fsdp_config, layout.ulysses_sequence_parallel_size or 1, get_value(config, keys.model)


def num_processes(trainer: TrainerConfig | SFTTrainerConfig) -> int:
    """Return the number of worker processes: those of the run's pools, else nodes × devices."""
    pools = getattr(trainer, "resource_pools", {})
    if pools:
        return sum(sum(devices) for devices in pools.values())
    return trainer.nnodes * trainer.n_gpus_per_node


def resolved_controller(trainer: TrainerConfig | SFTTrainerConfig) -> str:
    """Return `local` or `ray`: the controller that is set, or the one that `auto` resolves to."""
    if trainer.controller != "auto":
        return trainer.controller
    if num_processes(trainer) > 1 or getattr(trainer, "resource_pools", {}):
        return "ray"
    return "local"


@dataclass(frozen=True)
class RoleLayout:
    """Layout of one role's model over the processes of its pool."""

    block: str
    """Block of the role's keys, for example actor_rollout_ref.actor."""
    fsdp: FSDPConfig
    sequence: int
    """Its ulysses_sequence_parallel_size."""
    model: ModelConfig
    processes: int
    fsdp_name: str = "fsdp_config."

    @property
    def cut(self) -> tuple[int, ...]:
        """Sizes that decide which parameters a rank holds: processes, FSDP, tensor, stages, experts."""
        tensor = self.fsdp.tensor_parallel_size
        stages = self.fsdp.pipeline_parallel_size
        size = self.fsdp.fsdp_size
        if size == -1:
            size = self.processes // (tensor * stages)
        parts = self.fsdp.virtual_pipeline_parallel_size
        return self.processes, size, tensor, stages, parts, self.fsdp.expert_parallel_size

    def __str__(self) -> str:
        further = {
            "pipeline_parallel_size": self.fsdp.pipeline_parallel_size,
            "expert_parallel_size": self.fsdp.expert_parallel_size,
        }
        return (
            f"{self.processes} processes with fsdp_size={self.fsdp.fsdp_size}, "
            f"tensor_parallel_size={self.fsdp.tensor_parallel_size}"
        ) + "".join(f", {name}={size}" for name, size in further.items() if size > 1)

    def problems(self) -> Iterator[str]:
        """Yield one line for each size that does not fit the others.

        Where one does not fit, those that depend on it are held against what would be true for any value in
        its place, so that no problem hides another.
        """
        here = f"{self.block}.{self.fsdp_name}"
        ulysses = f"{self.block}.ulysses_sequence_parallel_size"
        tensor = self.fsdp.tensor_parallel_size
        size = self.fsdp.fsdp_size
        if self.fsdp.context_parallel == "ring" and self.sequence == 1:
            yield (
                f"{here}context_parallel=ring, but no ranks share rows: set {ulysses} to the number of "
                "ranks in the ring, or leave it out"
            )
        stages = self.fsdp.pipeline_parallel_size
        ranks = self.processes
        whose = "processes of its pool"
        if self.processes % stages:
            yield (
                f"{here}pipeline_parallel_size={stages} does not divide the {self.processes} processes of "
                "its pool: set a divisor, or other devices"
            )
        elif stages > 1:
            ranks = self.processes // stages
            whose = f"processes of each of the {stages} stages"
        widths = {f"{here}tensor_parallel_size": tensor, ulysses: self.sequence}
        if min(widths.values()) > 1 and not any(ranks % width for width in widths.values()):
            widths = {f"{here}tensor_parallel_size × {ulysses}": tensor * self.sequence}
        for name, width in widths.items():
            if ranks % width:
                yield f"{name}={width} does not divide the {ranks} {whose}: set a divisor, or other devices"
        if tensor > 1 and (self.model.lora_rank or self.model.lora_adapter_path):
            yield (
                f"{here}tensor_parallel_size={tensor} with lora_rank={self.model.lora_rank}: adapters are "
                "not split; leave one out"
            )
        yield from quantized_problems(self.block, self.model, self.fsdp)
        if self.fsdp.use_torch_compile and self.model.lora_dropout:
            yield (
                f"{here}use_torch_compile=true with lora_dropout={self.model.lora_dropout}: what is dropped "
                "cannot be compiled; leave one out"
            )
        sharers = ranks
        sharing = ranks
        if ranks % tensor == 0:
            sharers = ranks // tensor
        fits = size == -1 or (size > 0 and sharers % size == 0)
        if not fits:
            yield (
                f"{here}fsdp_size={size} does not divide the {sharers} ranks that could share them: set a "
                "divisor, or -1 for all"
            )
        elif size > 0 and ranks % tensor == 0:
            sharing = tensor * size
        if size > 0 and size % self.sequence and self.sequence % size:
            yield f"{here}fsdp_size={size} and {ulysses}={self.sequence}: one must be a multiple of the other"
        experts = self.fsdp.expert_parallel_size
        if sharing % experts:
            yield (
                f"{here}expert_parallel_size={experts} does not divide the {sharing} ranks that share the "
                "parameters: set a divisor"
            )


def quantized_problems(block: str, model: ModelConfig, fsdp: FSDPConfig) -> Iterator[str]:
    """Yield one line where a role's layout cannot hold its base in 4 bits."""
    held = f"quantization={model.quantization} of the model of {block}"
    stages = fsdp.pipeline_parallel_size
    if model.quantization and stages > 1:
        yield (
            f"{held} with pipeline_parallel_size={stages}: each process holds all weights in 4 bits; leave "
            "one out"
        )
    if model.quantization and fsdp.use_torch_compile:
        yield f"{held} with use_torch_compile=true: its products are not compiled; leave one out"


def pool_sizes(trainer: TrainerConfig, role: str) -> list[int]:
    """Return the number of processes of each pool that hosts a role.

    A pool that does not exist counts as one process here, and is refused where the placement is made.
    """
    if not trainer.resource_pools:
        return [num_processes(trainer)]
    return [max(1, sum(trainer.resource_pools.get(pool, []))) for pool in _pools_of(trainer, role)]


def processes_by_node(trainer: TrainerConfig, role: str) -> list[int]:
    """Return the number of processes on each node of the pools that host a role."""
    if not trainer.resource_pools:
        return [trainer.n_gpus_per_node] * trainer.nnodes
    return [count for pool in _pools_of(trainer, role) for count in trainer.resource_pools.get(pool, [])]


def inexact_ranks(config: PPOConfig) -> str | None:
    """Return the reason the run's ranks cannot generate and train a row with the same bits, or None.

    Ranks that share weights gather them whole before they compute, and the sum of two ranks' parts is the
    same in either order.
    """
    processes = sum(pool_sizes(config.trainer, "actor"))
    fsdp, sequence, _ = engine_keys(config, "actor")
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    key = f"actor_rollout_ref.rollout.tensor_model_parallel_size={width}"
    if (fsdp.pipeline_parallel_size, sequence, fsdp.expert_parallel_size) != (1, 1, 1):
        return (
            f"the actor's {processes} processes share the layers, the tokens or the experts of a row: let "
            "them share weights only"
        )
    if fsdp.tensor_parallel_size != width:
        return (
            f"{key} and {ACTOR}.fsdp_config.tensor_parallel_size={fsdp.tensor_parallel_size} add products up "
            "from other parts: set both to 1, or both to 2"
        )
    if width > 2:
        return f"{key}: more than two ranks add up in an order that depends on how much it is: set it to 2"
    if width > 1 and not share_a_pool(config.trainer, "rollout", "actor"):
        return f"{key} in processes of their own have no whole weights to compare: share the actor's pool"
    return None


def share_a_pool(trainer: TrainerConfig, role: str, other: str) -> bool:
    """Return whether two roles have a pool in common, so that they share processes."""
    if not trainer.resource_pools:
        return True
    return not set(_pools_of(trainer, role)).isdisjoint(_pools_of(trainer, other))


def pushes_weights(config: PPOConfig) -> bool:
    """Return whether the actor's weights travel to other processes: of the rollout, or of a validation."""
    return config.trainer.val_in_background or not share_a_pool(config.trainer, "rollout", "actor")


def lives_alone(trainer: TrainerConfig, role: str) -> bool:
    """Return whether no other role shares a pool with this one; those that are not placed share the first."""
    pools = trainer.resource_pools
    others = {
        name for other, named in trainer.placement.items() if other != role for name in pool_names(named)
    }
    return bool(pools) and {next(iter(pools)), *others}.isdisjoint(_pools_of(trainer, role))


def without_validation(trainer: TrainerConfig) -> TrainerConfig:
    """Return the keys of a run that validates between its steps, on devices that it has anyway."""
    if not trainer.val_in_background:
        return trainer
    named = pool_names(trainer.placement[VALIDATION])
    return replace(
        trainer,
        val_in_background=False,
        resource_pools={name: nodes for name, nodes in trainer.resource_pools.items() if name not in named},
        placement={role: pools for role, pools in trainer.placement.items() if role != VALIDATION},
    )


def mix_pools(trainer: TrainerConfig, role: str, other: str) -> bool:
    """Return whether two roles share some of their pools and not all of them."""
    if not trainer.resource_pools:
        return False
    mine = set(_pools_of(trainer, role))
    others = set(_pools_of(trainer, other))
    return mine != others and not mine.isdisjoint(others)


def _pools_of(trainer: TrainerConfig, role: str) -> list[str]:
    named = trainer.placement.get(role, next(iter(trainer.resource_pools)))
    return pool_names(named)


def pool_names(named: str | list[str]) -> list[str]:
    """Return the names of pools that a role is placed in."""
    return [named] if isinstance(named, str) else named
