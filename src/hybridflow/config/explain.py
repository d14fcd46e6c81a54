"""What follows from a configuration, before anything is built: `hybridflow config --explain`.

    resolved config, rows of training data, numbers of the model ──explain──► lines (label, value, how)

Memory is an estimate to plan with, by phase; it counts what grows with the model and the batch, not the libraries themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hybridflow.config.needs import needs_reference, needs_teacher
from hybridflow.config.root import PPOConfig, SFTConfig

LOGIT_CHUNK_BYTES = 2 * 64 * 2**20  # one chunk of logits and its gradient


class Line(NamedTuple):
    """One fact: its label, its value with the unit, and the keys and the arithmetic behind it."""

    label: str
    value: str
    how: str


@dataclass(frozen=True)
class ModelNumbers:
    """What the memory estimate needs to know of a model; `bytes_per_parameter` is of the compute dtype (float32: 4, bfloat16: 2)."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    bytes_per_parameter: int = 4


def explain(config: PPOConfig | SFTConfig, num_train_rows: int | None = None, model: ModelNumbers | None = None) -> list[Line]:
    """Sizes of a step, optimizer steps and micro-batches, then memory by phase where the model's numbers are known."""
    if isinstance(config, PPOConfig):
        return [*_ppo_sizes(config, num_train_rows), *(_ppo_memory(config, model) if model else [])]
    return [*_sft_sizes(config, num_train_rows), *(_sft_memory(config, model) if model else [])]


def num_training_steps(config: PPOConfig | SFTConfig, num_train_rows: int | None) -> int | None:
    """Steps of the run: trainer.total_training_steps, or epochs × steps an epoch; None when the number of rows is not known.

    An epoch ends where fewer than data.train_batch_size rows are left. A step of dynamic sampling in which groups are dropped draws
    further generation batches: the steps stay as many, and the data is gone through more often.
    """
    rows, trainer, limit = num_train_rows, config.trainer, config.data.train_max_samples
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    if rows is None and config.data.task.name:
        rows = config.data.task.size
    if rows is None:
        return None
    rows = rows if limit < 0 else min(rows, limit)
    return trainer.total_epochs * (rows // rows_per_step(config))


def rows_per_step(config: PPOConfig | SFTConfig) -> int:
    """Training rows that a step draws; with dynamic sampling the fewest, which is whole generation batches."""
    data = config.data
    if not isinstance(config, PPOConfig) or not config.algorithm.filter_groups.enable:
        return data.train_batch_size
    batch = _generation_batch(config)
    return math.ceil(data.train_batch_size / batch) * batch


def _generation_batch(config: PPOConfig) -> int:
    """Prompts that are generated for at once."""
    data, sampled = config.data, config.algorithm.filter_groups.enable
    return (data.gen_batch_size if sampled else None) or data.train_batch_size


def _steps_line(config: PPOConfig | SFTConfig, num_train_rows: int | None) -> Line:
    steps, batch = num_training_steps(config, num_train_rows), rows_per_step(config)
    if config.trainer.total_training_steps is not None:
        return Line("training steps", f"{steps:,}", "trainer.total_training_steps")
    if steps is None:
        return Line("training steps", "not known yet", "the number of training rows is needed")
    how = f"trainer.total_epochs={config.trainer.total_epochs} × (training rows // {batch})"
    return Line("training steps", f"{steps:,}", how)


def _ppo_sizes(config: PPOConfig, num_train_rows: int | None) -> list[Line]:
    data, actor, n = config.data, config.actor_rollout_ref.actor, _rows_per_prompt(config)
    rows, longest = data.train_batch_size * n, data.max_prompt_length + data.max_response_length
    minis = math.ceil(data.train_batch_size / actor.ppo_mini_batch_size)
    per_step = minis * actor.ppo_epochs
    lines = [
        _sequences_line(config),
        *_generated_lines(config),
        Line("tokens per step, at most", f"{rows * longest:,}", f"{rows:,} × (max_prompt_length + max_response_length = {longest:,})"),
        Line("mini-batches per step", f"{minis:,}", f"data.train_batch_size / actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}"),
        Line("optimizer steps per step", f"{per_step:,}", f"{minis} mini-batches × actor.ppo_epochs={actor.ppo_epochs}"),
        _steps_line(config, num_train_rows),
    ]
    steps = num_training_steps(config, num_train_rows)
    if steps is not None:
        lines.append(Line("optimizer steps in all", f"{steps * per_step:,}", f"{steps:,} steps × {per_step}"))
    mini_rows = actor.ppo_mini_batch_size * n
    lines.append(
        _micro_batches("actor", mini_rows, longest, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu, "actor.ppo_")
    )
    if config.critic.enable:
        critic = config.critic
        critic_rows = (critic.ppo_mini_batch_size or actor.ppo_mini_batch_size) * n
        lines.append(
            _micro_batches(
                "critic", critic_rows, longest, critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu, "critic.ppo_"
            )
        )
    process = config.reward.process_reward_model
    if process.enable:
        process_rows = (process.ppo_mini_batch_size or data.train_batch_size) * n
        limit = process.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        lines.append(_micro_batches("process reward model", process_rows, longest, limit, None, "process_reward_model.ppo_"))
    return lines


def _rows_per_prompt(config: PPOConfig) -> int:
    """Rows of a prompt that are trained on: its responses, and for SPIN the data's own answer."""
    return config.actor_rollout_ref.rollout.n + (config.algorithm.adv_estimator == "spin")


def _sequences_line(config: PPOConfig) -> Line:
    batch, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    each = f"rollout.n={n}" if config.algorithm.adv_estimator != "spin" else f"(rollout.n={n} + the data's own answer)"
    return Line("sequences per step", f"{batch * _rows_per_prompt(config):,}", f"data.train_batch_size={batch} × {each}")


def _generated_lines(config: PPOConfig) -> list[Line]:
    """Rows that are generated, where they are not those that are trained on."""
    n, groups, remax = config.actor_rollout_ref.rollout.n, config.algorithm.filter_groups, config.algorithm.adv_estimator == "remax"
    prompts = rows_per_step(config)
    each = f"(rollout.n={n} + 1 greedy)" if remax else f"rollout.n={n}"
    lines = []
    if groups.enable:
        batch = _generation_batch(config)
        how = f"{prompts // batch} generation batches of data.gen_batch_size={batch} × {each}"
        lines.append(Line("responses generated per step, at least", f"{prompts * (n + remax):,}", how))
        if groups.max_num_gen_batches:
            how = f"filter_groups.max_num_gen_batches={groups.max_num_gen_batches} × data.gen_batch_size={batch} × {each}"
            most = groups.max_num_gen_batches * batch * (n + remax)
            lines.append(Line("responses generated per step, at most", f"{most:,}", how))
    elif remax or config.algorithm.adv_estimator == "spin":
        lines.append(Line("responses generated per step", f"{prompts * (n + remax):,}", f"data.train_batch_size={prompts} × {each}"))
    return lines


def _micro_batches(role: str, rows: int, longest: int, max_tokens: int, max_rows: int | None, keys: str) -> Line:
    """At most: when every row has its greatest length."""
    by_tokens = max(1, max_tokens // longest)
    per_micro = min(by_tokens, max_rows or by_tokens)
    limit = f"{keys}max_token_len_per_gpu={max_tokens:,} // {longest:,} tokens"
    if max_rows is not None and max_rows < by_tokens:
        limit = f"{keys}micro_batch_size_per_gpu={max_rows}"
    return Line(
        f"{role} micro-batches per mini-batch, at most", f"{math.ceil(rows / per_micro):,}", f"{rows:,} rows / {per_micro} rows ({limit})"
    )


def _sft_sizes(config: SFTConfig, num_train_rows: int | None) -> list[Line]:
    data = config.data
    return [
        Line("conversations per step", f"{data.train_batch_size:,}", "data.train_batch_size"),
        Line("tokens per step, at most", f"{data.train_batch_size * data.max_length:,}", f"× data.max_length={data.max_length:,}"),
        _steps_line(config, num_train_rows),
        _micro_batches(
            "SFT",
            data.train_batch_size,
            data.max_length,
            data.max_token_len_per_gpu,
            data.micro_batch_size_per_gpu,
            "data.",
        ),
    ]


def _trained(role: str, model: ModelNumbers) -> list[tuple[str, int, str]]:
    """Bytes that a trained model holds through the run and during its update."""
    p, size = model.num_parameters, model.bytes_per_parameter
    wide = max(4, size)
    masters = 0 if size >= 4 else 4 * p
    return [
        (f"{role}: weights", p * size, f"{p:,} parameters × {size} bytes"),
        (f"{role}: float32 masters", masters, "× 4 bytes" if masters else "the weights are their own masters"),
        (f"{role}: gradients", p * wide, f"× {wide} bytes"),
        (f"{role}: Adam moments", 2 * p * wide, f"× 2 × {wide} bytes"),
    ]


def _activations(model: ModelNumbers, tokens: int, checkpointing: bool) -> tuple[int, str]:
    one_layer = tokens * (12 * model.hidden_size + 4 * model.intermediate_size) * model.bytes_per_parameter
    if not checkpointing:
        return model.num_layers * one_layer, f"{tokens:,} tokens × {model.num_layers} layers × (12 hidden + 4 intermediate)"
    kept = model.num_layers * tokens * model.hidden_size * model.bytes_per_parameter
    return kept + one_layer, f"{tokens:,} tokens × ({model.num_layers} layers × hidden + one layer recomputed)"


def _memory_lines(parts: list[tuple[str, int, str]], phases: dict[str, int]) -> list[Line]:
    lines = [Line(f"memory, {label}", format_bytes(size), how) for label, size, how in parts if size]
    return lines + [Line(f"memory while {phase}", format_bytes(size), "estimate, without the libraries") for phase, size in phases.items()]


def _ppo_memory(config: PPOConfig, model: ModelNumbers) -> list[Line]:
    roles, data = config.actor_rollout_ref, config.data
    longest = data.max_prompt_length + data.max_response_length
    rows = _generation_batch(config) * (roles.rollout.n + (config.algorithm.adv_estimator == "remax"))
    process, weights = config.reward.process_reward_model, model.num_parameters * model.bytes_per_parameter
    parts = _trained("actor", model)
    if config.critic.enable:
        parts += _trained("critic", model)
    if process.enable:
        parts += _trained("process reward model", model)
    if needs_reference(config):
        parts.append(("reference: weights", weights, "the actor's first weights"))
    if needs_teacher(config):
        parts.append(("teacher: weights", weights, "if it is of the actor's size"))
    held = sum(size for label, size, _ in parts if not label.endswith("gradients"))
    gradients = max(size for label, size, _ in parts if label.endswith("gradients"))
    slots = min(rows, roles.rollout.max_num_seqs)
    cache = slots * longest * 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.bytes_per_parameter
    limit = max(
        roles.actor.ppo_max_token_len_per_gpu,
        config.critic.ppo_max_token_len_per_gpu if config.critic.enable else 0,
        (process.ppo_max_token_len_per_gpu or 0) if process.enable else 0,
    )
    tokens = min(limit, roles.actor.ppo_mini_batch_size * _rows_per_prompt(config) * longest)
    activations, how = _activations(model, tokens, roles.model.enable_gradient_checkpointing)
    parts += [
        (
            "KV cache, at most",
            cache,
            f"{slots} rows × {longest:,} tokens × 2 × {model.num_layers} layers × {model.num_kv_heads} × {model.head_dim}",
        ),
        ("activations of a micro-batch", activations, how),
        ("logits of a chunk", _logits(model, tokens), "two chunks of at most 64 MiB"),
    ]
    return _memory_lines(parts, {"generating": held + cache, "updating": held + gradients + activations + _logits(model, tokens)})


def _sft_memory(config: SFTConfig, model: ModelNumbers) -> list[Line]:
    tokens = min(config.data.max_token_len_per_gpu, config.data.train_batch_size * config.data.max_length)
    activations, how = _activations(model, tokens, config.model.enable_gradient_checkpointing)
    parts = [
        *_trained("model", model),
        ("activations of a micro-batch", activations, how),
        ("logits of a chunk", _logits(model, tokens), "two chunks of at most 64 MiB"),
    ]
    return _memory_lines(parts, {"updating": sum(size for _, size, _ in parts)})


def _logits(model: ModelNumbers, tokens: int) -> int:
    return min(LOGIT_CHUNK_BYTES, 2 * tokens * model.vocab_size * 4)


def format_bytes(size: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
