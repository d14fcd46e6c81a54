"""Prompts for generation: rows in verl's schema in, token ids with the row they belong to out.

    {data_source, prompt, ability, reward_model{style, ground_truth}, extra_info} ──encode──►
    PromptRow(prompt_token_ids, row, index)

Every row is tokenised once, while the dataset is built: rows that fail and prompts that are too long are
known, counted and shown before anything trains. The token ids are kept (four bytes each); the rest of a row
is read again from the table on access.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.config.data import DataConfig
from hybridflow.data.files import Row, Rows
from hybridflow.data.ragged import RaggedInts
from hybridflow.data.row_report import SHOWN, RowReport
from hybridflow.data.tokenizer import (
    Message,
    Tokenizer,
    encode_prompt,
    encode_rendered,
    render_chat,
    require_chat_template,
)
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

UNKNOWN_SOURCE = "unknown"


@dataclass(frozen=True)
class PromptRow:
    """One prompt to generate from.

    `row` has every column of the data, and always: data_source (str), reward_model (dict with ground_truth),
    extra_info (dict with index), index, raw_prompt (the messages or the string). `index` is extra_info.index
    where the data has it, else the row's place.
    """

    prompt_token_ids: list[int]
    row: Row
    index: int | str
    demonstration_token_ids: list[int] | None = None
    """The data's own answer with its end token, where the run learns from it (`data/demonstrations.py`)."""


class PromptDataset:
    """The prompts of `rows` that can be used, tokenised; item i is a PromptRow.

    Raises DataError for a missing prompt column, prompts over `data.max_prompt_length` with
    `truncation=error`, or no usable row. A class of one's own (`data.custom_cls`) is constructed as
    `cls(files: list[str], tokenizer, config: DataConfig)` and has `__len__` and `__getitem__(i)` that gives
    either a PromptRow or a row dict in the schema above; row dicts are then encoded as here. To reuse this
    class: `super().__init__(load_rows(files, config.cache_dir), tokenizer, config)`.
    """

    def __init__(self, rows: Rows | Sequence[Row], tokenizer: Tokenizer, config: DataConfig) -> None:
        self.rows = rows if isinstance(rows, Rows) else Rows([rows])
        self.tokenizer, self.config = tokenizer, config
        self.num_overlong = 0
        self._kept: list[int] = []
        self._ids = RaggedInts()
        self._check_columns()
        self.report = RowReport(self.rows.source, len(self.rows))
        self._encode_all()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, position: int) -> PromptRow:
        index = self._kept[position]
        row = self._complete(self.rows[index], index)
        return PromptRow(self._ids[position % len(self)], row, row["index"])

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of one prompt: messages by the chat template with the generation prompt, a string as it
        stands.

        Raises TypeError or ValueError where the prompt is neither, and whatever the template raises.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is an empty string")
            return encode_prompt(self.tokenizer, prompt)
        messages = check_messages(prompt)
        text = render_chat(
            self.tokenizer, messages, self.config.apply_chat_template_kwargs, add_generation_prompt=True
        )
        return encode_rendered(self.tokenizer, text)

    def _check_columns(self) -> None:
        config = self.config
        if not len(self.rows):
            raise DataError(f"{self.rows.source} has no rows")
        self.rows.require(config.prompt_key, hint="set data.prompt_key")
        if config.reward_fn_key not in self.rows.columns:
            if config.reward_fn_key != "data_source":
                self.rows.require(config.reward_fn_key, hint="set data.reward_fn_key")
            logger.warning(
                "%s has no column data_source (data.reward_fn_key): its rows count as %r",
                self.rows.source,
                UNKNOWN_SOURCE,
            )
        if "reward_model" not in self.rows.columns:
            where = (
                "the column answer is the ground truth"
                if "answer" in self.rows.columns
                else "the rows have no ground truth"
            )
            logger.warning("%s has no column reward_model: %s", self.rows.source, where)
        if not isinstance(self.rows[0][config.prompt_key], str):
            require_chat_template(self.tokenizer)

    def _encode_all(self) -> None:
        limit, overlong = self.config.max_prompt_length, []
        longest = 0
        for index, row in enumerate(self.rows):
            self.report.seen(index)
            try:
                ids = self.encode(row[self.config.prompt_key])
                self._complete(row, index)
            except (
                Exception
            ) as error:  # templates are the tokenizer's own code, and rows are the user's: counted and shown
                self.report.failed(index, error)
                continue
            longest = max(longest, len(ids))
            if len(ids) > limit:
                overlong.append(index)
                if self.config.filter_overlong_prompts:
                    continue
                ids = (
                    truncate_middle(ids, limit)
                    if self.config.truncation == "middle"
                    else _cut(ids, limit, self.config.truncation)
                )
            self._kept.append(index)
            self._ids.append(ids)
        self.num_overlong = len(overlong)
        self.report.close()
        self._report_overlong(overlong, longest)

    def _report_overlong(self, overlong: list[int], longest: int) -> None:
        if not overlong:
            return
        first = ", ".join(str(index) for index in overlong[:SHOWN])
        text = (
            f"{len(overlong)} of {len(self.rows)} prompts of {self.rows.source} are longer than "
            "data.max_prompt_length="
            f"{self.config.max_prompt_length} tokens (the longest has {longest}; first rows: {first})"
        )
        if self.config.filter_overlong_prompts:
            if not self._kept:
                raise DataError(
                    f"{text}, and data.filter_overlong_prompts leaves none; raise data.max_prompt_length"
                )
            logger.warning("%s: left out by data.filter_overlong_prompts", text)
        elif self.config.truncation == "error":
            raise DataError(
                f"{text}; raise it, or set data.filter_overlong_prompts=true or data.truncation=left, right "
                "or middle"
            )
        else:
            logger.warning("%s: cut (data.truncation=%s)", text, self.config.truncation)

    def _complete(self, row: Row, index: int) -> Row:
        """The row with every field of the schema present and of the right kind."""
        source = row.get(self.config.reward_fn_key)
        row["data_source"] = UNKNOWN_SOURCE if source is None else str(source)
        reward_model = row.get("reward_model")
        if reward_model is None:
            reward_model = {"style": "rule", "ground_truth": row.get("answer")}
        if not isinstance(reward_model, dict):
            raise TypeError(
                f"reward_model is {type(reward_model).__name__}, wanted an object with style and ground_truth"
            )
        extra_info = row.get("extra_info")
        if extra_info is not None and not isinstance(extra_info, dict):
            raise TypeError(f"extra_info is {type(extra_info).__name__}, wanted an object")
        extra_info = dict(extra_info or {})
        if extra_info.get("index") is None:
            extra_info["index"] = index
        row |= {"reward_model": reward_model, "extra_info": extra_info, "index": extra_info["index"]}
        row["raw_prompt"] = row[self.config.prompt_key]
        return row


def check_messages(messages: object) -> list[Message]:
    """`messages` as chat messages, without the keys that a columnar file fills with nulls.

    Raises TypeError or ValueError where it is not a non-empty list of objects with a role and a content.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"got {type(messages).__name__}, wanted a list of messages or a templated string")
    if not messages:
        raise ValueError("the list of messages is empty")
    cleaned: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TypeError(
                f"message {number} is {type(message).__name__}, wanted an object with role and content"
            )
        if not isinstance(message.get("role"), str):
            raise TypeError(
                f"message {number} has role {message.get('role')!r}, wanted a string such as user"
            )
        kind = type(message.get("content")).__name__
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            raise TypeError(
                f"message {number} ({message['role']}) has content of type {kind}, wanted a string"
            )
        cleaned.append(
            {key: value for key, value in message.items() if value is not None or key == "content"}
        )
    return cleaned


def truncate_middle(ids: list[int], limit: int) -> list[int]:
    """The first and the last `limit` / 2 tokens (the last get the odd one)."""
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def _cut(ids: list[int], limit: int, side: str) -> list[int]:
    return ids[len(ids) - limit :] if side == "left" else ids[:limit]
