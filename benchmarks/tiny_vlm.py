"""Models of some 0.3 million parameters that read pictures, for the recipes tiny/vlm and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from hybridflow.models.files.build import auto_class
from hybridflow.models.files.progress import without_progress_bars
from hybridflow.models.tiny import word_tokenizer

PICTURE = 16
"""Side of the pictures that the models are made for, in pixels."""
PATCH = 2
MERGE = 2
"""Patches, along each side, that become one token: a picture of 16 × 16 pixels is 16 tokens."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
PICTURE_WORDS = {
    "qwen": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "smolvlm": ("<fake_token_around_image>", "<global-img>", "<image>"),
}
"""Special tokens around and in the place of pictures, by the way in which a family writes them."""
PICTURE_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{%- else -%}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}
{%- elif part['type'] == 'video' -%}{{- 'VIDEO' -}}
{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def create_tiny_picture_tokenizer(style: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a tiny model that reads pictures; `style` is a key of `PICTURE_WORDS`."""
    image = "<image>"
    video = "<image>"
    if style == "qwen":
        image = "<|vision_start|><|image_pad|><|vision_end|>"
        video = "<|vision_start|><|video_pad|><|vision_end|>"
    template = PICTURE_CHAT_TEMPLATE.replace("IMAGE", image).replace("VIDEO", video)
    words = PICTURE_WORDS[style]
    return word_tokenizer(words, template, special=words)


def create_tiny_vlm(
    folder: str | Path,
    family: str = "qwen3_vl",
    *,
    hidden: int = 64,
    layers: int = 2,
    vision_layers: int = 2,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised model of one of `FAMILIES`, with tokenizer and image processor, as a
    Hugging Face folder.

    The same `seed` gives the same weights. The global random stream stays as it was.
    """
    folder = Path(folder)
    style = "smolvlm" if family == "smolvlm" else "qwen"
    tokenizer = create_tiny_picture_tokenizer(style)
    size = len(tokenizer)
    common = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
    }
    text = common | {
        "vocab_size": size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    if style == "smolvlm":
        config, processor = _smolvlm(text, common, vision_layers, tokenizer)
    else:
        config, processor = _qwen(family, text, common, vision_layers, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class("policy", config).from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with without_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _qwen(
    family: str, text: dict[str, Any], common: dict[str, Any], depth: int, tokenizer: Any
) -> tuple[PretrainedConfig, Any]:
    head = text["hidden_size"] // text["num_attention_heads"]
    sections = [head // 2 - 2 * (head // 6), head // 6, head // 6]
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10_000.0}
    vision = common | {
        "depth": depth,
        "num_heads": 4,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    words = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids: dict[str, Any] = dict(zip(names, tokenizer.convert_tokens_to_ids(list(words)), strict=True))
    ids["tie_word_embeddings"] = True
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": PICTURE**2 // 4, "longest_edge": 16 * PICTURE**2},
    )
    if family == "qwen2_vl":
        vision |= {"embed_dim": text["hidden_size"], "mlp_ratio": 2}
        return Qwen2VLConfig(
            text_config=text | {"rope_parameters": rope}, vision_config=vision, **ids
        ), processor
    if family == "qwen2_5_vl":
        vision |= {"window_size": 2 * PATCH * MERGE, "fullatt_block_indexes": [depth - 1]}
        return Qwen2_5_VLConfig(
            text_config=text | {"rope_parameters": rope}, vision_config=vision, **ids
        ), processor
    text = text | {"head_dim": head, "rope_parameters": rope | {"mrope_interleaved": True}}
    vision |= {"num_position_embeddings": (PICTURE // PATCH) ** 2, "deepstack_visual_indexes": [0]}
    if family == "qwen3_vl_moe":
        experts = {
            "moe_intermediate_size": text["hidden_size"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
        return Qwen3VLMoeConfig(text_config=text | experts, vision_config=vision, **ids), processor
    return Qwen3VLConfig(text_config=text, vision_config=vision, **ids), processor


def _smolvlm(
    text: dict[str, Any], common: dict[str, Any], depth: int, tokenizer: Any
) -> tuple[PretrainedConfig, Any]:
    vision = common | {
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "image_size": PICTURE,
        "patch_size": PATCH,
    }
    config = SmolVLMConfig(
        text_config=text | {"model_type": "llama"},
        vision_config=vision,
        scale_factor=MERGE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    edge = {"longest_edge": PICTURE}
    return config, SmolVLMImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
