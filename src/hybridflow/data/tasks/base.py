"""The protocol of procedural tasks."""

from __future__ import annotations

from typing import Any, Literal, Protocol

Split = Literal["train", "validation"]


class Task(Protocol):
    """Questions made by a program.

    A row has the schema of `data.prompts` (data_source, prompt, ability, reward_model, extra_info with index
    and split) and, where the task knows a worked answer, `messages` with the assistant's turn, for supervised
    fine-tuning. The rows depend on (the task's seed, split, index) alone, and no training question is a
    validation question.
    """

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]: ...
