"""Rows of a samples file as the page takes them: short for its table, cut to size for a trajectory.

{"prompt": …, "response": …, "score": …, "tokens": {…}} ──brief──► one entry of each of COLUMNS
                                                        └─detail─► the row without what no page can hold
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_TOKENS = 2048  # a response
MAX_TEXT = 20_000  # characters of a prompt, a response or a conversation
MAX_BRIEF = 160  # characters of a prompt or a response in the table

COLUMNS = (
    "row_id",
    "uid",
    "trajectory_id",
    "lineage",
    "score",
    "num_tokens",
    "num_turns",
    "finish_reason",
    "data_source",
    "prompt",
    "response",
    "key",
    "has_tokens",
)
"""Columns of the table of rollouts. `key` is the same for the same prompt in all runs."""

_MARKER = re.compile(r"<[^<>]*>")
_ROLES = {"assistant", "user", "system"}


def is_shown(row: Any) -> bool:
    """Return whether a line's value is a row as the run writes them; the page cannot show any other."""
    if not isinstance(row, dict):
        return False
    scalars = (row[name] for name in COLUMNS if name in row)
    tokens = row.get("tokens")
    messages = row.get("messages")
    media = row.get("media")
    return (
        not any(isinstance(value, (dict, list)) for value in scalars)
        and (not isinstance(tokens, dict) or all(isinstance(values, list) for values in tokens.values()))
        and (not isinstance(messages, list) or all(map(_is_message, messages)))
        and (media is None or (isinstance(media, list) and all(map(_is_medium, media))))
    )


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    calls = message.get("tool_calls") or []
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls
    )


def _is_medium(medium: Any) -> bool:
    return (
        isinstance(medium, dict)
        and isinstance(medium.get("digest"), str)
        and isinstance(medium.get("picture", ""), str)
    )


def brief(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return one list for each of COLUMNS that some row has, with None where another has it not."""
    entries = [_entry(row) for row in rows]
    columns = {}
    for name in COLUMNS:
        values = [entry.get(name) for entry in entries]
        if any(value is not None for value in values):
            columns[name] = values
    return columns


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    entry = {name: finite(row[name]) for name in COLUMNS if name in row}
    if "row_id" in row:
        entry["row_id"] = str(row["row_id"])  # more digits than a number of the page has
    extra = row.get("extra_info")
    if isinstance(extra, Mapping) and "num_turns" in extra:
        entry["num_turns"] = extra["num_turns"]
    if isinstance(row.get("prompt"), str):
        entry["key"] = text_key(row["prompt"])
        entry["prompt"] = _telling_line(row["prompt"])
    if isinstance(row.get("response"), str):
        entry["response"] = " ↵ ".join(row["response"][: 2 * MAX_BRIEF].split("\n")).strip()[:MAX_BRIEF]
    entry["has_tokens"] = bool(row.get("tokens")) or None
    return entry


def text_key(text: str) -> str:
    """Return the key of a prompt's text: eight hexadecimal digits."""
    return f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}"


def _telling_line(prompt: str) -> str:
    """Return the last line of a prompt that says something outside the markers of a chat template."""
    for line in reversed(prompt[-4 * MAX_TEXT :].split("\n")):
        said = _MARKER.sub("", line).strip()
        if said not in _ROLES and any(letter.isalnum() for letter in said):
            return said[:MAX_BRIEF]
    return prompt.strip()[:MAX_BRIEF]


def detail(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample row as the page takes it: cut to size, and without numbers that JSON cannot hold."""
    kept: dict[str, Any] = {}
    for name, value in row.items():
        if name == "tokens" and isinstance(value, Mapping):
            kept["tokens"] = {
                field: [finite(item) for item in values[:MAX_TOKENS]] for field, values in value.items()
            }
            longest = max((len(values) for values in value.values()), default=0)
            kept["tokens_cut"] = max(0, longest - MAX_TOKENS)
        elif name == "messages" and isinstance(value, list):
            kept["messages"] = _messages(value)
        elif isinstance(value, str) and len(value) > MAX_TEXT:
            kept[name] = value[:MAX_TEXT] + f"… (cut; {len(value)} characters in all)"
        else:
            kept[name] = finite(value)
    return kept


def take_pictures(rows: Iterable[Mapping[str, Any]], most: float = math.inf) -> dict[str, str]:
    """Take the pictures out of all rows: return each once, by its digest, in at most `most` characters.

    A file has a picture in the first row that shows it, so rows of the same file are to come in order.
    """
    pictures: dict[str, str] = {}
    left = most
    for medium in (medium for row in rows for medium in (row.get("media") or ())):
        picture = medium.pop("picture", None)
        if picture and medium["digest"] not in pictures and len(picture) <= left:
            pictures[medium["digest"]] = picture
            left -= len(picture)
    return pictures


def digests(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the digests of all pictures that rows name."""
    return {medium["digest"] for row in rows for medium in (row.get("media") or ())}


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation as far as MAX_TEXT characters reach: role, name, content and calls as text."""
    kept: list[dict[str, Any]] = []
    left = MAX_TEXT
    for number, message in enumerate(messages):
        if left <= 0:
            kept.append({"role": "…", "content": f"{len(messages) - number} more messages", "calls": []})
            break
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        texts = [f"{call.get('name')}({_text(call.get('arguments'))})" for call in calls]
        content = _text(message.get("content"))
        if isinstance(parts := message.get("content"), list) and all(
            isinstance(part, dict) for part in parts
        ):
            content = "".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
        role = " ".join(str(message[key]) for key in ("role", "name") if message.get(key))
        kept.append({"role": role, "content": content[:left], "calls": [text[:left] for text in texts]})
        left -= len(content) + sum(map(len, texts))
    return kept


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def number(value: Any) -> float | str | None:
    """Return a number with six digits, the name of one that is not finite, or None for what is none."""
    if not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:  # a whole number may have thousands of digits
        value = math.inf if value > 0 else -math.inf
    if not math.isfinite(value):
        return str(value).replace("nan", "NaN").replace("inf", "Infinity")
    return float(f"{value:.6g}")


def finite(value: Any) -> Any:
    """Return the same JSON value with NaN and infinities as their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return number(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
