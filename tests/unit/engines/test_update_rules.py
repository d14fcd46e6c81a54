"""Optimizers by name against torch's own and against float64, on one rank and on two, and over a resume."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hybridflow.config.model import OptimConfig
from hybridflow.engines.optimizer import MasterAdamW
from hybridflow.engines.update_rules import (
    AdamW8bit,
    lr_factor,
    orthogonal,
    pack,
    unpack,
)
from hybridflow.errors import CheckpointError
from hybridflow.models.blocks import tables_and_heads
from ranks import Ranks

NAMES = ("AdamW", "AdamW8bit", "Muon", "SGD")


def config(name: Any, **keys: Any) -> OptimConfig:
    return OptimConfig(
        **{"optimizer": name, "lr": 1e-2, "weight_decay": 0.1, "betas": [0.8, 0.95], "momentum": 0.9, **keys}
    )


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two matrices, a tall one among them, a bias, a norm, an embedding and a head."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 20), nn.LayerNorm(20), nn.Linear(20, 8))
    module.add_module("head", nn.Linear(8, 4, bias=False))
    return module.to(dtype)


def backward(module: nn.Module, step: int) -> None:
    ids = torch.randint(0, 9, (12,), generator=torch.Generator().manual_seed(step))
    module(ids).square().mean().backward()


def slow_muon(weight: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    """The weight after these gradients in float64, its update by singular values."""
    momentum = torch.zeros_like(weight)
    for grad in grads:
        momentum = 0.9 * momentum + 0.1 * grad
        u, singular, v = torch.linalg.svd(grad + 0.9 * (momentum - grad), full_matrices=False)
        values = singular / singular.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        weight = weight * (1 - lr * 0.1) - lr * 0.2 * max(weight.shape) ** 0.5 * u @ values.diag() @ v
    return weight


def train(module: nn.Module, optimizer: MasterAdamW, steps: range, lr: float = 1e-2) -> None:
    for step in steps:
        backward(module, step)
        if isinstance(next(module.parameters()), DTensor):
            optimizer.collect_shards()
        optimizer.step(lr)
        optimizer.zero_grad()


def made(name: str, dtype: torch.dtype = torch.float32, **keys: Any) -> tuple[nn.Module, MasterAdamW]:
    module = net(dtype)
    return module, MasterAdamW(
        module.named_parameters(), config(name, **keys), apart=tables_and_heads(module)
    )


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_muon_is_torchs_but_for_rounding_to_bfloat16_and_adamw_has_the_rest() -> None:
    ours, optimizer = made("Muon", torch.float64)
    theirs = net(torch.float64)
    named = dict(theirs.named_parameters())
    matrices = [named[name] for name in ("1.weight", "3.weight")]
    moved = {name: named[name].detach().clone() for name in ("1.weight", "3.weight")}
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    rest = [p for name, p in named.items() if name not in ("1.weight", "3.weight")]
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-8)
    grads: dict[str, list[Tensor]] = {name: [] for name in moved}
    for step in range(3):
        backward(ours, step)
        for other, parameter in named.items():
            parameter.grad = ours.get_parameter(other).grad.clone()  # type: ignore[union-attr]
            grads.setdefault(other, []).append(parameter.grad.clone())
        optimizer.step(1e-2)
        optimizer.zero_grad()
        muon.step()
        adamw.step()
        for name, parameter in ours.named_parameters():
            if name in moved:
                slow = slow_muon(moved[name], grads[name], 1e-2)
                assert torch.allclose(parameter, slow, atol=1e-9, rtol=0), step
                ways = [(x.detach() - moved[name]).flatten() for x in (parameter, named[name])]
                assert torch.cosine_similarity(*ways, dim=0) > 0.9, "torch iterates in bfloat16"
            else:
                assert torch.allclose(parameter, named[name], atol=1e-12, rtol=0), (name, step)
    assert [type(rule).__name__ for rule in optimizer.rules] == ["Muon", "AdamW"]


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 5, 5)])
def test_newton_and_schulz_make_a_matrix_orthogonal(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = orthogonal(matrix, 5)
    u, singular, v = torch.linalg.svd(matrix, full_matrices=False)
    values = singular / singular.norm(dim=-1, keepdim=True)
    for _ in range(5):  # the iteration acts on singular values alone
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    assert torch.allclose(u @ torch.diag_embed(values) @ v, got, atol=1e-10)
    assert (values > 0.6).all() and (values < 1.3).all()
    if len(shape) == 3:
        assert torch.allclose(got[1], orthogonal(matrix[1], 5), atol=1e-12)


def test_factors_of_muons_learning_rate() -> None:
    assert lr_factor("original", 16, 4) == 2.0 and lr_factor("original", 4, 16) == 1.0
    assert lr_factor("match_rms_adamw", 4, 25) == lr_factor("match_rms_adamw", 25, 4) == 1.0


def test_sgd_is_torchs() -> None:
    ours, optimizer = made("SGD")
    theirs = net()
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    sgd = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    optimizer.state_dict()  # makes the state, which must begin as torch's does
    for step in range(3):
        train(ours, optimizer, range(step, step + 1))
        backward(theirs, step)
        sgd.step()
        sgd.zero_grad()
        assert all(map(torch.equal, values(ours), values(theirs)))


def test_packing_is_close_and_exact_for_what_was_unpacked() -> None:
    draw = torch.Generator().manual_seed(0)
    tensor = torch.randn(7, 100, generator=draw) * 10.0 ** torch.randint(-6, 3, (7, 1), generator=draw)
    tensor[2, :50] = 0.0
    numbers, exponents = pack(tensor)
    assert numbers.dtype == torch.float8_e4m3fn and numbers.numel() == 768 and exponents.numel() == 3
    got = unpack(numbers, exponents, tensor)
    largest = nn.functional.pad(tensor.reshape(-1), (0, 68)).reshape(3, 256).abs().amax(1)
    bound = (tensor.abs() / 15).reshape(-1) + largest.repeat_interleave(256)[:700] * 2.0**-17
    assert ((got - tensor).abs().reshape(-1) <= bound).all()
    again = pack(got)
    assert torch.equal(unpack(*again, tensor), got)
    assert unpack(*pack(torch.zeros(3)), torch.zeros(3)).tolist() == [0.0] * 3
    rounded_up = torch.full((256,), 447.0)  # its largest number becomes 448, with another scale
    rounded_up[1:] = torch.arange(255) * 2.0**-9
    for values_of, keep in ((rounded_up, False), (torch.full((256,), 1e-25), True)):
        got = unpack(*pack(values_of, keep_positive=keep), values_of)
        assert torch.equal(unpack(*pack(got.square().sqrt(), keep_positive=keep), got), got)
    roots = torch.tensor([1.0, 1e-9, 0.0])
    kept = unpack(*pack(roots, keep_positive=True), roots)
    assert kept[1] > 0 and kept[2] == 0


def test_moments_of_8_bits_stay_near_adamw_and_take_a_quarter() -> None:
    ours, optimizer = made("AdamW8bit")
    exact, reference = made("AdamW")
    start = values(exact)
    train(ours, optimizer, range(20))
    train(exact, reference, range(20))
    for before, got, want in zip(start, values(ours), values(exact), strict=True):
        assert (got - want).norm() < 0.1 * (want - before).norm()
    (rule,) = optimizer.rules
    assert isinstance(rule, AdamW8bit)
    entry = rule.state[optimizer.masters["1.weight"]]
    assert {name: tensor.dtype for name, tensor in entry.items() if tensor.ndim} == {
        "mean": torch.float8_e4m3fn,
        "root": torch.float8_e4m3fn,
        "mean_exponents": torch.int16,
        "root_exponents": torch.int16,
    }
    assert entry["mean"].numel() == 256 and entry["mean_exponents"].numel() == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_optimizer_goes_on_to_the_bit(name: str, dtype: torch.dtype) -> None:
    first, optimizer = made(name, dtype)
    train(first, optimizer, range(3))
    state = deepcopy(optimizer.state_dict())
    second, resumed = made(name, dtype)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(state)
    train(first, optimizer, range(3, 6))
    train(second, resumed, range(3, 6))
    assert all(map(torch.equal, values(first), values(second)))


def test_states_of_other_rules() -> None:
    _, adamw = made("AdamW")
    _, eight = made("AdamW8bit")
    eight.load_state_dict(adamw.state_dict())
    _, muon = made("Muon")
    with pytest.raises(CheckpointError, match=r"exp_avg_sq of 1\.weight, and Muon keeps momentum_buf"):
        muon.load_state_dict(adamw.state_dict())


def sharded_steps(rank: int, name: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights after three steps of a module over two ranks, its state, and weights after a resume."""
    mesh = init_device_mesh("cpu", (2,))

    def build() -> tuple[nn.Module, MasterAdamW]:
        module = net(torch.float64)
        fully_shard(module, mesh=mesh)
        optimizer = MasterAdamW(module.named_parameters(), config(name), apart=tables_and_heads(module))
        return module, optimizer

    module, optimizer = build()
    train(module, optimizer, range(3))
    whole = [parameter.full_tensor().detach() for parameter in module.parameters()]  # type: ignore[attr-defined]
    state = optimizer.state_dict()
    other, resumed = build()
    other.load_state_dict(module.state_dict())
    resumed.load_state_dict(deepcopy(state))
    train(other, resumed, range(3, 5))
    train(module, optimizer, range(3, 5))
    assert all(
        torch.equal(a.full_tensor(), b.full_tensor())  # type: ignore[attr-defined]
        for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )
    gathered = {
        key: {part: x.full_tensor() if isinstance(x, DTensor) else x for part, x in entry.items()}
        for key, entry in state.items()
    }
    return whole, gathered


@pytest.mark.parametrize("name", ["Muon", "SGD", "AdamW8bit"])
def test_two_ranks_step_as_one(two_ranks: Ranks, name: str) -> None:
    module, optimizer = made(name, torch.float64)
    train(module, optimizer, range(3))
    both = two_ranks.run(sharded_steps, name)
    atol = 1e-3 if name == "AdamW8bit" else 1e-12  # pieces have other blocks
    for whole, _ in both:
        for got, want in zip(whole, values(module), strict=True):
            assert torch.allclose(got, want, atol=atol, rtol=0)
    _, on_one = made(name, torch.float64)
    on_one.load_state_dict(deepcopy(both[0][1]))
    for part, kept in on_one.state_dict()["1.weight"].items():
        assert torch.allclose(kept, both[0][1]["1.weight"][part], rtol=0.1 if name == "AdamW8bit" else 1e-12)
