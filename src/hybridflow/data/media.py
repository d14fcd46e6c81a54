"""The pictures and videos of a row: its columns and messages in, media among its token ids out.

row {images: […], prompt: "<image>Count"} ──in_parts──► messages whose contents are lists of parts
                     │                                          └──chat template──► token ids
                     └──found──► pictures ──processor──► expand: token ids and media
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from hybridflow.config.data import BaseDataConfig
from hybridflow.data.files import Row, Rows
from hybridflow.data.messages import MEDIA_PARTS, Message, media_keys
from hybridflow.data.pictures import (
    SENT_FORMATS,
    MediaError,
    Picture,
    media_in,
    picture_size,
    read_picture,
    read_video,
    thumbnail,
    url_of,
)
from hybridflow.data.processor import Expanded, MediaProcessor, Read, load_processor
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.protocol.prompt import Medium, MediumKind

_MARK = re.compile(r"(<image>|<video>)")


class MediaSource(NamedTuple):
    """A picture or a video of a row, as the data has it, or a picture that a client has sent."""

    kind: MediumKind
    value: Any
    formats: tuple[str, ...] | None = None
    """Formats that the file of a picture may have; None: any."""


class MediaReader:
    """Reads the media of rows for one model."""

    def __init__(self, processor: MediaProcessor, config: BaseDataConfig) -> None:
        self.processor = processor
        self.config = config
        self._known: WeakValueDictionary[str, Read] = WeakValueDictionary()
        """What conversations that go on have read, by the digest of the picture: samples of a group that run
        beside each other share the tensors of a picture.
        """

    @classmethod
    def of_model(cls, tokenizer: Tokenizer, config: BaseDataConfig) -> MediaReader | None:
        """Return the reader of a model's conversations; None for a model that reads text alone."""
        processor = load_processor(tokenizer, trust_remote_code=config.trust_remote_code)
        return None if processor is None else cls(processor, config)

    @classmethod
    def for_rows(cls, rows: Rows, tokenizer: Tokenizer, config: BaseDataConfig) -> MediaReader | None:
        """Return the reader of a dataset; None for a model that reads text alone.

        Raises DataError for rows with media that the model, or the keys, leave out, and where a key names a
        column that is not there.
        """
        defaults = BaseDataConfig()
        for name in ("image_key", "video_key"):
            key = getattr(config, name)
            if key != getattr(defaults, name) and key:
                rows.require(key, hint=f"set data.{name} to the column of the pictures or videos")
        reader = cls.of_model(tokenizer, config)
        if reader is None:
            why = f"the model beside the tokenizer {tokenizer.name_or_path} reads text only"
            rows.refuse_media(why, named=media_keys(config))
            return None
        why = "data.image_key and data.video_key name other columns"
        rows.refuse_media(why, named=media_keys(config), read=True)
        return reader

    def in_parts(
        self, messages: Sequence[Message], row: Row, *, of_agent: bool = False
    ) -> tuple[list[Message], list[MediaSource]]:
        """Return the messages with lists of parts as contents, and the media in the order of their places.

        A place is <image> or <video> in a text, or a part of type image or video, which may hold its picture
        itself. MediaError where a row has more or fewer media in its columns than places without their own.
        In messages `of_agent`, which a tool or an environment may have written, a text without places stays a
        text, and media of the row without a place are left to the environment.
        """
        waiting = {kind: self._column(kind, row) for kind in ("image", "video")}
        marked = any(waiting.values())
        found: list[MediaSource] = []
        ready = []
        for message in messages:
            content = message.get("content")
            if content is None or (of_agent and isinstance(content, str) and not marked):
                ready.append(message)
                continue
            parts: list[dict[str, Any]] = []
            for part in _parts_of(content, marked):
                parts.append(self._place(part, waiting, found))
            ready.append({**message, "content": parts})
        left = sum(map(len, waiting.values()))
        if left and not of_agent:
            raise MediaError(
                f"the row has {left} more pictures or videos than its messages have places for: write "
                "<image> or <video> where each belongs"
            )
        return ready, found

    def as_sent(self, row: Row) -> dict[str, Any]:
        """Return a row as an agent sends it on over HTTP: its column of pictures has URLs, and its messages
        have them in parts of OpenAI's form. MediaError where a picture cannot be read or is too large to be
        sent, and for videos.
        """
        sent = dict(row)
        if self._column("video", row):
            raise MediaError(
                "videos are not sent over HTTP: give the row their frames as pictures, or leave them out"
            )
        if pictures := self._column("image", row):
            sent[str(self.config.image_key)] = _urls(pictures)
        prompt = row.get("raw_prompt")
        if isinstance(prompt, str) or not prompt:
            return sent
        messages, sources = self.in_parts(prompt, row, of_agent=True)
        if not sources:
            return sent
        urls = iter(_urls([source.value for source in sources]))
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if part["type"] == "image":
                    part |= {"type": "image_url", "image_url": {"url": next(urls)}}
        return {**sent, "raw_prompt": messages}

    def of_text(self, row: Row) -> list[MediaSource]:
        """Return the media of a row whose prompt is a text with the model's own placeholders."""
        kinds: tuple[MediumKind, ...] = ("image", "video")
        return [MediaSource(kind, value) for kind in kinds for value in self._column(kind, row)]

    def expand(self, token_ids: Sequence[int], sources: Sequence[MediaSource], *, whole: bool) -> Expanded:
        """Return token ids with media; MediaError for one that cannot be read, which it names by number.

        Media are left out unless they are read `whole`; of pictures the size is enough then.
        """
        reads = self.read(sources, whole=whole)
        return self.processor.expand(token_ids, [source.kind for source in sources], reads)

    def read(self, sources: Sequence[MediaSource], *, whole: bool = True) -> list[Read]:
        """Return the media as the model reads them, as `expand` has them."""
        reads = []
        for number, source in enumerate(sources):
            try:
                reads.append(self._read(source) if whole else self._measured(source))
            except MediaError as error:
                raise MediaError(f"{source.kind} {number}: {error}") from error
        return reads

    @staticmethod
    def of_files(files: Sequence[bytes]) -> list[MediaSource]:
        """Return pictures by the bytes of the files that `sent_file` gives, for the same decoders."""
        return [MediaSource("image", file, SENT_FORMATS) for file in files]

    def has_media(self, token_ids: Sequence[int]) -> bool:
        """Return whether there are pictures or videos among expanded token ids."""
        return not self.processor.placeholders.isdisjoint(token_ids)

    def check_places(self, token_ids: Sequence[int], media: Sequence[Medium]) -> None:
        """Raise MediaError where media do not have their tokens in the places of these token ids."""
        places = [place for place, token in enumerate(token_ids) if token in self.processor.placeholders]
        if places != [place for each in media for place in range(each.start, each.start + each.length)]:
            raise MediaError("its pictures or videos have other sizes")

    def _read(self, source: MediaSource) -> Read:
        fetch = self.config.fetch_media
        if source.kind == "image":
            return self._picture(read_picture(source.value, fetch=fetch, formats=source.formats))
        frames, fps = read_video(source.value, fetch=fetch)
        read = self.processor.video(frames, fps)
        count = len(read.media)
        return _shown(read, [thumbnail(frames[part * len(frames) // count]) for part in range(count)])

    def _picture(self, picture: Picture) -> Read:
        digest = hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).hexdigest()
        read = self._known.get(digest)
        if read is None:
            read = self.processor.picture(picture)
            # a picture that is read in crops, too, has itself as its last part
            read = _shown(read, [b""] * (len(read.media) - 1) + [thumbnail(picture)])
            self._known[digest] = read
        return read

    def _measured(self, source: MediaSource) -> Read:
        """Return the token ids that a picture or a video becomes, without its media."""
        fetch = self.config.fetch_media
        if source.kind == "image":
            size = picture_size(source.value, fetch=fetch, formats=source.formats)
            return Read(self.processor.picture_tokens(size), ())
        return Read(self.processor.video(*read_video(source.value, fetch=fetch)).token_ids, ())

    def _column(self, kind: str, row: Row) -> list[Any]:
        key = getattr(self.config, f"{kind}_key")
        value = row.get(key) if key else None
        if value is None:
            return []
        if isinstance(value, (list, tuple)):
            return list(value)
        return [value]

    def _place(
        self, part: Mapping[str, Any], waiting: dict[str, list[Any]], found: list[MediaSource]
    ) -> dict[str, Any]:
        """Return a part as the template takes it, and note its picture."""
        kind = MEDIA_PARTS.get(str(part.get("type", "text")))
        if kind is None:
            return {"type": "text", "text": part.get("text", "")}
        held: Any = media_in(part)
        if not held:
            if not waiting[kind]:
                raise MediaError(f"there are more places for an {kind} than the row has in data.{kind}_key")
            held = waiting[kind].pop(0)
        found.append(MediaSource(kind, held))
        return {"type": kind}


def _urls(pictures: Sequence[Any]) -> list[str]:
    """Return pictures as `url_of` has them; MediaError with the number of one that cannot be sent."""
    urls = []
    for number, picture in enumerate(pictures):
        try:
            urls.append(url_of(picture))
        except MediaError as error:
            raise MediaError(f"image {number} of the row: {error}") from error
    return urls


def _shown(read: Read, shown: Sequence[bytes]) -> Read:
    """Return a medium whose parts have these small pictures for people."""
    media = (replace(part, shown=each) for part, each in zip(read.media, shown, strict=True))
    return replace(read, media=tuple(media))


def _parts_of(content: str | Sequence[Any], marked: bool) -> list[Mapping[str, Any]]:
    """Return a content as parts; <image> and <video> are places in rows that have pictures or videos."""
    if not isinstance(content, str):
        return [
            each if isinstance(each, Mapping) else {"type": "text", "text": str(each)} for each in content
        ]
    if not marked:
        return [{"type": "text", "text": content}]
    kinds = {"<image>": "image", "<video>": "video"}
    return [
        {"type": kinds[text]} if text in kinds else {"type": "text", "text": text}
        for text in _MARK.split(content)
        if text
    ]


def no_media(messages: Sequence[Message]) -> None:
    """Raise DataError where a message has a picture or a video, and the model reads text alone."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping) and str(part.get("type", "text")) in MEDIA_PARTS:
                raise DataError(
                    f"message {number} has a part of type {part['type']!r}, and the model reads text only"
                )
