"""Dropout of what LoRA adapters read, in updates only: y = W·x + s·B·A·(m ∘ x) / (1 − p), m of 0 and 1.

    engine ──TokenKeys.choose(packed, update)──► a key for each token ──► masks m of every adapted layer
    engine ──TokenKeys.clear()─────────────────► no dropout: log-probs, the reference, generation

Nothing is drawn from a stream. Whether input j of a layer is dropped at a token is a function of the run's
seed, the number of the update, the layer, j, and the tokens of the row up to this one. It therefore depends
neither on how rows are packed, shared or dealt to ranks nor on when it is computed: a pass that gradient
checkpointing repeats has the same masks, and so has a run that is resumed. Rows that begin with the same
tokens share the masks of these tokens within an update, so computing a prompt once for several rows changes
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hybridflow.models.policy import PolicyModel, sequence_cut
from hybridflow.models.value import ValueModel
from hybridflow.protocol.packing import PackedBatch
from hybridflow.protocol.randomness import derive_seed

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_BITS = 53
"""Bits of a hash that are compared with the rate."""
_CHUNK = 2**24
"""Hashes that are in memory at once, 8 bytes each."""


class TokenKeys:
    """The keys of the tokens of the pass at work, which all adapted layers of a model read."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.keys: Tensor | None = None
        """[N] int64, on the device of the pass; None: nothing is dropped."""

    @classmethod
    def of(cls, model: nn.Module) -> TokenKeys | None:
        """Return the keys that a model's adapters read, or None where these have no dropout."""
        return next((each.keys for each in model.modules() if isinstance(each, DropoutLinear)), None)

    def choose(self, model: PolicyModel | ValueModel, packed: PackedBatch, update: int) -> None:
        """Drop in the passes over `packed`, forward and backward, of optimizer step number `update`."""
        keys = token_keys(packed, derive_seed(self.seed, "dropout of adapters", update))
        cut = sequence_cut(packed, model.sequence_group, model.config, model.sequence_ring)
        if cut is not None:
            keys = cut.tokens(keys)
        self.keys = keys

    def clear(self) -> None:
        """Drop nothing from now on."""
        self.keys = None


class DropoutLinear(nn.Linear):
    """The matrix A of an adapter, applied to inputs of which a share `rate` is dropped while there are keys.

    The mask is computed again for the backward pass, so no more is kept for it than without dropout.
    """

    def __init__(self, whole: nn.Linear, layer: str, rate: float, keys: TokenKeys) -> None:
        """Take the place of `whole`, which has no bias, in the layer of this name."""
        super().__init__(whole.in_features, whole.out_features, bias=False, device="meta")
        self.weight = whole.weight
        self.rate = rate
        self.keys = keys
        self.seed = derive_seed(keys.seed, f"dropout of the adapter of {layer}")

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., in] -> [..., rank], one vector for each token of the pass."""
        tokens = self.keys.keys
        if tokens is None:
            return super().forward(input)
        assert input.numel() == len(tokens) * self.in_features, (
            f"an adapted layer reads {tuple(input.shape)} in a pass over {len(tokens)} tokens"
        )
        product: Tensor = _DropoutProduct.apply(input, self.weight, tokens, self.seed, self.rate)  # type: ignore[no-untyped-call]
        return product


class _DropoutProduct(torch.autograd.Function):
    """(m ∘ x) · Aᵀ / (1 − p), whose backward pass makes m again."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, tokens: Tensor, seed: int, rate: float) -> Tensor:
        ctx.save_for_backward(inputs, weight, tokens)
        ctx.seed = seed
        ctx.rate = rate
        dropped = dropped_inputs(tokens, weight.shape[1], seed, rate).view(inputs.shape)
        return linear(inputs.masked_fill(dropped, 0), weight) / (1 - rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        inputs, weight, tokens = ctx.saved_tensors
        dropped = dropped_inputs(tokens, weight.shape[1], ctx.seed, ctx.rate).view(inputs.shape)
        grad = grads[0] / (1 - ctx.rate)
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = (grad @ weight).masked_fill_(dropped, 0)
        kept = inputs.masked_fill(dropped, 0).flatten(0, -2)
        return of_inputs, grad.flatten(0, -2).T @ kept, None, None, None


def dropped_inputs(tokens: Tensor, inputs: int, seed: int, rate: float) -> Tensor:
    """Return [N, inputs] bool, true with probability `rate`, by `tokens` [N] int64 and the layer's seed."""
    columns = _mix(torch.arange(inputs, device=tokens.device) * _GOLDEN + seed)
    limit = int(rate * 2**_BITS)
    parts = [
        _shifted(_mix(part[:, None] + columns), 64 - _BITS) < limit
        for part in tokens.split(max(1, _CHUNK // inputs))
    ]
    return torch.cat(parts)


def token_keys(packed: PackedBatch, seed: int) -> Tensor:
    """Return a key [N] int64 of each token: a hash of the seed and of the row's tokens up to this one."""
    ids = packed.input_ids
    if packed.places is not None:  # the rows in full; what they share gets the same key from each
        ids = ids[packed.places.to(ids.device)]
    lengths = torch.tensor(packed.lengths, device=ids.device)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=len(ids))
    positions = torch.arange(len(ids), device=ids.device) - starts
    sums = _mix(ids + (positions << 32)).cumsum(0)
    before = torch.cat([sums.new_zeros(1), sums])[starts]
    keys = _mix(sums - before + seed)
    if packed.places is not None:
        keys = keys.new_empty(packed.num_tokens).index_put((packed.places.to(ids.device),), keys)
    return keys


def _mix(state: Tensor) -> Tensor:
    """Return the hash of 64-bit numbers that ends a step of SplitMix64; products wrap around."""
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    found: Tensor = state ^ _shifted(state, 31)
    return found


def _shifted(state: Tensor, by: int) -> Tensor:
    """Shift to the right as an unsigned number, which int64 is not."""
    found: Tensor = (state >> by) & (2 ** (64 - by) - 1)
    return found
