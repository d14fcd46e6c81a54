"""Preference data: rows in, answers that are compared out.

    {chosen, rejected}              ──► Comparison(chosen, rejected)
    {prompt, completion, label}     ──► Comparison(the answer, another row's answer to its prompt)   (kto)

Only the last answer of a conversation is learned; all before it is the prompt.

Answers whose steps have labels are here too, from which a process reward model learns.

    {prompt, completions: [step, …], labels: [true, …]} ──► StepRow(tokens, where steps end, their labels)

A step is scored at its last token, that of the separator after it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridflow.config.preference import PreferenceDataConfig, RewardDataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.files import RaggedInts, Row, Rows, as_rows
from hybridflow.data.messages import prompt_of
from hybridflow.data.prompts import truncate
from hybridflow.data.row_report import RowReport
from hybridflow.data.row_schema import answers_of_pair, label_of, require_comparisons, require_steps, steps_of
from hybridflow.data.sft import ConversationEncoder, Encoded, SFTRow, last_answer, usable_rows
from hybridflow.data.tokenizer import Tokenizer, check_template, encode_prompt, encode_rendered
from hybridflow.errors import DataError

CHOSEN = 1
REJECTED = 0
MISMATCHED = -1
"""An answer to another prompt than the one it is given to: kto's reference point is made of them."""
WRONG = 1
RIGHT = 2
"""The value in a mask where a step ends, so that a row that is cut keeps the labels of its tokens."""


@dataclass(frozen=True)
class Comparison:
    """Two answers, what each is (CHOSEN, REJECTED or MISMATCHED), and where it was computed the sum of the
    reference model's log-probs of each.
    """

    answers: tuple[SFTRow, SFTRow]
    kinds: tuple[int, int]
    reference: tuple[float, ...] = ()
    margin: float | None = None
    """By how much the chosen answer is better, where the data says so."""


class PreferenceDataset:
    """The comparisons of `rows` that can be used; item i is a Comparison.

    With `single` (kto) each answer is a separate item, beside its prompt with the answer of the next row
    that has another prompt; rows are then pairs, or have one answer with a label. `margin_key` names a column
    of margins, if the data has one. Raises DataError as `SFTDataset` does.
    """

    reference: Tensor | None = None
    """[items, 2] float32, nats: sums of the reference model's log-probs."""

    def __init__(
        self,
        rows: Rows | Sequence[Row],
        tokenizer: Tokenizer,
        config: PreferenceDataConfig,
        *,
        single: bool = False,
        margin_key: str | None = None,
    ) -> None:
        self.rows = as_rows(rows)
        self.config = config
        self.single = single
        self._margin_key = margin_key
        self._ids = RaggedInts()
        self._mask = RaggedInts()
        self._kinds: list[int] = []
        self._margins: list[float | None] = []
        self._kept: list[int] = []
        if not len(self.rows):
            raise DataError(f"{self.rows.source} has no rows")
        column = require_comparisons(self.rows, config, single=single)
        self.paired = config.chosen_key in self.rows.columns
        self.encoder = ConversationEncoder(self.rows, tokenizer, config, column)
        self.report = RowReport(self.rows.source, len(self.rows))
        for index, answers in usable_rows(self.rows, self.report, self._encode, config):
            row = self.rows[index]
            self._margins.append(self._margin_of(row))
            for (ids, mask), kind in zip(answers, self._kinds_of(row), strict=True):
                self._ids.append(ids)
                self._mask.append(mask)
                self._kinds.append(kind)
                self._kept.append(index)
        if single:
            self._others = self._answers_to_other_prompts()

    def __len__(self) -> int:
        if self.single:
            return len(self._ids)
        return len(self._ids) // 2

    def __getitem__(self, position: int) -> Comparison:
        reference: tuple[float, ...] = ()
        if self.reference is not None:
            reference = tuple(self.reference[position].tolist())
        if self.single:
            answers = (self._answer(position), self._mismatched(position))
            return Comparison(answers, (self._kinds[position], MISMATCHED), reference)
        pair = (self._answer(2 * position), self._answer(2 * position + 1))
        return Comparison(pair, (CHOSEN, REJECTED), reference, self._margins[position])

    def digest(self) -> str:
        """Return a digest of all that a model computes log-probs of."""
        form = (self.single, self.paired, self.config.max_length)
        content = hashlib.blake2b(repr(form).encode(), digest_size=16)
        for part in (self._ids, self._mask):
            content.update(part.content())
        return content.hexdigest()

    def _answers_to_other_prompts(self) -> list[int]:
        """Return for each answer the number of the next one to another prompt, in one column of pairs."""
        distance = 2 if self.paired else 1
        size = len(self)
        prompts = [hash(tuple(self._ids[n][: last_answer(self._mask[n])[0]])) for n in range(size)]
        others = [-1] * size
        for number in [*reversed(range(size))] * 2:  # twice: after the last row comes the first
            following = (number + distance) % size
            others[number] = following
            if prompts[following] == prompts[number]:
                others[number] = others[following]
        if -1 in others:
            raise DataError(
                f"{self.rows.source}: all usable rows have one prompt: kto compares with answers to others"
            )
        return others

    def _answer(self, number: int) -> SFTRow:
        return SFTRow(self._ids[number], self._mask[number], self._kept[number])

    def _mismatched(self, number: int) -> SFTRow:
        own = self._answer(number)
        other = self._answer(self._others[number])
        start, _ = last_answer(own.loss_mask)
        begin, _ = last_answer(other.loss_mask)
        ids = own.input_ids[:start] + other.input_ids[begin:]
        mask = own.loss_mask[:start] + other.loss_mask[begin:]
        limit = self.config.max_length
        return SFTRow(truncate(ids, limit, "right"), truncate(mask, limit, "right"), own.index)

    def _kinds_of(self, row: Row) -> list[int]:
        if self.paired:
            return [CHOSEN, REJECTED]
        key = self.config.label_key
        return [CHOSEN if label_of(row[key], key) else REJECTED]

    def _margin_of(self, row: Row) -> float | None:
        if self._margin_key not in self.rows.columns:
            return None
        margin = row.get(self._margin_key)
        if margin is None or not math.isfinite(float(margin)):
            raise ValueError(f"{self._margin_key}: got {margin!r}, wanted a finite number")
        return float(margin)

    def _encode(self, row: Row) -> list[Encoded]:
        self._kinds_of(row)
        self._margin_of(row)
        if not self.paired:
            return [_last(self.encoder.encode(row))]
        encoded = []
        for answer in answers_of_pair(row, self.config):
            if isinstance(answer, str):
                encoded.append(_last(self.encoder.answer(answer, row)))
            else:
                encoded.append(_last(self.encoder.conversation(answer, row)))
        return encoded


def _last(encoded: Encoded) -> Encoded:
    """Return a conversation that ends with its last answer, which alone is learned."""
    ids, mask = encoded
    start, end = last_answer(mask)
    return ids[:end], [0] * start + [1] * (end - start)


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
