"""A fast path for one token of each row through a Llama-shaped decoder, without the cost of module calls.

    first step ──modules──► states ─┐ equal: every later step is `FlatDecoder`'s
               ──flat─────► states ─┴ else:  every later step is that of the modules

A step of generation is a few hundred small operations, and for few rows the Python code between them takes
longer than they do. The same weights are used here in the same order, and norms and rotary positions in fewer
operations where these give the bits of the model's own. So the states are equal to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from hybridflow.models.attention.layouts import Layout
from hybridflow.models.attention.scores import Scores
from hybridflow.models.cache.kv_cache import LayerShape

_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


Norm = Callable[[Tensor], Tensor]
"""States [..., H] to normed states of the same shape."""


Decoder = Callable[[Tensor, Tensor, Layout], Tensor]
"""input_ids and position_ids [B, 1] and a layout to last hidden states [B, 1, H]."""


@dataclass(frozen=True)
class FlatLayer:
    """The parts of one block, looked up once."""

    attention: Any
    mlp: Any
    norm_before: Norm
    norm_between: Norm
    scores: Scores
    head_norms: bool


class FlatDecoder:
    """A decoder that computes for one token of each row what its base model computes."""

    def __init__(
        self, base: Any, layers: list[FlatLayer], rotate: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        self.layers = layers
        self._base = base
        self._norm = _norm_of(base.norm)
        self._rotate = rotate
        self._rotates_halves = _rotates_halves(rotate, layers[0].attention)
        # models of pictures have positions in time, height and width, which are one for text
        self._axes = (3,) if hasattr(base.rotary_emb, "mrope_section") else ()

    @classmethod
    def of(cls, base: nn.Module, scores: Mapping[int, Scores]) -> FlatDecoder | None:
        """Return a decoder for a base model built like Llama, Qwen 2 and 3, or Mistral; None for any other.

        `scores` has the way in which each layer scores keys.
        """
        rotate = None
        layers = []
        if not _has(base, _BASE):
            return None
        for block in base.get_submodule("layers").children():
            attention: Any = getattr(block, "self_attn", None)
            mlp: Any = getattr(block, "mlp", None)
            heads_normed = attention is not None and _has(attention, _ATTENTION | _HEAD_NORMS)
            if not (
                _has(block, _LAYER) and _has(mlp, _MLP) and (heads_normed or _has(attention, _ATTENTION))
            ):
                return None
            rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
            parts: Any = block
            own = scores[attention.layer_idx]
            norms = (_norm_of(parts.input_layernorm), _norm_of(parts.post_attention_layernorm))
            layers.append(FlatLayer(attention, mlp, *norms, own, heads_normed))
        if rotate is None:
            return None
        return cls(base, layers, rotate)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states [B, 1, H] of input_ids and position_ids [B, 1] under `layout`."""
        states = self._base.embed_tokens(input_ids)
        cos, sin = self._base.rotary_emb(states, position_ids.expand(*self._axes, *position_ids.shape))
        if self._rotates_halves:
            first, second = sin.chunk(2, -1)
            sin = torch.cat((-first, second), -1)
        for layer in self.layers:
            states = states + self._attend(layer, layer.norm_before(states), cos, sin, layout)
            normed = layer.norm_between(states)
            mlp = layer.mlp
            gate = mlp.act_fn(_project(mlp.gate_proj, normed))
            states = states + _project(mlp.down_proj, gate.mul_(_project(mlp.up_proj, normed)))
        return self._norm(states)

    def _attend(self, layer: FlatLayer, states: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        own = layer.attention
        shape = (states.shape[0], 1, -1, own.head_dim)
        query = _project(own.q_proj, states).view(shape)
        key = _project(own.k_proj, states).view(shape)
        if layer.head_norms:
            query = own.q_norm(query)
            key = own.k_norm(key)
        if self._rotates_halves:
            query, key = _rotate_halves(query, key, cos, sin)
        else:
            query, key = self._rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        value = _project(own.v_proj, states).view(shape).transpose(1, 2)
        return _project(own.o_proj, layout.attend(query, key, value, layer.scores).flatten(2))


def choose_decoder(
    base: nn.Module, modules: Decoder, input_ids: Tensor, position_ids: Tensor, layout: Layout
) -> tuple[Decoder, Tensor]:
    """Compute a step by the modules and by `FlatDecoder`; return the decoder to use, and the states.

    That is the flat one where it exists and its states are those of the modules: to the bit on a CPU, within
    roundings on other devices, whose kernels depend on strides.
    """
    seen = ScoresSeen(layout)
    states = modules(input_ids, position_ids, seen)
    flat = FlatDecoder.of(base, seen.of_layer)
    if flat is None:
        return modules, states
    found = flat(input_ids, position_ids, layout)
    if torch.equal(found, states) or (states.device.type != "cpu" and _near(found, states)):
        return flat, states
    return modules, modules(input_ids, position_ids, layout)  # once more: the cache has what `flat` stored


def _near(found: Tensor, wanted: Tensor) -> bool:
    """Return whether states are as near to each other as two ways to compute them are."""
    distance = (found - wanted).float().norm() / wanted.float().norm().clamp_min(1e-30)
    return bool(float(distance) <= torch.finfo(wanted.dtype).eps ** 0.5)


def _rotate_halves(query: Tensor, key: Tensor, cos: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query [B, 1, H, D] and key [B, 1, KV, D] by cos [B, 1, D] and the sine, [B, 1, D] with the sign
    of its first half turned: -> [B, H, 1, D] and [B, KV, 1, D].

    A head's halves (a, b) become (a, b)·cos + (b, a)·signed, for the heads of both at once.
    """
    heads = torch.cat((query, key), 2)[:, 0]
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    rotated = (heads * cos).add_(swapped.mul_(signed))[:, :, None]
    return rotated[:, : query.shape[2]], rotated[:, query.shape[2] :]


def _rotates_halves(rotate: Callable[..., tuple[Tensor, Tensor]], attention: Any) -> bool:
    """Return whether `_rotate_halves` gives the bits of a model's own function on the model's device."""
    weight = attention.q_proj.weight
    random = torch.Generator().manual_seed(0)
    sizes = ((3, 1, 4, attention.head_dim), (3, 1, 2, attention.head_dim), *[(3, 1, attention.head_dim)] * 2)
    query, key, cos, sin = (torch.randn(size, generator=random).to(weight) for size in sizes)
    try:
        wanted = rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    except (TypeError, RuntimeError):  # other arguments
        return False
    first, second = sin.chunk(2, -1)
    found = _rotate_halves(query, key, cos, torch.cat((-first, second), -1))
    return all(map(_same_bits, found, wanted))


def _norm_of(module: Any) -> Norm:
    """Return a norm by one operation, where that gives the bits of the module; else the module."""
    norm: Norm = module
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or eps is None or "forward" in vars(module):
        return norm
    shape = weight.shape

    def fused(states: Tensor) -> Tensor:
        return rms_norm(states, shape, module.weight, eps)

    # weights of a new model are 1, which would hide another order of the products
    random = torch.Generator().manual_seed(0)
    probe = deepcopy(module)
    probe.weight.data = torch.randn(shape, generator=random).to(weight)
    states = torch.randn((3, 1, *shape), generator=random).to(weight)
    same = _same_bits(rms_norm(states, shape, probe.weight, eps), probe(states))
    return fused if same else norm


def _same_bits(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two tensors are equal; those without memory (meta) are."""
    return wanted.is_meta or torch.equal(found, wanted)


class ScoresSeen:
    """A layout that records how each layer scores its keys, and what it stores for a token."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.routes = layout.routes
        self.of_layer: dict[int, Scores] = {}
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Record a layer, and attend under the wrapped layout."""
        self.of_layer[scores.layer_idx] = scores
        self.shapes[scores.layer_idx] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        return self.layout.attend(query, key, value, scores)


def _has(module: nn.Module | None, children: set[str]) -> bool:
    """Return whether a module has exactly these children, no own parameters and no replaced `forward`."""
    if (
        module is None
        or {name for name, _ in module.named_children()} != children
        or list(module.parameters(recurse=False))
    ):
        return False
    linears = [child for child in module.children() if type(child) is nn.Linear]
    return not any("forward" in vars(one) for one in (module, *linears))


def _project(module: Any, states: Tensor) -> Tensor:
    """Apply a linear layer without a module call; adapters and other modules in its place are called."""
    if type(module) is nn.Linear:
        return linear(states, module.weight, module.bias)
    projected: Tensor = module(states)
    return projected
