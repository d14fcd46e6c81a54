"""Pairs of answers, and steps with labels, in the rows of the data; neither torch nor a tokenizer is needed.

{chosen, rejected: messages}           UltraFeedback's form; messages that start with the answer follow
                                       the prompt of the column data.prompt_key
{prompt, chosen, rejected: texts}      the answers to a prompt, which is a templated text or messages
{chosen, rejected: transcripts}        hh-rlhf's form: texts of `Human:` and `Assistant:`
{prompt, completions, labels}          an answer's steps and their labels: true, 1 or +; false, 0 or -
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

from hybridflow.config.preference import PreferenceDataConfig, RewardDataConfig
from hybridflow.data.files import Row
from hybridflow.data.messages import Message, check_messages, prompt_of

_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_LABELS = {True: True, False: False, "+": True, "-": False}  # of numbers, 1 and 0 are equal to these


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
    """Return what a label of the column `key` says; ValueError where it is none."""
    if not isinstance(value, Hashable) or value not in _LABELS:
        raise ValueError(f"{key}: got {value!r}, wanted true or false, 1 or 0, or + or -")
    return _LABELS[value]
