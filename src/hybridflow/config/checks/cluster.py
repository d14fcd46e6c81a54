"""The checks of processes and of the layout of models over them, as far as the keys alone can tell.

`controller/ray/preflight.py` asks the cluster which devices it has, before any worker starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from importlib.util import find_spec

from hybridflow.config.layout import (
    COLLECTORS,
    RoleLayout,
    num_processes,
    pool_names,
    pool_sizes,
    resolved_controller,
)
from hybridflow.config.needs import has_own_reference, is_given, needs_reference
from hybridflow.config.roles import ROLE_KEYS, engine_keys
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig
from hybridflow.errors import install_extra

ROLLOUT = "actor_rollout_ref.rollout"


def ppo_cluster_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of a PPO run."""
    trainer = config.trainer
    roles = config.actor_rollout_ref
    yield from _controller(trainer)
    yield from _placement(trainer)
    yield from _collectors(config)
    yield from _row_store(trainer)
    cut = max(roles.actor.ulysses_sequence_parallel_size, roles.ref.ulysses_sequence_parallel_size or 1)
    if roles.actor.use_prefix_grouper and cut > 1:
        yield (
            f"actor_rollout_ref.actor.use_prefix_grouper=true with ulysses_sequence_parallel_size={cut}: "
            "ranks that share rows hold each prompt as often as it has responses; leave one of them out"
        )
    built = {
        "actor": True,
        "reference": needs_reference(config),
        "critic": config.critic.enable,
        "reward_model": config.reward.reward_model.enable,
    }
    spreads = [
        RoleLayout(
            ROLE_KEYS[role].layout, *engine_keys(config, role), processes=sum(pool_sizes(trainer, role))
        )
        for role, wanted in built.items()
        if wanted
    ]
    for spread in spreads:
        yield from spread.problems()
    if needs_reference(config) and config.algorithm.ref_update_freq and spreads[0].cut != spreads[1].cut:
        yield (
            f"algorithm.ref_update_freq={config.algorithm.ref_update_freq}: a rank of the reference takes "
            f"over what the same rank of the actor holds, but the actor has {spreads[0]} and the reference "
            f"{spreads[1]}: make them equal, or set ref_update_freq=0"
        )
    width = roles.rollout.tensor_model_parallel_size
    for processes in pool_sizes(trainer, "rollout"):
        if roles.rollout.name == "native" and processes % width:
            yield (
                f"{ROLLOUT}.tensor_model_parallel_size={width} does not divide the {processes} processes "
                "that generate: set a divisor"
            )
    yield from _lora(config)


def sft_cluster_problems(config: SFTConfig) -> Iterator[str]:
    """Yield one line for each problem of a supervised run."""
    yield from _controller(config.trainer)
    processes = num_processes(config.trainer)
    yield from RoleLayout(
        "engine", config.engine, config.engine.ulysses_sequence_parallel_size, config.model, processes, ""
    ).problems()


def cluster_notes(config: PPOConfig | SFTConfig, given: Set[str]) -> Iterator[str]:
    """Yield one line for each key that is set and has less effect than it seems to have."""
    trainer = config.trainer
    pools = getattr(trainer, "resource_pools", {})
    if pools and {"trainer.nnodes", "trainer.n_gpus_per_node"} & given:
        yield (
            "trainer.nnodes and trainer.n_gpus_per_node are not read: trainer.resource_pools says which "
            "devices there are"
        )
    if num_processes(trainer) == 1:
        blocks = ["engine"]
        if isinstance(config, PPOConfig):
            blocks = ["actor_rollout_ref.actor.fsdp_config", "critic.fsdp_config"]
        odd = [
            f"{block}.{name}"
            for block in blocks
            for name in ("fsdp_size", "offload_policy", "reshard_after_forward")
            if is_given(f"{block}.{name}", given)
        ]
        if odd:
            yield f"{', '.join(odd)}: with one process there is nothing to shard"
    if trainer.max_restarts and trainer.save_freq <= 0:
        yield (
            f"trainer.max_restarts={trainer.max_restarts} without trainer.save_freq: a restart begins at "
            "step 1 again"
        )


def _placement(trainer: TrainerConfig) -> Iterator[str]:
    """Problems with pools and placement whatever roles there are; making the placement refuses the others."""
    pools = trainer.resource_pools
    for name, devices in pools.items():
        if not devices or min(devices) < 1:
            yield (
                f"trainer.resource_pools.{name}={devices}: a pool has at least one device on each of its "
                "nodes, for example [2]"
            )
    there = ", ".join(pools) or "none: set trainer.resource_pools"
    for role, named in trainer.placement.items():
        if role not in ROLE_KEYS:
            yield f"trainer.placement.{role} is no role: there are {', '.join(ROLE_KEYS)}"
        wanted = pool_names(named)
        if not wanted:
            yield (
                f"trainer.placement.{role}=[] leaves the {role} without devices: name a pool (there are "
                f"{there})"
            )
        for pool in wanted:
            if pool not in pools:
                yield (
                    f"trainer.placement.{role} is resource pool {pool!r}, which does not exist (there are "
                    f"{there})"
                )


def _collectors(config: PPOConfig) -> Iterator[str]:
    number = config.trainer.num_collectors
    if not number:
        return
    here = f"trainer.num_collectors={number}"
    if resolved_controller(config.trainer) == "local":
        yield (
            f"{here} without Ray: in one process tokens pass no other; set trainer.controller=ray, or "
            "num_collectors=0"
        )
    if COLLECTORS in config.trainer.resource_pools:
        yield f"trainer.resource_pools.{COLLECTORS} has the name of the pool of {here}: choose another name"
    if config.reward.reward_model.enable:
        yield (
            f"{here} with reward.reward_model.enable=true: the model scores all responses of a step "
            "together, and no collector has them all; set num_collectors=0"
        )
    if config.reward.manager:
        yield (
            f"{here} with reward.manager={config.reward.manager}: a manager scores all responses of a "
            "step in one call, and no collector has them all; set num_collectors=0"
        )
    if config.actor_rollout_ref.rollout.agent.endpoint_port:
        yield (
            f"{here} with {ROLLOUT}.agent.endpoint_port="
            f"{config.actor_rollout_ref.rollout.agent.endpoint_port}: several processes cannot listen at one "
            "port; set endpoint_port=0"
        )


def _row_store(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.row_store == "auto":
        return
    if resolved_controller(trainer) == "local":
        yield (
            f"trainer.row_store={trainer.row_store} without Ray, whose processes the package needs: set "
            "trainer.controller=ray, or trainer.row_store=auto"
        )
    if find_spec("transfer_queue") is None:
        yield (
            f"trainer.row_store={trainer.row_store} needs the package transferqueue: "
            f"{install_extra('transferqueue')}, or set trainer.row_store=auto"
        )


def _controller(trainer: TrainerConfig | SFTTrainerConfig) -> Iterator[str]:
    processes = num_processes(trainer)
    pools = getattr(trainer, "resource_pools", {})
    if trainer.controller == "local" and (processes > 1 or pools):
        named = "trainer.nnodes × trainer.n_gpus_per_node"
        if pools:
            named = "trainer.resource_pools"
        yield (
            f"trainer.controller=local hosts every role in this process, but {named} ask for {processes}: "
            "set trainer.controller=ray or auto, or trainer.nnodes=1 and trainer.n_gpus_per_node=1"
        )


def _lora(config: PPOConfig) -> Iterator[str]:
    teacher = config.distillation.teacher_model
    if teacher.lora_rank or teacher.lora_adapter_path:
        yield (
            "distillation.teacher_model.lora_rank: the teacher does not train; merge its adapter into its "
            "folder (hybridflow merge)"
        )
    reference = config.actor_rollout_ref.ref.model
    if reference.lora_rank or reference.lora_adapter_path:
        yield (
            "actor_rollout_ref.ref.model.lora_rank: the reference does not train; merge its adapter into its "
            "folder (hybridflow merge)"
        )
    if has_own_reference(config) and config.algorithm.ref_update_freq:
        yield (
            f"algorithm.ref_update_freq={config.algorithm.ref_update_freq} would replace the weights of "
            f"actor_rollout_ref.ref.model.path={reference.path} by the actor's: set one of the two"
        )
    model = config.actor_rollout_ref.model
    if (model.lora_rank or model.lora_adapter_path) and config.algorithm.ref_update_freq:
        yield (
            f"algorithm.ref_update_freq={config.algorithm.ref_update_freq} with "
            f"actor_rollout_ref.model.lora_rank={model.lora_rank}: the reference is the actor without its "
            "adapter and has no weights of its own to renew; set ref_update_freq=0 or lora_rank=0"
        )
