"""Tiny models, rows with every column a loss reads, and the engines under test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.config.model import OptimConfig
from hybridflow.engines import TrainEngine
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows

VOCABULARY = 64
LENGTHS = ((3, 6), (7, 5), (2, 1), (5, 9), (4, 4), (1, 7), (6, 3))
"""(prompt, response) tokens of each row; one row has a single token to learn."""


def make_fsdp(module: nn.Module, optim: OptimConfig | None, **settings: Any) -> TrainEngine:
    return FSDPEngine(module, name="actor", optim=optim, **settings)


EngineMaker = Callable[..., TrainEngine]
ENGINES: dict[str, EngineMaker] = {"fsdp": make_fsdp}
"""A training engine joins the conformance suite by one line here."""


def tiny_llama(
    dtype: torch.dtype = torch.float32,
    *,
    tied: bool = True,
    seed: int = 0,
    layers: int = 2,
    bias: bool = False,
) -> LlamaForCausalLM:
    """Weights large enough that attention matters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM._from_config(config, attn_implementation="eager").to(dtype)


def tiny_policy(dtype: torch.dtype = torch.float32, **changes: Any) -> PolicyModel:
    return PolicyModel(tiny_llama(dtype, **changes))


def tiny_value(dtype: torch.dtype = torch.float32) -> ValueModel:
    """A value model whose head says something from the start."""
    model = ValueModel(tiny_llama(dtype))
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(5))
    return model


def training_rows(
    *, extra_prompt: int = 0, extra_response: int = 0, dtype: torch.dtype = torch.float64
) -> DataProto:
    """The rows of LENGTHS with all columns of both losses, `extra_*` columns wider than needed; what stands
    in padding is junk.

    Rows 1 and 3 have observation tokens, row 4 is left out of the loss as a whole, row 5 in part.
    """
    draw = torch.Generator().manual_seed(1)
    prompts, responses = (
        [torch.randint(3, VOCABULARY, (pair[i],), generator=draw).tolist() for pair in LENGTHS]
        for i in (0, 1)
    )
    longest_prompt, longest_response = (max(pair[i] for pair in LENGTHS) for i in (0, 1))
    sampled = [[1] * len(response) for response in responses]
    sampled[1][2] = sampled[3][4] = sampled[3][5] = 0
    columns = make_rows(
        prompts,
        responses,
        pad_id=0,
        prompt_width=longest_prompt + extra_prompt,
        response_width=longest_response + extra_response,
        response_masks=sampled,
    )
    columns["loss_mask"] = columns["response_mask"].clone()
    columns["loss_mask"][4] = False
    columns["loss_mask"][5, 2:4] = False

    def field(mean: float, spread: float) -> Tensor:
        values = mean + spread * torch.randn(
            len(LENGTHS), longest_response, generator=draw, dtype=torch.float64
        )
        junk = torch.full((len(LENGTHS), extra_response), 1e4, dtype=torch.float64)
        return torch.cat([values, junk], dim=1).to(dtype)

    columns |= {
        "old_log_probs": field(-4.2, 0.5),
        "ref_log_prob": field(-4.2, 0.5),
        "advantages": field(0.0, 1.0),
    }
    columns |= {"rollout_is_weights": field(1.0, 0.1), "values": field(0.0, 0.5), "returns": field(0.5, 1.0)}
    columns["group_ids"] = torch.arange(len(LENGTHS)) // 2
    return DataProto.from_dict(columns, {"uid": [f"group {row // 2}" for row in range(len(LENGTHS))]})


def row_tokens() -> list[int]:
    return [prompt + response for prompt, response in LENGTHS]


class Counting:
    """Notes (rows, tokens) of every forward of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.seen = list[tuple[int, int]]()
        module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        self.seen.append((len(args[0].lengths), args[0].num_tokens))


class Gradients:
    """Adds up what flows into each parameter, so that an engine may drop or clip its own."""

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._add(name, gradient))

    def _add(self, name: str, gradient: Tensor) -> None:
        self.found[name] = self.found[name] + gradient if name in self.found else gradient.clone()

    def norm(self) -> float:
        return float(torch.stack([gradient.norm() for gradient in self.found.values()]).norm())


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def folders(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []
