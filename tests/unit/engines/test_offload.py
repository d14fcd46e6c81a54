"""What waits in CPU memory: which activations, and when parameters and optimizer move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_zoo import training_rows
from sharded_runs import Run, build, dealt, save_tiny, spec
from torch import Tensor, nn

from hybridflow.config.model import FSDPConfig
from hybridflow.engines.fsdp.offload import ActivationOffload, Offloader


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
    engine.train_mini_batch(batch, spec(run), loss, replace(run.limits, max_tokens=1000))
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
