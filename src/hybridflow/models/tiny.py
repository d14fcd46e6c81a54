"""A model of about 0.4 million parameters, made here: for the demo, for tests, for trying a recipe on a
laptop.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from hybridflow.models.progress import without_progress_bars
from hybridflow.models.tiny_tokenizer import create_tiny_tokenizer


def tiny_config(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 384,
) -> LlamaConfig:
    """Llama architecture with tied embeddings, its vocabulary and special tokens the tokenizer's.

    Not Qwen2: transformers' AutoTokenizer overrules the tokenizer of a folder whose model_type is qwen2 with
    its own.
    """
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        dtype="float32",
    )


def create_tiny_model(
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 384,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised model and its tokenizer as a Hugging Face folder; the same `seed` gives
    the same weights.

    The global random stream is left as it was.
    """
    folder = Path(folder)
    tokenizer = tokenizer if tokenizer is not None else create_tiny_tokenizer()
    config = tiny_config(
        tokenizer, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, intermediate=intermediate
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with without_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
