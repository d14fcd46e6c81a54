"""The fields that every row of prompts has, whatever its file left out; and pairs of answers, and steps with
labels, in the rows of the data. Neither torch nor a tokenizer is needed.

{chosen, rejected: messages}           UltraFeedback's form; messages that start with the answer follow
                                       the prompt of the column data.prompt_key
{prompt, chosen, rejected: texts}      the answers to a prompt, which is a templated text or messages
{chosen, rejected: transcripts}        hh-rlhf's form: texts of `Human:` and `Assistant:`
{prompt, completions, labels}          an answer's steps and their labels: true, 1 or +; false, 0 or -
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Sequence
from typing import Any

from hybridflow.config.data import DataConfig, SFTDataConfig
from hybridflow.config.preference import PreferenceDataConfig, RewardDataConfig
from hybridflow.data.files import Row, Rows
from hybridflow.data.messages import Message, check_messages, choose_column, messages_column, prompt_of

logger = logging.getLogger(__name__)
UNNAMED_SOURCE = "data"
"""Source of rows whose data names none: what their metrics are called by, as in val-core/data/acc/mean@1."""
READ_BY_THE_RUN = (
    "data_source",
    "reward_model",
    "extra_info",
    "index",
    "raw_prompt",
    "messages",
    "seed",
    "agent_name",
    "tools_kwargs",
    "interaction_kwargs",
)
"""Columns, or entries of extra_info, that the run itself reads."""

PROMPT_HINT = (
    "set data.prompt_key to the column of the prompts, and data.wrap_prompts=true where these are questions "
    "as plain text"
)
PLAIN_PROMPTS = (
    "the prompts of %s are plain text and %s as they stand, without the chat template of the tokenizer: "
    "where they are not templated already, set data.wrap_prompts=true to make each a user's message"
)
"""The message about prompts that are texts: the source, and what is done with them."""
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_LABELS = {True: True, False: False, "+": True, "-": False}  # of numbers, 1 and 0 are equal to these


def complete_row(row: Row, index: int, config: DataConfig) -> Row:
    """The row with every field of the schema present and of the right kind.

    These are data_source, reward_model, extra_info, index and raw_prompt (see `PromptRow`). A column
    that the run does not read itself is also an entry of extra_info, unless that has one of its name. Raises
    TypeError, ValueError or KeyError where a field is of another kind or the row has no prompt.
    """
    row["data_source"] = source_of(row, config)
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
    prompt_column = choose_column(row, config.prompt_key)
    read = (*READ_BY_THE_RUN, config.reward_fn_key, prompt_column, config.image_key, config.video_key)
    columns = {name: value for name, value in row.items() if name not in read}
    extra_info = {**columns, **(extra_info or {})}
    if extra_info.get("index") is None:
        extra_info["index"] = index
    row |= {"reward_model": reward_model, "extra_info": extra_info, "index": extra_info["index"]}
    row["raw_prompt"] = prompt_of(row[prompt_column], wrap=config.wrap_prompts, media=True)
    return row


def require_prompts(rows: Rows, config: DataConfig) -> None:
    """Raise DataError where a column is missing that the keys name."""
    rows.require(choose_column(rows.columns, config.prompt_key), hint=PROMPT_HINT)
    if config.reward_fn_key != "data_source":
        rows.require(config.reward_fn_key, hint="set data.reward_fn_key")


def require_conversations(rows: Rows, config: SFTDataConfig) -> str | None:
    """Return the column of whole conversations, or None where prompts and responses have their own.

    Raises DataError where there is neither, nor the plain text that the configuration names.
    """
    if config.text_key is not None:
        rows.require(config.text_key, hint="data.text_key names a column of plain text")
        return None
    column = messages_column(rows.columns, config.messages_key, config.prompt_key, config.response_key)
    if column is None:
        hint = (
            f"wanted data.messages_key={config.messages_key}, or both data.prompt_key and "
            "data.response_key, or data.text_key for plain text"
        )
        rows.require(config.prompt_key, config.response_key, hint=hint)
    return column


def plain_text(row: Row, key: str) -> str:
    """Return the plain text of a row; TypeError where it is no text, ValueError where it is empty."""
    text = row[key]
    if not isinstance(text, str):
        raise TypeError(f"the text is {type(text).__name__}, wanted a string")
    if not text:
        raise ValueError("the text is empty")
    return text


def require_comparisons(rows: Rows, config: PreferenceDataConfig, *, single: bool) -> str | None:
    """Return the column with messages, or None where prompts and answers are texts in separate columns.

    With `single` one answer with a label is enough in place of a pair. Raises DataError where there is
    neither.
    """
    if single and config.chosen_key not in rows.columns:
        hint = "wanted pairs (data.chosen_key, data.rejected_key), or answers with a data.label_key"
        rows.require(config.label_key, hint=hint)
        return require_conversations(rows, config)
    rows.require(config.chosen_key, config.rejected_key, hint="set data.chosen_key and data.rejected_key")
    if config.prompt_key in rows.columns and isinstance(rows[0][config.chosen_key], str):
        return None
    return config.chosen_key


def require_steps(rows: Rows, config: RewardDataConfig) -> None:
    """Raise DataError where a column is missing that labels of steps need."""
    hint = "set data.prompt_key, data.steps_key and data.step_labels_key"
    rows.require(config.prompt_key, config.steps_key, config.step_labels_key, hint=hint)


def source_of(row: Row, config: DataConfig) -> str:
    """The data source of a row; `UNNAMED_SOURCE` where the data does not say."""
    source = row.get(config.reward_fn_key)
    if source is None:
        return UNNAMED_SOURCE
    return str(source)


def note_missing_columns(source: str, columns: Sequence[str], config: DataConfig) -> None:
    """Log what follows from columns that the data lacks and need not have."""
    if config.reward_fn_key not in columns:
        logger.info(
            "%s has no column data_source (data.reward_fn_key): metrics call its rows %r",
            source,
            UNNAMED_SOURCE,
        )
    if "reward_model" in columns:
        return
    if "answer" in columns:
        logger.info("%s has no column reward_model: the column answer is the ground truth", source)
    else:
        logger.warning("%s has no column reward_model: the rows have no ground truth", source)


def answers_of_pair(row: Row, config: PreferenceDataConfig) -> list[str | list[Message]]:
    """Return the chosen and the rejected answer: texts that answer the row's prompt, or conversations.

    Raises TypeError or ValueError where a column holds neither, or the conversations differ before the last
    answer.
    """
    found = [_answer(row, key, config) for key in (config.chosen_key, config.rejected_key)]
    if found[0][:-1] != found[1][:-1] and not isinstance(found[0], str):
        raise ValueError(
            f"{config.chosen_key} and {config.rejected_key} differ before the last answer: a pair answers "
            "one prompt"
        )
    return found


def _answer(row: Row, key: str, config: PreferenceDataConfig) -> str | list[Message]:
    value = row[key]
    if isinstance(value, str) and row.get(config.prompt_key) is not None:
        return value
    if isinstance(value, str):
        messages = transcript(value)
    else:
        messages = check_messages(value)
        if messages[0]["role"] == "assistant":
            messages = [*prompt_of(row[config.prompt_key], wrap=True), *messages]
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{key} ends with role {messages[-1]['role']}, wanted an answer of the assistant")
    return messages


def transcript(text: str) -> list[Message]:
    """Return the messages of a text of `Human:` and `Assistant:` parts; ValueError where it is none."""
    before, *parts = _SPEAKER.split(text)
    if before.strip() or not parts:
        raise ValueError(
            f"the text {text[:40]!r} begins with neither `Human:` nor `Assistant:`, and the row has no prompt"
        )
    return [
        {"role": _ROLES[speaker], "content": content.strip()}
        for speaker, content in zip(parts[0::2], parts[1::2], strict=True)
    ]


def steps_of(row: Row, config: RewardDataConfig) -> tuple[list[str], list[bool]]:
    """Return the steps of a row and their labels; TypeError or ValueError where it has none."""
    steps = row[config.steps_key]
    labels = row[config.step_labels_key]
    if not isinstance(steps, list) or not all(isinstance(step, str) and step for step in steps) or not steps:
        raise TypeError(f"{config.steps_key} is no list of texts")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise ValueError(f"{config.step_labels_key} is no list with a label for each of {len(steps)} steps")
    return steps, [label_of(label, config.step_labels_key) for label in labels]


def label_of(value: Any, key: str) -> bool:
    """Return the value of a label in the column `key`; ValueError where it is none."""
    if not isinstance(value, Hashable) or value not in _LABELS:
        raise ValueError(f"{key}: got {value!r}, wanted true or false, 1 or 0, or + or -")
    return _LABELS[value]
