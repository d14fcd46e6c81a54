"""The checks of models that ask for kernels that are not torch's own."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.needs import built_models
from hybridflow.config.root import PPOConfig, SFTConfig


def on_cpu(block: str, why: str) -> str:
    """Return the line about a model with use_liger=true on a CPU; `why` goes on after the key's value."""
    return (
        f"{block}.use_liger=true{why}: Liger's kernels are Triton programs, which run on CUDA only: "
        f"leave {block}.use_liger out"
    )


def kernel_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each model with use_liger=true that cannot have it."""
    for block, model, fsdp in built_models(config):
        if not model.use_liger:
            continue
        if config.trainer.device == "cpu":
            yield on_cpu(block, " with trainer.device=cpu")
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
