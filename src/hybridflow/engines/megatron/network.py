"""A decoder of megatron-core for a Hugging Face configuration, with our attention over packed rows.

    packed rows ──► this rank's P tokens ──► embeddings ──► layers of this part ──► states [P, 1, H]

megatron-core's own layers without Transformer Engine know no packed rows, and no ranks that share them. So
three parts are ours: the core attention, which is the one of all engines (`models/attention/layouts.py`, and
`models/parallel` where ranks have a part of the tokens each), the rotary angles, which come from the
frequencies of the Hugging Face model at the positions within rows, and the norms. The first two get the
micro-batch where megatron-core hands on `packed_seq_params`, which recomputed layers see again.

Where tensor parallelism divides a model with experts, its ranks share the tokens between the layers that it
cuts (megatron-core's `sequence_parallel`), so that each token goes to its experts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad

from hybridflow.config.megatron import family_refusal
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.errors import ModelError
from hybridflow.models.attention.layouts import Layout, PackedLayout
from hybridflow.models.attention.scores import Scores
from hybridflow.models.experts.layers import experts_per_token, num_experts
from hybridflow.models.parallel.sequence_parallel import SequenceCut
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from hybridflow.protocol.packing import PackedBatch

ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class PackedRows:
    """The rows of a micro-batch, as megatron-core's layers hand them on."""

    positions: Tensor
    """[P] int64, the positions within rows of the tokens that this rank computes."""
    layout: Layout
    qkv_format: str = "sbhd"
    """The layout of queries as megatron-core names it: tokens, 1, heads, dimensions."""
    cp_group: None = None


class PackedAttention(nn.Module):
    """megatron-core's core attention, by the attention of all engines."""

    def __init__(self, config: TransformerConfig, layer_number: int, **others: Any) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scores = Scores(layer_number - 1, config.kv_channels**-0.5, None, None, None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        *,
        packed_seq_params: PackedRows,
        **others: Any,
    ) -> Tensor:
        """query [P, 1, H, D], key and value [P, 1, KV, D] -> [P, 1, H·D]."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        attended = packed_seq_params.layout.attend(query, key, value, self.scores)
        return attended.transpose(0, 1).flatten(2)


class Norm(nn.RMSNorm):
    """The norm of layers; megatron-core's own one refuses ranks that share tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        # megatron-core then sums its gradients, each of a part of the tokens
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RowAngles(nn.Module):
    """The rotary angles of tokens at their positions within rows, from a Hugging Face model's frequencies."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def get_rotary_seq_len(
        self, context: Any, block: Any, states: Any, config: Any, rows: PackedRows
    ) -> PackedRows:
        """Return what `forward` is then called with: the rows in the place of their length."""
        return rows

    def forward(self, rows: PackedRows, **others: Any) -> Tensor:
        """Return angles [P, 1, 1, D], float32."""
        angles = rows.positions.float()[:, None] * self.frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None]


class Network(GPTModel):  # type: ignore[misc]
    """A part of this rank's stage of a decoder; the last one gives states in the place of logits."""

    value_head: nn.Linear
    """The head of a value model, in the last part."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.post_process and self.config.sequence_parallel:
            # heads leave the whole gradient of the states on every rank, of which each takes its part
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        return hidden_states

    def evened(self, packed: PackedBatch) -> PackedBatch:
        """Return packed rows whose tokens the ranks can share; a row that nothing reads fills them up."""
        sizes = self.config.tensor_model_parallel_size * self.config.context_parallel_size
        missing = -packed.num_tokens % sizes
        if not missing or not self.config.sequence_parallel:
            return packed
        return replace(
            packed,
            input_ids=pad(packed.input_ids, (0, missing)),
            position_ids=pad(packed.position_ids, (0, missing)),
            lengths=(*packed.lengths, missing),
        )

    def rows_forward(self, packed: PackedBatch, cut: SequenceCut | None) -> Tensor:
        """Return the states [P, 1, H] after this part, of all tokens of packed rows on its device, or of
        this rank's part under a cut.
        """
        tokens = packed.input_ids
        rows = PackedRows(packed.position_ids, PackedLayout.build(packed.lengths, tokens.device))
        if cut is not None:
            tokens = cut.tokens(tokens)
            rows = PackedRows(cut.tokens(packed.position_ids), cut.layout(rows.layout))
        states: Tensor = self(tokens[None], None, None, packed_seq_params=rows)
        return states

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the output head, or of the embeddings where they are tied."""
        if self.share_embeddings_and_output_weights:
            weight: Tensor = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        return weight


def check_family(config: Any, layout: ParallelLayout, parts: int) -> None:
    """Raise ModelError for a model or a layout that megatron-core does not serve here."""
    kind = config.model_type
    refusal = family_refusal(kind)
    if refusal is None:
        refusal = family_refusal(kind, [*_odd_parts(config), *_odd_sizes(config, layout, parts)])
    if refusal is not None:
        raise ModelError(refusal)


def _odd_parts(config: Any) -> Iterator[str]:
    """Yield what the layers of a family have here that the map of weights and layers leaves out."""
    rope = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        yield "its layers have biases"
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windows or (config.model_type in ("mistral", "mixtral") and config.sliding_window is not None):
        yield "it attends in a sliding window"
    if rope.get("rope_type", "default") not in ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"its rotary positions are {rope}, and {', '.join(ROPES)} over whole heads are served"
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        yield "only some of its layers have experts"
    if config.hidden_act != "silu":
        yield f"its activation is {config.hidden_act}, and silu is served"


def _odd_sizes(config: Any, layout: ParallelLayout, parts: int) -> Iterator[str]:
    """Yield which sizes of the layout do not fit the model."""
    experts = num_experts(config)
    if config.num_attention_heads % layout.tp or config.num_key_value_heads % layout.tp:
        yield (
            f"tensor_parallel_size={layout.tp} does not divide both its {config.num_attention_heads} heads "
            f"and its {config.num_key_value_heads} key-value heads"
        )
    if config.num_hidden_layers % (layout.pp * parts):
        times = f" × virtual_pipeline_parallel_size={parts}" if parts > 1 else ""
        yield (
            f"pipeline_parallel_size={layout.pp}{times} does not divide its {config.num_hidden_layers} layers"
        )
    if layout.ep > 1 and (not experts or experts % layout.ep):
        yield f"expert_parallel_size={layout.ep} does not divide its {experts} experts"


def transformer_config(
    config: Any, layout: ParallelLayout, dtype: torch.dtype, *, recompute: bool, parts: int
) -> TransformerConfig:
    """Return megatron-core's configuration of a model that `check_family` has passed."""
    experts = num_experts(config) or None
    settings: dict[str, Any] = {}
    if experts:
        settings = {
            "num_moe_experts": experts,
            "moe_router_topk": experts_per_token(config),
            # softmax over all experts or over the chosen ones, which is that of all, renormalised
            "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
        }
    if recompute:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if layout.pp > 1:
        settings |= {"pipeline_dtype": dtype, "variable_seq_lengths": True, "batch_p2p_comm": False}
    if parts > 1:
        # two stages send to each other both ways: states and gradients apart, or their shapes are mixed up
        settings |= {"virtual_pipeline_model_parallel_size": parts, "overlap_p2p_comm": True}
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1 and experts is not None,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # shares of the loss are summed over micro-batches and ranks, and divided by nothing
        calculate_per_token_loss=True,
        # weights come from files: none are drawn
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **settings,
    )


def build_network(
    model: PolicyModel | ValueModel,
    layout: ParallelLayout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    recompute: bool,
    part: int,
    parts: int,
) -> Network:
    """Return a part of this rank's stage, with unwritten weights; all ranks call it together."""
    config: Any = model.config
    backbone: Any = model.text
    table: Any = backbone.get_input_embeddings()
    is_policy = isinstance(model, PolicyModel)
    settings = transformer_config(config, layout, dtype, recompute=recompute, parts=parts)
    spec = get_gpt_layer_local_spec(
        num_experts=settings.num_moe_experts,
        qk_layernorm=settings.qk_layernorm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if settings.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    initialize_rng_tracker(inference_rng_tracker=True)  # without dropout no part of a layer draws numbers
    network = Network(
        config=settings,
        transformer_layer_spec=TransformerBlockSubmodules(
            [spec] * get_num_layers_to_build(settings, vp_stage=part), Norm
        ),
        vocab_size=-(-table.weight.shape[0] // layout.tp) * layout.tp,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part),
        share_embeddings_and_output_weights=is_policy and bool(config.tie_word_embeddings),
        position_embedding_type="rope",
        vp_stage=part,
    )
    network.rotary_pos_emb = RowAngles(backbone.rotary_emb.inv_freq)
    if not is_policy and network.post_process:
        del network.output_layer
        own = {"bias": model.head.bias is not None, "dtype": model.head.weight.dtype}
        network.value_head = nn.utils.skip_init(nn.Linear, config.hidden_size, 1, **own)
    padding: int | None = table.padding_idx
    if network.pre_process and padding is not None:
        network.embedding.word_embeddings.register_forward_hook(partial(_keep_padding, padding))
    if settings.sequence_parallel:
        for name, parameter in network.named_parameters():
            if ".experts." in name:
                # each rank's are of other tokens: ranks of tensor parallelism are among those that sum their
                # gradients, and the norm counts those of each
                parameter.allreduce = False
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    network.to(device=device)
    return network


def _keep_padding(padding: int, module: Any, inputs: tuple[Tensor], states: Tensor) -> Tensor:
    """Return embeddings [1, N, H], or this rank's [P, 1, H] where ranks share them, without a gradient for
    that of `padding`, which torch never moves.
    """
    padded = inputs[0] == padding
    if module.reduce_scatter_embeddings:
        padded = padded.T.chunk(module.tp_group.size())[module.tp_group.rank()]
    return torch.where(padded[..., None], states.detach(), states)
