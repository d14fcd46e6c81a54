"""Chat messages in the rows of the data, checked and in one form: {"role": ..., "content": ...}.

    [{"role": "user", "content": "Hi"}]            as chat templates take them
    [{"from": "human", "value": "Hi"}]             ShareGPT's form, translated

A row's prompt is found here too, so that the checks before a run (which import neither torch nor
transformers) and the datasets read it in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from hybridflow.config.data import BaseDataConfig

Message = Mapping[str, Any]

SHAREGPT = "conversations"
"""The column of ShareGPT's conversations; read where the configured column is missing."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Roles by the names that ShareGPT's `from` may have."""

KEYWORDS = ("tools_kwargs", "interaction_kwargs")
"""Columns, or entries of extra_info, with keyword arguments: of each tool, and of the simulated user."""

MEDIA = ("images", "videos", "image", "video")
"""Columns of data sets that are not text alone."""

MEDIA_PARTS: Mapping[str, Literal["image", "video"]] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
}
"""Types of parts of a content that are pictures or videos."""


def check_messages(messages: object, *, media: bool = False) -> list[Message]:
    """`messages` as chat messages, without keys that are null.

    Raises TypeError or ValueError where it is not a non-empty list of objects with a role and a content (or
    with ShareGPT's `from` and `value`), or where a content holds something other than text and, with `media`,
    pictures and videos.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"got {type(messages).__name__}, wanted a list of messages or a templated string")
    if not messages:
        raise ValueError("the list of messages is empty")
    return [_checked(number, message, media) for number, message in enumerate(messages)]


def _checked(number: int, message: object, media: bool) -> Message:
    if not isinstance(message, dict):
        raise TypeError(
            f"message {number} is {type(message).__name__}, wanted an object with role and content"
        )
    if message.get("role") is None and message.get("from") is not None:
        sender = message["from"]
        if sender not in ROLES:
            raise ValueError(f"message {number} is from {sender!r}, wanted one of {', '.join(ROLES)}")
        message = {"role": ROLES[sender], "content": message.get("value")}
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str):
        raise TypeError(f"message {number} has role {role!r}, wanted a string such as user")
    if not isinstance(content, (str, list)) and not message.get("tool_calls"):
        raise TypeError(
            f"message {number} ({role}) has content of type {type(content).__name__}, wanted a string"
        )
    if isinstance(content, list):
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind != "text" and not (media and kind in MEDIA_PARTS):
                known = "text"
                if media:
                    known = f"text, {', '.join(MEDIA_PARTS)}"
                raise ValueError(
                    f"message {number} ({role}) has a part of type {kind!r}, and what is read here is {known}"
                )
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def check_tools(tools: object) -> list[dict[str, Any]]:
    """The tools of a row, which are a list of schemas or its JSON; TypeError or ValueError for others."""
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError(f"tools are {type(tools).__name__}, wanted a list of schemas, or its JSON")
    return list(tools)


def without_fills(value: Any, name: str = "") -> Any:
    """A value of a columnar file; its tool calls, schemas of tools and arguments of tools without nulls.

    All structs of a column have the same keys there: a call has the arguments of all others, as nulls, and a
    row the tools of all others in its `tools_kwargs`, which is the column's name or an entry of the value. An
    argument that is to be null needs a file of JSON, or `arguments` as JSON text.
    """
    if name in KEYWORDS:
        return _without_nulls(value)
    if isinstance(value, dict):
        return {key: _without_nulls(each) if key in KEYWORDS else each for key, each in value.items()}
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return value
    if any("function" in each for each in value):
        return _without_nulls(value)
    return [
        {**each, "tool_calls": _without_nulls(each["tool_calls"])} if each.get("tool_calls") else each
        for each in value
    ]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(each) for each in value]
    return value


def is_sharegpt(messages: object) -> bool:
    """Whether `messages` is a list of messages in ShareGPT's form."""
    if not isinstance(messages, (list, tuple)) or not messages or not isinstance(messages[0], dict):
        return False
    return messages[0].get("role") is None and messages[0].get("from") is not None


def choose_column(columns: Iterable[str], key: str) -> str:
    """The column `key`, or `conversations` where there is no column `key` and there is that one."""
    names = set(columns)
    if key not in names and SHAREGPT in names:
        return SHAREGPT
    return key


def messages_column(
    columns: Iterable[str], messages_key: str, prompt_key: str, response_key: str
) -> str | None:
    """The column with whole conversations for supervised fine-tuning.

    It is `messages_key`, or ShareGPT's `conversations` where there are neither that column nor a prompt and a
    response. None where prompts and responses have separate columns.
    """
    names = set(columns)
    if messages_key in names:
        return messages_key
    if SHAREGPT in names and not {prompt_key, response_key} <= names:
        return SHAREGPT
    return None


def prompt_of(value: object, *, wrap: bool, media: bool = False) -> str | list[Message]:
    """The prompt in a row's prompt column: messages, or a string.

    With `wrap` a string becomes a user's message. A ShareGPT conversation that ends in an answer is the
    prompt up to that answer. `media`: as in `check_messages`. Raises TypeError or ValueError where the value
    is neither a string nor messages.
    """
    if isinstance(value, str):
        if not value:
            raise ValueError("the prompt is an empty string")
        if wrap:
            return [{"role": "user", "content": value}]
        return value
    messages = check_messages(value, media=media)
    if is_sharegpt(value) and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
        if not messages:
            raise ValueError("the conversation is one answer, with no prompt before it")
    return messages


def media_message(source: str, column: str, row: int, why: str) -> str:
    """The message for data with pictures or videos that would be left out; `why` says by what."""
    return (
        f"{source} has a column {column}, filled in row {row}, and {why}: use a model that reads pictures "
        "with data.image_key or data.video_key, or take the column out to train on the text without it"
    )


def media_keys(config: BaseDataConfig) -> tuple[str, ...]:
    """Return the columns of pictures and videos that a run reads."""
    return tuple(key for key in (config.image_key, config.video_key) if key)
