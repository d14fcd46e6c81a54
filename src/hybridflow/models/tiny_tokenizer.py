"""Tokenizers of about 120 tokens for tiny models: digits, operators, letters, and the ChatML template; one of
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

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

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


def create_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, the same on every call; all but printable ASCII is `<unk>`."""
    return word_tokenizer((), CHAT_TEMPLATE)


def create_tiny_tool_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return the tokenizer for calls of tools in the hermes format; each of `words` is a token of its own.

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
