"""The part of a model that reads pictures and videos: from pixels to what its text model reads.

    media ──tower──► features [length, H] each ──put in the place of placeholders──► embeddings [1, N, H]
                └──► further features for the first layers (DeepStack, qwen3_vl)

Only the text model sees packed rows. The tower sees each different medium of a pass once, however many rows
share it. Positions come with the media (`protocol/prompt.py`), and which tokens are placeholders does too: a
token of a response is text, whatever its id is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from hybridflow.data.mrope import grid_positions
from hybridflow.distributed.transfers import to_device
from hybridflow.errors import ModelError
from hybridflow.protocol.packing import PlacedMedium
from hybridflow.protocol.prompt import Medium

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id", "vision_token_id")


class Features(NamedTuple):
    """The tower's features of one medium."""

    tokens: Tensor
    """[length, H]: the embeddings in place of its placeholders."""
    deep: tuple[Tensor, ...] = ()
    """[length, H] each: what is added to the states after the first layers."""


@dataclass(frozen=True)
class TextInputs:
    """The inputs of a text model that stand in the place of token ids."""

    embeds: Tensor
    """[1, N, H]."""
    further: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the text model: `visual_pos_masks` [1, N] bool, `deepstack_visual_embeds`."""

    def padded(self, length: int) -> dict[str, Any]:
        """Return the arguments of the text model for `length` tokens; those after the N are zeros."""
        missing = length - self.embeds.shape[1]
        further = dict(self.further)
        if missing and "visual_pos_masks" in further:
            further["visual_pos_masks"] = pad(further["visual_pos_masks"], (0, missing))
        return {"inputs_embeds": pad(self.embeds, (0, 0, 0, missing)), **further}


@dataclass(frozen=True)
class Family:
    """How models of one kind keep their parts, and how their tower is called."""

    text: str
    """Name of the text model in the base model."""
    tower: str
    """Name of the part that `model.freeze_vision_tower` freezes."""
    features: Callable[[Any, Sequence[Medium]], list[Features]]
    """(base model, media) -> their features."""
    sample: Callable[[PretrainedConfig], Medium]
    """A small medium with arbitrary values, for probes."""
    arguments: Callable[[Tensor, int, Medium], dict[str, Tensor]]
    """(token ids [N], the placeholder's, picture) -> arguments for the forward of transformers."""


def _read_patches(base: Any, media: Sequence[Medium]) -> list[Features]:
    """Read media as flat patches [patches, values], which Qwen's towers take for all media at once."""
    device = next(base.visual.parameters()).device
    pixels = to_device(torch.cat([medium.values["pixel_values"] for medium in media]), device)
    grids = to_device(torch.stack([medium.values["grid_thw"] for medium in media]), device)
    read = base.get_image_features(pixels, grids, return_dict=True)
    tokens = read.pooler_output
    lengths = [len(each) for each in tokens]
    deep = getattr(read, "deepstack_features", None) or []
    # transformers 5.17 leaves those of all media together
    deep = [each.split(lengths) if isinstance(each, Tensor) else each for each in deep]
    return [Features(*each) for each in zip(tokens, zip(*deep) if deep else [()] * len(media), strict=True)]


def _sample_patches(config: PretrainedConfig) -> Medium:
    vision = config.vision_config
    merge = vision.spatial_merge_size
    grid = (1, 2 * merge, 3 * merge)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    values = {"pixel_values": _waves(math.prod(grid), width), "grid_thw": torch.tensor(grid)}
    positions, advance = grid_positions(*grid, merge=merge)
    return Medium(0, 6, "sample", values, positions=positions, advance=advance)


def _patch_arguments(ids: Tensor, placeholder: int, medium: Medium) -> dict[str, Tensor]:
    return {
        "pixel_values": medium.values["pixel_values"],
        "image_grid_thw": medium.values["grid_thw"][None],
        "mm_token_type_ids": (ids == placeholder).int()[None],
    }


def _waves(*shape: int) -> Tensor:
    """Return numbers from -1 to 1 that differ from place to place, without random ones."""
    return torch.arange(math.prod(shape), dtype=torch.float32).mul(0.7).sin().reshape(shape)


def _read_crops(base: Any, media: Sequence[Medium]) -> list[Features]:
    """Read media as pictures [3, S, S] with masks [S, S], those of one size together."""
    device = next(base.vision_model.parameters()).device
    found: dict[int, Features] = {}
    sizes: dict[torch.Size, list[int]] = {}
    for number, medium in enumerate(media):
        sizes.setdefault(medium.values["pixel_values"].shape, []).append(number)
    for numbers in sizes.values():
        pixels, masks = (
            to_device(torch.stack([media[number].values[name] for number in numbers])[None], device)
            for name in ("pixel_values", "pixel_attention_mask")
        )
        read = base.get_image_features(pixels, masks, return_dict=True)
        # one tensor for each picture or, from transformers 5.23 on, one for all of them
        tokens = torch.cat([part.flatten(0, -2) for part in read.pooler_output])
        found |= dict(zip(numbers, map(Features, tokens.chunk(len(numbers))), strict=True))
    return [found[number] for number in range(len(media))]


def _sample_crop(config: PretrainedConfig) -> Medium:
    size = config.vision_config.image_size
    values = {
        "pixel_values": _waves(3, size, size),
        "pixel_attention_mask": torch.ones(size, size, dtype=torch.int64),
    }
    length = (size // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    return Medium(0, length, "sample", values)


def _crop_arguments(ids: Tensor, placeholder: int, medium: Medium) -> dict[str, Tensor]:
    return {name: value[None, None] for name, value in medium.values.items()}


_QWEN = Family("language_model", "visual", _read_patches, _sample_patches, _patch_arguments)
FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "smolvlm": Family("text_model", "vision_model", _read_crops, _sample_crop, _crop_arguments),
}
"""Families that read pictures, by `model_type`."""


def reads_media(config: PretrainedConfig) -> bool:
    """Return whether a configuration describes a model with a tower; ModelError for an unknown family."""
    if getattr(config, "vision_config", None) is None:
        return False
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"model_type {config.model_type!r} reads pictures in a way that is not known here: use one of "
            f"{', '.join(FAMILIES)}, or a model that reads text"
        )
    return True


def language_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that reads the language model of a configuration, with its tower.

    ModelError as `reads_media`.
    """
    if reads_media(config):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def placeholder_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the placeholder token ids of media, which a policy never samples."""
    if getattr(config, "vision_config", None) is None:
        return ()
    ids = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return tuple(sorted({int(number) for number in ids if number is not None}))


class Vision:
    """The reader of media of one model, which finds the model's parts again in each call: adapters and shards
    replace them.
    """

    always_reads = False
    """Whether a pass with gradients that has no media reads one that weighs nothing: ranks that share
    gradients need them of the same tensors.
    """

    def __init__(self, base: Any) -> None:
        """Take a base model of one of `FAMILIES`."""
        self._base = base
        self.family = FAMILIES[base.config.model_type]

    @classmethod
    def of(cls, base: Any) -> Vision | None:
        """Return the reader of a base model; None where it reads text alone."""
        if reads_media(base.config):
            return cls(base)
        return None

    @property
    def text(self) -> nn.Module:
        """The text model."""
        text: nn.Module = getattr(self._base, self.family.text)
        return text

    @property
    def tower(self) -> nn.Module:
        """The part that `model.freeze_vision_tower` freezes."""
        tower: nn.Module = getattr(self._base, self.family.tower)
        return tower

    def sample(self, start: int = 0) -> Medium:
        """Return a small medium for probes, whose first placeholder is at `start`."""
        return replace(self.family.sample(self._base.config), start=start)

    @property
    def placeholder(self) -> int:
        """The placeholder token id of a picture."""
        return int(self._base.config.image_token_id)

    def outside_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all that is not the text model."""
        for name, part in self._base.named_children():
            if name != self.family.text:
                yield from part.parameters()

    def freeze(self) -> None:
        """Leave the weights of the tower as they are."""
        self.tower.requires_grad_(False)

    def inputs(
        self, input_ids: Tensor, media: Sequence[PlacedMedium], *, one_at_a_time: bool = False
    ) -> TextInputs | None:
        """Return the inputs of the text model for input_ids [1, N] with these media; None: the token ids.

        With `one_at_a_time` a medium's features have the bits that they have alone. ModelError where a medium
        has another number of features than placeholders.
        """
        idle = not media and self.always_reads and torch.is_grad_enabled()
        if not media and not idle:
            return None
        embeds = self.text.get_input_embeddings()(input_ids)  # type: ignore[operator]
        if idle:
            own = self._read([self.sample()], False)[0]
            nothing = sum((part * 0.0).sum() for part in (own.tokens, *own.deep))
            return TextInputs(embeds + nothing)
        different = {each.medium.digest: each.medium for each in media}
        read = self._read(list(different.values()), one_at_a_time)
        by_digest = dict(zip(different, read, strict=True))
        for each in media:
            found = len(by_digest[each.medium.digest].tokens)
            if found != each.medium.length:
                raise ModelError(
                    f"a medium has {each.medium.length} placeholders in the prompt and {found} features: "
                    "the processor of the model's folder does not fit the model"
                )
        ordered = sorted(media, key=lambda each: each.place)
        places = torch.cat([torch.arange(each.place, each.place + each.count) for each in ordered])
        places = to_device(places, embeds.device)
        parts = [by_digest[each.medium.digest] for each in ordered]
        spans = [slice(each.first, each.first + each.count) for each in ordered]
        tokens = torch.cat([part.tokens[span] for part, span in zip(parts, spans)])
        embeds = embeds.index_copy(1, places, tokens.to(embeds)[None])
        if not parts[0].deep:
            return TextInputs(embeds)
        mask = torch.zeros(input_ids.shape, dtype=torch.bool, device=embeds.device)
        mask[0, places] = True
        deep = [
            torch.cat([part.deep[layer][span] for part, span in zip(parts, spans)])
            for layer in range(len(parts[0].deep))
        ]
        return TextInputs(embeds, {"visual_pos_masks": mask, "deepstack_visual_embeds": deep})

    def _read(self, media: list[Medium], one_at_a_time: bool) -> list[Features]:
        if one_at_a_time:
            return [self.family.features(self._base, [medium])[0] for medium in media]
        return self.family.features(self._base, media)


def settle_tower(
    vision: Vision | None, config: PretrainedConfig, *, freeze: bool, always_reads: bool = False
) -> None:
    """Freeze the part that reads pictures, and let it read in every pass, as ranks that share gradients need.

    ModelError for a model of text that has nothing to freeze.
    """
    if vision is not None:
        vision.always_reads = always_reads
        if freeze:
            vision.freeze()
    elif freeze:
        raise ModelError(
            "model.freeze_vision_tower=true, and the model reads text alone "
            f"({type(config).__name__}): leave the key out"
        )
