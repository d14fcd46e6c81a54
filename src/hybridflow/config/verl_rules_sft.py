"""The keys of verl's supervised fine-tuning that the schema does not have, as data; see `verl_rule.py`."""

from __future__ import annotations

from hybridflow.config.verl_rule import (
    FSDP2,
    FUSED_ALWAYS,
    FUSED_BACKEND,
    HYDRA,
    LATER,
    OFF_OR_ONE,
    OPTIMIZER,
    PROFILERS,
    RESULTS_SAME,
    Rule,
    ignored,
    off,
    only,
    sharding,
)

SFT_RULES: tuple[Rule, ...] = (
    *HYDRA,
    ignored(
        r"(data\.|model\.)?(use_dynamic_bsz|use_remove_padding)",
        "sequences are always packed up to the token limit",
    ),
    only(r"data\.pad_mode", (None, "no_padding"), "sequences are always packed"),
    ignored(
        r"data\.multiturn\..+",
        "rows with a column of messages (data.messages_key) are always conversations of several turns",
    ),
    ignored(r"data\.use_shm", RESULTS_SAME),
    ignored(
        r"data\.ignore_input_ids_mismatch",
        "a conversation is encoded as a whole, so there are no turns whose tokens could differ",
    ),
    off(
        r"data\.custom_cls\.(path|name)",
        "supervised runs read files with messages, or with a prompt and a response: leave it out",
    ),
    off(r"data\.chat_template", "put the chat template into the tokenizer's folder (data.tokenizer)"),
    *sharding("engine"),
    Rule(r"engine\..+", OFF_OR_ONE, "the feature is off", LATER),
    FUSED_BACKEND,
    ignored(r"model\.(use_fused_kernels|fused_kernel_options\..+)", FUSED_ALWAYS),
    ignored(r"model\.use_shm", RESULTS_SAME),
    Rule(r"model\.strategy", FSDP2, "the engine is FSDP2", "set fsdp2"),
    *OPTIMIZER,
    ignored(r"checkpoint\.mbridge_config\..+", "it is read only with Megatron, and the engine is FSDP2"),
    *PROFILERS,
)
