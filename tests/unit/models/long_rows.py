"""A tiny model for rows of many tokens, and one such row: for a test, and for the page of them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows

HOW = ("one process", "Ulysses 2", "ring 2")
"""Ways to hold a row."""


def save_model(folder: Path, vocabulary: int = 64) -> None:
    """Write a Llama whose positions reach 40,000 and whose attention matters."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=40000,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


def long_row(length: int, vocabulary: int = 64) -> DataProto:
    """One row of random tokens, half prompt and half response, with the columns that a policy loss reads."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (length,), generator=draw).tolist()
    half = length // 2
    columns = make_rows([ids[:half]], [ids[half:]], pad_id=0)
    columns["loss_mask"] = columns["response_mask"].clone()
    columns["old_log_probs"] = torch.full((1, length - half), -4.0)
    columns["advantages"] = torch.linspace(-1, 1, length - half)[None]
    return DataProto.from_dict(columns)
