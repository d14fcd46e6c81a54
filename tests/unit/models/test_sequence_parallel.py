"""Sequences cut among ranks: the uncut model's outputs, and gradients that sum to its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from zoo import packed_rows, tiny_hf, tiny_rows

from hybridflow.models.files.build import enable_gradient_checkpointing
from hybridflow.models.parallel.sequence_parallel import SequenceCut, divide_heads
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from hybridflow.protocol.packing import PackedBatch
from ranks import Ranks

MIXED = ((3, 6), (7, 5), (2, 1), (5, 9))


def _weighted(outputs: Any) -> Tensor:
    """A loss with another weight for every output, and not linear in them."""
    columns = [outputs] if isinstance(outputs, Tensor) else [x for x in outputs[:2] if x is not None]
    total = torch.zeros((), dtype=columns[0].dtype)
    for number, column in enumerate(columns):
        weights = torch.linspace(-1, 2 + number, len(column), dtype=column.dtype)
        total = total + (weights * column).sum() + 0.3 * (weights * column.square()).sum()
    return total


def _run(
    model: nn.Module, packed: PackedBatch, settings: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    outputs = model(packed, **settings)
    _weighted(outputs).backward()
    values = [outputs] if isinstance(outputs, Tensor) else [x for x in outputs if x is not None]
    assert all(x.requires_grad for x in values[:2])
    assert len(values) < 3 or not values[2].requires_grad
    return [x.detach() for x in values], {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def _summed(grad: Tensor) -> Tensor:
    dist.all_reduce(grad)
    return grad


def _shard(model: nn.Module) -> None:
    """Parameters sharded over the ranks that also share the sequences, gradients summed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh).set_gradient_divide_factor(1.0)


def cut_against_uncut(
    rank: int,
    kind: str,
    model_type: str,
    changes: dict[str, Any],
    rows: tuple[tuple[int, int], ...],
    options: dict[str, Any],
) -> tuple[float, float, int]:
    """Largest differences of outputs and of summed gradients, and how many gradients there are."""
    hf = tiny_hf(model_type, options.get("dtype", torch.float64), **changes)
    model = (PolicyModel if kind == "policy" else ValueModel)(hf).train()
    if isinstance(model, ValueModel):
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(3))
    if options.get("checkpointing"):
        enable_gradient_checkpointing(hf)
    data = tiny_rows(rows)
    if options.get("given"):  # tokens of tools, which are read and not predicted
        data.batch["response_mask"][:, 1::3] = False
    packed = packed_rows(data)
    settings = options.get("settings", {})
    wanted, wanted_grads = _run(model, packed, settings)
    model.sequence_group = dist.group.WORLD
    model.sequence_ring = bool(options.get("ring"))
    if options.get("shard"):
        _shard(model)
    got, grads = _run(model, packed, settings)
    assert grads.keys() == wanted_grads.keys(), "every rank has every gradient"
    grads = {
        name: grad.full_tensor() if isinstance(grad, DTensor) else _summed(grad)
        for name, grad in grads.items()
    }
    scale = max(float(grad.abs().max()) for grad in wanted_grads.values())
    apart = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
    return (
        apart,
        max(float((grads[name] - wanted_grads[name]).abs().max()) for name in grads) / scale,
        len(grads),
    )


def _check(ranks: Ranks, kind: str, model_type: str, tolerance: float = 1e-10, **options: Any) -> None:
    changes, rows = options.pop("changes", {}), options.pop("rows", MIXED)
    for apart, grads_apart, count in ranks.run(cut_against_uncut, kind, model_type, changes, rows, options):
        assert apart < tolerance and grads_apart < tolerance and count > 10


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3_moe", "gemma3_text", "mistral", "phi3", "deepseek_v3", "gpt_neox"]
)
def test_architectures(two_ranks: Ranks, model_type: str) -> None:
    _check(two_ranks, "policy", model_type)


def test_rows_with_tokens_that_tools_have_given(two_ranks: Ranks) -> None:
    _check(two_ranks, "policy", "llama", given=True, settings={"with_entropy": True})


@pytest.mark.parametrize(
    ("model_type", "heads", "kv_heads"),
    [
        ("llama", 4, 1),
        ("gpt_oss", 4, 1),
        ("qwen3", 6, 3),
        ("gemma2", 3, 3),
        ("gpt_oss", 3, 1),
        ("llama", 5, 5),
    ],
)
def test_heads_that_do_not_divide(two_ranks: Ranks, model_type: str, heads: int, kv_heads: int) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    _check(two_ranks, "policy", model_type, changes=changes)


@pytest.mark.parametrize(
    "rows", [((1, 1),), ((1, 1), (2, 1), (1, 1)), ((2, 9),), ((20, 1),), ((9, 2), (1, 30))]
)
def test_rows_of_any_size(two_ranks: Ranks, rows: tuple[tuple[int, int], ...]) -> None:
    """One target for two ranks; parts without a predicting token; an odd number of tokens."""
    _check(two_ranks, "policy", "mistral", rows=rows)


def test_entropy_and_squares(two_ranks: Ranks) -> None:
    settings = {"temperature": 0.7, "with_entropy": True, "with_sum_pi_squared": True}
    _check(two_ranks, "policy", "gemma2", settings=settings)


def test_values(two_ranks: Ranks) -> None:
    _check(two_ranks, "value", "qwen2")
    _check(two_ranks, "value", "gpt_oss", rows=((1, 1),))


def test_float32_and_checkpointing(two_ranks: Ranks) -> None:
    _check(
        two_ranks,
        "policy",
        "llama",
        1e-6,
        dtype=torch.float32,
        changes={"initializer_range": 0.1},
        checkpointing=True,
    )
    _check(two_ranks, "policy", "gpt_oss", checkpointing=True)


def test_sharded_parameters(two_ranks: Ranks) -> None:
    """One rank has no target at all, and still gathers the head and sums its gradient."""
    _check(two_ranks, "policy", "qwen2", rows=((20, 1),), shard=True)
    _check(two_ranks, "value", "llama", shard=True, checkpointing=True)


@pytest.mark.slow
def test_three_ranks(three_ranks: Ranks) -> None:
    """Neither 4 heads, nor 2 key-value heads, nor 38 tokens, nor 2 tokens divide by three."""
    _check(three_ranks, "policy", "gpt_oss")
    _check(
        three_ranks, "policy", "qwen3", changes={"num_attention_heads": 6, "hidden_size": 48}, rows=((1, 1),)
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "wanted"),
    [
        (8, 4, 2, (8, 4)),
        (8, 1, 4, (8, 4)),
        (8, 2, 4, (8, 4)),
        (6, 3, 2, (6, 6)),
        (6, 2, 4, (8, 8)),
        (3, 1, 2, (4, 4)),
        (12, 3, 2, (12, 6)),
    ],
)
def test_divide_heads(heads: int, kv_heads: int, size: int, wanted: tuple[int, int]) -> None:
    """Each rank's query heads find their own key-value heads among the rank's."""
    query = torch.arange(1.0, heads + 1)[None, :, None, None]
    key = torch.arange(1.0, kv_heads + 1)[None, :, None, None]
    q, k, _ = divide_heads(query, key, key, size)
    assert (q.shape[1], k.shape[1]) == wanted and not any(count % size for count in wanted)
    shared = k.repeat_interleave(wanted[0] // wanted[1], dim=1)[0, :heads, 0, 0]
    assert shared.tolist() == [head // (heads // kv_heads) + 1 for head in range(heads)]
    assert not q[:, heads:].any()


class Seat:
    """A rank's place in a group."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("lengths", [MIXED, ((4, 1),), ((3, 0), (1, 9))])
def test_each_predicting_position_is_on_the_rank_of_its_token_and_no_device_is_asked(
    size: int, lengths: tuple[tuple[int, int], ...]
) -> None:
    packed = packed_rows(tiny_rows(lengths))
    places = [SequenceCut(packed, Seat(size, rank)) for rank in range(size)]  # type: ignore[arg-type]
    found = [cut.predict_index + rank * cut.part for rank, cut in enumerate(places)]
    assert torch.equal(torch.cat(found), packed.predict_index)
    assert all(bool(((cut.predict_index >= 0) & (cut.predict_index < cut.part)).all()) for cut in places)
    for rank, cut in enumerate(places):
        blind = SequenceCut(packed.to("meta"), Seat(size, rank))  # type: ignore[arg-type]  # whose numbers nobody can read
        assert (blind.own, blind._sends, blind._receives) == (cut.own, cut._sends, cut._receives)
