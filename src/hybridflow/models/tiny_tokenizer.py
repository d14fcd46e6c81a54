"""A tokenizer of about 120 tokens for tiny models: digits, operators, letters, and the ChatML template.

Arithmetic is short: `3 + 4 = 7 . ` is the six tokens `3`, ` + `, `4`, ` = `, `7`, ` . `. Operators include
the spaces around them, so that a digit is the same token everywhere. All printable ASCII is encoded a
character at a time, and decoding gives back the text that was encoded.
"""

from __future__ import annotations

import string

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


def create_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, the same on every call; all but printable ASCII is `<unk>`."""
    vocabulary = {token: index for index, token in enumerate((UNKNOWN, PAD, START, END, *WORDS, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(
        Regex(r"system|user|assistant|#### ?| [-+*/=.] |[\s\S]"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=4096,
    )
