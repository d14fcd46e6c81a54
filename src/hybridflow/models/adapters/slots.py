"""Many LoRA adapters on one base: a policy whose linear layers have places for an adapter, filled by turns.

    open_slots(policy) ──► places, base frozen     new_adapter, read_into ──► Adapter
    slots.use(adapter)     this adapter answers and learns     slots.use(None)    the base alone

Nothing is copied when the adapter changes: peft's layers get the adapter's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from hybridflow.errors import ModelError
from hybridflow.models.adapters.adapter_folder import (
    read_adapter,
    write_adapter_config,
    write_adapter_weights,
)
from hybridflow.models.adapters.lora import (
    ADAPTER,
    LoraSettings,
    adapted_layers,
    adapter_config,
    add_lora,
    first_a,
)
from hybridflow.models.policy import PolicyModel

Pair = tuple[nn.Parameter, nn.Parameter]
"""A [rank, in] and B [out, rank] of a layer, in the base's dtype."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's own tensors."""

    rank: int
    alpha: int
    pairs: dict[str, Pair]
    """By the name of the linear layer in the causal language model; other layers are the base's."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parts by `LAYER.lora_A` and `LAYER.lora_B`."""
        for name, (a, b) in self.pairs.items():
            yield from ((f"{name}.lora_A", a), (f"{name}.lora_B", b))


class AdapterSlots:
    """The layers of a policy that may have an adapter, and the one that they have now."""

    def __init__(self, policy: PolicyModel) -> None:
        """Put places beside all linear layers but the output head, and freeze the base; ModelError without
        peft.
        """
        add_lora(policy, LoraSettings(rank=1, alpha=1))
        policy.requires_grad_(False)
        self._policy = policy
        self._layers = adapted_layers(policy)
        self._empty = {
            name: (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
            for name, layer in self._layers.items()
        }

    def new_adapter(
        self, rank: int, alpha: int, seed: int, *, attention: bool = True, mlp: bool = True
    ) -> Adapter:
        """Return a new adapter of layers of attention, of the others (`mlp`), or of both: A uniform within
        1/√in by seed and layer, the values of `init_lora`, and B zero.
        """
        wanted = [
            name for name in self._layers if (attention if "attn" in name or "attention" in name else mlp)
        ]
        if not wanted:
            raise ModelError(
                f"the layers that were chosen (attention={attention}, mlp={mlp}) are none of this model's"
            )
        pairs = {}
        for name in wanted:
            a, b = self._empty[name]
            first = first_a((rank, a.shape[1]), seed, name).to(a)
            pairs[name] = (nn.Parameter(first), nn.Parameter(b.new_zeros(b.shape[0], rank)))
        return Adapter(rank, alpha, pairs)

    def read(self, folder: Path, *, trains: bool = False) -> Adapter:
        """Return the adapter of a folder in peft's format; ModelError where it does not fit this model."""
        file = read_adapter(folder)
        pairs = {}
        for name in sorted({each.rsplit(".", 1)[0] for each in file.tensors}):
            if name not in self._empty:
                raise ModelError(f"adapter {folder} has a layer {name!r} that the served model has not")
            a, b = self._empty[name]
            first, second = file.tensors[f"{name}.lora_A"], file.tensors[f"{name}.lora_B"]
            rank = file.settings["r"]
            if first.shape != (rank, a.shape[1]) or second.shape != (b.shape[0], rank):
                raise ModelError(
                    f"adapter {folder}: {name} has parts of {tuple(first.shape)} and {tuple(second.shape)}, "
                    f"wanted {(rank, a.shape[1])} and {(b.shape[0], rank)}"
                )
            pairs[name] = (nn.Parameter(first.to(a), trains), nn.Parameter(second.to(b), trains))
        return Adapter(file.settings["r"], file.settings["lora_alpha"], pairs)

    def write(self, adapter: Adapter, folder: Path) -> None:
        """Write an adapter to a folder in peft's format."""
        config = adapter_config(self._policy)
        config.r = adapter.rank
        config.lora_alpha = adapter.alpha
        if len(adapter.pairs) < len(self._layers):
            config.target_modules = sorted(adapter.pairs)
        write_adapter_config(folder, config)
        write_adapter_weights(folder, dict(adapter.named_parameters()))

    def use(self, adapter: Adapter | None) -> None:
        """Let this adapter answer from now on; None: the base."""
        pairs: dict[str, Pair] = {} if adapter is None else adapter.pairs
        scaling = 1.0 if adapter is None else adapter.alpha / adapter.rank
        for name, layer in self._layers.items():
            a, b = pairs.get(name, self._empty[name])
            layer.lora_A[ADAPTER].weight = a
            layer.lora_B[ADAPTER].weight = b
            layer.scaling[ADAPTER] = scaling
