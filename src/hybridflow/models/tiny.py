"""A model of about 0.4 million parameters, or a mixture of experts, built in memory for demo and tests.

It has a tokenizer of about 120 tokens: digits, operators, letters, and the ChatML template; one of
them with tool calls.

Arithmetic is short: `3 + 4 = 7 . ` is the six tokens `3`, ` + `, `4`, ` = `, `7`, ` . `. Operators include
the spaces around them, so that a digit is the same token everywhere. All printable ASCII is encoded a
character at a time, and decoding gives back the text that was encoded. The tokenizer with tools has further
tokens for the parts of a call, which is so about ten tokens longer than its arguments.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hybridflow.models.files.progress import without_progress_bars

UNKNOWN = "<unk>"
PAD = "<|pad|>"
START = "<|im_start|>"
END = "<|im_end|>"
WORDS = ("system", "user", "assistant", "#### ", "####", *(f" {sign} " for sign in "+-*/=."))
CHARACTERS = (
    *string.digits,
    *string.ascii_lowercase,
    *string.ascii_uppercase,
    *string.punctuation,
    " ",
    "\n",
    "\t",
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

TOOL_WORDS = (
    "tool",
    "<tool_call>",
    "</tool_call>",
    '{"name": "',
    '", "arguments": {"',
    '": "',
    '"}}',
)
TOOL_CHAT_TEMPLATE = """\
{%- if tools and show_tools -%}
{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] or '' -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- arguments if arguments is string else arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


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
    model_type is qwen2 by its own. With `experts` it is a Mixtral, a Llama whose layers have that many
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


def create_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, the same on every call; all but printable ASCII is `<unk>`."""
    return word_tokenizer((), CHAT_TEMPLATE)


def create_tiny_tool_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return the tokenizer for calls of tools in the hermes format; each of `words` is a single token.

    The chat template leaves the tools' schemas out, which a tiny model knows from its warm-up, unless
    `show_tools` is true.
    """
    return word_tokenizer((*TOOL_WORDS, *words), TOOL_CHAT_TEMPLATE)


def word_tokenizer(
    words: Sequence[str], chat_template: str, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with further tokens after the common ones; `special` ones are left out of texts."""
    tokens = (UNKNOWN, PAD, START, END, *WORDS, *CHARACTERS, *words)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    further = "".join(f"{re.escape(word)}|" for word in sorted(words, key=len, reverse=True))
    tokenizer.pre_tokenizer = Split(
        Regex(further + r"system|user|assistant|#### ?| [-+*/=.] |[\s\S]"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, *special],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=4096,
    )
