"""A model of about 0.4 million parameters, or a mixture of experts, made on the spot for demo and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from hybridflow.models.progress import without_progress_bars
from hybridflow.models.tiny_tokenizer import create_tiny_tokenizer


def create_tiny_model(
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 384,
    experts: int = 0,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised model and its tokenizer as a Hugging Face folder.

    It is a Llama with tied embeddings, because AutoTokenizer replaces the tokenizer of a folder whose
    model_type is qwen2 by its own. With `experts` it is a Mixtral, which is a Llama whose layers have so many
    experts, two of them for each token and each of half of the width. The same `seed` gives the same weights.
    The global random stream stays as it was.
    """
    folder = Path(folder)
    if tokenizer is None:
        tokenizer = create_tiny_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
        "dtype": "float32",
    }
    config: PretrainedConfig = LlamaConfig(**settings)
    if experts:
        settings |= {"intermediate_size": intermediate // 2, "num_local_experts": experts}
        config = MixtralConfig(**settings, num_experts_per_tok=2, sliding_window=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with without_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
