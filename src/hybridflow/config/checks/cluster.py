"""The checks of processes and of the layout of models over them, as far as they follow from the keys alone.

`controller/ray/preflight.py` asks the cluster which devices it has, before any worker starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from importlib.util import find_spec

from hybridflow.config.layout import (
    COLLECTORS,
    JUDGE,
    ROLE_KEYS,
    VALIDATION,
    RoleLayout,
    engine_keys,
    lives_alone,
    num_processes,
    pool_names,
    pool_sizes,
    processes_by_node,
    quantized_problems,
    share_a_pool,
)
from hybridflow.config.needs import has_own_reference, has_validation, is_given, needs_reference
from hybridflow.config.reward import has_classifier, has_judge
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.trainer import EXACT_SCHEDULES
from hybridflow.errors import install_extra

ROLLOUT = "actor_rollout_ref.rollout"


def pool_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of what pools are for."""
    trainer = config.trainer
    if trainer.num_collectors and COLLECTORS in trainer.resource_pools:
        yield (
            f"trainer.resource_pools.{COLLECTORS} has the name of the pool of trainer.num_collectors="
            f"{trainer.num_collectors}: choose another name"
        )
    if trainer.row_store != "auto" and find_spec("transfer_queue") is None:
        yield (
            f"trainer.row_store={trainer.row_store} needs the package transferqueue: "
            f"{install_extra('transferqueue')}, or set trainer.row_store=auto"
        )
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    for processes in pool_sizes(trainer, "rollout"):
        if processes % width:
            yield (
                f"{ROLLOUT}.tensor_model_parallel_size={width} does not divide the {processes} processes "
                "that generate: set a divisor"
            )


def _layout(config: PPOConfig, role: str) -> RoleLayout:
    return RoleLayout(
        ROLE_KEYS[role].layout, *engine_keys(config, role), processes=sum(pool_sizes(config.trainer, role))
    )


def actor_layout(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each size of the actor that does not fit the others."""
    yield from _layout(config, "actor").problems()


def reference_layout(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each size of the reference that does not fit the others, or the actor's."""
    if not needs_reference(config):
        return
    layout = _layout(config, "reference")
    yield from layout.problems()
    actor = _layout(config, "actor")
    if config.algorithm.ref_update_freq and actor.cut != layout.cut:
        yield (
            f"algorithm.ref_update_freq={config.algorithm.ref_update_freq}: a rank of the reference takes "
            f"over what the same rank of the actor holds, but the actor has {actor} and the reference "
            f"{layout}: make them equal, or set ref_update_freq=0"
        )


def critic_layout(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each size of the critic that does not fit the others."""
    if config.critic.enable:
        yield from _layout(config, "critic").problems()


def process_reward_layout(config: PPOConfig) -> Iterator[str]:
    """Yield one line where an implicit process reward model cannot hold its base in 4 bits."""
    if config.reward.process_reward_model.enable:
        layout = _layout(config, "process_reward")
        block = "reward.process_reward_model"
        yield from quantized_problems(block, layout.model, layout.fsdp)
        width = layout.fsdp.tensor_parallel_size
        if layout.model.quantization and width > 1:
            yield (
                f"{block}.model.quantization={layout.model.quantization} with the actor's "
                f"tensor_parallel_size={width}: weights in 4 bits are not cut; leave one out"
            )
        actor = config.actor_rollout_ref.model
        if layout.model.path in (None, actor.path) and layout.model.quantization != actor.quantization:
            yield (
                f"{block}.model.quantization={layout.model.quantization} and actor_rollout_ref.model."
                f"quantization={actor.quantization}: both begin from one model, and differ by its rounding "
                "before the first step; make them equal"
            )


def reward_model_layout(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each size of the reward model that does not fit the others."""
    if has_classifier(config.reward):
        yield from _layout(config, "reward_model").problems()


def judge_layout(config: PPOConfig) -> Iterator[str]:
    """Yield one line where the devices of a generative reward model do not make whole replicas."""
    if not has_judge(config.reward):
        return
    width = config.reward.reward_model.rollout.tensor_model_parallel_size
    key = f"reward.reward_model.rollout.tensor_model_parallel_size={width}"
    if width > 1 and not lives_alone(config.trainer, JUDGE):
        yield (
            f"{key}: ranks of a replica wait for each other, and would in processes that train: give it a "
            "pool of its own by trainer.resource_pools and trainer.placement.judge, or set it to 1"
        )
    for nodes in processes_by_node(config.trainer, JUDGE):
        if nodes % width:
            yield f"{key} does not divide the {nodes} processes of its pool on a node: set a divisor"


def validation_layout(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each reason why no replica of its own can validate beside training."""
    trainer = config.trainer
    if not trainer.val_in_background:
        return
    if not has_validation(config):
        yield (
            "trainer.val_in_background=true without validation data: set data.val_files, or "
            "data.task.val_size with data.task.name, or set val_in_background=false"
        )
    if trainer.test_freq <= 0 and not trainer.val_before_train:
        yield (
            f"trainer.val_in_background=true with trainer.test_freq={trainer.test_freq} and "
            "trainer.val_before_train=false, so nothing validates: set test_freq to 1 or more, or "
            "val_in_background=false"
        )
    if trainer.controller == "local" or VALIDATION not in trainer.placement:
        return  # told by the key itself
    if not lives_alone(trainer, VALIDATION):
        yield (
            f"trainer.placement.{VALIDATION}={trainer.placement[VALIDATION]} shares its devices with other "
            "roles, which would wait for it: name a pool of its own, or leave "
            f"trainer.placement.{VALIDATION} out, which adds one"
        )
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    devices = processes_by_node(trainer, VALIDATION)
    if devices != [width]:
        yield (
            f"trainer.placement.{VALIDATION} has {devices} devices on its nodes, and it is one replica of "
            f"{ROLLOUT}.tensor_model_parallel_size={width}: give its pool [{width}]"
        )


def validation_port(config: PPOConfig) -> Iterator[str]:
    """Yield one line where the agents of training and those of a validation would listen at one port."""
    trainer = config.trainer
    port = config.actor_rollout_ref.rollout.agent.endpoint_port
    validates = has_validation(config) and (trainer.test_freq > 0 or trainer.val_before_train)
    goes_on = not trainer.val_only and trainer.schedule not in ("sync", *EXACT_SCHEDULES)
    if port and validates and goes_on:
        yield (
            f"{ROLLOUT}.agent.endpoint_port={port} with trainer.schedule={trainer.schedule} and validation "
            "data: episodes of training go on during a validation, and the agents of both cannot listen at "
            f"one port: set {ROLLOUT}.agent.endpoint_port=0"
        )


def sft_layout_problems(config: SFTConfig) -> Iterator[str]:
    """Yield one line for each size of a supervised run that does not fit the others."""
    processes = num_processes(config.trainer)
    yield from RoleLayout(
        "engine", config.engine, config.engine.ulysses_sequence_parallel_size, config.model, processes, ""
    ).problems()


def cluster_notes(config: PPOConfig | SFTConfig, given: Set[str]) -> Iterator[str]:
    """Yield one line for each key that is set and has less effect than it seems to have."""
    trainer = config.trainer
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


def placement_problems(config: PPOConfig) -> Iterator[str]:
    """Problems with pools and placement whatever roles there are; making the placement refuses the others."""
    trainer = config.trainer
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


def controller_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line where one process is to host what needs several."""
    trainer = config.trainer
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


def quantized_actor(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each way of computing with other weights than those of an actor in 4 bits."""
    rollout = config.actor_rollout_ref.rollout
    held = config.actor_rollout_ref.model.quantization
    if held is None:
        return
    why = f"actor_rollout_ref.model.quantization={held}, whose weights only the actor's own processes hold"
    if rollout.name != "native":
        yield f"{ROLLOUT}.name={rollout.name} with {why}: set {ROLLOUT}.name=native"
    if rollout.quantization is not None:
        yield f"{ROLLOUT}.quantization={rollout.quantization} with {why}: leave {ROLLOUT}.quantization out"
    width = rollout.tensor_model_parallel_size
    if width > 1:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={width} with actor_rollout_ref.model.quantization={held}: "
            "each process of the actor generates with all of the weights in 4 bits, which are not cut: "
            "set it to 1"
        )
    if not share_a_pool(config.trainer, "rollout", "actor"):
        yield f"trainer.placement.rollout is another pool than the actor's with {why}: set it to the actor's"
    if config.trainer.val_in_background:
        yield f"trainer.val_in_background=true with {why}: leave trainer.val_in_background out"
    apart = needs_reference(config) and not share_a_pool(config.trainer, "reference", "actor")
    if apart and not has_own_reference(config):
        yield (
            f"trainer.placement.reference is another pool than the actor's with actor_rollout_ref.model."
            f"quantization={held}, and the reference is the actor's module without adapters: set it to the "
            "actor's"
        )


def frozen_adapters(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each adapter of a model that does not train."""
    reward = config.reward.reward_model
    frozen = {
        "teacher": ("distillation.teacher_model", config.distillation.teacher_model),
        "reference": ("actor_rollout_ref.ref.model", config.actor_rollout_ref.ref.model),
    }
    if reward.enable:
        frozen["reward model"] = ("reward.reward_model.model", reward.model)
    for role, (block, model) in frozen.items():
        for name in ("lora_rank", "lora_adapter_path"):
            if getattr(model, name):
                yield (
                    f"{block}.{name}={getattr(model, name)}: the {role} does not train; merge its adapter "
                    "into its folder (hybridflow merge)"
                )
    if has_own_reference(config) and config.algorithm.ref_update_freq:
        yield (
            f"algorithm.ref_update_freq={config.algorithm.ref_update_freq} would replace the weights of "
            f"actor_rollout_ref.ref.model.path={config.actor_rollout_ref.ref.model.path} by the actor's: set "
            "one of the two"
        )


RULES = (
    controller_problems,
    placement_problems,
    pool_problems,
    actor_layout,
    reference_layout,
    critic_layout,
    process_reward_layout,
    reward_model_layout,
    judge_layout,
    quantized_actor,
    validation_layout,
    validation_port,
    frozen_adapters,
)
"""The rules of processes and layouts of a run of reinforcement learning."""
