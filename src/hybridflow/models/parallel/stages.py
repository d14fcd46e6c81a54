"""A model in stages, as a pipeline has it: each rank holds some of the layers and runs them alone.

    packed rows ──► embeddings, first layers ──states──► … ──states──► last layers, norm, head ──► answers

Every rank has the whole module, so names, ties, adapters and buffers are everywhere the same. Parameters of
other stages stay on the meta device. To run a part, the architecture's own forward runs with stand-ins for
what is not in the part: a layer that returns its input, embeddings that return the states that have arrived.
So whatever the architecture does besides (rotary embeddings, kinds of layers) is done as in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.config.model import ModelConfig
from hybridflow.errors import ModelError
from hybridflow.models.blocks import decoder_blocks
from hybridflow.models.experts.layers import experts_per_token, num_experts
from hybridflow.models.files.build import auto_class, shape_of
from hybridflow.models.output_spec import Outputs, OutputSpec
from hybridflow.models.outputs import outputs_of
from hybridflow.models.parallel.sequence_parallel import SequenceCut
from hybridflow.models.policy import PolicyModel, all_states, device_of, sequence_cut
from hybridflow.models.value import ValueModel
from hybridflow.protocol.packing import PackedBatch

KEY = "fsdp_config.pipeline_parallel_size"

Model = PolicyModel | ValueModel

_PLANS = {"olmoe": ("embed_tokens", "norm")}
"""Names of the embeddings and of the last norm, for architectures that transformers has no plan for."""


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a model."""

    number: int
    """Its place among all parts."""
    layers: range
    """Numbers of its layers."""
    is_first: bool
    """Whether it has the embeddings."""
    is_last: bool
    """Whether it has the last norm and the head."""


class Stage(nn.Module):
    """The parts of a model that one rank holds, as the module that runs them.

    `stage` of `stages` ranks holds each `stages`-th of `parts` parts, the first of them number `stage`. It
    is made on the meta device and gets memory for its own parameters. Raises ModelError for an architecture
    that cannot be run in parts, and for fewer layers than parts.
    """

    backbone: Any
    _list: nn.ModuleList

    def __init__(self, model: Model, *, stage: int, stages: int, parts: int) -> None:
        super().__init__()
        self.model = model
        backbone: Any = model.backbone if isinstance(model, ValueModel) else model.hf.base_model
        self.__dict__["backbone"] = backbone  # registered within `model`
        embedding, norm = plan_of(backbone)
        layers = decoder_blocks(model)
        self.__dict__["_list"] = next(each for each in backbone.children() if list(each.children()) == layers)
        self._names = (embedding, norm)
        table = backbone.get_submodule(embedding)
        head: nn.Module = model.head
        self.tied = isinstance(model, PolicyModel) and model.head.weight is table.weight
        """Whether embeddings and head are one parameter, which the first and the last stage both hold."""
        ranges = cut_layers(*costs_of(model, layers, table), parts)
        self.parts = [
            Part(number, layers, number == 0, number == parts - 1) for number, layers in enumerate(ranges)
        ]
        """All parts of the model."""
        self.own = self.parts[stage::stages]
        """The parts of this rank."""
        self.layers: list[nn.Module] = [layers[number] for part in self.own for number in part.layers]
        """The layers of this rank."""
        held: list[nn.Module] = list(self.layers)
        if self.own[0].is_first:
            held.append(table)
        if self.own[-1].is_last:
            held += [backbone.get_submodule(norm), head]
        self._held = held
        # raise ModelError for a parameter of the model that is in none of the modules of its plan
        known = {
            parameter
            for module in [*layers, table, backbone.get_submodule(norm), head]
            for parameter in module.parameters()
        }
        for name, parameter in model.named_parameters():
            if parameter not in known or parameter.ndim == 0:
                raise ModelError(
                    f"{type(model).__name__} of model_type {model.config.model_type!r} keeps {name} outside "
                    f"of what a stage can hold: set {KEY}=1"
                )

    @property
    def absent(self) -> set[nn.Parameter]:
        """Parameters that other stages hold and this one does not."""
        here = {parameter for module in self._held for parameter in module.parameters()}
        return {parameter for parameter in self.model.parameters() if parameter not in here}

    def check_trained(self) -> None:
        """Raise ModelError where nothing in this stage is trained, as with adapters on a few layers."""
        absent = self.absent
        if any(each.requires_grad for each in self.model.parameters() if each not in absent):
            return
        layers = ", ".join(str(number) for part in self.own for number in part.layers)
        raise ModelError(
            f"nothing is trained in the stage of the layers {layers}: set model.target_modules to modules "
            f"that each stage has, or {KEY}=1"
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states between two parts."""
        return self.model.dtype

    def layers_of(self, part: Part) -> list[nn.Module]:
        """Return the layers of one of this rank's parts."""
        every = list(self._list)
        return [every[number] for number in part.layers]

    @property
    def width(self) -> int:
        """Size H of the hidden states [1, N, H] between two parts."""
        size: int = self.model.config.get_text_config().hidden_size
        return size

    def num_states(self, packed: PackedBatch) -> int:
        """Return the number N of hidden states of a micro-batch on this rank."""
        cut = self._cut(packed)
        if cut is not None:
            return cut.part
        return packed.num_tokens

    def _cut(self, packed: PackedBatch) -> SequenceCut | None:
        model = self.model
        return sequence_cut(packed, model.sequence_group, model.config, model.sequence_ring)

    def forward(
        self, packed: PackedBatch, spec: OutputSpec, part: Part, arrived: Tensor | None
    ) -> Outputs | Tensor:
        """Run a part: hidden states [1, N, H] before it (None for the first) -> those after it.

        The last part gives answers instead, each [M]. Routes are on the model's tape, those of the part.
        """
        with self._running(part, arrived):
            if part.is_last:
                return outputs_of(self.model, packed, replace(spec, routes=False))
            cut = self._cut(packed)
            routes = None
            if isinstance(self.model, PolicyModel) and self.model.routing is not None:
                routes = self.model.tape = self.model.routing.tape(packed, cut)
            return all_states(self.backbone, packed, device_of(self), cut, routes=routes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stage:
        """Move or cast what this rank holds (`nn.Module.to` and others)."""
        super()._apply(lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def _running(self, part: Part, arrived: Tensor | None) -> Iterator[None]:
        """Put stand-ins in the place of all that is not in the part, while its forward runs."""
        embedding, norm = self._names
        around = self.backbone._modules
        before = dict(around)
        layers = dict(self._list._modules)
        try:
            if arrived is not None:
                around[embedding] = _Arrived(arrived)
            if not part.is_last:
                around[norm] = nn.Identity()
            for number, (name, layer) in enumerate(layers.items()):
                if number not in part.layers:
                    self._list._modules[name] = _Elsewhere(layer)
            yield
        finally:
            around.update(before)
            self._list._modules.update(layers)


class _Arrived(nn.Module):
    """Embeddings whose result has come from another stage."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.states


class _Elsewhere(nn.Module):
    """A layer that another part runs, seen as one that changes nothing."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if hasattr(layer, "attention_type"):  # some models ask it of a layer before they call it
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def plan_of(backbone: Any) -> tuple[str, str]:
    """Return the names of the embeddings and of the last norm; ModelError for a model without such a plan."""
    config = backbone.config
    if config.get_text_config() is config:
        published = list(getattr(config, "base_model_pp_plan", None) or ())
        if "layers" in published and published[-1] != "layers":
            return published[0], published[-1]
        if config.model_type in _PLANS:
            return _PLANS[config.model_type]
    raise ModelError(
        f"{type(backbone).__name__} (model_type {config.model_type!r}) has no plan of stages in "
        f"transformers: set {KEY}=1; fsdp_size, tensor_parallel_size and ulysses_sequence_parallel_size "
        "spread it otherwise"
    )


def costs_of(model: Model, layers: Sequence[nn.Module], table: nn.Module) -> tuple[list[float], float, float]:
    """Return the cost of each layer, of the embeddings and of the head, in units of the mean layer.

    Memory and arithmetic count as much: parameters that a rank holds, and those that a token is multiplied
    with. Embeddings are held and not multiplied with, and of experts a token meets a few.
    """
    config = model.config.get_text_config()
    share = 1.0
    if experts := num_experts(config):
        share = experts_per_token(config) / experts
    held = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
    used = [
        sum(p.numel() * (share if ".experts." in f".{name}" else 1.0) for name, p in layer.named_parameters())
        for layer in layers
    ]
    mean_held = sum(held) / len(held)
    mean_used = sum(used) / len(used)
    rows = sum(p.numel() for p in table.parameters())
    top = sum(p.numel() for p in model.head.parameters())
    costs = [(own / mean_held + met / mean_used) / 2 for own, met in zip(held, used, strict=True)]
    return costs, rows / mean_held / 2, (top / mean_held + top / mean_used) / 2


def cut_layers(costs: Sequence[float], first: float, last: float, parts: int) -> list[range]:
    """Return the numbers of the layers of each part, so that the dearest part costs as little as it can.

    `first` and `last` are the costs of what comes before and after the layers. Raises ModelError for fewer
    layers than parts.
    """
    count = len(costs)
    if count < parts:
        raise ModelError(
            f"the model has {count} layers, which make no {parts} parts: set {KEY} × "
            f"virtual_pipeline_parallel_size to at most {count}"
        )
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    ends = [first + end for end in ends]
    ends[0] = 0.0
    ends[-1] += last
    # best[n]: the least cost of the dearest part where the parts so far hold n layers, and their edges
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(parts):
        best = {
            stop: min(
                (max(cost, ends[stop] - ends[edges[-1]]), [*edges, stop])
                for cost, edges in best.values()
                if edges[-1] < stop
            )
            for stop in range(min(best) + 1, count + 1)
        }
    return [range(start, stop) for start, stop in pairwise(best[count][1])]


def layers_of_parts(config: ModelConfig, parts: int, *, is_value: bool) -> list[range]:
    """Return the numbers of the layers of each part of a policy or a value model; no weights are read.

    Raises ModelError as making a `Stage` would.
    """
    shape = shape_of(config)
    with torch.device("meta"):
        hf = auto_class("policy", shape).from_config(
            shape, attn_implementation="eager", trust_remote_code=config.trust_remote_code
        )
        model: Model = ValueModel(hf) if is_value else PolicyModel(hf)
    return [part.layers for part in Stage(model, stage=0, stages=1, parts=parts).parts]


@torch.no_grad()
def check_stages(policy: PolicyModel) -> None:
    """Raise ModelError where a small whole policy gives other log-probs in two parts than in one piece.

    An architecture may do more with its embeddings than to hand them to the first layer.
    """
    layers = policy.config.get_text_config().num_hidden_layers
    stage = Stage(policy, stage=0, stages=1, parts=min(2, layers))
    lengths = (5, 3)
    index = torch.tensor([0, 1, 2, 3, 5, 6], device=policy.device)
    tokens = torch.arange(sum(lengths), device=policy.device)
    packed = PackedBatch(
        input_ids=tokens,
        position_ids=torch.cat([tokens[:length] for length in lengths]),
        lengths=lengths,
        prompt_lengths=(1, 1),
        predict_index=index,
        predict_index_on_cpu=index.cpu(),
        targets=index,
        rows=torch.tensor([0, 0, 0, 0, 1, 1], device=policy.device),
        columns=torch.tensor([0, 1, 2, 3, 0, 1], device=policy.device),
        shape=(2, 4),
    )
    spec = OutputSpec(log_probs=True)
    outputs: Any = None
    for part in stage.parts:
        outputs = stage(packed, spec, part, outputs)
    if not torch.equal(outputs["log_probs"], outputs_of(policy, packed, spec)["log_probs"]):
        raise ModelError(
            f"{type(policy.hf).__name__} (model_type {policy.config.model_type!r}) computes otherwise in "
            f"stages than in one piece: set {KEY}=1"
        )
