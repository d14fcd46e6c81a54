"""The engine behind `strategy=megatron`: megatron-core where it is installed, else PyTorch's own.

    megatron-core installed, several processes   actor, reference and critic, or the model of a supervised run
    not installed, or one process                PyTorch's own engine, which has the same layouts

What megatron-core does not serve here is refused before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from importlib.util import find_spec

from hybridflow.config.layout import num_processes, pool_sizes, share_a_pool
from hybridflow.config.model import FSDPConfig, ModelConfig, OptimConfig
from hybridflow.config.needs import has_divergence, needs_reference, wants_full_kl
from hybridflow.config.preference import DPOConfig, RewardModelConfig
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.tree import get_value

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
STRATEGIES = {"actor": f"{ACTOR}.strategy", "reference": f"{ACTOR}.strategy", "critic": "critic.strategy"}
"""The key of the engine, by role; models of other roles have PyTorch's."""
SHARDING = {
    f"{ACTOR}.strategy": (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config"),
    "critic.strategy": ("critic.fsdp_config",),
    "engine.strategy": ("engine",),
}
"""The blocks of the sharding of the models that the key of an engine is for."""
BLOCKS = {"actor": ACTOR, "reference": REF, "critic": "critic"}
SIZES = (
    "ulysses_sequence_parallel_size",
    *(f"fsdp_config.{name}_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline", "expert")),
)
"""Keys below a role with the sizes of megatron-core's layout, which it has one of in a process."""
UNREAD = ("fsdp_size", "reshard_after_forward", "forward_prefetch", "mixed_precision.reduce_dtype")
"""Keys of the sharding of a role that FSDP2 alone reads."""
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` whose layers megatron-core has, and whose weights `engines/megatron` maps."""
WAY_OUT = "Set strategy=fsdp2, PyTorch's own engine, which trains it"
TORCH = "PyTorch's own engine (FSDP2, tensor parallelism, stages by 1F1B)"


def megatron_serves(config: PPOConfig | SFTConfig, role: str = "actor") -> str | None:
    """Return why PyTorch's engine serves a role that asks for megatron, or None where megatron-core does."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return "the package megatron-core is not installed"
    if isinstance(config, PPOConfig):
        processes = sum(pool_sizes(config.trainer, role))
    else:
        processes = num_processes(config.trainer)
    if processes == 1:
        return "one process divides nothing"
    return None


def family_refusal(kind: str, why: Sequence[str] = ()) -> str | None:
    """Return the message that megatron-core does not serve a model of this `model_type`, for these reasons or
    because of the family; None where it does.
    """
    if kind not in FAMILIES:
        why = [f"only {', '.join(FAMILIES)} are mapped"]
    if not why:
        return None
    return f"strategy=megatron does not serve this model of model_type {kind!r}: {'; '.join(why)}. {WAY_OUT}"


def megatron_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each key that asks for what megatron-core does not do here."""
    if isinstance(config, PPOConfig):
        if config.actor_rollout_ref.actor.strategy == "megatron":
            yield from _of_ppo(config)
        if config.critic.enable and config.critic.strategy == "megatron":
            yield from _of_critic(config)
    elif config.engine.strategy == "megatron":
        key = "engine.strategy"
        yield from _of_block(key, "engine", config.engine)
        yield from _of_model(key, "model", config.model)
        yield from _of_optimizer(key, "optim", config.optim)
        if isinstance(config, (DPOConfig, RewardModelConfig)):
            yield f"{key}=megatron learns from no comparisons: set {key}=fsdp2"


def megatron_notes(config: PPOConfig | SFTConfig, given: Set[str]) -> Iterator[str]:
    """Yield one line for each engine of megatron-core with keys of FSDP2, of those that the user set."""
    keys = ["engine.strategy"]
    if isinstance(config, PPOConfig):
        keys = [f"{ACTOR}.strategy", *["critic.strategy"] * bool(config.critic.enable)]
    for key in keys:
        names = (f"{block}.{name}" for block in SHARDING[key] for name in UNREAD)
        unread = [name for name in names if name in given]
        if unread and get_value(config, key) == "megatron":
            yield (
                f"{', '.join(unread)} {'is' if len(unread) == 1 else 'are'} not read with {key}=megatron: "
                "megatron-core shards no parameters, and sums gradients in float32"
            )


def _of_ppo(config: PPOConfig) -> Iterator[str]:
    key = f"{ACTOR}.strategy"
    roles = config.actor_rollout_ref
    actor = roles.actor
    yield from _of_block(key, f"{ACTOR}.fsdp_config", actor.fsdp_config)
    yield from _of_model(key, "actor_rollout_ref.model", roles.model)
    yield from _of_optimizer(key, f"{ACTOR}.optim", actor.optim)
    refused = {
        f"{ACTOR}.use_prefix_grouper=true": bool(actor.use_prefix_grouper),
        f"{ACTOR}.router_replay.mode={actor.router_replay.mode}": actor.router_replay.mode != "disabled",
        f"{ACTOR}.router_aux_loss_coef={actor.router_aux_loss_coef}": bool(actor.router_aux_loss_coef),
        f"{ACTOR}.kl_loss_type=full": wants_full_kl(actor),
        "actor_rollout_ref.rollout.exact=true": roles.rollout.exact is True,
        f"algorithm.ref_update_freq={config.algorithm.ref_update_freq}": config.algorithm.ref_update_freq > 0,
    }
    divergence = config.distillation.distillation_loss.loss_mode
    refused[f"distillation.distillation_loss.loss_mode={divergence}"] = has_divergence(config)
    yield from _refusals(key, refused)
    if not needs_reference(config):
        return
    ref = roles.ref
    yield from _of_block(key, f"{REF}.fsdp_config", ref.fsdp_config)
    yield from _of_model(key, f"{REF}.model", ref.model)
    yield from _other_sizes(key, config, "actor", "reference")


def _of_critic(config: PPOConfig) -> Iterator[str]:
    key = "critic.strategy"
    yield from _of_block(key, "critic.fsdp_config", config.critic.fsdp_config)
    yield from _of_model(key, "critic.model", config.critic.model)
    yield from _of_optimizer(key, "critic.optim", config.critic.optim)
    if config.actor_rollout_ref.actor.strategy == "megatron":
        yield from _other_sizes(key, config, "actor", "critic")
        if needs_reference(config) and not share_a_pool(config.trainer, "critic", "actor"):
            yield from _other_sizes(key, config, "reference", "critic")


def _other_sizes(key: str, config: PPOConfig, first: str, second: str) -> Iterator[str]:
    """Yield the sizes in which a role differs from the first, where megatron-core has both in a process."""
    if not share_a_pool(config.trainer, first, second):
        return
    for name in SIZES:
        here, there = (get_value(config, f"{BLOCKS[role]}.{name}") for role in (first, second))
        if None not in (here, there) and here != there:
            yield (
                f"{key}=megatron: megatron-core has one layout in a process, and {BLOCKS[first]}.{name}="
                f"{here} while {BLOCKS[second]}.{name}={there}: make them equal, or set {key}=fsdp2"
            )


def _of_block(key: str, block: str, fsdp: FSDPConfig) -> Iterator[str]:
    refused = {
        f"{block}.{name}={getattr(fsdp, name)}": bool(getattr(fsdp, name))
        for name in ("param_offload", "optimizer_offload", "offload_policy", "use_torch_compile")
    }
    dtype = fsdp.mixed_precision.param_dtype
    refused[f"{block}.mixed_precision.param_dtype={dtype}"] = dtype not in ("auto", "float32", "bfloat16")
    yield from _refusals(key, refused)


def _of_model(key: str, block: str, model: ModelConfig) -> Iterator[str]:
    refused = {
        f"{block}.lora_rank={model.lora_rank}": model.lora_rank > 0,
        f"{block}.dtype=float64": model.dtype == "float64",
    }
    for name in ("lora_adapter_path", "use_liger", "enable_activation_offload", "freeze_vision_tower"):
        refused[f"{block}.{name}={getattr(model, name)}"] = bool(getattr(model, name))
    yield from _refusals(key, refused)


def _of_optimizer(key: str, block: str, optim: OptimConfig) -> Iterator[str]:
    yield from _refusals(key, {f"{block}.optimizer={optim.optimizer}": optim.optimizer != "AdamW"})


def _refusals(key: str, refused: dict[str, bool]) -> Iterator[str]:
    for what, is_so in refused.items():
        if is_so:
            yield f"{key}=megatron does not go with {what}: leave it out, or set {key}=fsdp2, which does both"
