"""Answers whose steps have labels, from which a process reward model learns.

    {prompt, completions: [step, …], labels: [true, …]} ──► StepRow(tokens, where steps end, their labels)

A step is scored at its last token, that of the separator after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.config.preference import RewardDataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.comparisons import steps_of
from hybridflow.data.files import RaggedInts, Row, Rows, as_rows
from hybridflow.data.messages import prompt_of
from hybridflow.data.row_report import RowReport
from hybridflow.data.row_schema import require_steps
from hybridflow.data.sft import Encoded, SFTRow, usable_rows
from hybridflow.data.tokenizer import Tokenizer, check_template, encode_prompt, encode_rendered
from hybridflow.errors import DataError

WRONG = 1
RIGHT = 2
"""What stands in a mask where a step ends, so that a row that is cut keeps the labels of its tokens."""


@dataclass(frozen=True)
class StepRow:
    """An answer, whose `loss_mask` is 1 where a step ends, and the labels of its steps."""

    answer: SFTRow
    labels: list[bool]


class StepDataset:
    """The answers of `rows` that can be used; item i is a StepRow. Raises DataError as `SFTDataset` does."""

    def __init__(self, rows: Rows | Sequence[Row], tokenizer: Tokenizer, config: RewardDataConfig) -> None:
        self.rows = as_rows(rows)
        self.tokenizer = tokenizer
        self.config = config
        self._kept: list[int] = []
        self._ids = RaggedInts()
        self._marks = RaggedInts()
        if not len(self.rows):
            raise DataError(f"{self.rows.source} has no rows")
        require_steps(self.rows, config)
        first = self.rows[0].get(config.prompt_key)
        check_template(tokenizer, self.rows.source, first, wrap=config.wrap_prompts, use="are read")
        report = RowReport(self.rows.source, len(self.rows))
        for index, [(ids, marks)] in usable_rows(self.rows, report, self._encode, config):
            self._kept.append(index)
            self._ids.append(ids)
            self._marks.append(marks)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, position: int) -> StepRow:
        marks = self._marks[position]
        ends = [int(mark > 0) for mark in marks]
        # nothing stands before the first token, at which a row that was cut may begin
        labels = [mark == RIGHT for mark in marks[1:] if mark]
        return StepRow(SFTRow(self._ids[position], ends, self._kept[position]), labels)

    def _encode(self, row: Row) -> list[Encoded]:
        steps, labels = steps_of(row, self.config)
        prompt = prompt_of(row[self.config.prompt_key], wrap=self.config.wrap_prompts)
        if isinstance(prompt, str):
            ids = encode_prompt(self.tokenizer, prompt)
        else:
            template = ChatTemplate(self.tokenizer, self.config.apply_chat_template_kwargs)
            ids = template.begin(prompt, None)
        marks = [0] * len(ids)
        for number, (step, label) in enumerate(zip(steps, labels, strict=True)):
            separator = self.config.step_separator if number + 1 < len(steps) else ""
            tokens = encode_rendered(self.tokenizer, step + separator)
            ids = ids + tokens
            marks += [0] * (len(tokens) - 1) + [RIGHT if label else WRONG]
        return [(ids, marks)]
