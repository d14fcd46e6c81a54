"""A model's sizes from its config.json alone, without torch: parameters, FLOPs and bytes of a token.

config.json ──read_shape──► ModelShape ──► size (ModelSize), numbers in the cache, forward FLOPs
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.config.model import NUMBERS_OF_EXPERTS, ModelConfig
from hybridflow.errors import ModelError
from hybridflow.planner.model_size import Count, ModelSize

UNCUT = (
    "afmoe",
    "deepseek_v2",
    "deepseek_v32",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "phimoe",
    "stablelm",
)
"""Kinds of models that tensor parallelism does not cut, for transformers publishes no plan that fits."""
UNDEALT = ("doge", "granitemoe", "granitemoeshared", "jetmoe")
"""Kinds of mixtures whose experts ranks cannot share, for transformers names no tensors of them."""


class Linear(NamedTuple):
    """Matrices of one size in a layer."""

    inputs: int
    outputs: int
    copies: int = 1
    """How many there are, as many as experts."""
    used: int = 1
    """How many of them a token passes through."""
    whole: bool = False
    """Tensor parallelism does not cut it."""

    @property
    def size(self) -> int:
        """Parameters of all copies."""
        return self.inputs * self.outputs * self.copies

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with."""
        return self.inputs * self.outputs * self.used

    @property
    def cut(self) -> bool:
        """Whether tensor parallelism shards it; experts are distributed whole."""
        return self.copies == 1 and not self.whole


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    linears: tuple[Linear, ...]
    kv_numbers: int
    """Numbers that the cache keeps of a token; 0 for linear attention, whose state does not grow."""
    pair: int
    """heads · (key width + value width): multiplications of one query-key pair."""
    window: int | None = None
    """Tokens that a query sees at most; None: all before it."""

    @property
    def parameters(self) -> int:
        """All parameters, but for norms and biases."""
        return sum(linear.size for linear in self.linears)

    @property
    def expert_parameters(self) -> int:
        """Parameters of its routed experts."""
        return sum(linear.size for linear in self.linears if linear.copies > 1)

    @property
    def cut_parameters(self) -> int:
        """Parameters that tensor parallelism cuts."""
        return sum(linear.size for linear in self.linears if linear.cut)


@dataclass(frozen=True)
class ModelShape:
    """The facts from which the sizes of a causal language model follow."""

    name: str
    hidden: int
    vocab: int
    tied: bool
    """The head is the table of embeddings."""
    layers: tuple[Layer, ...]
    width: int
    """Activations of the widest feed-forward part for a token."""
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    experts_per_token: int = 0
    can_cut: bool = True
    """Tensor parallelism can cut its layers."""
    can_deal: bool = True
    """Ranks can share its experts."""
    kind: str = ""
    """Its `model_type`."""

    def cuts(self, tensor: int) -> bool:
        """Return whether a tensor-parallel degree of `tensor` divides all dense layers."""
        return tensor == 1 or (self.can_cut and self._cut_by % tensor == 0)

    def deals(self, parts: int, ranks: int) -> bool:
        """Return whether `parts` ranks can share the experts of a layer, and `ranks` each of their parts."""
        return parts == 1 or (self.can_deal and self.experts % parts == 0 == self._shared_by % ranks)

    @cached_property
    def _linears(self) -> list[Linear]:
        return [linear for layer in self.layers for linear in layer.linears]

    @cached_property
    def _cut_by(self) -> int:
        """The largest number that divides the heads and the widths of all matrices that are cut."""
        return math.gcd(self.kv_heads, *(linear.inputs for linear in self._linears if linear.cut))

    @cached_property
    def _shared_by(self) -> int:
        """The largest number that divides the widths of all matrices of experts."""
        linears = {linear for linear in self._linears if linear.copies > 1}
        return math.gcd(*(size for linear in linears for size in (linear.inputs, linear.outputs)))

    @cached_property
    def parameters(self) -> int:
        """All parameters, without biases."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        norms = (2 * len(self.layers) + 1) * self.hidden
        return tables + norms + sum(layer.parameters for layer in self.layers)

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of routed experts."""
        return sum(layer.expert_parameters for layer in self.layers)

    @cached_property
    def active(self) -> int:
        """Parameters that a token is multiplied with, those of the head among them."""
        return self.vocab * self.hidden + sum(linear.active for linear in self._linears)

    @cached_property
    def kv_numbers(self) -> int:
        """Numbers that the cache keeps of a token, in all layers."""
        return sum(layer.kv_numbers for layer in self.layers)

    @cached_property
    def _pairs(self) -> tuple[tuple[int | None, int], ...]:
        """Each window with the sum of the widths of a pair of its layers."""
        found: dict[int | None, int] = {}
        for layer in self.layers:
            found[layer.window] = found.get(layer.window, 0) + layer.pair
        return tuple(found.items())

    @cached_property
    def active_experts(self) -> int:
        """Parameters of routed experts that a token is multiplied with."""
        return sum(linear.active for linear in self._linears if linear.copies > 1)

    def pair_flops(self, length: float) -> float:
        """Return the FLOPs of attention of one token over `length` tokens before it, in all layers."""
        flops = 0.0
        for window, pair in self._pairs:
            flops += 2.0 * pair * min(length, window or length)
        return flops

    def causal_flops(self, tokens: float, square: float) -> float:
        """Return the FLOPs of causal attention in a forward pass over rows of `tokens` tokens and `square`
        squared tokens in all: half of each square.
        """
        halves = square / 2
        flops = 0.0
        for window, pair in self._pairs:
            flops += 2.0 * pair * min(halves, tokens * window if window else halves)
        return flops

    def size(
        self, *, trained: bool = True, lora_rank: int = 0, itemsize: int = 2, quantized: bool = False
    ) -> ModelSize:
        """Return the sizes that the estimate of memory reads; `quantized`: linear layers are in 4 bits."""

        def count(parameters: int, cut: int, experts: int, adapters: int) -> Count:
            if lora_rank:
                return Count(parameters + adapters, adapters if trained else 0, cut, experts=experts)
            if not trained:
                return Count(parameters, 0, cut, experts=experts)
            return Count(parameters, parameters, cut, cut, experts, experts)

        largest = max(self.layers, key=lambda layer: layer.parameters)
        cut = sum(layer.cut_parameters for layer in self.layers)
        # adapters are on all linear layers of attention and of dense MLPs
        adapters = sum(lora_rank * (each.inputs + each.outputs) for each in self._linears if each.copies == 1)
        tables = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        norms = 2 * self.hidden
        held = [each.size for each in self._linears] if quantized else []
        return ModelSize(
            count(self.parameters, cut, self.expert_parameters, adapters),
            count(tables, 0, 0, 0),
            count(
                largest.parameters + norms,
                largest.cut_parameters,
                largest.expert_parameters,
                adapters // len(self.layers),
            ),
            num_layers=len(self.layers),
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            itemsize=itemsize,
            active=self.active,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            quantized=sum(held),
            largest_quantized=max(held, default=0),
        )


def load_shape(path: str) -> ModelShape:
    """Read `path`/config.json, or the JSON file `path`. Raises ModelError where there is none that fits."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} has no config.json that can be read ({error}): give a folder of a model, or a "
            "config.json alone, which is all that a plan reads"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no object with the sizes of a model, as a config.json does")
    return read_shape(config, Path(path).name)


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of the causal language model that a config.json describes. Raises ModelError."""
    text = config.get("text_config") or config
    wanted = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [key for key in wanted if not text.get(key)]
    if missing:
        raise ModelError(
            f"{name}: its config.json has no {', '.join(missing)}, from which a plan counts parameters; it "
            "can plan for decoder models whose config.json names its sizes as Llama's does"
        )
    try:
        return _shape(config, text, name)
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name}: the sizes in its config.json do not fit together ({type(error).__name__}: {error})"
        ) from error


def _shape(config: Mapping[str, Any], text: Mapping[str, Any], name: str) -> ModelShape:
    heads = int(text["num_attention_heads"])
    experts = next((int(text[key]) for key in NUMBERS_OF_EXPERTS if text.get(key)), 0)
    own = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * text["hidden_size"])
    width = int(text.get("intermediate_size") or own)
    per_token = 0
    if experts:
        per_token = int(text.get("num_experts_per_tok") or experts)
        width = max(width, per_token * own + _shared_width(text, own))
    kinds = {str(each.get("model_type")) for each in (config, text)}
    layers = tuple(_layers(text, experts, per_token, own))
    kv_heads = int(text.get("num_key_value_heads") or heads)
    if text.get("kv_lora_rank"):  # the native engine keeps what comes of the latent vectors
        kv_heads = heads
    return ModelShape(
        name,
        hidden=int(text["hidden_size"]),
        vocab=int(text["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=max(layer.pair for layer in layers) // (2 * heads),
        experts=experts,
        experts_per_token=per_token,
        can_cut=kinds.isdisjoint(UNCUT) and "vision_config" not in config,
        can_deal=kinds.isdisjoint(UNDEALT),
        kind=str(config.get("model_type", "")),
    )


def _shared_width(text: Mapping[str, Any], own: int) -> int:
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    return shared + own * int(text.get("n_shared_experts") or 0)


def _layers(text: Mapping[str, Any], experts: int, per_token: int, own: int) -> Iterator[Layer]:
    count = int(text["num_hidden_layers"])
    kinds = text.get("layer_types") or [None] * count
    window = text.get("sliding_window")
    if not text.get("use_sliding_window", True):
        window = None
    named = any(kinds)
    for number in range(count):
        feed = tuple(_feed_forward(text, number, experts, per_token, own))
        kind = kinds[number]
        seen = window if kind == "sliding_attention" or not named else None
        if kind == "linear_attention":
            yield Layer((*_linear_attention(text), *feed), 0, 0)
        elif text.get("kv_lora_rank"):
            attention, numbers, pair = _latent_attention(text)
            yield Layer((*attention, *feed), numbers, pair, seen)
        else:
            attention, numbers, pair = _attention(text)
            yield Layer((*attention, *feed), numbers, pair, seen)


def _attention(text: Mapping[str, Any]) -> tuple[tuple[Linear, ...], int, int]:
    """Return the matrices of attention, the numbers that it caches of a token, and the width of a pair."""
    hidden = int(text["hidden_size"])
    heads = int(text["num_attention_heads"])
    dim = int(text.get("head_dim") or hidden // heads)
    keys = int(text.get("num_key_value_heads") or heads) * dim
    gated = 1
    if str(text.get("model_type", "")).startswith(("qwen3_5", "qwen3_next")):
        gated = 2  # its queries come with a gate of the output
    query = Linear(hidden, heads * dim * gated)
    linears = (query, Linear(hidden, keys), Linear(hidden, keys), Linear(heads * dim, hidden))
    return linears, 2 * keys, 2 * heads * dim


def _latent_attention(text: Mapping[str, Any]) -> tuple[tuple[Linear, ...], int, int]:
    """Return the same of DeepSeek's attention over latent vectors (MLA, arXiv 2405.04434); it is not cut."""
    hidden = int(text["hidden_size"])
    heads = int(text["num_attention_heads"])
    latent = int(text["kv_lora_rank"])
    rope = int(text["qk_rope_head_dim"])
    key = int(text["qk_nope_head_dim"])
    value = int(text["v_head_dim"])
    query = int(text.get("q_lora_rank") or 0)
    queries = [Linear(hidden, heads * (key + rope), whole=True)]
    if query:
        queries = [Linear(hidden, query, whole=True), Linear(query, heads * (key + rope), whole=True)]
    linears = (
        *queries,
        Linear(hidden, latent + rope, whole=True),
        Linear(latent, heads * (key + value), whole=True),
        Linear(heads * value, hidden, whole=True),
    )
    return linears, latent + rope, heads * (key + rope + value)


def _linear_attention(text: Mapping[str, Any]) -> tuple[Linear, ...]:
    """Return the matrices of a gated delta net (arXiv 2412.06464): q, k, v, gates and out."""
    hidden = int(text["hidden_size"])
    values = int(text["linear_num_value_heads"])
    keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
    value = values * int(text["linear_value_head_dim"])
    return (
        Linear(hidden, 2 * keys + 2 * value),
        Linear(hidden, 2 * values),
        Linear(value, hidden),
    )


def _feed_forward(
    text: Mapping[str, Any], number: int, experts: int, per_token: int, own: int
) -> Iterator[Linear]:
    """Yield the matrices of a layer's feed-forward part, sparse or dense."""
    hidden = int(text["hidden_size"])
    dense = not experts or number < int(text.get("first_k_dense_replace") or 0)
    dense |= number in (text.get("mlp_only_layers") or ())
    dense |= bool((number + 1) % int(text.get("decoder_sparse_step") or 1))
    if dense:
        width = int(text.get("intermediate_size") or 4 * hidden)
        yield from (Linear(hidden, 2 * width), Linear(width, hidden))
        return
    yield from (Linear(hidden, 2 * own, experts, per_token), Linear(own, hidden, experts, per_token))
    yield Linear(hidden, experts, whole=True)
    if shared := _shared_width(text, own):
        # Qwen's shared expert is not in the plans that transformers publishes
        whole = bool(text.get("shared_expert_intermediate_size"))
        yield from (Linear(hidden, 2 * shared, whole=whole), Linear(shared, hidden, whole=whole))


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the sizes of well-known models from their config.json, by name without the owner, so that a
    plan needs no download.
    """
    found: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text())
    return found


@cache
def shape_of(path: str) -> ModelShape:
    """Return the shape of a model that is a folder, a config.json, or a known name. Raises ModelError."""
    if Path(path).expanduser().exists():
        return load_shape(path)
    name = path.rstrip("/").rpartition("/")[2]
    known = known_models()
    for ending in ("", "-Instruct", "-Base"):
        if name.endswith(ending) and name.removesuffix(ending) in known:
            base = name.removesuffix(ending)
            return read_shape(known[base], base)
    near = difflib.get_close_matches(name, known, n=3)
    raise ModelError(
        f"{path} is no folder and no config.json, and no model whose sizes are known"
        + (f"; did you mean {', '.join(near)}?" if near else "")
        + ": give the path of its config.json, which is all that a plan reads"
    )


def shape_by_keys(model: ModelConfig) -> ModelShape:
    """Return the shape of the model that these keys name. Raises ModelError, also if it cannot be trained."""
    shape = shape_of(str(model.path))
    recurrent = sum(layer.kv_numbers == 0 for layer in shape.layers)
    if recurrent:
        raise ModelError(
            f"{model.path} has linear attention in {recurrent} of its {len(shape.layers)} layers, and such "
            "models cannot be trained here: plan for one whose layers all attend to tokens"
        )
    return shape


def adapter_rank(model: ModelConfig) -> int:
    """Return the largest rank of the adapters that a model trains, 0 without any; ModelError where those of
    `lora_adapter_path` cannot be read.
    """
    if model.lora_adapter_path is None:
        return model.lora_rank
    file = Path(model.lora_adapter_path).expanduser() / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int(max(config["r"], *(config.get("rank_pattern") or {}).values(), 0))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file}: the rank of the adapters cannot be read ({error!r})") from error
