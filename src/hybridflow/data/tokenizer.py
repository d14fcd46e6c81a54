"""The tokenizer: a folder or hub name in, a tokenizer with a pad token out; two ways from text to tokens.

messages ──render_chat──► text ──encode_rendered──► token ids    the template writes every special token
string   ──encode_prompt──────────────────────────► token ids    a missing first token is added
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.hub import cached_file

from hybridflow.config.model import TOKENIZER_FILES
from hybridflow.config.paths import is_written_as_path
from hybridflow.data.messages import Message
from hybridflow.data.remote import hub_folder, require_hub
from hybridflow.data.row_schema import PLAIN_PROMPTS
from hybridflow.errors import DataError, ModelError

logger = logging.getLogger(__name__)

Tokenizer = PreTrainedTokenizerBase

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model that reads pictures, by which they become tensors."""
OF_THE_PROCESS = ("is_local", "local_files_only")
"""What the library notes of how a process found the files, and would write with them: with HF_HUB_OFFLINE=1
the same checkpoint had other bytes.
"""


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a local folder or hub name; it pads with its end token where it has no pad token.

    Raises ModelError if the folder does not exist or holds no tokenizer, or if there is neither a pad nor an
    end token.
    """
    folder = hub_folder(str(path))
    _check_folder(folder)
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the library raises many kinds for one fact: `path` cannot be loaded
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"cannot load a tokenizer from {path}: {reason}; wanted a Hugging Face folder or a hub name"
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {path} has neither a pad token nor an end token; set one in its "
                "tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info(
            "the tokenizer of %s has no pad token; padding with its end token %r", path, tokenizer.eos_token
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write a tokenizer into a folder, with the files beside it by which pictures and videos are read."""
    for name in OF_THE_PROCESS:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    if not tokenizer.name_or_path:
        return
    where = hub_folder(str(tokenizer.name_or_path))
    for name in PROCESSOR_FILES:
        found = cached_file(
            where,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None and Path(found).resolve() != (Path(folder) / name).resolve():
            shutil.copyfile(found, Path(folder) / name)


def _check_folder(path: str) -> None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(
                f"{path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); set data.tokenizer"
            )
    elif is_written_as_path(path) or ("/" in path and folder.parent.is_dir()):
        raise ModelError(
            f"no folder {path} to load a tokenizer from; wanted a Hugging Face folder or a hub name such as "
            "Qwen/Qwen2.5-0.5B"
        )
    else:
        require_hub(path)


def check_template(tokenizer: Tokenizer, source: str, first: object, *, wrap: bool, use: str) -> None:
    """Look whether the tokenizer's chat template fits the first prompt of `source`.

    Raises DataError, naming the remedies, where messages (or a text, with `wrap`) need a template and there
    is none. Warns of a text that has none of the special tokens which the template could have written; `use`
    says what is done with it.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(first, str) or wrap:
        if not template:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path or ''} has no chat template, and the data holds "
                "messages: use a chat model's tokenizer (data.tokenizer=...), put a chat_template.jinja "
                "beside it, or give prompts as strings that are already templated"
            )
    elif template and not any(token and token in first for token in tokenizer.all_special_tokens):
        logger.warning(PLAIN_PROMPTS, source, use)


_NO_CONTENT = (
    "{% set kept = namespace(messages=[]) %}{% for message in messages %}"
    "{% set kept.messages = kept.messages + "
    "[message if message.content is defined else dict(message, content=none)] %}"
    "{% endfor %}{% set messages = kept.messages +%}"
)
"""Gives messages their `content` of none back, which transformers 5.23 takes away: templates ask for it, for
example DeepSeek's, to distinguish an answer that only calls tools from one with text.
"""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool,
) -> str:
    """Render a conversation by the tokenizer's chat template; `options` are the template's arguments."""
    options = dict(options or {})
    if any("content" in message and message["content"] is None for message in messages):
        own = tokenizer.get_chat_template(options.get("chat_template"), tools=options.get("tools"))
        options["chat_template"] = _NO_CONTENT + own
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **options,
    )
    assert isinstance(text, str), "a chat template that is not tokenised gives text"
    return text


def render_marked(
    tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation by a template with {% generation %} marks; return the text, and (begin, end),
    in characters, of each part that the template marks as the assistant's.
    """
    options = dict(options)
    own = tokenizer.get_chat_template(options.pop("chat_template", None), tools=options.get("tools"))
    render: Any = render_jinja_template  # it says that it returns a text
    texts, spans = render(
        conversations=[[dict(message) for message in messages]],
        chat_template=own,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **options},
    )
    return texts[0], [(begin, end) for begin, end in spans[0]]


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of token ids as it stands, with special tokens written out and every space kept."""
    return str(
        tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


@functools.lru_cache(maxsize=8)
def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the texts of the special tokens, which a decoder can leave out, by their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token_id: token.content for token_id, token in added.items() if token.special}
    return special | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def without_special(tokenizer: Tokenizer, token_ids: Sequence[int], keep: Set[str]) -> list[int]:
    """Return token ids without those of special tokens, but for those whose text is in `keep`."""
    special = special_tokens(tokenizer)
    return [token for token in token_ids if token not in special or special[token] in keep]


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of `text` as it stands, with no special token added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a prompt string.

    The first token that the tokenizer wants stands there exactly once; no end token is added.
    """
    ids = encode_rendered(tokenizer, text)
    first = tokenizer.bos_token_id
    if first is not None and _adds_bos(tokenizer) and ids[:1] != [first]:
        return [int(first), *ids]
    return ids


@functools.lru_cache(maxsize=8)
def _adds_bos(tokenizer: Tokenizer) -> bool:
    return list(tokenizer("0")["input_ids"])[:1] == [tokenizer.bos_token_id]
