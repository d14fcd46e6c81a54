"""The processor of a model that reads pictures: pictures in, tensors and the tokens around them out.

    picture ──image processor of the model's folder──► pixels ──► Read: tokens in the place of the placeholder
                                                                 and a Medium for each run of placeholders

A chat template writes one placeholder for each picture. `MediaProcessor.expand` puts the tokens of the
picture in its place. Pictures go through PIL, so they have the same values on every machine.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from hybridflow.data.mrope import grid_positions
from hybridflow.data.pictures import MediaError, Picture, blank
from hybridflow.data.remote import hub_folder
from hybridflow.data.tokenizer import PROCESSOR_FILES, Tokenizer, encode_rendered
from hybridflow.errors import ModelError
from hybridflow.protocol.prompt import Medium, MediumKind

KEPT_SIZES = 1024
"""Most sizes of pictures whose tokens are kept."""
SMALL_SIDE = 4
"""Pixels of a side below which transformers may take it for the colours."""


@dataclass(frozen=True)
class Read:
    """A picture or a video as the model reads it."""

    token_ids: tuple[int, ...]
    """The tokens in the prompt in place of its placeholder."""
    media: tuple[Medium, ...]
    """Its parts, with `start` counted from the first of these tokens."""


@dataclass(frozen=True)
class Expanded:
    """Token ids with their media, and which token each came from."""

    token_ids: list[int]
    media: tuple[Medium, ...]
    origins: list[int]
    """For each token, the place of its origin among the tokens before the expansion."""

    def spread(self, values: Sequence[int]) -> list[int]:
        """Return values of the tokens before the expansion as values of the expanded tokens."""
        return [values[origin] for origin in self.origins]


class MediaProcessor(ABC):
    """The processor of one family."""

    marks: Mapping[MediumKind, str]
    """The text that the chat template writes for a picture or a video."""
    image_class: Any
    """The image processor of transformers, by PIL: it has the same values on every machine."""

    def __init__(self, tokenizer: Tokenizer, config: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.image_processor = image_processor
        self.placeholders = {
            number for name in ("image_token_id", "video_token_id") if (number := getattr(config, name, None))
        }
        """Token ids that a row may have only where a picture is."""
        self._by_size: dict[tuple[int, int], tuple[int, ...]] = {}

    @abstractmethod
    def picture(self, picture: Picture) -> Read:
        """Return a picture as the model reads it; MediaError where its size does not fit."""

    def picture_tokens(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the token ids of any picture of (width, height) pixels; MediaError as `picture`."""
        if size not in self._by_size:
            if len(self._by_size) == KEPT_SIZES:
                self._by_size.clear()
            self._by_size[size] = self.picture(blank(size)).token_ids
        return self._by_size[size]

    def video(self, frames: Sequence[Picture], fps: float) -> Read:
        """Return a video as the model reads it; MediaError for a family that reads none here."""
        raise MediaError(f"{self.config.model_type} reads pictures here, and no videos")

    def expand(
        self, token_ids: Sequence[int], kinds: Sequence[MediumKind], reads: Sequence[Read]
    ) -> Expanded:
        """Replace the placeholders by the media that were read, in their order.

        MediaError where placeholders and media are not the same number, in the same order of `kinds`.
        """
        marks: dict[MediumKind, list[int]] = {
            kind: encode_rendered(self.tokenizer, text) for kind, text in self.marks.items()
        }
        ids: list[int] = []
        origins: list[int] = []
        media: list[Medium] = []
        place = 0
        waiting = list(zip(kinds, reads, strict=True))
        while place < len(token_ids):
            read = None
            mark = [token_ids[place]]
            if waiting:
                mark = marks[waiting[0][0]]
                if list(token_ids[place : place + len(mark)]) == mark:
                    read = waiting.pop(0)[1]
            if read is None:
                if token_ids[place] in self.placeholders:
                    raise self._mismatch(len(reads))
                ids.append(token_ids[place])
                origins.append(place)
                place += 1
                continue
            media += [replace(medium, start=len(ids) + medium.start) for medium in read.media]
            ids += read.token_ids
            origins += [place] * len(read.token_ids)
            place += len(mark)
        if waiting:
            raise self._mismatch(len(reads))
        return Expanded(ids, tuple(media), origins)

    def _mismatch(self, count: int) -> MediaError:
        marks = " and ".join(self.marks.values())
        return MediaError(
            f"the row has {count} pictures and videos, and its text another number of places for them: write "
            f"<image> or <video> once for each, in their order (the template makes {marks} of it), and "
            "nowhere else"
        )

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text without further tokens."""
        return tuple(encode_rendered(self.tokenizer, text))


class QwenProcessor(MediaProcessor):
    """Qwen2-VL and Qwen2.5-VL: flat patches, and one run of placeholders for a picture or a video."""

    image_class = Qwen2VLImageProcessorPil

    def __init__(self, tokenizer: Tokenizer, config: Any, image_processor: Any) -> None:
        super().__init__(tokenizer, config, image_processor)
        self.image = str(tokenizer.convert_ids_to_tokens(config.image_token_id))
        self.film = str(tokenizer.convert_ids_to_tokens(config.video_token_id))
        self.marks = {"image": self.image, "video": self.film}
        self.merge = int(config.vision_config.spatial_merge_size)

    def picture(self, picture: Picture) -> Read:
        """See `MediaProcessor.picture`."""
        pixels, height, width = self._patches(picture)
        medium = self._medium("image", pixels, (1, height, width))
        return Read((self.config.image_token_id,) * medium.length, (medium,))

    def picture_tokens(self, size: tuple[int, int]) -> tuple[int, ...]:
        """See `MediaProcessor.picture_tokens`."""
        if not self.image_processor.do_resize or min(size) < SMALL_SIDE:
            return super().picture_tokens(size)
        width, height = size
        with _fitting(size):
            patches: int = self.image_processor.get_number_of_image_patches(height, width)
        return (self.config.image_token_id,) * (patches // self.merge**2)

    def video(self, frames: Sequence[Picture], fps: float) -> Read:
        """See `MediaProcessor.video`; each frame is resized as a picture is."""
        pairs, height, width = self._pairs(frames)
        # Qwen2.5-VL counts time in its own ticks; Qwen2-VL has one position for each pair of frames
        ticks = getattr(self.config.vision_config, "tokens_per_second", None)
        interval = 1.0 if ticks is None else ticks * self._temporal / fps
        medium = self._medium("video", torch.cat(pairs), (len(pairs), height, width), interval)
        return Read((self.config.video_token_id,) * medium.length, (medium,))

    @property
    def _temporal(self) -> int:
        return int(self.config.vision_config.temporal_patch_size)

    def _patches(self, picture: Picture) -> tuple[Tensor, int, int]:
        """Return patches [n, values] of a picture, which is taken for all frames of a temporal patch."""
        with _fitting(picture.size):
            made = self.image_processor([picture], return_tensors="pt")
        _, height, width = made["image_grid_thw"][0].tolist()
        return made["pixel_values"], height, width

    def _pairs(self, frames: Sequence[Picture]) -> tuple[list[Tensor], int, int]:
        """Return patches of frames, `temporal_patch_size` of them together; the last frame fills up."""
        size = frames[0].size
        if any(frame.size != size for frame in frames):
            raise MediaError("the frames of a video have different sizes")
        made = [self._patches(frame) for frame in frames]
        step = self._temporal
        patches = [each[0].unflatten(1, (-1, step, made[0][0].shape[1] // (3 * step))) for each in made]
        patches += [patches[-1]] * (-len(patches) % step)
        pairs = [
            torch.stack([patches[first + place][:, :, place] for place in range(step)], 2).flatten(1)
            for first in range(0, len(patches), step)
        ]
        return pairs, made[0][1], made[0][2]

    def _medium(
        self, kind: MediumKind, pixels: Tensor, grid: tuple[int, int, int], interval: float = 1.0
    ) -> Medium:
        positions, advance = grid_positions(*grid, merge=self.merge, interval=interval)
        values = {"pixel_values": pixels, "grid_thw": torch.tensor(grid)}
        digest = digest_of(kind, values | {"positions": positions})
        return Medium(0, positions.shape[1], digest, values, kind, positions, advance)


@contextmanager
def _fitting(size: tuple[int, int]) -> Iterator[None]:
    """Turn the error on an aspect ratio that a family does not take into a MediaError with the size."""
    try:
        yield
    except ValueError as error:
        raise MediaError(f"a picture of {size[0]} × {size[1]} pixels: {error}") from error


class Qwen3Processor(QwenProcessor):
    """Qwen3-VL: a video is a text with the second before each pair of frames."""

    def __init__(self, tokenizer: Tokenizer, config: Any, image_processor: Any) -> None:
        super().__init__(tokenizer, config, image_processor)
        self._start, self._end = (
            str(tokenizer.convert_ids_to_tokens(getattr(config, f"vision_{side}_token_id")))
            for side in ("start", "end")
        )
        self.marks = {"image": self.image, "video": self._start + self.film + self._end}

    def video(self, frames: Sequence[Picture], fps: float) -> Read:
        """See `MediaProcessor.video`."""
        pairs, height, width = self._pairs(frames)
        ids: tuple[int, ...] = ()
        media = []
        for number, pixels in enumerate(pairs):
            first = number * self._temporal
            last = min(first + self._temporal, len(frames)) - 1
            medium = self._medium("video", pixels, (1, height, width))
            ids += self.ids(f"<{(first + last) / 2 / fps:.1f} seconds>{self._start}")
            media.append(replace(medium, start=len(ids)))
            ids += (self.config.video_token_id,) * medium.length + self.ids(self._end)
        return Read(ids, tuple(media))


class SmolVLMProcessor(MediaProcessor):
    """SmolVLM: a picture is itself, made small, behind the crops that it is cut into."""

    image_class = SmolVLMImageProcessorPil

    def __init__(self, tokenizer: Tokenizer, config: Any, image_processor: Any) -> None:
        super().__init__(tokenizer, config, image_processor)
        self.marks = {"image": str(tokenizer.convert_ids_to_tokens(config.image_token_id))}
        self._around = str(getattr(tokenizer, "fake_image_token", "<fake_token_around_image>"))
        self._whole = str(getattr(tokenizer, "global_image_token", "<global-img>"))
        vision = config.vision_config
        self._length = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2

    def picture(self, picture: Picture) -> Read:
        """See `MediaProcessor.picture`."""
        made = self.image_processor([picture], return_tensors="pt", return_row_col_info=True)
        rows = int(made["rows"][0][0])
        columns = int(made["cols"][0][0])
        names = [f"<row_{row + 1}_col_{column + 1}>" for row in range(rows) for column in range(columns)]
        ids: tuple[int, ...] = ()
        media = []
        for number, name in enumerate([*names, self._whole]):
            line = ""
            if names and number and number % columns == 0:
                line = "\n" if number < len(names) else "\n\n"
            ids += self.ids(line + self._around + name)
            values = {part: made[part][0, number] for part in ("pixel_values", "pixel_attention_mask")}
            digest = digest_of("image", values)
            media.append(Medium(len(ids), self._length, digest, values))
            ids += (self.config.image_token_id,) * self._length
        return Read(ids + self.ids(self._around), tuple(media))


PROCESSORS: dict[str, type[MediaProcessor]] = {
    "qwen2_vl": QwenProcessor,
    "qwen2_5_vl": QwenProcessor,
    "qwen3_vl": Qwen3Processor,
    "qwen3_vl_moe": Qwen3Processor,
    "smolvlm": SmolVLMProcessor,
}
"""Processors by `model_type`."""


def load_processor(tokenizer: Tokenizer, *, trust_remote_code: bool = False) -> MediaProcessor | None:
    """Return the processor beside a tokenizer; None where the model of that folder reads text alone.

    ModelError where the model reads pictures and its folder has no processor, or one of an unknown family.
    """
    if not tokenizer.name_or_path:  # one that was made on the spot
        return None
    path = hub_folder(str(tokenizer.name_or_path))
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):  # a folder of a tokenizer alone
        return None
    if getattr(config, "vision_config", None) is None:
        return None
    if config.model_type not in PROCESSORS:
        raise ModelError(
            f"{path}: model_type {config.model_type!r} reads pictures in a way that is not known here: use "
            f"one of {', '.join(PROCESSORS)}"
        )
    family = PROCESSORS[config.model_type]
    try:
        images = family.image_class.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"{path} has no image processor that can be loaded ({', '.join(PROCESSOR_FILES[:2])}): take "
            f"the files of the model's own folder ({' '.join(str(error).split())[:200]})"
        ) from error
    return family(tokenizer, config, images)


def digest_of(kind: MediumKind, values: Mapping[str, Tensor]) -> str:
    """Return a digest of all that the model reads of a medium."""
    digest = hashlib.sha256(kind.encode())
    for name, value in sorted(values.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()
