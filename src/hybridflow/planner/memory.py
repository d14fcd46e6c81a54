"""How much memory a process needs for training and generation, as `hybridflow config --explain` adds it up.

    RoleEngine, ModelSize ──engine_needs──► parts ──► between phases · during an update
    PlannedReplica, ModelSize ──generation_needs──► weights of its own, KV cache

An estimate to plan with: it counts what grows with the model and the batch, not the libraries themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.config.layout import ROLE_KEYS, engine_keys, pushes_weights
from hybridflow.config.megatron import STRATEGIES
from hybridflow.config.model import NF4_BLOCK, SCALE_BLOCK, FSDPConfig, ModelConfig
from hybridflow.config.needs import longest_row, rows_per_prompt
from hybridflow.config.tree import get_value
from hybridflow.distributed.accelerators import KEPT_BYTES, RING_QUERIES, features, is_accelerator
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.planner.model_size import ModelSize

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RING_COPIES = 4
"""Tensors of a block's scores that are there at once in the backward pass of ring attention."""
NF4_BYTES = 1 / 2 + 4 / NF4_BLOCK
"""Bytes of a number of a weight in 4 bits: its code, and its part of a float32 scale."""
DEQUANTIZING_BYTES = 6
"""Bytes of a number of the one such weight that is dequantized: its level, and its index or a rounded one."""
QUANTIZED_BYTES = {"int8": 1, "fp8": 1, "float16": 2}
"""Bytes of a number by `rollout.quantization` of the native engine."""


@dataclass(frozen=True)
class RoleEngine:
    """A role's engine, as the run will build it."""

    role: str
    layout: ParallelLayout
    fsdp: FSDPConfig
    model: ModelConfig
    trained: bool = True
    rows: int = 0
    """Rows of a mini-batch, those of all processes."""
    longest: int = 0
    """Tokens of the longest row."""
    max_tokens: int = 16384
    """Tokens of a forward on one data rank."""
    max_rows: int | None = None
    optimizer: str = "AdamW"
    keys: str = ""
    """Beginning of the keys of the two limits."""
    epochs: int = 1
    """Passes over the rows of a step."""
    optimizer_steps: int = 0
    """Optimizer steps of a step of the run."""
    strategy: str = "fsdp2"
    """The key of that name."""
    keeps_sent: bool = False
    """Whether its ranks together keep a copy of the weights that they have sent last (`delta_push`)."""

    @classmethod
    def of(cls, config: PPOConfig, role: str, layout: ParallelLayout) -> RoleEngine:
        """Return the engine of a role with this layout."""
        fsdp, _, model = engine_keys(config, role)
        path = ROLE_KEYS[role].updates
        strategy = get_value(config, STRATEGIES[role]) if role in STRATEGIES else "fsdp2"
        if not path:
            max_tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
            return cls(role, layout, fsdp, model, trained=False, max_tokens=max_tokens, strategy=strategy)
        block = get_value(config, path)
        mini = block.ppo_mini_batch_size
        epochs = getattr(block, "ppo_epochs", 1)
        return cls(
            role.replace("_reward", " reward model"),
            layout,
            fsdp,
            model,
            rows=mini * rows_per_prompt(config),
            longest=longest_row(config)[0],
            max_tokens=block.ppo_max_token_len_per_gpu,
            max_rows=getattr(block, "ppo_micro_batch_size_per_gpu", None),
            optimizer=block.optim.optimizer,
            keys=f"{path.rpartition('.')[2]}.ppo_",
            epochs=epochs,
            optimizer_steps=math.ceil(config.data.train_batch_size / mini) * epochs,
            strategy=strategy,
            keeps_sent=role == "actor"
            and pushes_weights(config)
            and config.actor_rollout_ref.rollout.delta_push,
        )

    @property
    def rows_here(self) -> int:
        """Rows of a mini-batch that a process gets, if all are equally long."""
        return math.ceil(self.rows / self.layout.data)

    @property
    def rows_at_once(self) -> int:
        """Rows of the greatest length in one forward."""
        by_tokens = max(1, self.max_tokens // self.longest)
        return min(by_tokens, self.max_rows or by_tokens)

    @cached_property
    def trains_adapters(self) -> bool:
        """Whether only adapters of LoRA are trained."""
        return self.trained and bool(self.model.lora_rank or self.model.lora_adapter_path)


class PlannedReplica(NamedTuple):
    """How ranks of the rollout generate together."""

    tensor: int
    """Devices that split each layer."""
    rows: int
    """Rows that run at once."""
    slot: int
    """Tokens for which a row has memory."""
    quantization: str | None
    """The kind to which the native engine quantizes weights; None where it does not."""
    ranks: int
    """Ranks of the rollout that serve requests together."""


class MemoryItem(NamedTuple):
    """Something that takes memory in one process: bytes, and where the number is from."""

    label: str
    size: int
    how: str
    on_host: bool = False
    """True: it is in CPU memory although the run computes on a GPU."""


class Needs(NamedTuple):
    """Memory of one role in one process: bytes on its device."""

    parts: list[MemoryItem]
    between: int
    """Bytes between its phases."""
    update: int = 0
    """Bytes on top of that at the peak of an update."""
    fetched: int = 0
    """Bytes of weights that are on the device only while the role works, else in CPU memory."""
    shared: int = 0
    """Those of them that generation on several ranks has on the device too, because it takes no copy."""


def engine_needs(engine: RoleEngine, size: ModelSize, *, device: str) -> Needs:
    """Estimate weights, masters, gradients, moments and activations, and the copy of weights that were sent
    last, which is in CPU memory; on a CPU offload moves nothing.
    """
    needs = _computing_needs(engine, size, device)
    if not engine.keeps_sent:
        return needs
    ranks = engine.layout.world_size
    trained = size.whole.trained
    # ranks deal whole tensors among them, of which embeddings are the largest
    largest = size.vocab_size * size.hidden_size if trained == size.whole.all else 0
    sent = max(math.ceil(trained / ranks), largest) * size.itemsize
    how = f"{trained:,} trained × {size.itemsize} bytes / {ranks} ranks, whole tensors (rollout.delta_push)"
    away = is_accelerator(device)
    part = MemoryItem("weights sent last", sent, how, away)
    return needs._replace(parts=[*needs.parts, part], between=needs.between + (0 if away else sent))


def _computing_needs(engine: RoleEngine, size: ModelSize, device: str) -> Needs:
    fsdp = engine.fsdp
    layout = engine.layout
    on_cpu = not is_accelerator(device)
    many = layout.world_size > 1
    if many and engine.strategy == "megatron":
        return _megatron_needs(engine, size, device)
    wide = max(4, size.itemsize)
    live = fsdp.offload_policy and not on_cpu  # on the CPU even while it works
    weights_away = (fsdp.param_offload or fsdp.offload_policy) and not on_cpu
    state_away = (fsdp.optimizer_offload or fsdp.offload_policy) and not on_cpu
    own = size.at_rest(layout)
    share = _share(layout)
    trained_bytes = wide if many else size.itemsize
    frozen = own.all - own.trained
    quantized = math.ceil(size.quantized * NF4_BYTES) + size.largest_quantized * DEQUANTIZING_BYTES
    others = frozen * size.itemsize + own.trained * trained_bytes
    how = _weights_how(size, trained_bytes, share)
    parts = []
    if quantized and live:  # FSDP's own offloading leaves codes where they compute
        parts.append(MemoryItem("weights in 4 bits", quantized, _codes_how(size)))
        weights = others
    else:
        weights = others + quantized
        how = f"{_codes_how(size)} + {how}" if quantized else how
    parts.append(MemoryItem("weights", weights, how, weights_away))
    gathered, at_once, how = _gathered(engine, size) if many else (0, 0, "")
    if gathered:
        parts.append(MemoryItem("weights gathered for a pass", gathered, how))
    resting = 0 if weights_away else weights
    if live:
        resting = quantized
    if not engine.trained:
        return Needs(parts, resting, fetched=0 if live else weights - resting)
    trained = f"{size.whole.trained:,} trained"
    masters = 0 if many or size.itemsize >= 4 else 4 * own.trained
    if masters:
        parts.append(MemoryItem("float32 masters", masters, f"{trained} × 4 bytes", state_away))
    kept = many and not fsdp.reshard_after_forward
    grads = at_once if kept else own.trained * wide
    how = f"{trained} × {wide} bytes{share}"
    if kept:
        how = "whole on each process (reshard_after_forward=false)"
    parts.append(MemoryItem("gradients", grads, how, live))
    label = "Adam moments" if engine.optimizer == "AdamW" else f"state of {engine.optimizer}"
    each, how = _moments(engine.optimizer, wide)
    moments = math.ceil(own.trained * each)
    parts.append(MemoryItem(label, moments, f"{trained} × {how}{share}", state_away))
    passing, passing_parts = _pass(engine, size, device)
    parts += passing_parts
    between = resting + (0 if state_away else masters + moments)
    fetched = weights if weights_away and not live else 0
    stepping = moments if state_away and not live else 0
    accumulating = masters if state_away and not live else 0
    peak = max(gathered + passing + (0 if kept else at_once), stepping)
    update = fetched + accumulating + (0 if live else grads) + peak
    return Needs(parts, between, update, fetched, quantized if fetched else 0)


def _megatron_needs(engine: RoleEngine, size: ModelSize, device: str) -> Needs:
    """Estimate what megatron-core holds from the start on: a part of the weights and a float32 buffer of its
    gradients, and of masters and moments a share, which the ranks of data parallelism divide.
    """
    layout = engine.layout
    copies = layout.stage_size // layout.tp
    own = _of_a_stage(size, layout, 1, layout.ep)
    state = _of_a_stage(size, layout, copies, layout.tp)
    weights = own * size.itemsize
    parts = [MemoryItem("weights", weights, f"{own:,} parameters × {size.itemsize} bytes, not sharded")]
    if not engine.trained:
        return Needs(parts, weights)
    shared = f"bytes, {own:,} parameters / {copies} ranks"
    parts.append(MemoryItem("gradients", 4 * own, f"{own:,} parameters × 4 bytes, not sharded"))
    if size.itemsize < 4:
        parts.append(MemoryItem("float32 masters", 4 * state, f"4 {shared}"))
    parts.append(MemoryItem("Adam moments", 8 * state, f"2 × 4 {shared}"))
    passing, passing_parts = _pass(engine, size, device)
    return Needs([*parts, *passing_parts], sum(part.size for part in parts), passing)


def _of_a_stage(size: ModelSize, layout: ParallelLayout, shards: int, parts: int) -> int:
    """Return the parameters of a rank of the fullest stage of megatron-core, in which ranks of tensor
    parallelism cut the vocabulary too, if `shards` ranks share them; experts are spread over `parts` first.
    """
    shares = layout.pp * shards
    blocks = size.whole.on_rank(layout.tp, shares, parts=parts).all - size.root.on_rank(layout.tp, shares).all
    ends = size.root.all if layout.pp == 1 else size.vocab_size * size.hidden_size
    return blocks + math.ceil(ends / (layout.tp * shards))


def _moments(optimizer: str, wide: int) -> tuple[float, str]:
    """Return the bytes that an optimizer keeps of a trained number, and their arithmetic."""
    if optimizer == "AdamW8bit":
        return 2 * (1 + 2 / SCALE_BLOCK), f"2 × (1 byte + 2 bytes / {SCALE_BLOCK})"
    if optimizer == "Muon":
        return wide, f"{wide} bytes, and as many more of what AdamW steps"
    if optimizer == "SGD":
        return wide, f"{wide} bytes"
    return 2 * wide, f"2 × {wide} bytes"


def _share(layout: ParallelLayout) -> str:
    """Return the divisor of a count, in words."""
    share = ""
    if layout.pp > 1:
        share += f" / {layout.pp} stages"
    if layout.dp_shard > 1:
        share += f" / {layout.dp_shard} shards"
    if layout.tp > 1:
        share += f", layers / {layout.tp} (tensor parallelism)"
    return share


def _codes_how(size: ModelSize) -> str:
    return (
        f"{size.quantized:,} frozen × {NF4_BYTES} bytes (nf4) + {size.largest_quantized:,} at work × "
        f"{DEQUANTIZING_BYTES} bytes"
    )


def _weights_how(size: ModelSize, trained_bytes: int, share: str) -> str:
    trained = size.whole.trained
    frozen = size.whole.all - size.quantized - trained
    if not trained:
        return f"{frozen:,} parameters × {size.itemsize} bytes{share}"
    if not frozen:
        return f"{trained:,} parameters × {trained_bytes} bytes{share}"
    if trained_bytes == size.itemsize:
        return f"{frozen + trained:,} parameters ({trained:,} trained) × {size.itemsize} bytes{share}"
    return f"({frozen:,} frozen × {size.itemsize} bytes + {trained:,} trained × {trained_bytes} bytes){share}"


def _gathered(engine: RoleEngine, size: ModelSize) -> tuple[int, int, str]:
    """Return the bytes that a pass of a sharded model gathers, those of their whole gradients, and how."""
    tensor = engine.layout.tp
    parts = engine.layout.ep
    reduce = max(BYTES[engine.fsdp.mixed_precision.reduce_dtype], size.itemsize)
    root, block = (count.on_rank(tensor, parts=parts) for count in (size.root, size.block))
    whole = size.whole.on_rank(tensor, engine.layout.pp, parts=parts)
    block = replace(block, all=block.all - size.quantized // size.num_layers)
    whole = replace(whole, all=whole.all - size.quantized)
    if engine.trained and not engine.fsdp.reshard_after_forward:
        return (
            whole.all * size.itemsize,
            whole.trained * reduce,
            "the whole model (reshard_after_forward=false)",
        )
    how = (
        f"what is outside of blocks and two blocks, {root.all + 2 * block.all:,} parameters × "
        f"{size.itemsize} bytes"
    )
    return (root.all + 2 * block.all) * size.itemsize, (root.trained + block.trained) * reduce, how


def _pass(engine: RoleEngine, size: ModelSize, device: str) -> tuple[int, list[MemoryItem]]:
    """Estimate what the heaviest micro-batch leaves on the device: activations and one chunk of logits."""
    sequence = engine.layout.cp
    tensor = engine.layout.tp
    model = engine.model
    tokens = math.ceil(min(engine.max_tokens, engine.rows_here * engine.longest) / sequence)
    shared = f"{tokens:,} tokens"
    if sequence > 1:
        shared += f" (a {sequence}th of a micro-batch, Ulysses)"
    numbers = 12 * size.hidden_size + 4 * size.intermediate_size // tensor
    one_layer = "12 hidden + 4 intermediate"
    if size.experts:  # what goes to the experts of each token, and what comes back, is kept for the gradient
        numbers += 2 * size.experts_per_token * size.hidden_size // tensor
        one_layer += f" + 2 × {size.experts_per_token} experts × hidden"
    layer = tokens * numbers * size.itemsize
    kept = size.num_layers * tokens * size.hidden_size * size.itemsize
    one = layer
    how = f"{shared} × ({size.num_layers} layers × hidden + one layer recomputed)"
    if not model.enable_gradient_checkpointing:
        kept = size.num_layers * layer
        one = 0
        how = f"{shared} × {size.num_layers} layers × ({one_layer})"
    chunk = features(device).logits_bytes
    whole = tokens * size.vocab_size * 4
    # logits, log-probs and their gradient
    logits = 3 * min(chunk, whole) + min(KEPT_BYTES, whole)
    limits = f"three chunks of at most {chunk // 2**20} MiB, and at most {KEPT_BYTES // 2**20} MiB kept"
    parts = [MemoryItem("logits", logits, limits)]
    if sequence > 1 and engine.fsdp.context_parallel == "ring":
        heads = max(1, size.num_heads // tensor)
        scores = RING_COPIES * heads * min(RING_QUERIES, tokens) * tokens * 4
        told = (
            f"{heads} heads × {min(RING_QUERIES, tokens)} queries × {tokens:,} keys × 4 bytes × {RING_COPIES}"
        )
        if scores > logits:  # logits are gone when the layers go backward
            logits = scores
            parts = [MemoryItem("scores of a block of the ring", scores, told)]
    if model.enable_activation_offload and is_accelerator(device):
        moved = MemoryItem("activations of a micro-batch", kept, how, on_host=True)
        here = MemoryItem("activations of the layer at work", layer, f"{shared} × ({one_layer})")
        return layer + logits, [moved, here, *parts]
    return kept + one + logits, [MemoryItem("activations of a micro-batch", kept + one, how), *parts]


def planned_judge(config: PPOConfig) -> PlannedReplica:
    """Return how a rank of a generative reward model generates. Where no key bounds what it reads and writes,
    this counts twice the longest row of the run.
    """
    keys = config.reward.reward_model.rollout
    width = keys.tensor_model_parallel_size
    return PlannedReplica(
        width, keys.max_num_seqs, keys.max_model_len or 2 * longest_row(config)[0], None, width
    )


def judge_needs(size: ModelSize, replica: PlannedReplica) -> Needs:
    """Estimate the memory of a rank of a generative reward model, which has its weights and its KV cache from
    the start of the run to its end.
    """
    needs = generation_needs(size, replica, alone=True, devices=1, whence="its own")
    return Needs(needs.parts, needs.between + needs.update)


def generation_needs(
    size: ModelSize,
    replica: PlannedReplica,
    *,
    alone: bool,
    devices: int,
    whence: str = "it is sent the actor's",
) -> Needs:
    """Estimate the memory of one of `devices` processes that generate with the native engine.

    `alone`: they are not the actor's, so that the weights that they are sent are there all the time; `whence`
    says where those are from.
    """
    tensor, rows, slot, kind, _ = replica
    heads = max(1, size.num_kv_heads // tensor)
    cache = rows * slot * (2 * size.num_layers + 1) * heads * size.head_dim * size.itemsize
    how = (
        f"{rows} rows × {slot:,} tokens × (2 × {size.num_layers} layers + 1 spare) × {heads} × "
        f"{size.head_dim} × {size.itemsize} bytes"
    )
    cache_part = MemoryItem("KV cache, at most", cache, how)
    source = ""  # of weights beside the actor's
    if alone:
        source = whence
    elif devices > 1:
        source = "gathered from the shards while it generates"
    whole = size.whole.on_rank(tensor).all - size.quantized  # those in 4 bits are the actor's very own
    weights = whole * size.itemsize if source else 0
    between = weights if alone else 0
    if kind is None:
        parts = [cache_part]
        if weights:
            cut = f", layers / {tensor}" if tensor > 1 else ""
            how = f"{size.whole.all - size.quantized:,} parameters × {size.itemsize} bytes{cut}: {source}"
            parts.insert(0, MemoryItem("weights", weights, how))
        return Needs(parts, between, weights - between + cache)
    # rounded copies are made from the whole weights
    outside = size.root.all
    itemsize = QUANTIZED_BYTES[kind]
    copies = (whole - outside) * itemsize
    of_each = "1 byte" if itemsize == 1 else f"{itemsize} bytes"
    how = f"{whole - outside:,} parameters of layers × {of_each}, rounded to {kind}"
    parts = [MemoryItem("rounded weights", copies, how)]
    rest = 0
    if source:
        rest = outside * size.itemsize
        how = f"{outside:,} parameters of embeddings, head and tower × {size.itemsize} bytes: {source}"
        parts.append(MemoryItem("weights that stay whole", rest, how))
        how = f"{whole:,} parameters × {size.itemsize} bytes, from which copies are made"
        parts.append(MemoryItem("whole weights", weights, how, on_host=alone))
    return Needs([*parts, cache_part], 0, copies + max(weights - between, rest + cache))


def native_quantization(rollout: RolloutConfig) -> str | None:
    """Return the kind to which the native engine quantizes weights; None where it does not."""
    if rollout.name != "native" or rollout.quantization not in QUANTIZED_BYTES:
        return None
    return rollout.quantization


def phases_of_pool(needs: Mapping[str, Needs], processes: int) -> dict[str, int]:
    """Return the bytes of one process in each phase of a pool whose roles need these, by role; the rollout
    is `generation`.
    """
    between = sum(need.between for need in needs.values())
    phases = {}
    if generation := needs.get("generation"):
        actor = needs.get("actor")  # without its own weights, generation needs the actor's on the device
        shared = 0
        if actor:
            shared = actor.fetched if processes == 1 else actor.shared
        phases["generating"] = between + generation.update + shared
    working = [need.update for role, need in needs.items() if role != "generation" and need.update]
    if working:
        phases["updating"] = between + max(working)
    return phases or {"computing": between + max(need.fetched for need in needs.values())}
