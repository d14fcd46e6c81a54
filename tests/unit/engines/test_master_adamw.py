"""AdamW with float32 masters against torch's own, and what it owes a bfloat16 module."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from engine_zoo import tiny_policy
from torch import Tensor, nn

from hybridflow.config.model import OptimConfig
from hybridflow.engines.optimizer import MasterAdamW
from hybridflow.errors import TrainingError

CONFIG = OptimConfig(lr=3e-3, weight_decay=0.1, betas=[0.8, 0.95], eps=1e-7)


class Net(nn.Module):
    """Two matrices, a bias, a norm and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.last(torch.tanh(self.norm(self.first(x))))


def inputs(step: int, dtype: torch.dtype = torch.float32, part: int = 0) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + part)).to(dtype)


def test_float32_equals_torch_to_the_bit() -> None:
    ours, theirs = Net(), Net()
    optimizer = MasterAdamW(ours.named_parameters(), CONFIG)
    decayed = [p for p in theirs.parameters() if p.ndim >= 2]
    others = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-7, fused=True)
    for step in range(4):
        for net in (ours, theirs):
            net(inputs(step)).square().mean().backward()
        optimizer.step(3e-3)
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(optimizer.masters[name] is parameter for name, parameter in ours.named_parameters()), (
        "no copy where none is needed"
    )


def test_only_matrices_decay() -> None:
    net = Net()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer = MasterAdamW(net.named_parameters(), CONFIG)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5)
    for name, parameter in net.named_parameters():
        factor = 1 - 0.5 * 0.1 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_bfloat16_adds_gradients_up_in_float32() -> None:
    """Many small micro-batches: a bfloat16 sum would stop growing."""
    net, parts = Net(torch.bfloat16), 40
    optimizer = MasterAdamW(net.named_parameters(), CONFIG)
    exact: dict[str, Tensor] = {}
    for part in range(parts):
        x = inputs(0, torch.bfloat16, part)
        for name, gradient in zip(
            dict(net.named_parameters()),
            torch.autograd.grad(net(x).sum(), list(net.parameters())),
            strict=True,
        ):
            exact[name] = exact.get(name, torch.zeros(())) + gradient.float()
        net(x).sum().backward()
    for name, master in optimizer.masters.items():
        assert master.dtype == torch.float32
        assert master.grad is not None
        assert master.grad.dtype == torch.float32
        assert torch.equal(master.grad, exact[name])
    assert all(parameter.grad is None for parameter in net.parameters())
    norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    assert float(optimizer.gradient_norm()) == pytest.approx(float(norm), rel=1e-6)
    optimizer.scale_gradients(torch.tensor(0.5))
    assert float(optimizer.gradient_norm()) == pytest.approx(float(norm) / 2, rel=1e-6)


def test_bfloat16_rounds_into_the_same_storage() -> None:
    net = Net(torch.bfloat16)
    pointers = [parameter.data_ptr() for parameter in net.parameters()]
    optimizer = MasterAdamW(net.named_parameters(), CONFIG)
    masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in net.named_parameters()}
    groups = [
        {"params": [m for m in masters.values() if m.ndim >= 2], "weight_decay": 0.1},
        {"params": [m for m in masters.values() if m.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-4, betas=(0.8, 0.95), eps=1e-7, fused=True)
    for step in range(5):
        loss = net(inputs(step, torch.bfloat16)).float().square().mean()
        for master, gradient in zip(
            masters.values(),
            torch.autograd.grad(loss, list(net.parameters()), retain_graph=True),
            strict=True,
        ):
            master.grad = gradient.float()
        loss.backward()
        optimizer.step(1e-4)
        optimizer.zero_grad()
        reference.step()
        for name, parameter in net.named_parameters():
            assert torch.equal(optimizer.masters[name], masters[name]), (
                "steps too small for bfloat16 are not lost"
            )
            assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, masters[name].bfloat16())
    assert [parameter.data_ptr() for parameter in net.parameters()] == pointers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embeddings_have_one_master(dtype: torch.dtype) -> None:
    tied, untied = (
        MasterAdamW(tiny_policy(dtype, tied=is_tied).named_parameters(), CONFIG) for is_tied in (True, False)
    )
    assert set(untied.masters) - set(tied.masters) == {"hf.lm_head.weight"}
    model = tiny_policy(dtype)
    optimizer = MasterAdamW(model.named_parameters(), CONFIG)
    (model.head.weight.sum() + 2 * model.hf.get_input_embeddings().weight.sum()).backward()
    master = optimizer.masters["hf.model.embed_tokens.weight"]
    assert master.grad is not None and bool((master.grad == 3.0).all())
    optimizer.step(1e-2)
    assert model.head.weight.data_ptr() == model.hf.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_gives_the_same_next_step(dtype: torch.dtype) -> None:
    def train(net: Net, optimizer: MasterAdamW, step: int) -> None:
        net(inputs(step, dtype)).float().square().mean().backward()
        optimizer.step(1e-3)
        optimizer.zero_grad()

    net = Net(dtype)
    optimizer = MasterAdamW(net.named_parameters(), CONFIG)
    for step in range(3):
        train(net, optimizer, step)
    state, weights = deepcopy(optimizer.state_dict()), deepcopy(net.state_dict())
    other = Net(dtype)
    other.load_state_dict(weights)
    resumed = MasterAdamW(other.named_parameters(), CONFIG)
    resumed.load_state_dict(state)
    train(net, optimizer, 3)
    train(other, resumed, 3)
    for name, master in optimizer.masters.items():
        assert torch.equal(master, resumed.masters[name])
        assert torch.equal(optimizer.parameters[name], resumed.parameters[name])
    assert float(state["gain"]["step"]) == 3.0, "the state that was loaded is not the optimizer's own"


def test_a_state_of_another_dtype_fits() -> None:
    """A run may go on in bfloat16 from a float32 checkpoint: its parameters are the masters."""
    wide, narrow = Net(), Net(torch.bfloat16)
    wide_optimizer, narrow_optimizer = (MasterAdamW(net.named_parameters(), CONFIG) for net in (wide, narrow))
    wide(inputs(0)).square().mean().backward()
    wide_optimizer.step(1e-3)
    narrow.load_state_dict(wide.state_dict())
    narrow_optimizer.load_state_dict(wide_optimizer.state_dict())
    assert all(
        torch.equal(master, narrow.get_parameter(name).float())
        for name, master in narrow_optimizer.masters.items()
    )
    wide_optimizer.load_state_dict(narrow_optimizer.state_dict())
    assert all(
        torch.equal(parameter, narrow_optimizer.masters[name]) for name, parameter in wide.named_parameters()
    )


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(TrainingError, match="no parameter of the model can be trained here: all are frozen"):
        MasterAdamW(Net().requires_grad_(False).named_parameters(), CONFIG)
