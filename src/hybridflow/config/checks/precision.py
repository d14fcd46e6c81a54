"""The checks of `rollout.quantization` with the native engine, whose tokens then come from another policy."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.checks.correction import uncorrected
from hybridflow.config.root import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"
NATIVE_KINDS = ("int8", "fp8", "float16")
"""Kinds that the native engine rounds to: those of `models/rounded_weights.py`."""


def precision_problems(config: PPOConfig, *, trains: bool = True) -> Iterator[str]:
    """Yield one line for each value that rounded weights do not go with and, if the run `trains`, for a
    missing correction.
    """
    rollout = config.actor_rollout_ref.rollout
    kind = rollout.quantization
    if kind is None or rollout.name != "native":
        return
    key = f"{ROLLOUT}.quantization={kind}"
    if kind not in NATIVE_KINDS:
        yield f"{key} with {ROLLOUT}.name=native, which rounds to {', '.join(NATIVE_KINDS)}: set one of these"
    if kind == "float16" and config.trainer.device not in ("auto", "cpu"):
        yield f"{key} is for CPUs, and trainer.device={config.trainer.device}: set it to fp8 or int8"
    if rollout.exact is True:
        yield (
            f"{key} with {ROLLOUT}.exact=true: rounded weights give other log-probs than training's; set "
            f"{ROLLOUT}.exact=auto, or {ROLLOUT}.quantization=null"
        )
    if rollout.enable_torch_compile:
        yield (
            f"{key} with {ROLLOUT}.enable_torch_compile=true: compiled steps know whole weights only; leave "
            "one of them out"
        )
    if trains and not config.trainer.val_only:
        yield from uncorrected(config, f"{key} samples tokens from rounded weights")
