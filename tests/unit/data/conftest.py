"""A small tokenizer for the data tests: characters, ChatML's two marks, a chat template."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def character_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    vocab = {
        token: i
        for i, token in enumerate(["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", *string.printable])
    }
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def characters() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture(scope="session")
def characters_marked() -> PreTrainedTokenizerFast:
    return character_tokenizer(MARKED)


@pytest.fixture(scope="session")
def characters_without_template() -> PreTrainedTokenizerFast:
    return character_tokenizer(None)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    character_tokenizer().save_pretrained(tmp_path / "tok")
    return tmp_path / "tok"
