"""What waits in CPU memory: which activations, and when parameters and optimizer move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_zoo import tiny_policy, training_rows
from sharded_runs import Run, ask, build, dealt, save_tiny
from torch import Tensor, nn

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import OptimConfig
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.engines.fsdp.offload import ActivationOffload, Offloader
from hybridflow.engines.optimizer import MasterAdamW


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_wait_and_parameters_stay(
    folder: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActivationOffload, "smallest", 1)
    run = Run(
        folder,
        activation_offload=True,
        model={"gradient_checkpointing": checkpointing},
        deal=(tuple(range(7)),),
    )
    engine = build(run, 1)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
    moved: list[tuple[int, ...]] = []
    pack = ActivationOffload._pack

    def noting(self: ActivationOffload, tensor: Tensor) -> tuple[torch.device, Tensor]:
        packed = pack(self, tensor)
        if packed[1] is not tensor:
            assert tensor.untyped_storage().data_ptr() not in parameters and torch.equal(packed[1], tensor)
            moved.append(tuple(tensor.shape))
        return packed

    monkeypatch.setattr(ActivationOffload, "_pack", noting)
    batch, loss = dealt(run, engine)
    engine.train_mini_batch(batch, ask(run), loss, replace(run.limits, max_tokens=1000))
    tokens = int(training_rows().batch["attention_mask"].sum())
    inputs = [shape for shape in moved if shape == (1, tokens, 32)]
    assert len(inputs) >= 2, "the inputs of the two blocks"
    inner = [shape for shape in moved if shape[-1] == 48]  # as wide as an MLP
    assert bool(inner) != checkpointing, "what is made again is not kept anywhere"


class Moves(nn.Module):
    """Says where it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Moves:
        self.sent.append(fn(torch.empty(1)).device.type)
        return self


def test_parameters_rest_when_nobody_needs_them() -> None:
    module, meta = Moves(), torch.device("meta")
    residence = Offloader(module, None, meta, FSDPConfig(param_offload=True))
    assert module.sent == ["cpu"], "at rest from the start"
    with residence.parameters(), residence.parameters():
        assert module.sent[1:] == ["meta"]
    residence.onload()
    with residence.parameters():
        pass
    assert module.sent[1:] == ["meta", "cpu", "meta"], "who asked for them has them until it lets go"
    residence.offload()
    assert module.sent[-1] == "cpu"
    for config in (FSDPConfig(), FSDPConfig(param_offload=True, offload_policy=True)):
        still = Moves()
        with Offloader(still, None, meta, config).parameters():
            assert still.sent == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_rests_steps_as_one_that_stays(dtype: torch.dtype) -> None:
    config = FSDPConfig(optimizer_offload=True)
    engine = FSDPEngine(tiny_policy(dtype), name="actor", optim=OptimConfig(lr=1e-3), fsdp=config)
    plain = FSDPEngine(tiny_policy(dtype), name="actor", optim=OptimConfig(lr=1e-3))
    run = Run("", deal=(tuple(range(7)),))
    for each in (engine, plain):
        batch, loss = dealt(run, each)
        each.train_mini_batch(batch, ask(run), loss, run.limits)
    assert all(
        torch.equal(a, b) for a, b in zip(engine.module.parameters(), plain.module.parameters(), strict=True)
    )


def test_the_optimizer_is_on_the_device_for_its_step_and_rests_before_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FSDPEngine(
        tiny_policy(torch.bfloat16),
        name="actor",
        optim=OptimConfig(),
        fsdp=FSDPConfig(optimizer_offload=True),
    )
    optimizer = engine.optimizer
    assert optimizer is not None
    # there is no second device to compute on: what would move says where it is
    engine.offloader.device = torch.device("meta")
    where = {"masters": "cpu", "moments": "cpu"}
    monkeypatch.setattr(optimizer, "move_masters", lambda device, _: where.update(masters=str(device)))
    monkeypatch.setattr(
        optimizer,
        "move_moments",
        lambda device, _: where.update(moments=where["masters"] if device is None else str(device)),
    )
    at: dict[str, list[dict[str, str]]] = {"backward": [], "step": []}
    optimizer.rules[0].register_step_pre_hook(lambda *_: at["step"].append(dict(where)))
    run = Run("", deal=(tuple(range(7)),))
    batch, loss = dealt(run, engine)

    def noting(*args: Any) -> Any:
        at["backward"].append(dict(where))
        return loss(*args)

    for _ in range(2):
        engine.train_mini_batch(batch, ask(run), noting, run.limits)
        assert where == {"masters": "cpu", "moments": "cpu"}
    assert at["step"] == [{"masters": "meta", "moments": "meta"}] * 2
    assert len(at["backward"]) > 2
    assert all(each == {"masters": "meta", "moments": "cpu"} for each in at["backward"])


def moments_of(optimizer: MasterAdamW) -> set[str]:
    return {value.device.type for entry in optimizer.rules[0].state.values() for value in entry.values()}


def optimizer_on_a_device(config: FSDPConfig) -> tuple[MasterAdamW, Offloader]:
    device = torch.device("meta")
    optimizer = MasterAdamW(nn.Linear(2, 3, device=device).named_parameters(), OptimConfig())
    return optimizer, Offloader(Moves(), optimizer, device, config)


def test_moments_that_came_while_parameters_rested_join_them_for_the_step() -> None:
    optimizer, residence = optimizer_on_a_device(FSDPConfig(param_offload=True))
    optimizer.rules[0].state = {
        master: {"exp_avg": torch.zeros(master.shape)} for master in optimizer.masters.values()
    }
    with residence.moments():
        assert moments_of(optimizer) == {"meta"}


def test_moments_are_made_where_they_rest() -> None:
    optimizer, _ = optimizer_on_a_device(FSDPConfig(optimizer_offload=True))
    state = optimizer.state_dict()
    assert moments_of(optimizer) == {"cpu"}
    optimizer.load_state_dict(state)
    assert moments_of(optimizer) == {"cpu"}
