"""Rows of 16,384 tokens: generated and trained on with the same log-probs, on one rank and on two, in memory
that does not grow with the square of a row.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from long_rows import HOW, long_row, save_model
from torch import Tensor

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.models.files.build import build_policy
from hybridflow.planner.memory import RoleEngine, engine_needs
from hybridflow.planner.model_shape import load_shape
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from ranks import Ranks

LENGTH = 16384


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("long")
    save_model(path)
    return str(path)


@torch.no_grad()
def log_probs(rank: int, folder: str, how: str) -> Tensor:
    """Log-probs [M] of a long row."""
    policy = build_policy(folder, device="cpu")
    if how != HOW[0]:
        policy.sequence_group = dist.group.WORLD
        policy.sequence_ring = how == "ring 2"
    return policy(pack(long_row(LENGTH))).log_probs


@pytest.mark.slow
def test_two_ranks_hold_a_row_of_16k_tokens_as_one_does(folder: str, two_ranks: Ranks) -> None:
    alone = log_probs(0, folder, HOW[0])
    assert alone.shape == (LENGTH // 2,) and float(alone.std()) > 0.1
    for how in HOW[1:]:
        for found in two_ranks.run(log_probs, folder, how):
            assert torch.allclose(found, alone, atol=2e-5), how


@pytest.mark.slow
def test_a_prompt_of_16k_tokens_is_read_in_pieces_and_answered_as_in_training(folder: str) -> None:
    policy = build_policy(folder, device="cpu")
    ids = long_row(LENGTH).batch["prompts"][0].tolist() * 2
    engine = NativeEngine(policy, eos_token_ids=(), max_num_batched_tokens=4096)
    made = next(iter(engine.generate([GenerationRequest(0, Prompt(tuple(ids)), SamplingParams(8), seed=3)])))
    rows = DataProto.from_dict(make_rows([ids], [made.token_ids], pad_id=0))
    with torch.no_grad():
        trained = policy(pack(rows)).log_probs
    assert len(made.token_ids) == 8 and torch.allclose(trained, torch.tensor(made.log_probs), atol=2e-5)


@pytest.mark.parametrize("how", ["ulysses", "ring"])
def test_a_block_of_the_ring_is_planned_where_it_is_the_largest(how: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    layout = ParallelLayout.from_keys(2, sequence=2)
    fsdp = FSDPConfig(context_parallel="ring") if how == "ring" else FSDPConfig()
    engine = RoleEngine("actor", layout, fsdp, ModelConfig(path=str(tmp_path)), True, 1, LENGTH, LENGTH)
    size = load_shape(str(tmp_path)).size(itemsize=4)
    parts = {part.label: part.size for part in engine_needs(engine, size, device="cpu").parts}
    if how == "ring":  # four tensors of scores of four heads, 512 queries, and the keys of a rank
        assert parts["scores of a block of the ring"] == 4 * 4 * 512 * LENGTH // 2 * 4
    else:
        assert parts["logits"] < 4 * 4 * 512 * LENGTH // 2 * 4
