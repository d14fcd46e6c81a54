"""A decode step by compiled functions, which fuse the small operations between matrix products.

    embed ──► enter ──► attention ──► between ──► attention ──► … ──► leave ──► norm
              norm, q k v, rotation   o, +, norm, MLP, +, then `enter` of the next layer

`torch.compile` makes the three functions, with Triton on CUDA and with C++ on a CPU; the layers share them.
Attention and the cache stay as they are. The plain twin is `FlatDecoder`, whose states these are within
roundings: an intermediate result of a fused operation keeps all its digits. It takes over where compiling
fails, with a warning.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hybridflow.models.attention import Layout
from hybridflow.models.flat_decoder import FlatDecoder

logger = logging.getLogger(__name__)

Affine = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""


class _Block(NamedTuple):
    """The parameters of one layer."""

    norm_before: Tensor
    query: Affine
    key: Affine
    value: Affine
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Affine
    norm_between: Tensor
    gate: Affine
    up: Affine
    down: Affine


class CompiledDecoder:
    """A decoder that computes for one token of each row what its base model computes, within roundings."""

    def __init__(self, base: Any, flat: FlatDecoder) -> None:
        self._base = base
        self._flat = flat
        self.works = True
        """False once compiling has failed: then every step is the plain one."""
        attention, mlp = base.layers[0].self_attn, base.layers[0].mlp
        head_dim, eps, activation = attention.head_dim, base.norm.variance_epsilon, mlp.act_fn
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb

        def enter(states: Tensor, cos: Tensor, sin: Tensor, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
            normed = _normed(states, block.norm_before, eps)
            shape = (states.shape[0], 1, -1, head_dim)
            query, key, value = (
                linear(normed, *each).view(shape) for each in (block.query, block.key, block.value)
            )
            if block.query_norm is not None and block.key_norm is not None:
                query, key = _normed(query, block.query_norm, eps), _normed(key, block.key_norm, eps)
            query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
            return query, key, value.transpose(1, 2)

        def leave(states: Tensor, attended: Tensor, block: _Block) -> Tensor:
            states = states + linear(attended.flatten(2), *block.output)
            normed = _normed(states, block.norm_between, eps)
            gated = activation(linear(normed, *block.gate)) * linear(normed, *block.up)
            return states + linear(gated, *block.down)

        def between(
            states: Tensor, attended: Tensor, cos: Tensor, sin: Tensor, block: _Block, after: _Block
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            states = leave(states, attended, block)
            return states, *enter(states, cos, sin, after)

        def finish(states: Tensor, attended: Tensor, block: _Block, norm: Tensor) -> Tensor:
            return _normed(leave(states, attended, block), norm, eps)

        self._enter = torch.compile(enter, dynamic=True, fullgraph=True)
        self._between = torch.compile(between, dynamic=True, fullgraph=True)
        self._finish = torch.compile(finish, dynamic=True, fullgraph=True)

    @classmethod
    def of(cls, base: Any, flat: FlatDecoder) -> CompiledDecoder | None:
        """Return a decoder for the model of `flat`; None where its layers differ or have adapters."""
        fits = all(_fits(block) for block in base.layers)
        if not fits or not isinstance(getattr(base.norm, "variance_epsilon", None), float):
            say_plain("its layers have adapters, or norms of another kind")
            return None
        return cls(base, flat)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states [B, 1, H] of input_ids and position_ids [B, 1] under `layout`."""
        # torch compiles nothing where operations are watched, as before a graph is recorded
        if self.works and not is_in_torch_dispatch_mode(include_infra_modes=False):
            try:
                return self._step(input_ids, position_ids, layout)
            except Exception as error:  # a compiler may raise anything; the plain step raises what is ours
                self.give_up(f"{type(error).__name__}: {error}")
        # what the other path has stored is stored once more
        return self._flat(input_ids, position_ids, layout)

    def check(self, states: Tensor, wanted: Tensor) -> None:
        """Give up where the first states are not those of the plain step, within the dtype's roundings."""
        distance, limit = apart(states, wanted), roundings(wanted.dtype)
        if self.works and not distance <= limit:
            told = f"its states are {distance:.2g} from those of the plain step"
            self.give_up(f"{told}, and may be {limit:.2g}")

    def give_up(self, why: str) -> None:
        """Go on with the plain step, and say why."""
        self.works = False
        say_plain(why)

    def _step(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        states = self._base.embed_tokens(input_ids)
        cos, sin = self._base.rotary_emb(states, position_ids)
        blocks = [_block_of(layer) for layer in self._base.layers]
        query, key, value = self._enter(states, cos, sin, blocks[0])
        for layer, block, after in zip(self._flat.layers, blocks, blocks[1:]):
            attended = layout.attend(query, key, value, layer.scores)
            states, query, key, value = self._between(states, attended, cos, sin, block, after)
        attended = layout.attend(query, key, value, self._flat.layers[-1].scores)
        return self._finish(states, attended, blocks[-1], self._base.norm.weight)


def apart(states: Tensor, wanted: Tensor) -> float:
    """Return how far states are from wanted ones, as a share of their norm."""
    return float((states - wanted).float().norm() / wanted.float().norm().clamp_min(1e-30))


def roundings(dtype: torch.dtype) -> float:
    """Return how far two ways to compute the same states may be `apart`."""
    return float(torch.finfo(dtype).eps ** 0.5)


def say_plain(why: str) -> None:
    """Warn that steps are not compiled."""
    logger.warning(
        "decoding goes on without torch.compile (%s). To leave it out from the start, set "
        "actor_rollout_ref.rollout.enable_torch_compile=false",
        why.splitlines()[0],
    )


def _normed(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm, of states [..., H]."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


def _fits(block: Any) -> bool:
    """Return whether a layer has plain linear layers and norms of the usual kind."""
    own, mlp = block.self_attn, block.mlp
    linears = (own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    norms = [block.input_layernorm, block.post_attention_layernorm]
    if hasattr(own, "q_norm"):
        norms += [own.q_norm, own.k_norm]
    return all(type(one) is nn.Linear for one in linears) and all(
        hasattr(norm, "variance_epsilon") for norm in norms
    )


def _block_of(block: Any) -> _Block:
    own, mlp = block.self_attn, block.mlp
    head_norms: tuple[Tensor | None, Tensor | None] = (None, None)
    if hasattr(own, "q_norm"):
        head_norms = (own.q_norm.weight, own.k_norm.weight)
    return _Block(
        block.input_layernorm.weight,
        _affine(own.q_proj),
        _affine(own.k_proj),
        _affine(own.v_proj),
        *head_norms,
        _affine(own.o_proj),
        block.post_attention_layernorm.weight,
        _affine(mlp.gate_proj),
        _affine(mlp.up_proj),
        _affine(mlp.down_proj),
    )


def _affine(module: nn.Linear) -> Affine:
    return module.weight, module.bias
