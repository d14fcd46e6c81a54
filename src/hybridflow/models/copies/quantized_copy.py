"""A second module of a policy that generates with quantized weights (`rollout.quantization`).

    policy's weights ──refresh──► linear layers and experts of the text model, quantized; all else as it is

The output head, embeddings, norms, routers, adapters and the tower that reads pictures keep their precision.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.copies.quantized_weights import KEY, MULTIPLE, QuantizedWeight, check_kind
from hybridflow.models.copies.sliced import SlicedLinear, replace_layer
from hybridflow.models.copies.twin import Twin
from hybridflow.models.experts.layers import expert_modules, is_router
from hybridflow.models.policy import PolicyModel

logger = logging.getLogger(__name__)

_OF_EXPERTS = ("gate_up_proj", "down_proj")


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized copy; its own weight has no memory."""

    quantized: QuantizedWeight

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., in] -> [..., out]."""
        return self.quantized.linear(input, self.bias)


class QuantizedCopy:
    """The second module of `policy`, whose weights `refresh` quantizes.

    `kind`: a key of `quantized_weights.KINDS`. `device`: where it generates; left out: where the policy is.
    `lora` and `replica` are those that the policy was made with; `key` names the kind in errors. Raises
    ConfigError where the device cannot multiply by this kind, ModelError where a model allows no second
    module or has nothing to quantize.
    """

    def __init__(
        self,
        policy: PolicyModel,
        kind: str,
        *,
        device: torch.device | None = None,
        lora: LoraSettings | None = None,
        replica: ReplicaRanks | None = None,
        key: str = KEY,
    ) -> None:
        if policy.dtype == torch.float64:
            raise ModelError(
                f"{key}={kind} with a model in float64: rounded weights multiply in float32 or less; "
                "set actor_rollout_ref.model.dtype=float32"
            )
        self.whole = policy
        self.kind = kind
        self._device = device or policy.device
        self._make = check_kind(kind, self._device, key)
        dtypes = {name: parameter.dtype for name, parameter in policy.named_parameters()}
        self._twin = Twin(policy, dtypes=dtypes, device=self._device, lora=lora, replica=replica)
        self.policy = self._twin.policy
        """The module that generates, without memory for its weights before `refresh`."""
        self._copies: dict[str, list[QuantizedWeight]] = {}
        """Quantized copies by the name of their parameter: one, or one for each expert."""
        self._transposed: set[str] = set()
        """Names of experts' parameters [E, K, N]."""
        self._quantize_layers()
        if self.policy.chooses_experts_kernel:
            self._quantize_experts()
        if not self._copies:
            raise ModelError(
                f"{key}={kind}: {type(policy.hf).__name__} has no linear layer whose sizes are multiples of "
                f"{MULTIPLE}, so nothing of it can be rounded; leave {key} out"
            )
        logger.info(
            "generation multiplies by %s copies of %d weights; %d others stay as they are",
            kind,
            len(self._copies),
            len(dtypes) - len(self._copies),
        )

    @property
    def names(self) -> set[str]:
        """Names of the policy's parameters that are quantized."""
        return set(self._copies)

    @property
    def nbytes(self) -> int:
        """Bytes that quantized weights take now."""
        return sum(one.nbytes for copies in self._copies.values() for one in copies)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the policy's present weights; share the others with it where the device is one.

        Quantized copies, but for float16, and weights that come from another device stay at their addresses
        from one call to the next, so that graphs that were recorded with them stay right.
        """
        own = dict(self.policy.named_parameters())
        for name, weight in self.whole.named_parameters():
            copies = self._copies.get(name)
            if copies is None:
                _put(own[name], weight.detach(), shares=weight.device == own[name].device)
                continue
            parts = [weight.detach()] if weight.dim() == 2 else list(weight.detach())
            for copy, part in zip(copies, parts, strict=True):
                copy.fill((part.T if name in self._transposed else part).to(self._device))

    def free(self) -> None:
        """Free the memory; weights shared with the policy stay with it."""
        self._twin.free()
        for copies in self._copies.values():
            for copy in copies:
                copy.free()

    def _quantize_layers(self) -> None:
        names = {id(parameter): name for name, parameter in self.policy.named_parameters()}
        for path, layer in list(self.policy.text.named_modules()):
            if type(layer) not in (nn.Linear, SlicedLinear) or ".lora_" in f".{path}":
                continue
            if is_router(self.policy.text, path):
                continue
            name = names[id(layer.weight)]
            if any(size % MULTIPLE for size in self._twin.shapes[name]):
                continue
            copy = self._make()
            self._copies[name] = [copy]
            if isinstance(layer, SlicedLinear):
                layer.quantized = copy
                continue
            new = QuantizedLinear(layer.in_features, layer.out_features, bias=False, device="meta")
            new.weight = layer.weight
            new.bias = layer.bias
            new.quantized = copy
            replace_layer(self.policy.text, path, new)

    def _quantize_experts(self) -> None:
        found: dict[str, dict[str, list[QuantizedWeight]]] = {}
        for path, experts in expert_modules(self.policy.hf).items():
            names = {leaf: f"hf.{path}.{leaf}" for leaf in _OF_EXPERTS}
            shapes = [self._twin.shapes.get(name, ()) for name in names.values()]
            if any(len(shape) != 3 or any(size % MULTIPLE for size in shape[1:]) for shape in shapes):
                continue
            copies = {leaf: [self._make() for _ in range(experts.num_experts)] for leaf in names}
            found[path] = copies
            self._copies |= {names[leaf]: copies[leaf] for leaf in names}
            if experts.is_transposed:
                self._transposed |= set(names.values())
        if found:
            self.policy.quantize_experts(found)


def _put(own: nn.Parameter, weight: Tensor, *, shares: bool) -> None:
    """Give `own` the values of `weight`: its memory, or a copy, in the place of the one before."""
    if shares:
        own.data = weight
    elif own.shape == weight.shape:
        own.copy_(weight)
    else:
        own.data = weight.to(own.device, copy=True)
