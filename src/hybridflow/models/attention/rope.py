"""Rotary frequencies that depend on the length of a row: `dynamic` and `longrope`, computed for each row.

    positions [B, N] ─► rows ─► rows up to the limit: the model's first frequencies
                              └► longer rows: those of their own length ─► cos and sin, in the order of tokens

transformers takes the frequencies of the longest row of a forward pass for all of its rows, and some of its
modules keep them for the next one. Here each row gets those that it has alone, whatever it is packed with. A
row that is generated is another matter: its keys were rotated when it was shorter, so a row that changes its
frequencies on the way would not have the log-probs of training. `longest_generated` is where that begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import unwrap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridflow.errors import ModelError

Settings = Mapping[str, Any]


def rope_settings(config: PretrainedConfig) -> dict[str, Settings]:
    """Return the rotary settings by type of layer; those of a model with one kind of layer by ''."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested: dict[str, Settings] = {name: value for name, value in rope.items() if isinstance(value, dict)}
    if nested or not rope:
        return nested
    return {"": rope}


def length_limit(config: PretrainedConfig) -> int | None:
    """Return the number of tokens beyond which a row has other rotary frequencies; None if there is none."""
    text = config.get_text_config()
    limits = [_limit(text, settings) for settings in rope_settings(config).values()]
    return min((limit for limit in limits if limit is not None), default=None)


def longest_generated(config: PretrainedConfig) -> int | None:
    """Return the most tokens of a row that the native engine generates; None where the model names no limit.

    This is the model's `max_position_embeddings`, more with yarn, which is for `factor` times the original
    length, and less where frequencies change with the length of a row.
    """
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        for settings in rope_settings(config).values():
            if settings.get("rope_type") == "yarn":
                original = settings.get("original_max_position_embeddings") or positions
                positions = max(positions, int(original * settings["factor"]))
    limits = [limit for limit in (positions, length_limit(config)) if limit is not None]
    return min(limits, default=None)


def describe_rope(config: PretrainedConfig) -> str:
    """Return the rotary settings in force, for a log: the type of each kind of layer and its numbers."""
    described = []
    for kind, settings in rope_settings(config).items():
        shown = [f"{name} {_short(value)}" for name, value in settings.items() if name not in _NAMES]
        name = str(settings.get("rope_type", "default"))
        described.append(f"{kind} {name} ({', '.join(sorted(shown))})".strip())
    return "; ".join(described) or "none"


_NAMES = ("rope_type", "type")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, (list, tuple)):
        return f"[{len(value)} numbers]"
    return str(value)


def check_lengths(config: PretrainedConfig, longest: int, key: str) -> None:
    """Raise ModelError for a row past the limit where a rank or a sequence does not hold rows whole.

    `key` is the setting that makes rows whole.
    """
    limit = length_limit(config)
    if limit is not None and longest > limit:
        raise ModelError(
            f"a row of {longest} tokens: the rotary frequencies of this model ({describe_rope(config)}) "
            f"change past {limit} tokens, and a part of a row cannot tell its length. Set {key}, or shorten "
            "data.max_prompt_length and data.max_response_length"
        )


def rotate_rows_alone(hf: nn.Module) -> None:
    """Make rotary modules whose frequencies depend on length compute those of each row, where there are any.

    Raises ModelError for a module that does so in another way.
    """
    for module in hf.modules():
        kinds = getattr(module, "rope_type", None)
        if not isinstance(kinds, dict):
            kinds = {"": kinds}
        config = getattr(module, "config", None)
        if not isinstance(config, PretrainedConfig) or not any(map(_changes, kinds.values())):
            continue
        settings = rope_settings(config)
        if any("mrope_section" in entry for entry in settings.values()):
            raise ModelError(
                f"{type(module).__name__}: positions of pictures do not tell the length of a row, which "
                f"rotary scaling of type {', '.join(map(str, kinds.values()))} depends on: use yarn or linear"
            )
        if unwrap(type(module).forward) is type(module).forward:
            raise ModelError(
                f"{type(module).__name__} chooses its rotary frequencies in a way of its own, by the longest "
                "row of a forward pass, so that rows would change each other's log-probs: use yarn or linear"
            )
        module.forward = MethodType(_forward, module)


def _changes(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _limit(text: PretrainedConfig, settings: Settings) -> int | None:
    kind = settings.get("rope_type", "default")
    if not _changes(kind):
        return None
    if kind != "longrope":  # transformers starts from the length that the configuration has now
        return int(text.max_position_embeddings)
    same = settings.get("short_factor") == settings.get("long_factor")
    if same and settings.get("short_mscale") == settings.get("long_mscale"):
        return None
    return int(settings["original_max_position_embeddings"])


@torch.no_grad()
def _forward(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Return what the module returns for each row alone: its cos and sin [B, N, D], in the dtype of `x`."""
    plain = unwrap(type(module).forward)
    told = () if layer_type is None else (layer_type,)
    text = module.config.get_text_config()
    limit = _limit(text, rope_settings(module.config)[layer_type or ""])
    lengths = row_lengths(position_ids)
    if limit is None or not bool((lengths > limit).any()):
        return plain(module, x, position_ids, *told)
    parts = []
    places = []
    for length, chosen in _by_length(module, lengths, limit, layer_type):
        place = chosen.nonzero()[:, 0]
        positions = position_ids.reshape(-1)[place][None]
        with _Frequencies(module, length, layer_type):
            parts.append(plain(module, x, positions, *told))
        places.append(place)
    order = torch.cat(places).argsort()
    shape = position_ids.shape
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=1)[0, order].unflatten(0, shape)
    return tuple(torch.cat(each, dim=1)[0, order].unflatten(0, shape) for each in zip(*parts, strict=True))


def row_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of the row of each token, [B * N] int64; a row is a run of rising positions.

    The last position of a row is one less than its length, as where it is whole or where it is decoded.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    first = starts.reshape(-1).nonzero()[:, 0]
    last = torch.cat([first[1:] - 1, first.new_tensor([position_ids.numel() - 1])])
    return (position_ids.reshape(-1)[last] + 1).repeat_interleave(last - first + 1)


def _by_length(
    module: Any, lengths: Tensor, limit: int, layer_type: str | None
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Yield (length, tokens [B * N] bool) of rows with equal frequencies; length None: up to the limit."""
    short = lengths <= limit
    if bool(short.any()):
        yield None, short
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if kind == "longrope":  # the same for all longer rows
        yield lengths.max(), ~short
        return
    for length in lengths[~short].unique():
        yield length, lengths == length


class _Frequencies:
    """A context in which a rotary module has the frequencies of rows of one length."""

    def __init__(self, module: Any, length: Tensor | None, layer_type: str | None) -> None:
        prefix = f"{layer_type}_" if layer_type else ""
        self.module = module
        self.name = f"{prefix}inv_freq"
        self.first: Tensor = getattr(module, self.name)
        self.wanted = self.first
        if length is not None:
            kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
            self.wanted, _ = ROPE_INIT_FUNCTIONS[kind](
                module.config, self.first.device, seq_len=length, layer_type=layer_type
            )

    def __enter__(self) -> None:
        setattr(self.module, self.name, self.wanted)

    def __exit__(self, *error: object) -> None:
        setattr(self.module, self.name, self.first)
