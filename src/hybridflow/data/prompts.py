"""Prompts for generation: rows in verl's schema in, token ids with the row they belong to out.

    {data_source, prompt, ability, reward_model{style, ground_truth}, extra_info}
        ──encode──► PromptRow(prompt_token_ids, row, index)

Every row is tokenised once, while the dataset is built: rows that fail and prompts that are too long are
known, counted and shown before anything trains. The token ids are kept (four bytes each); the rest of a row
is read again from the table on access, and its pictures are made into tensors then: before, their sizes
are enough.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config.data import DataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.files import RaggedInts, Row, Rows, as_rows
from hybridflow.data.media import MediaReader, no_media
from hybridflow.data.messages import MEDIA, Message, check_messages, choose_column, media_keys
from hybridflow.data.pictures import MediaError
from hybridflow.data.processor import Expanded
from hybridflow.data.row_report import RowReport
from hybridflow.data.row_schema import complete_row, note_missing_columns, require_prompts
from hybridflow.data.tokenizer import Tokenizer, check_template, encode_prompt
from hybridflow.errors import DataError
from hybridflow.protocol.prompt import Medium, Prompt
from hybridflow.protocol.storage import media_of, plain_media

logger = logging.getLogger(__name__)


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
    """The data's own answer with its end token, where the run learns from it (`data/build.py`)."""
    media: tuple[Medium, ...] = ()
    """The pictures and videos among the tokens."""

    @property
    def prompt(self) -> Prompt:
        """The token ids and media that a response continues."""
        return Prompt(tuple(self.prompt_token_ids), self.media)

    def to_state(self) -> dict[str, Any]:
        """Return all fields in types that a checkpoint can keep."""
        (media,), tensors = plain_media([self.media])
        return {**vars(self), "media": media, "media_tensors": tensors}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PromptRow:
        """Return the row from a result of `to_state`; older checkpoints have no media."""
        fields = {name: value for name, value in state.items() if name not in ("media", "media_tensors")}
        (media,) = media_of([state.get("media", ())], dict(state.get("media_tensors", {})))
        return cls(**fields, media=media)


class PromptDataset:
    """The prompts of `rows` that can be used, tokenised; item i is a PromptRow.

    Raises DataError for a missing prompt column, prompts over `data.max_prompt_length` with
    `truncation=error`, or no usable row. A user's class (`data.custom_cls`) is constructed as
    `cls(files: list[str], tokenizer, config: DataConfig)` and has `__len__` and `__getitem__(i)` that gives
    either a PromptRow or a row dict in the schema above; row dicts are then encoded as here. To reuse this
    class: `super().__init__(load_rows(files, config.cache_dir), tokenizer, config)`.
    """

    def __init__(self, rows: Rows | Sequence[Row], tokenizer: Tokenizer, config: DataConfig) -> None:
        self.rows = as_rows(rows)
        self.tokenizer = tokenizer
        self.config = config
        self.num_overlong = 0
        self._template = ChatTemplate(tokenizer, config.apply_chat_template_kwargs)
        self.agent_names: set[str] = set()
        """Names in the column `agent_name`."""
        self.data_sources: set[str] = set()
        """Data sources of the rows."""
        self._all_have_truth = True
        self._kept: list[int] = []
        self._ids = RaggedInts()
        self._with_media: set[int] = set()
        self.reader: MediaReader | None = None
        self._check_columns()
        self.report = RowReport(self.rows.source, len(self.rows))
        self._encode_all()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def has_media(self) -> bool:
        """Whether a row that is kept has pictures or videos."""
        return bool(self._with_media)

    def __getitem__(self, position: int) -> PromptRow:
        index = self._kept[position]
        row = complete_row(self.rows[index], index, self.config)
        ids = self._ids[position % len(self)]
        media: tuple[Medium, ...] = ()
        if index in self._with_media:
            assert self.reader is not None, "there are media where they are read"
            try:
                media = self._encode_row(row, whole=True).media
                self.reader.check_places(ids, media)
            except MediaError as error:
                raise DataError(
                    f"row {index} of {self.rows.source} was read before, and now: {error}"
                ) from error
        return PromptRow(ids, row, row["index"], media=media)

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the token ids of one prompt.

        Messages are rendered by the chat template with the generation prompt, and what looks like a special
        token in the words of others than the assistant stays text; a string is taken as it stands.
        Raises TypeError or ValueError where the prompt is neither, and whatever the template raises.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is an empty string")
            return encode_prompt(self.tokenizer, prompt)
        return self._template.begin(check_messages(prompt, media=self.reader is not None))

    def _encode_row(self, row: Row, *, whole: bool = False) -> Expanded:
        """Return the token ids of a complete row, and its media where they are read `whole`; raises what
        `encode` does, and MediaError.
        """
        prompt = row["raw_prompt"]
        if self.reader is None:
            if not isinstance(prompt, str):
                no_media(prompt)
            ids = self.encode(prompt)
            return Expanded(ids, (), list(range(len(ids))))
        if isinstance(prompt, str):
            return self.reader.expand(self.encode(prompt), self.reader.of_text(row), whole=whole)
        messages, sources = self.reader.in_parts(prompt, row)
        return self.reader.expand(self.encode(messages), sources, whole=whole)

    def _check_columns(self) -> None:
        config = self.config
        if not len(self.rows):
            raise DataError(f"{self.rows.source} has no rows")
        require_prompts(self.rows, config)
        self.reader = MediaReader.for_rows(self.rows, self.tokenizer, config)
        note_missing_columns(self.rows.source, self.rows.columns, config)
        first = self.rows[0].get(choose_column(self.rows.columns, config.prompt_key))
        check_template(
            self.tokenizer, self.rows.source, first, wrap=config.wrap_prompts, use="go to the model"
        )

    def extend(self, rows: Sequence[Row], source: str) -> None:
        """Add rows behind those that are there.

        Rows that cannot be used are left out, counted and shown by `source`; so are those that are too long
        with `data.truncation=error`, and those that the run is not set up for: with an agent or a data source
        that no row before has, without a ground truth where all have one, with media that nothing reads.
        Raises DataError where no row can be used.
        """
        report = RowReport(source, len(rows))
        self._encode(rows, report, first=len(self.rows))
        report.close()
        if report.overlong:
            logger.warning("%s", report.overlong_rows("prompts", "data.max_prompt_length", self._limit))
        self.rows = self.rows.plus(rows)

    def _encode_all(self) -> None:
        report = self.report
        self._encode(self.rows, report)
        self.num_overlong = len(report.overlong)
        report.close()
        if report.overlong:
            self._say_overlong(report.overlong_rows("prompts", "data.max_prompt_length", self._limit))

    @property
    def _limit(self) -> int:
        return self.config.max_prompt_length

    def _encode(self, rows: Sequence[Row], report: RowReport, first: int = 0) -> None:
        """Take in the rows that can be used; `first` is the number of rows before them, which the run is set
        up for.
        """
        limit = self._limit

        def encode(index: int, row: Row) -> Expanded:
            complete = complete_row(dict(row), first + index, self.config)
            if first:
                self._check_made(row, complete)
            if agent := complete.get("agent_name"):
                self.agent_names.add(str(agent))
            self.data_sources.add(complete["data_source"])
            self._all_have_truth &= complete["reward_model"].get("ground_truth") is not None
            return self._encode_row(complete)

        for place, encoded in report.encoded(rows, encode):
            index = first + place
            ids = encoded.token_ids
            has_media = self.reader is not None and self.reader.has_media(ids)
            if report.is_overlong(place, len(ids), limit):
                if self.config.filter_overlong_prompts:
                    continue
                if first and (has_media or self.config.truncation == "error"):
                    continue
                if has_media and self.config.truncation != "error":
                    raise DataError(
                        f"row {index} of {self.rows.source} has pictures and {len(ids)} tokens with them, "
                        f"more than data.max_prompt_length={limit}, and "
                        f"data.truncation={self.config.truncation} would cut the places of pictures: "
                        "raise data.max_prompt_length, or set data.filter_overlong_prompts=true"
                    )
                ids = truncate(ids, limit, self.config.truncation)
            if has_media:
                self._with_media.add(index)
            self._kept.append(index)
            self._ids.append(ids)

    def _check_made(self, row: Row, complete: Row) -> None:
        """Raise ValueError for a further row that a run which was set up for the rows at the start cannot
        use; `complete` has what the row leaves out.
        """
        source = complete["data_source"]
        agent = complete.get("agent_name")
        if source not in self.data_sources and row.get(self.config.reward_fn_key) is None:
            raise ValueError(f"the row has no {self.config.reward_fn_key}")
        if source not in self.data_sources:
            raise ValueError(f"{source} is no data source of the rows at the start")
        if agent and str(agent) not in self.agent_names:
            raise ValueError(f"{agent} is no agent of the rows at the start")
        if self._all_have_truth and complete["reward_model"].get("ground_truth") is None:
            raise ValueError(
                "the row has no ground truth (reward_model.ground_truth, or the column answer), and all rows "
                "at the start have one"
            )
        unread = {*MEDIA, *media_keys(self.config)}
        why = "the model reads text only"
        if self.reader is not None:
            unread -= {*media_keys(self.config)}
            why = "data.image_key and data.video_key name other columns"
        if filled := sorted(name for name in unread if row.get(name)):
            raise ValueError(f"the row has {', '.join(filled)}, and {why}")

    def _say_overlong(self, text: str) -> None:
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


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Return the tokens that `data.truncation` leaves: left, right or middle says which are cut.

    Of a cut in the middle the first and the last `limit` / 2 tokens are left (the last get the odd one).
    """
    if len(ids) <= limit:
        return ids
    if side == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    if side == "left":
        return ids[len(ids) - limit :]
    return ids[:limit]
