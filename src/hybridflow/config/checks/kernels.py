"""The checks of models that ask for kernels that are not torch's own."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import ModelConfig
from hybridflow.config.needs import needs_teacher
from hybridflow.config.root import PPOConfig, SFTConfig


def kernel_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each model with use_liger=true that cannot have it."""
    for block, model, fsdp in _models(config):
        if not model.use_liger:
            continue
        if config.trainer.device == "cpu":
            yield (
                f"{block}.use_liger=true with trainer.device=cpu: Liger's kernels are Triton programs, "
                f"which run on CUDA only: leave {block}.use_liger out"
            )
        if model.dtype == "float64":
            yield (
                f"{block}.use_liger=true with {block}.dtype=float64: Liger's kernels compute in float32: "
                "leave one of them out"
            )
        if fsdp is not None and fsdp.tensor_parallel_size > 1:
            yield (
                f"{block}.use_liger=true with tensor_parallel_size={fsdp.tensor_parallel_size}: layers that "
                "are split among ranks have torch's own kernels: leave use_liger out, or set "
                "tensor_parallel_size=1"
            )
        if isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.exact is True:
            yield (
                f"{block}.use_liger=true with actor_rollout_ref.rollout.exact=true: Liger's kernels change "
                "the last bits of what is computed, and nothing shows them to be the same for any number of "
                "rows: leave one of them out"
            )


def _models(config: PPOConfig | SFTConfig) -> Iterator[tuple[str, ModelConfig, FSDPConfig | None]]:
    """Yield (path of the block, the block, its sharding) of each model that the run builds."""
    if isinstance(config, SFTConfig):
        yield "model", config.model, config.engine
        return
    roles = config.actor_rollout_ref
    critic = config.critic
    process = config.reward.process_reward_model
    yield "actor_rollout_ref.model", roles.model, roles.actor.fsdp_config
    if critic.enable:
        yield "critic.model", critic.model, critic.fsdp_config
    if process.enable:
        yield "reward.process_reward_model.model", process.model, roles.actor.fsdp_config
    if needs_teacher(config):
        yield "distillation.teacher_model", config.distillation.teacher_model, None
