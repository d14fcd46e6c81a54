"""A Hugging Face causal language model as a policy: packed rows in, log-probs of their response tokens out.

The module that trains is the module that generates: `forward` is for training and scoring, and the native
rollout engine calls `hidden` and `logits` with another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AttentionInterface

from hybridflow.errors import ModelError
from hybridflow.models.attention.layouts import ATTENTION_NAME, Layout, PackedLayout, attention
from hybridflow.models.attention.rope import check_lengths, rotate_rows_alone
from hybridflow.models.attention.shared_tokens import SharedTokens
from hybridflow.models.exact_mode import ExactMode, join_sums
from hybridflow.models.experts.layers import ExactExperts
from hybridflow.models.experts.routing import RouteTape, Routing
from hybridflow.models.flat_decoder import Decoder, choose_decoder
from hybridflow.models.float64 import compute_in_float64
from hybridflow.models.heads.divergence import (
    DivergenceSpec,
    HeadInputs,
    full_kl,
    head_divergence,
    top_outcomes,
)
from hybridflow.models.heads.log_probs import LogitTransform, Product, TokenOutputs, token_log_probs
from hybridflow.models.lean_backward import keep_gates_lean
from hybridflow.models.norms import join_norms
from hybridflow.models.parallel.sequence_parallel import SequenceCut
from hybridflow.models.vision import TextInputs, Vision, placeholder_ids, reads_media

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig, PreTrainedModel

    from hybridflow.distributed.mesh import Column
    from hybridflow.models.copies.quantized_weights import QuantizedWeight
    from hybridflow.protocol.packing import PackedBatch, PlacedMedium


_OTHER_LAYERS = {
    *("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"),  # a state that goes along a row
    *("chunked_attention", "indexed_attention", "minimax_m3_sparse"),  # keys that are chosen otherwise
    *("compressed_sparse_attention", "heavily_compressed_attention"),
}
"""Types of layers that our attention does not compute."""
_ROWS_APART = "actor.use_prefix_grouper=false, or algorithm.share_prompts=false"


class PolicyModel(nn.Module):
    """A causal LM whose one forward goes from packed rows to log-probs, for FSDP and hooks."""

    sequence_group: ProcessGroup | None = None
    """Ranks that share the tokens of a forward pass; each gets the same packed batch and the same outputs."""
    column: Column | None = None
    """Ranks that hold the other stages of the model, or None where this rank has all layers."""
    sequence_ring = False
    """Whether these ranks attend in a ring instead of exchanging heads."""
    reference: Callable[[PackedBatch], HeadInputs] | None = None
    """Gives the reference's states and head for the KL over the whole vocabulary, where a run asks for it."""
    teacher: Callable[[PackedBatch], HeadInputs] | None = None
    """Gives those of the teacher of a divergence over the whole vocabulary."""
    is_sharded = False
    """Whether each rank holds a part of the parameters, which are gathered for a pass."""
    source_dtype: torch.dtype | None = None
    """The dtype that the model's folder says its weights have; None where the model comes from no folder."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.source_dtype = getattr(hf, "source_dtype", None)
        use_attention(hf)
        head = hf.get_output_embeddings()
        if not isinstance(head, nn.Module) or not isinstance(getattr(head, "weight", None), Tensor):
            raise ModelError(
                f"{type(hf).__name__} has no output head with a weight matrix: it is no causal language model"
            )
        self.vision = Vision.of(hf.base_model)
        self.transform = replace(LogitTransform.from_config(hf.config), forbidden=placeholder_ids(hf.config))
        if self.dtype == torch.float64:
            compute_in_float64(hf)
        self._decoder: Decoder | None = None  # chosen in the first step of decoding
        self._exact: ExactMode | None = None
        self._experts = ExactExperts(hf)
        self.routing: Routing | None = None
        """The routers' part in recording and replaying routes; None before `follow_routes`."""
        self.tape: RouteTape | None = None
        """The routes of the newest forward pass, of this rank's tokens; None before `follow_routes`."""
        self.train(hf.training)

    @property
    def exact(self) -> ExactMode | None:
        """Exact mode: a token's log-prob has the same bits in training and in generation; None: it is off."""
        return self._exact

    @exact.setter
    def exact(self, mode: ExactMode | None) -> None:
        self._exact = mode
        join_sums(self.hf)
        if mode is not None:
            mode.split_sums(self.hf)
        self._experts.switch(mode)

    @property
    def chooses_experts_kernel(self) -> bool:
        """Whether the model has experts, and lets the kernel be chosen that computes them."""
        return self._experts.usual is not None

    def quantize_experts(self, quantized: Mapping[str, Mapping[str, Sequence[QuantizedWeight]]]) -> None:
        """Compute experts with quantized weights: by module and parameter, one for each expert."""
        self._experts.use_quantized(quantized)

    @property
    def config(self) -> PretrainedConfig:
        """The model's Hugging Face configuration."""
        return self.hf.config

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return device_of(self.hf)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output head, the compute dtype of the model."""
        return self.head.weight.dtype

    @property
    def head(self) -> nn.Linear:
        """The output projection (its weight may be the input embedding's)."""
        head: nn.Linear = self.hf.get_output_embeddings()
        return head

    @property
    def text(self) -> nn.Module:
        """The base model that reads tokens; of a model that reads pictures the part without the tower."""
        if self.vision is not None:
            return self.vision.text
        text: nn.Module = self.hf.base_model
        return text

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(p.numel() for p in self.parameters())

    def file_name(self, name: str) -> str:
        """Return the name that a parameter of this module has in files."""
        return name.removeprefix("hf.")

    def forward(
        self,
        packed: PackedBatch,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
        with_full_kl: bool = False,
        divergence: DivergenceSpec | None = None,
        top: tuple[int, int] = (0, 0),
    ) -> TokenOutputs:
        """Return log-probs [M] of `packed.targets` and, on request, entropy and Σπ² [M] of the distributions.

        With `with_full_kl` the KL divergence from `reference` [M] over the whole vocabulary is one more, and
        with `divergence` that from the teacher, who has told the rows' top outcomes or is `teacher` itself.
        `top` is how many most likely tokens are wanted and below which id. Only the M predicting positions go
        through the head, a chunk at a time.
        """
        cut = sequence_cut(packed, self.sequence_group, self.config, self.sequence_ring)
        if self.routing is not None:
            self.tape = self.routing.tape(packed, cut)
        states = packed_hidden(self.text, packed, self.device, cut, self.exact, self.tape, self.vision)
        head = self.head
        targets = packed.targets
        if cut is not None:
            targets = targets[cut.own]
        targets = targets.to(states.device)
        kl: Tensor | None = None
        apart: Tensor | None = None
        outcomes: Tensor | None = None
        inputs = HeadInputs(states, head.weight, head.bias, self.transform)
        if with_full_kl:
            assert self.reference is not None, "the reference has to be set before a KL from it is computed"
            kl = full_kl(inputs, self.reference(packed), temperature)
        if divergence is not None and packed.top_outcomes is not None:
            told = packed.top_outcomes.to(states.device)
            apart = head_divergence(inputs, told if cut is None else told[cut.own], divergence, temperature)
        elif divergence is not None and self.teacher is not None:
            apart = head_divergence(inputs, self.teacher(packed), divergence, temperature)
        elif divergence is not None:  # the rows of a dummy have no teacher
            apart = states.new_zeros(len(states), dtype=torch.promote_types(states.dtype, torch.float32))
        if top[0]:
            outcomes = top_outcomes(inputs, *top, temperature)
        chunk_step = 1
        product: Product = linear
        if self.exact is not None:
            states = self.exact.pad_rows(states)
            targets = self.exact.pad_rows(targets)
            chunk_step = self.exact.chunk_step
            product = self.exact.product
        outputs = token_log_probs(
            states,
            head.weight,
            head.bias,
            targets,
            temperature=temperature,
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            softcap=self.transform.softcap,
            logit_scale=self.transform.scale,
            forbidden=self.transform.forbidden,
            chunk_step=chunk_step,
            product=product,
        )
        if self.exact is not None:
            outputs = outputs.first(packed.targets.shape[0])
        outputs = outputs._replace(full_kl=kl, divergence=apart, top_outcomes=outcomes)
        if cut is not None:
            outputs = cut.gather_outputs(outputs)
        return outputs

    @torch.no_grad()
    def head_inputs(self, packed: PackedBatch) -> HeadInputs:
        """Return what the distributions of `packed.targets` follow from, those of this rank under a cut."""
        cut = sequence_cut(packed, self.sequence_group, self.config, self.sequence_ring)
        states = packed_hidden(self.text, packed, self.device, cut, self.exact, vision=self.vision)
        weight = self.head.weight.detach()
        bias = None if self.head.bias is None else self.head.bias.detach()
        if self.is_sharded:  # the gathered head is freed after this call
            weight = weight.clone()
            bias = None if bias is None else bias.clone()
        return HeadInputs(states, weight, bias, self.transform)

    def follow_routes(self) -> Routing:
        """Enable recording and replay of routes; ModelError for a model without routers."""
        if self.routing is None:
            self.routing = Routing(self.hf, self.config)
        return self.routing

    def routes_of(self, packed: PackedBatch, own: Tensor | None = None) -> Tensor:
        """Return the routes [N, W] int16 of the newest pass, which was over these tokens.

        `own` [n, L, K] are those of this rank's tokens, where the pass had a part of the layers only.
        """
        if own is None:
            assert self.tape is not None, "`follow_routes` comes before a pass"
            own = self.tape.routes
        routes = own.flatten(1)
        cut = sequence_cut(packed, self.sequence_group, self.config, self.sequence_ring)
        if cut is not None:
            routes = cut.gather_rows(routes.int())
        return routes.to(torch.int16)

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, layout: Layout, media: Sequence[PlacedMedium] = ()
    ) -> Tensor:
        """Return last hidden states [1, N, H] or [B, 1, H] of input_ids [1, N] or [B, 1] under `layout`.

        Media are read among packed tokens only; position_ids are then [1, N] or [3, 1, N].
        """
        seen = see(self.vision, input_ids, media, self.exact)
        return run_backbone(self.text, input_ids, position_ids, layout, self.exact, seen)

    def decode(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states [B, 1, H] of a new token of each row, with the bits of `hidden`.

        On a device other than the CPU, whose kernels depend on strides, they may differ by roundings.
        """
        if torch.is_grad_enabled() or layout.routes is not None:
            return self.hidden(input_ids, position_ids, layout)
        rows = input_ids.shape[0]
        if self.exact is not None:
            input_ids, position_ids, layout = self.exact.pad_tokens(input_ids, position_ids, layout)
        if self._decoder is None:
            modules = partial(run_backbone, self.text)
            self._decoder, states = choose_decoder(self.text, modules, input_ids, position_ids, layout)
            return states[:rows]
        return self._decoder(input_ids, position_ids, layout)[:rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H], in float32 or better, before any temperature."""
        if self.exact is not None and hidden.dim() == 2:
            return self.transform(self.head(self.exact.pad_rows(hidden)))[: hidden.shape[0]]
        return self.transform(self.head(hidden))


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the parameters that this stage of a pipeline holds."""
    devices = (parameter.device for parameter in module.parameters() if not parameter.is_meta)
    return next(devices, torch.device("meta"))


def use_attention(hf: PreTrainedModel) -> None:
    """Switch a model to our attention, norms and gated layers; ModelError where that cannot be."""
    join_norms(hf)
    keep_gates_lean(hf)
    AttentionInterface.register(ATTENTION_NAME, attention)
    check_attention(type(hf), hf.config)
    choose_attention(hf, ATTENTION_NAME)
    rotate_rows_alone(hf)


def check_attention(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise ModelError for a class of models whose attention cannot be ours, and for kinds of layers that
    take more from earlier tokens than attention does.
    """
    layers = enumerate(getattr(config.get_text_config(), "layer_types", None) or ())
    other = {number: name for number, name in layers if name in _OTHER_LAYERS}
    if other:
        raise ModelError(
            f"{kind.__name__} (model_type {config.model_type!r}) has layers of the type "
            f"{', '.join(sorted(set(other.values())))} (the first is layer {min(other)}), which read earlier "
            "tokens otherwise than by attention over a row or its newest tokens, so packed rows would mix: "
            "it is not supported. Use a model whose layer_types are full_attention and sliding_attention"
        )
    if not getattr(kind, "_supports_attention_backend", False):
        raise ModelError(
            f"{kind.__name__} (model_type {config.model_type!r}) does not let its attention be "
            "chosen, so rows cannot be packed: it is not supported. Use an attention-only causal language "
            "model such as Llama, Qwen, Mistral, Gemma or Phi"
        )


def choose_attention(hf: PreTrainedModel, name: str) -> None:
    """Set the attention of the layers that read tokens to `name`; a tower uses PyTorch's own."""
    if reads_media(hf.config):
        hf.set_attn_implementation({"": name, "text_config": name, "vision_config": "sdpa"})
    else:
        hf.set_attn_implementation(name)


def see(
    vision: Vision | None, input_ids: Tensor, media: Sequence[PlacedMedium], exact: ExactMode | None
) -> TextInputs | None:
    """Return the inputs of a text model in place of input_ids [1, N]; None: these.

    ModelError for media that a model of text is given.
    """
    if vision is not None:
        return vision.inputs(input_ids, media, one_at_a_time=exact is not None)
    if media:
        raise ModelError(
            "rows have pictures, and this model reads text only: give every role that reads rows (actor, "
            "reference, critic, reward model) a model that reads pictures, or leave them out of the data"
        )
    return None


def run_backbone(
    backbone: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: Layout,
    exact: ExactMode | None = None,
    seen: TextInputs | None = None,
) -> Tensor:
    """Return a Hugging Face base model's last hidden states under `layout`, without its cache and mask.

    What was `seen` is read in the place of the token ids.
    """
    batch, length = input_ids.shape
    if exact is not None:
        input_ids, position_ids, layout = exact.pad_tokens(input_ids, position_ids, layout)
    read: dict[str, Any] = {"input_ids": input_ids}
    if seen is not None:
        read = seen.padded(input_ids.shape[1])
    outputs: Any = backbone(
        **read, position_ids=position_ids, attention_mask=None, use_cache=False, layout=layout
    )
    states: Tensor = outputs.last_hidden_state
    if exact is None:
        return states
    return states[:batch, :length]


def sequence_cut(
    packed: PackedBatch, group: ProcessGroup | None, config: PretrainedConfig, ring: bool = False
) -> SequenceCut | None:
    """Return the cut of `packed` among the ranks of `group`; None without a group of several ranks."""
    if group is None or group.size() == 1:
        return None
    assert packed.places is None, "rows share no tokens where ranks share rows"
    if packed.media:
        raise ModelError(
            "ranks that share the tokens of a row (ulysses_sequence_parallel_size above 1) cannot read "
            "pictures yet: set it to 1, and shard the model over more ranks where memory is short"
        )
    check_lengths(config, max(packed.lengths), "ulysses_sequence_parallel_size=1")
    return SequenceCut(packed, group, ring=ring)


def all_states(
    backbone: nn.Module,
    packed: PackedBatch,
    device: torch.device,
    cut: SequenceCut | None = None,
    exact: ExactMode | None = None,
    routes: RouteTape | None = None,
    vision: Vision | None = None,
) -> Tensor:
    """Return hidden states [1, N, H] of all tokens of `packed`; under a cut, those of this rank's part."""
    if packed.places is not None:
        config: Any = backbone.config
        check_lengths(config, max(packed.lengths), _ROWS_APART)
    layout: Layout = PackedLayout.build(packed.lengths, device, places=packed.places)
    layout.routes = routes
    input_ids = packed.input_ids
    position_ids = packed.position_ids
    if cut is not None:
        layout = cut.layout(layout)
        layout.routes = routes
        input_ids = cut.tokens(input_ids)
        position_ids = cut.tokens(position_ids)
    tokens = input_ids.to(device)[None]
    seen = see(vision, tokens, packed.media, exact)
    return run_backbone(backbone, tokens, position_ids.to(device)[..., None, :], layout, exact, seen)


def packed_hidden(
    backbone: nn.Module,
    packed: PackedBatch,
    device: torch.device,
    cut: SequenceCut | None = None,
    exact: ExactMode | None = None,
    routes: RouteTape | None = None,
    vision: Vision | None = None,
) -> Tensor:
    """Return hidden states [M, H] that predict `packed.targets`; under a cut, this rank's, `cut.own`."""
    states = all_states(backbone, packed, device, cut, exact, routes, vision)
    index = packed.predict_index
    if cut is not None:
        index = cut.predict_index
    if packed.places is not None:  # the last token of a shared prompt predicts the first of several responses
        return SharedTokens(packed.predict_index_on_cpu, None, device).spread(states[0], index.to(device))
    selected: Tensor = _SelectTokens.apply(states[0], index.to(device))  # type: ignore[no-untyped-call]
    if cut is not None:
        selected = cut.deal(selected)
    return selected


class _SelectTokens(torch.autograd.Function):
    """Selection of rows of [N, H] at distinct indices [M]. The backward pass copies instead of adding: ten
    times faster on CPU, and the same bits with any number of threads.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = states.shape[0]
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.num_tokens, grads[0].shape[1]).index_copy_(0, index, grads[0]), None
