"""What each family of models can do here, measured against transformers: for tests, and for the page of them.

A family is a tiny random model of its architecture. Every measurement is the largest difference that was
found, or the message of the ModelError by which the thing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import test_sequence_parallel
import test_tensor_parallel
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from zoo import MOE, VOCABULARY, packed_rows, tiny_hf, tiny_rows

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings, adapted_layers, add_lora, fold_adapters
from hybridflow.models.copies.twin import Twin
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.export import save_hf_sharded
from hybridflow.models.files.probe import probe_policy
from hybridflow.models.float64 import compute_in_float64
from hybridflow.models.parallel.stages import check_stages
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import PackedBatch, make_rows, pack, share_prompts
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.self_check import choose_exact_mode
from ranks import Ranks

ROWS = ((3, 6), (9, 13), (2, 1), (11, 19), (5, 9), (4, 26))
"""(prompt, response) tokens: all but one are longer than every window of the models, and three than the
length that rotary scaling starts from.
"""
Measured = float | str
"""A difference, or the reason that there is none."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers, and how its tiny model differs from the zoo's."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)

    def hf(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A random model, always the same; one of float64 computes so throughout, also by transformers."""
        hf = tiny_hf(self.model_type, dtype, **self.changes)
        if dtype == torch.float64:
            compute_in_float64(hf)
        return hf

    @property
    def sparse(self) -> bool:
        """Whether it has experts."""
        config = self.hf().config
        return any(hasattr(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, Family] = {
    "Llama 3": Family(
        "llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8, "rope_theta": 5e5}}
    ),
    "Qwen2.5": Family("qwen2"),
    "Qwen3": Family("qwen3"),
    "Qwen3-MoE": Family("qwen3_moe"),
    "Mistral": Family("mistral"),
    "Mixtral": Family("mixtral"),
    "Gemma 2": Family("gemma2"),
    "Gemma 3": Family("gemma3_text"),
    "Phi-3": Family("phi3"),
    "SmolLM3": Family("smollm3"),
    "OLMo 2": Family("olmo2"),
    "OLMo 3": Family("olmo3"),
    "OLMoE": Family("olmoe"),
    "GLM-4": Family("glm4"),
    "GLM-4.5": Family("glm4_moe"),
    "GLM-4.7-Flash": Family("glm4_moe_lite"),
    "DeepSeek-V3": Family("deepseek_v3"),
    "gpt-oss": Family("gpt_oss"),
    "Command R": Family("cohere"),
    "Granite 3": Family("granite"),
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
REFUSED: dict[str, Family] = {
    "Qwen3-Next": Family("qwen3_next", {**_LINEAR, **MOE}),
    "Qwen3.5": Family("qwen3_5_text", _LINEAR),
    "Llama 4": Family("llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}),
    "LFM2": Family("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "Phi-3.5-MoE with a window": Family("phimoe", {"sliding_window": 100, "num_local_experts": 4}),
    "Qwen2-MoE with a window": Family("qwen2_moe", {"use_sliding_window": True, "sliding_window": 100}),
    "Falcon": Family("falcon", {"head_dim": None}),
    "Mamba": Family("mamba"),
}
"""Families that are refused, as they are or with these settings."""


def refusal(of: Callable[..., Measured], *args: Any) -> Measured:
    """Return what a measurement gives, or the message by which it is refused."""
    try:
        return of(*args)
    except ModelError as error:
        return str(error)


def by_transformers(hf: PreTrainedModel, packed: PackedBatch) -> Tensor:
    """Return log-probs [M] of each row, run alone by transformers with its eager attention."""
    logits = [
        hf(input_ids=row[None], use_cache=False).logits[0] for row in packed.input_ids.split(packed.lengths)
    ]
    log_probs = torch.cat(logits).log_softmax(-1)[packed.predict_index.long()]
    return log_probs.gather(-1, packed.targets[:, None])[:, 0]


def gradients_of(model: torch.nn.Module, log_probs: Tensor) -> list[Tensor]:
    """Return the gradients of a loss that weighs every token otherwise."""
    model.zero_grad()
    (log_probs * torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def packed_apart(family: Family, dtype: torch.dtype) -> float:
    """Return how far packed log-probs are from those of transformers, in nats."""
    packed = packed_rows(tiny_rows(ROWS))
    with torch.no_grad():
        wanted = by_transformers(family.hf(dtype), packed)
        return float((PolicyModel(family.hf(dtype))(packed).log_probs - wanted).abs().max())


def gradients_apart(family: Family) -> float:
    """Return how far gradients of packed rows are from those of transformers, relative, in float64."""
    packed = packed_rows(tiny_rows(ROWS))
    hf = family.hf(torch.float64)
    wanted = gradients_of(hf, by_transformers(hf, packed))
    policy = PolicyModel(family.hf(torch.float64))
    found = gradients_of(policy, policy(packed).log_probs)
    scale = max(float(gradient.abs().max()) for gradient in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / scale


def shared_apart(family: Family) -> float:
    """Return how far log-probs of rows that share a prompt's tokens are from transformers', in float64."""
    data = tiny_rows(ROWS)
    prompts = [[5, 9, 4, 7, 6], [5, 9, 4, 7, 6], [8, 3], [8, 3], [8, 3], [11]]
    responses = [row.tolist()[: ROWS[number][1]] for number, row in enumerate(data.batch["responses"])]
    apart = pack(DataProto.from_dict(make_rows(prompts, responses, pad_id=0)))
    shared = share_prompts(apart)
    assert shared.num_tokens < apart.num_tokens
    with torch.no_grad():
        wanted = by_transformers(family.hf(torch.float64), apart)
        return float((PolicyModel(family.hf(torch.float64))(shared).log_probs - wanted).abs().max())


@dataclass(frozen=True)
class Generated:
    """What the native engine has generated greedily, against transformers."""

    same_tokens: int
    """Tokens that are those of transformers' own generation."""
    tokens: int
    apart: float
    """Largest difference of their log-probs from those of transformers' forward, in nats."""


@torch.no_grad()
def generated(family: Family) -> Generated:
    """Generate rows of mixed lengths greedily: five at a time, prompts in pieces, past every window."""
    hf = family.hf()
    engine = NativeEngine(
        PolicyModel(family.hf()), eos_token_ids=(2,), max_num_seqs=5, max_num_batched_tokens=20
    )
    draw = torch.Generator().manual_seed(4)
    requests = []
    for number in range(12):
        prompt = torch.randint(3, VOCABULARY, (1 + 7 * number % 23,), generator=draw).tolist()
        sampling = SamplingParams(3 + 5 * number % 17, greedy=True)
        requests.append(GenerationRequest(number, Prompt(tuple(prompt)), sampling, seed=0))
    outputs = {output.request_id: output for output in engine.generate(requests)}
    same = total = 0
    apart = 0.0
    for request in requests:
        output = outputs[request.request_id]
        ids = torch.tensor([request.prompt_token_ids])
        limits = GenerationConfig(
            max_new_tokens=request.sampling.max_tokens, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        theirs = hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=limits)[0]
        theirs = theirs[ids.shape[1] :].tolist()
        total += max(len(theirs), len(output.token_ids))
        same += sum(a == b for a, b in zip(theirs, output.token_ids))
        made = torch.tensor(output.token_ids)
        logits = hf(torch.cat([ids[0], made])[None], use_cache=False).logits[0]
        wanted = logits.log_softmax(-1)[ids.shape[1] - 1 : -1].gather(-1, made[:, None])[:, 0]
        apart = max(apart, float((wanted - torch.tensor(output.log_probs)).abs().max()))
    return Generated(same, total, apart)


def exact_problem(family: Family) -> str:
    """Return why generation and training cannot have the same bits, or an empty text where they have."""
    policy = PolicyModel(family.hf())
    mode = choose_exact_mode(NativeEngine(policy, eos_token_ids=(2,)), policy, longest=64, temperature=1.0)
    return mode if isinstance(mode, str) else ""


def read_back(family: Family, folder: Path) -> int:
    """Return how many tensors of a written folder are read back with the same bits; all, or it is wrong."""
    policy = PolicyModel(family.hf())
    save_hf_sharded(policy, folder)
    again = build_policy(folder, device="cpu").state_dict()
    before = policy.state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
    return len(before)


@torch.no_grad()
def adapters(family: Family) -> tuple[int, float]:
    """Return how many layers LoRA adapts, and how far folded adapters are from adapters, in nats."""
    policy = PolicyModel(family.hf())
    packed = packed_rows(tiny_rows(ROWS))
    before = policy(packed).log_probs
    add_lora(policy, LoraSettings(rank=4, alpha=8, seed=3))
    assert policy(packed).log_probs.equal(before), "adapters that have learned nothing change nothing"
    layers = adapted_layers(policy)
    for layer in layers.values():
        layer.lora_B["default"].weight.fill_(0.05)
    adapted = policy(packed).log_probs
    assert not torch.allclose(adapted, before, atol=1e-2)
    fold_adapters(policy)
    return len(layers), float((policy(packed).log_probs - adapted).abs().max())


def in_stages(family: Family) -> float:
    """Return 0.0 where two stages have the bits of one piece; ModelError where they have not."""
    check_stages(PolicyModel(family.hf()))
    return 0.0


def sequences_cut(rank: int, family: Family, **options: Any) -> float:
    """Return the worse of the differences of outputs and gradients where ranks share tokens, in float64."""
    given = (family.model_type, family.changes, ROWS, options)
    return max(test_sequence_parallel.cut_against_uncut(rank, "policy", *given)[:2])


def layers_cut(rank: int, family: Family, **options: Any) -> float:
    """Return the worse of the differences of outputs and gradients where ranks share layers, in float64."""
    given = (family.model_type, family.changes, torch.float64, options)
    return max(test_tensor_parallel.cut_against_whole(rank, "policy", *given)[:2])


@torch.no_grad()
def slices_apart(rank: int, family: Family) -> float:
    """Return how far log-probs of two ranks that generate together are from one's, in float64 nats."""
    policy = PolicyModel(family.hf(torch.float64))
    whole = dict(policy.named_parameters())
    twin = Twin(
        policy,
        dtypes={name: parameter.dtype for name, parameter in whole.items()},
        device=torch.device("cpu"),
        replica=ReplicaRanks.of_this_rank(2),
    )
    for name, memory in twin.allocate().items():
        part = whole[name]
        if name in twin.slices:
            part = part.chunk(2, twin.slices[name])[rank]
        memory.copy_(part)
    packed = packed_rows(tiny_rows(ROWS))
    return float((twin.policy(packed).log_probs - policy(packed).log_probs).abs().max())


SPREADS: dict[str, Callable[..., float]] = {
    "Ulysses 2": sequences_cut,
    "ring 2": partial(sequences_cut, ring=True),
    "TP 2": layers_cut,
    "EP 2": partial(layers_cut, experts=True, meta=True, slices=False),
    "TP 2 with EP 2": partial(layers_cut, experts=True, meta=True),
    "generation TP 2": slices_apart,
}
"""Ways to spread a model over two ranks, and what measures each."""


def on_rank(rank: int, name: str, family: Family) -> Measured:
    """Return the difference that one of two ranks finds, or the refusal."""
    return refusal(SPREADS[name], rank, family)


def spread(ranks: Ranks, name: str, family: Family) -> Measured:
    """Return the worst difference of two ranks from one, or why the model cannot be spread so."""
    found = ranks.run(on_rank, name, family)
    assert len({type(each) for each in found}) == 1, found
    return max(found)


def refused(family: Family) -> str:
    """Return the message by which a family is refused, or an empty text."""
    try:
        probe_policy(PolicyModel(family.hf()))
    except ModelError as error:
        return str(error)
    return ""
