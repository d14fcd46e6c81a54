"""The learning rate as a pure function of the optimizer step, so that a resume needs no scheduler object."""

from __future__ import annotations

import math

from hybridflow.config.model import OptimConfig


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Return the number of warm-up steps: the absolute number where given, else the share of all steps."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps)


def learning_rate(step: int, config: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (the first is 0).

    Warm-up is linear and reaches `lr` at its last step. After it the rate is constant, or falls along a line
    or half-cosines to `min_lr_ratio * lr` at `total_steps`; `wsd` falls in the last steps only.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    if config.lr_scheduler_type == "wsd":
        return _falling(config, _wsd_factor(step, config, total_steps))
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "linear":
        factor = 1.0 - progress
    else:
        factor = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return _falling(config, factor)


def _falling(config: OptimConfig, factor: float) -> float:
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)


def wsd_decay_steps(config: OptimConfig, total_steps: int) -> int:
    """Return the number of steps in which `wsd` falls at the end: the number given, else a tenth of all."""
    if config.lr_wsd_decay_steps >= 0:
        return config.lr_wsd_decay_steps
    return max(1, total_steps // 10)


def _wsd_factor(step: int, config: OptimConfig, total_steps: int) -> float:
    """Return 1 until the fall begins, then a curve to 0 at `total_steps`, by Megatron's formulas."""
    decay = wsd_decay_steps(config, total_steps)
    past = step - (total_steps - decay)
    if past <= 0:
        return 1.0
    share = min(1.0, past / max(1, decay))
    if config.lr_wsd_decay_style == "linear":
        return 1.0 - share
    if config.lr_wsd_decay_style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * share))
    if config.lr_wsd_decay_style == "minus_sqrt":
        return 1.0 - math.sqrt(share)
    return 2.0 * math.pow(0.5, share) - 1.0
