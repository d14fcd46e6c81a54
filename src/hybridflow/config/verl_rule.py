"""A rule about keys of verl, and the rules that reinforcement learning and supervised fine-tuning share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Keys outside the schema. A value in `accepted` (None: every value) has no effect, because `why`; every
    other value is refused with `refusal`.

    A text in `accepted` may hold `*`, and upper and lower case count the same. `True` is not `1`, and `False`
    is not `0`.
    """

    pattern: str
    accepted: tuple[Any, ...] | None
    why: str
    refusal: str = ""


FSDP = r"(fsdp_config|fsdp)"
OFF: tuple[Any, ...] = (None, False, 0, "null", "none", "", [], {})
OFF_OR_ONE: tuple[Any, ...] = (*OFF, 1, -1)
FLOAT32: tuple[Any, ...] = (None, "float32", "fp32")
FSDP2: tuple[Any, ...] = (None, "fsdp", "fsdp2")

RESULTS_SAME = "it changes memory or speed in verl, and never results"
LATER = "this version does not have it: leave it out"
SEED = "set trainer.seed, which seeds every draw of the run"


def ignored(pattern: str, why: str) -> Rule:
    """Return the rule of keys that have no effect, whatever their value."""
    return Rule(pattern, None, why)


def off(pattern: str, refusal: str) -> Rule:
    """Return the rule of a feature that this version does not have: only values that leave it off pass."""
    return Rule(pattern, OFF, "the feature is off", refusal)


def only(pattern: str, accepted: tuple[Any, ...], why: str) -> Rule:
    """Return the rule of keys whose other values are refused for the reason why these have no effect."""
    return Rule(pattern, accepted, why, f"{why}: leave it out")


def seed(pattern: str) -> Rule:
    """Return the rule of a seed apart from the run's: verl's defaults pass, any other choice is refused."""
    return Rule(pattern, (None, 42, 1, 0), "trainer.seed seeds every draw of the run", SEED)


def sharding(block: str) -> tuple[Rule, ...]:
    """Return the rules of the keys of FSDP below the blocks that a pattern matches."""
    return (
        Rule(rf"{block}\.strategy", FSDP2, "the engine is FSDP2", "set fsdp2"),
        Rule(
            rf"{block}\.model_dtype",
            FLOAT32,
            "the optimizer keeps float32 weights whatever the model computes in "
            "(mixed_precision.param_dtype)",
            "set bfloat16 or float32, or the `dtype` key of the model",
        ),
        seed(rf"{block}\.seed"),
        ignored(rf"{block}\.wrap_policy(\..+)?", "each transformer block is one unit of sharding"),
        only(
            rf"{block}\.mixed_precision\.buffer_dtype", FLOAT32, "buffers (rotary positions) stay in float32"
        ),
        ignored(rf"{block}\.use_orig_params", "FSDP2 always keeps the original parameters"),
        ignored(rf"{block}\.grad_offload", "gradients are freed after each optimizer step"),
    )


FUSED_ALWAYS = (
    "it is always on: the head and the log-probs are one function over a chunk of tokens, and whole logits "
    "never exist"
)
FUSED_BACKEND = Rule(
    r".+\.fused_kernel_options\.impl_backend",
    (None, "torch", "triton"),
    f"{FUSED_ALWAYS}; that function is PyTorch's on every device",
    "set torch",
)

# Entries of a model's config.json that mean the same for every model; they come before the schema, in which
# override_config takes any entry.
OVERRIDES: tuple[Rule, ...] = (
    ignored(r".+\.override_config\.attn_implementation", "one attention serves training and generation"),
    Rule(
        r".+\.override_config\.\w*(dropout|pdrop)",
        (None, 0),
        "dropout is always 0",
        "dropout is always 0 here, since the log-probs of training must be those of generation: leave it out",
    ),
    off(
        r".+\.override_config\.moe_config(\..+)?",
        "routers of experts are trained as the other weights are: leave it out",
    ),
    only(r".+\.override_config\.model_config", OFF, "the model's config.json stays as it is"),
)

# The run folder and the log of Hydra itself, which nothing here starts.
HYDRA: tuple[Rule, ...] = (
    ignored(
        r"hydra\.(run|sweep|job_logging|hydra_logging|help|hydra_help)(\..+)?|hydra\.(output_subdir|verbose)"
        r"|hydra\.job\.(name|config)(\..+)?",
        "Hydra's own folders and logs are not made: the run folder is trainer.default_local_dir",
    ),
    ignored(
        r"hydra\.searchpath",
        "the names of a `defaults` list are looked up beside the file and among the recipes",
    ),
    only(r"hydra\.job\.chdir", OFF, "the working directory stays"),
    Rule(
        r"hydra\.mode",
        (None, "RUN"),
        "one run is the default",
        "run several with `hybridflow train --multirun key=1,2`",
    ),
    off(
        r"hydra(\..+)?",
        "the command is not run by Hydra, so this has nothing to act on: leave it out (environment "
        "variables are set before the command; several runs are `hybridflow train --multirun key=1,2`)",
    ),
    Rule(
        r"(.+\.)?_target_",
        (None, "verl.*"),
        "each block of keys has one class here",
        "a block of keys has one class here: leave it out; your own code has keys of its own, such as "
        "reward.custom_reward_function, data.custom_cls and algorithm.adv_estimator",
    ),
)

OPTIMIZER: tuple[Rule, ...] = (
    ignored(
        r"(.+\.)?optim\.optimizer_impl",
        "optimizers are torch's and our own, by the name in optimizer: AdamW8bit needs no other library",
    ),
    ignored(
        r"(.+\.)?optim\.override_optimizer_config\.(optimizer_offload_fraction|optimizer_cpu_offload|"
        r"overlap_cpu_optimizer_d2h_h2d)",
        "optimizer_offload=true in the fsdp_config (or megatron) block of the same role, or in the block "
        "engine of a supervised run, keeps the whole state in CPU memory between steps",
    ),
    ignored(
        r"(.+\.)?optim\.override_optimizer_config\.use_precision_aware_optimizer",
        "master weights and moments are float32, which is that optimizer's default too",
    ),
    off(
        r"(.+\.)?optim\.override_optimizer_config(\..+)?",
        "set the keys of the optim block: betas, eps, weight_decay, momentum, muon_ns_steps, muon_adjust_lr",
    ),
    only(
        r"(.+\.)?optim\.zero_indexed_step",
        (None, False),
        "the schedule counts optimizer steps from 1, so that no step of a warm-up has learning rate 0",
    ),
    off(
        r"(.+\.)?optim\.(init_lr_ratio|lr_warmup_init)",
        "a warm-up starts at lr / lr_warmup_steps: leave it out",
    ),
    off(r"(.+\.)?optim\.min_lr", "set min_lr_ratio of the same block to min_lr / lr"),
    Rule(
        r"(.+\.)?optim\.weight_decay_incr_style",
        (None, "constant"),
        "weight_decay stays as it is",
        "weight_decay stays as it is all through the run: leave it out",
    ),
    off(
        r"(.+\.)?optim\.use_checkpoint_opt_param_scheduler",
        "the learning rate follows from the keys and the step, after a resume too: leave it out, and give a "
        "resumed run the keys of its first start",
    ),
)

PROFILERS: tuple[Rule, ...] = (
    ignored(
        r"(.+\.)?profiler\..+",
        "global_profiler.tool records all roles, on the ranks that global_profiler.ranks names",
    ),
)
