"""Dense layers sharded over the ranks of a generating replica: plain tensors and no gradients.

    colwise ──own columns──► attention over own heads, own part of an MLP ──► rowwise ──sum over ranks──►
    whole again

The plan is that of training (`tensor_parallel.tensor_styles`): a rank has the same slices in both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import ADAPTER
from hybridflow.models.copies.quantized_weights import QuantizedWeight
from hybridflow.models.parallel.tensor_parallel import KEY, Style, check_sizes, tensor_styles
from hybridflow.models.policy import PolicyModel

ROLLOUT_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"


class SlicedLinear(nn.Linear):
    """This rank's slice of a linear layer, with the same parameter names."""

    style: Style
    replica: ReplicaRanks
    quantized: QuantizedWeight | None = None
    """A copy in fewer bits that is multiplied by in the place of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., in] -> [..., out]: colwise its own outputs, rowwise the sum from its own inputs."""
        if self.style.startswith("colwise"):
            out = self._product(input, self.bias)
            if self.style == "colwise_gather":
                parts = [torch.empty_like(out) for _ in range(self.replica.size)]
                dist.all_gather(parts, out.contiguous(), group=self.replica.group)
                return torch.cat(parts, -1)
            return out
        if self.style == "rowwise_split":
            input = input.chunk(self.replica.size, -1)[self.replica.rank]
        out = self.replica.sum_(self._product(input, None))
        if self.bias is not None:
            out = out + self.bias
        return out

    def _product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        if self.quantized is not None:
            return self.quantized.linear(input, bias)
        return linear(input, self.weight, bias)


def check_sliceable(policy: PolicyModel, ranks: int) -> dict[str, Style]:
    """Return how each module of `policy.hf` is sharded over `ranks` ranks.

    Raises ModelError where its architecture or its sizes do not allow it.
    """
    try:
        styles = tensor_styles(policy.hf)
    except ModelError as error:
        raise ModelError(str(error).replace(KEY, ROLLOUT_KEY)) from error
    check_sizes(policy.hf, styles, ranks, key=ROLLOUT_KEY)
    return styles


def slice_layers(policy: PolicyModel, styles: dict[str, Style], replica: ReplicaRanks) -> dict[str, int]:
    """Replace dense layers, and adapters beside them, by slices on the meta device.

    Returns the dimension along which each of these parameters is cut, by its name in `policy`; rank r of n
    has the r-th of n equal slices.
    """
    dims: dict[str, int] = {}
    for name, style in styles.items():
        module = policy.hf.get_submodule(name)
        cut: dict[str, Style] = {}
        if isinstance(module, nn.Linear):
            cut = {name: style}
        if hasattr(module, "base_layer"):  # y = W·x + s·B·A·x: the outputs are B's, the inputs are A's
            part = "lora_A"
            if style.startswith("colwise"):
                part = "lora_B"
            cut = {f"{name}.base_layer": style, f"{name}.{part}.{ADAPTER}": style}
        for path, how in cut.items():
            dims |= {f"hf.{path}.{leaf}": dim for leaf, dim in _slice(policy.hf, path, how, replica).items()}
    return dims


def _slice(hf: nn.Module, path: str, style: Style, replica: ReplicaRanks) -> dict[str, int]:
    whole = hf.get_submodule(path)
    assert isinstance(whole, nn.Linear), f"{path} is a {type(whole).__name__}"
    inputs = whole.in_features
    outputs = whole.out_features
    dims: dict[str, int] = {}
    if style.startswith("colwise"):
        outputs //= replica.size
        dims["weight"] = 0
        if whole.bias is not None:
            dims["bias"] = 0
    else:
        inputs //= replica.size
        dims["weight"] = 1
    layer = SlicedLinear(
        inputs, outputs, bias=whole.bias is not None, device="meta", dtype=whole.weight.dtype
    )
    layer.style = style
    layer.replica = replica
    replace_layer(hf, path, layer)
    return dims


def replace_layer(root: nn.Module, path: str, layer: nn.Module) -> None:
    """Put `layer` in the place of the submodule of `root` at `path`."""
    parent, _, leaf = path.rpartition(".")
    owner = root.get_submodule(parent)
    if isinstance(owner, nn.ModuleDict):
        owner[leaf] = layer
    else:
        setattr(owner, leaf, layer)
