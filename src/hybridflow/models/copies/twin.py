"""A second module (the twin) of a policy, whose parameters get memory only for generation.

It generates where the policy's own module cannot, whose parameters are shards that its blocks gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings, add_lora, quantized_layers
from hybridflow.models.copies.sliced import check_sliceable, slice_layers
from hybridflow.models.liger import has_liger, patch_liger
from hybridflow.models.nf4 import NF4Linear
from hybridflow.models.parallel.tensor_parallel import Style
from hybridflow.models.policy import PolicyModel


class Twin:
    """A second module for generation, and the dimension along which each sliced parameter is cut.

    `policy` gives the architecture and the buffers, which are never sharded; `dtypes` are those of the twin's
    parameters, by name. With `replica` of several ranks it has this rank's slices. A base in NF4, which is
    whole on each rank, is not copied: the twin has the policy's codes while it generates. Raises ModelError
    for a model that cannot be cut among them.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        lora: LoraSettings | None = None,
        replica: ReplicaRanks | None = None,
    ) -> None:
        self.device = device
        self.replica = replica or ReplicaRanks()
        kind: Any = next(each for each in type(policy.hf).__mro__ if not issubclass(each, FSDPModule))
        with torch.device("meta"):
            own = kind._from_config(
                deepcopy(policy.config), dtype=next(iter(dtypes.values())), attn_implementation="eager"
            )
            self.policy = PolicyModel(own)
        self.policy.hf.generation_config = policy.hf.generation_config
        if has_liger(policy):
            patch_liger(self.policy.hf)
        styles: dict[str, Style] = {}
        if self.replica.size > 1:
            styles = check_sliceable(self.policy, self.replica.size)
        if lora is not None:
            add_lora(self.policy, lora)
        self.slices = slice_layers(self.policy, styles, self.replica)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.policy.named_parameters()}
        """Shapes of the parameters, or of this rank's slices of them."""
        _forget_parameters(self.policy, dtypes, device)
        _take_buffers(self.policy, policy, device)
        self.policy.eval()
        theirs = quantized_layers(policy)
        self._quantized = [(own, theirs[name]) for name, own in quantized_layers(self.policy).items()]
        """Each of the twin's layers in NF4, and the policy's whose codes it has."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name; tied ones occur once."""
        return dict(self.policy.named_parameters())

    def allocate(self) -> Mapping[str, Tensor]:
        """Give all parameters memory with arbitrary contents, and return them by name."""
        for name, parameter in self.parameters.items():
            parameter.data = torch.empty(self.shapes[name], dtype=parameter.dtype, device=self.device)
        for own, theirs in self._quantized:  # those that are there now: an offloaded policy has others later
            own.share(theirs)
        return {name: parameter.data for name, parameter in self.parameters.items()}

    def free(self) -> None:
        """Free the memory of all parameters."""
        for parameter in self.parameters.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)
        for own, _ in self._quantized:
            own.codes = own.codes.to("meta")
            own.scales = own.scales.to("meta")


def _forget_parameters(policy: PolicyModel, dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
    """Replace parameters on the meta device by empty ones on `device`; tied ones stay tied."""
    named = dict(policy.named_parameters())
    assert named.keys() == dtypes.keys(), (
        f"the twin has other parameters than the policy: {sorted(named.keys() ^ dtypes.keys())[:3]}"
    )
    made = {
        id(p): nn.Parameter(torch.empty(0, dtype=dtypes[name], device=device), requires_grad=False)
        for name, p in named.items()
    }
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]


def _take_buffers(twin: PolicyModel, policy: PolicyModel, device: torch.device) -> None:
    """Copy the policy's buffers; ModelError for a tensor that is neither parameter nor buffer of a module."""
    theirs = dict(policy.named_buffers(remove_duplicate=False))
    for path, module in twin.named_modules():
        if isinstance(module, NF4Linear):
            continue
        for name in list(module._buffers):
            whole_name = f"{path}.{name}".removeprefix(".")
            module._buffers[name] = theirs[whole_name].detach().clone().to(device)
        odd = [
            name
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value.device.type == "meta"
        ]
        if odd:
            raise ModelError(
                f"{type(twin.hf).__name__}: {path} keeps the tensor {odd[0]!r} neither as parameter nor as "
                "buffer, so a second module cannot be made of it for generation: train on one rank"
            )
