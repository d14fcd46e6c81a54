"""The Hugging Face parameters of a model in the tensors of a megatron-core stage, and back.

    q_proj, k_proj, v_proj   ◄─► linear_qkv: for each key-value head its queries, its keys, its values
    gate_proj, up_proj       ◄─► linear_fc1, one after the other
    experts.gate_up_proj     ◄─► linear_fc1 of each expert that this rank holds
    lm_head                  ◄─► output_layer, without rows that only pad the vocabulary
    head, of a value model   ◄─► value_head, which each rank of the last stage has all of

Each rank's part of a Hugging Face parameter is a box of it: tensor parallelism cuts by heads, columns or
rows, expert parallelism by experts. The same map serves weights, moments of the optimizer and anything else
that has the shapes of the weights, so checkpoints and generation know Hugging Face names alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hybridflow.config.megatron import WAY_OUT
from hybridflow.distributed.mesh import EngineMesh
from hybridflow.distributed.shards import Box
from hybridflow.engines.megatron.network import Network
from hybridflow.errors import ModelError
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel

TensorOf = Callable[[str], Tensor]
"""A function from a name in the stage to a tensor with the shape of that parameter."""
View = Callable[[Tensor], Tensor]

Cut = Literal["whole", "tensor", "experts"]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
}
"""Parameters of a layer that each rank has all of, and their names in megatron-core's layers."""


@dataclass(frozen=True)
class StagePiece:
    """This rank's part of one Hugging Face parameter."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    box: Box
    """The place of the part in the whole, empty where another stage holds the parameter."""
    sources: tuple[str, ...] = ()
    """Names of the stage's parameters that it lies in: one, or one for each expert; none: it is absent."""
    view: View = lambda tensor: tensor
    """Returns the place of the part within a source; it has as many elements, in the same order."""
    mesh: DeviceMesh | None = None
    """The ranks that share the whole, cut along `dim`; None where each has all of it."""
    dim: int = 0

    def read(self, tensor_of: TensorOf) -> Tensor:
        """Return the part, from tensors with the shapes of the stage's parameters; it may be a view."""
        parts = [self.view(tensor_of(source).detach()) for source in self.sources]
        if len(parts) > 1:
            return torch.stack(parts)
        return parts[0].reshape(self.box.shape)

    def write(self, tensor_of: TensorOf, part: Tensor) -> None:
        """Put the part into tensors with the shapes of the stage's parameters."""
        parts = part.unbind() if len(self.sources) > 1 else (part,)
        for source, own in zip(self.sources, parts, strict=True):
            place = self.view(tensor_of(source).detach())
            if place.data_ptr() != own.data_ptr():  # else it is the place itself, which was read
                place.copy_(own.reshape(place.shape))

    def placed(self, part: Tensor) -> Tensor:
        """Return the part as one of a sharded tensor, or as it is where each rank has all of it."""
        if self.mesh is None or not self.sources:
            return part
        whole = torch.empty(self.shape, device="meta", dtype=part.dtype)
        meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
        return DTensor(
            part, DTensorSpec(self.mesh, (Shard(self.dim),), tensor_meta=meta), requires_grad=False
        )


class HFWeights:
    """The pieces of all parameters of `model`, a module on the meta device, in the stage of this rank, whose
    parts are numbered.

    Raises ModelError for a parameter that has no place in megatron-core's layers, and for one of theirs that
    the model does not have.
    """

    def __init__(self, model: PolicyModel | ValueModel, parts: list[Network], mesh: EngineMesh) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(nn.ModuleList(parts).named_parameters())
        self._model = model
        self._mesh = mesh
        self._config: TransformerConfig = parts[0].config
        self._at_ends = {name.partition(".")[2]: name for name in self.parameters}  # but for layers
        self._layers = {
            layer.layer_number - 1: f"{number}.decoder.layers.{place}."
            for number, part in enumerate(parts)
            for place, layer in enumerate(part.decoder.layers)
        }
        self.pieces = {
            name: self._piece(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
        }
        taken = {source for piece in self.pieces.values() for source in piece.sources}
        if self.parameters.keys() != taken:
            raise self._misfit(f"has no weights for {min(self.parameters.keys() - taken)} of its layers")
        # megatron-core says this where it draws weights; the norm of gradients counts what is whole once
        cut = {
            source: piece.dim
            for piece in self.pieces.values()
            for source in piece.sources
            if piece.mesh is not None and piece.mesh is mesh.tensor
        }
        for source, dim in cut.items():
            if not hasattr(self.parameters[source], "tensor_model_parallel"):  # which biases have
                set_tensor_model_parallel_attributes(self.parameters[source], True, dim, 1)

    def read(self, tensor_of: TensorOf, dtype: torch.dtype) -> Iterator[tuple[str, StagePiece, Tensor]]:
        """Yield each parameter's name, piece and part; where absent the whole, of `dtype`, without memory."""
        for name, piece in self.pieces.items():
            if piece.sources:
                yield name, piece, piece.read(tensor_of)
            else:
                yield name, piece, torch.empty(piece.shape, dtype=dtype, device="meta")

    def _misfit(self, why: str) -> ModelError:
        return ModelError(
            f"strategy=megatron: the {self._model.config.model_type} {why}, so megatron-core would compute "
            f"something else. {WAY_OUT}"
        )

    def _piece(self, name: str, shape: tuple[int, ...]) -> StagePiece:
        file_name = name.removeprefix("hf.").replace("backbone.", "model.", 1)
        layer = _LAYER.fullmatch(file_name)
        if layer is not None:
            if int(layer[1]) not in self._layers:
                return _absent(shape)
            found = self._in_layer(layer[2], self._layers[int(layer[1])], shape)
        else:
            # the last of several stages has tied embeddings as its head
            sources = {
                "model.embed_tokens.weight": ["embedding.word_embeddings.weight", "output_layer.weight"],
                "lm_head.weight": ["output_layer.weight"],
                "model.norm.weight": ["decoder.final_layernorm.weight"],
                "head.weight": ["value_head.weight"],
                "head.bias": ["value_head.bias"],
            }.get(file_name)
            if sources is None:
                raise self._misfit(f"has a parameter {file_name} that its layers lack")
            if file_name == "model.embed_tokens.weight" and not self._model.config.tie_word_embeddings:
                sources.pop()
            source = next((self._at_ends[each] for each in sources if each in self._at_ends), None)
            if source is None:
                return _absent(shape)
            if len(shape) == 1 or file_name == "head.weight":
                found = self._cut(shape, "whole", (source,))
            else:
                found = self._cut(shape, "tensor", (source,), view=_first_rows)
        odd = [source for source in found.sources if source not in self.parameters]
        if odd:
            raise self._misfit(f"has a parameter {file_name} that its layers lack")
        return found

    def _in_layer(self, part: str, layer: str, shape: tuple[int, ...]) -> StagePiece:
        """Return the piece of a parameter of a layer that this rank holds."""
        own, _, kind = part.rpartition(".")
        if part in _WHOLE:
            return self._cut(shape, "whole", (layer + _WHOLE[part],))
        if own in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            config = self._config
            assert config.num_query_groups is not None and config.kv_channels is not None
            queries = config.num_attention_heads // config.num_query_groups
            first, count = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[own[10]]
            groups = config.num_query_groups // self._mesh.layout.tp
            size = config.kv_channels
            view = partial(_of_groups, groups=groups, start=first * size, stop=(first + count) * size)
            return self._cut(shape, "tensor", (f"{layer}self_attention.linear_qkv.{kind}",), view=view)
        if part == "self_attn.o_proj.weight":
            return self._cut(shape, "tensor", (f"{layer}self_attention.linear_proj.weight",), dim=1)
        if own in ("mlp.gate_proj", "mlp.up_proj"):
            view = partial(_half, second=own == "mlp.up_proj")
            return self._cut(shape, "tensor", (f"{layer}mlp.linear_fc1.{kind}",), view=view)
        if part == "mlp.down_proj.weight":
            return self._cut(shape, "tensor", (f"{layer}mlp.linear_fc2.weight",), dim=1)
        linear = {"mlp.experts.gate_up_proj": "linear_fc1", "mlp.experts.down_proj": "linear_fc2"}.get(part)
        if linear is None:
            raise self._misfit(f"has a parameter {part} of a layer that its layers lack")
        experts = range(shape[0] // self._mesh.layout.ep)
        sources = tuple(f"{layer}mlp.experts.local_experts.{expert}.{linear}.weight" for expert in experts)
        return self._cut(shape, "experts", sources)

    def _cut(
        self,
        shape: tuple[int, ...],
        cut: Cut,
        sources: tuple[str, ...],
        *,
        view: View | None = None,
        dim: int = 0,
    ) -> StagePiece:
        mesh = {"whole": None, "tensor": self._mesh.tensor, "experts": self._mesh.experts}[cut]
        box = Box.whole(shape)
        if mesh is not None:
            box = box.cut(dim, mesh.get_local_rank(), mesh.size())
        if view is _first_rows:
            view = partial(_first_rows, count=box.shape[0])
        return StagePiece(shape, box, sources, view or _same, mesh, dim)


def _absent(shape: tuple[int, ...]) -> StagePiece:
    nothing = (0,) * len(shape)
    return StagePiece(shape, Box(nothing, nothing))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _first_rows(tensor: Tensor, count: int = 0) -> Tensor:
    return tensor[:count]


def _of_groups(tensor: Tensor, groups: int, start: int, stop: int) -> Tensor:
    return tensor.view(groups, -1, *tensor.shape[1:])[:, start:stop]


def _half(tensor: Tensor, second: bool) -> Tensor:
    return tensor.chunk(2)[int(second)]
