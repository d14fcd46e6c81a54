"""The layout of each role over the processes that host it: sizes for its engine, the mesh for its calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.layout import JUDGE, VALIDATION, engine_keys
from hybridflow.config.needs import has_own_reference
from hybridflow.controller import MeshInfo, Placement
from hybridflow.distributed.device import resolve_device
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.protocol.balancing import Workload, even_in_groups
from hybridflow.trainer.models import row_cost

logger = logging.getLogger(__name__)


def sizes(config: PPOConfig, role: str, world_size: int) -> ParallelLayout:
    """Return how the engine of a role uses `world_size` processes; of a judge, each replica is one engine."""
    if role == JUDGE:
        tensor = config.reward.reward_model.rollout.tensor_model_parallel_size
        return ParallelLayout.from_keys(tensor, tensor=tensor)
    fsdp, sequence, _ = engine_keys(config, role)
    return ParallelLayout.from_keys(
        world_size,
        fsdp.fsdp_size,
        sequence,
        fsdp.tensor_parallel_size,
        fsdp.pipeline_parallel_size,
        fsdp.expert_parallel_size,
    )


def rollout_axes(config: PPOConfig, world_size: int) -> tuple[tuple[str, int], ...]:
    """Return how `world_size` ranks generate: groups of `tensor_model_parallel_size` ranks serve requests
    together.
    """
    tensor = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return ("dp", world_size // tensor), ("tp", tensor)


def may_share_prompts(config: PPOConfig) -> bool:
    """Return whether rows of a prompt may share it, as `actor.use_prefix_grouper` says.

    Where that is left to the run, they do on a CPU. Elsewhere the gain is not measured, and packed rows are
    one call of attention, which rows that share are not. Exact mode, settled later, has the last word.
    """
    roles = config.actor_rollout_ref
    if roles.actor.use_prefix_grouper is not None:
        return roles.actor.use_prefix_grouper
    sequence = max(roles.actor.ulysses_sequence_parallel_size, roles.ref.ulysses_sequence_parallel_size or 1)
    return (
        roles.rollout.n > 1
        and sequence == 1
        and roles.actor.strategy != "megatron"
        and not roles.actor.router_aux_loss_coef  # which would count a shared token once
        and roles.rollout.exact is not True
        and config.trainer.device in ("auto", "cpu")
        and resolve_device(config.trainer.device).type == "cpu"
    )


def dealt_by(actor: ActorConfig, parts: int) -> list[str]:
    """Return the columns by which rows are sharded over `parts` ranks.

    Where a user asks for shared prompts, rows are sharded by group, since only rows of one rank can share a
    prompt; where the run shares them by itself, those that meet on a rank do.
    """
    if not actor.use_prefix_grouper:
        return []
    if even_in_groups(actor.ppo_mini_batch_size, parts):
        return ["group_ids"]
    logger.info(
        "actor.use_prefix_grouper: the %d prompts of a mini-batch are not dealt whole to %d ranks, which "
        "would be uneven, so fewer rows "
        "share theirs: set actor_rollout_ref.actor.ppo_mini_batch_size to a multiple of %d",
        actor.ppo_mini_batch_size,
        parts,
        parts,
    )
    return []


def meshes(config: PPOConfig, roles: Sequence[str], placement: Placement) -> Mapping[str, MeshInfo]:
    """Return the ranks of each role, with the cost of a row for it.

    `trainer.balance_batch=false` leaves the cost out, and rows are sharded by number.
    """
    found: dict[str, MeshInfo] = {}
    costs: dict[str, Workload] = {}
    for role in roles:
        world = sum(pool.world_size for pool in placement.pools_of(role))
        if role in ("rollout", VALIDATION):
            cost = None
            if config.trainer.balance_batch:
                cost = Workload()  # requests say themselves what they cost
            found[role] = MeshInfo(world, rollout_axes(config, world), cost)
            continue
        if role == JUDGE:
            tensor = config.reward.reward_model.rollout.tensor_model_parallel_size
            found[role] = MeshInfo(world, (("dp", world // tensor), ("tp", tensor)))
            continue
        engine = role
        if role == "reference" and is_actors_module(config, placement):
            engine = "actor"
        model = engine_keys(config, engine)[2]
        if config.trainer.balance_batch and str(model.path) not in costs:
            costs[str(model.path)] = row_cost(model)
        found[role] = MeshInfo(world, sizes(config, engine, world).axes(), costs.get(str(model.path)))
    return found


def is_actors_module(config: PPOConfig, placement: Placement) -> bool:
    """Whether the reference is the actor without its adapters, which needs both in the same processes."""
    trains_adapters = LoraSettings.from_config(config.actor_rollout_ref.model) is not None
    return (
        trains_adapters
        and not has_own_reference(config)
        and placement.pools_of("reference") == placement.pools_of("actor")
    )
