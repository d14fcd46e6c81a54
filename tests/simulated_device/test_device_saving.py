"""Saving from the device: tensors come to the host together, and all ways of saving write the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sharded_runs import Run, build, dealt, save_tiny, spec
from simulated_accelerator import counts

from hybridflow.checkpoint import state
from hybridflow.checkpoint.layout import shard_file
from hybridflow.config.model import FSDPConfig
from hybridflow.distributed.accelerators import features
from hybridflow.distributed.transfers import HostBuffers
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.workers.state import StatefulWorker

SIM = torch.device("sim", 0)
PINS = features("sim").pins_memory
PARTS = ("model", "optimizer", "scheduler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("untied"), tied=False)


def trained(folder: str, fsdp: FSDPConfig | None = None) -> FSDPEngine:
    """A bfloat16 model with masters and moments, after a step."""
    model = {"device": SIM, "dtype": "bfloat16"}
    run = Run(folder, model=model, fsdp=fsdp or FSDPConfig(), deal=(tuple(range(7)),))
    engine = build(run, 1)
    batch, loss = dealt(run, engine)
    engine.train_mini_batch(batch, spec(run), loss, run.limits)
    return engine


def contents(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


@pytest.mark.parametrize("fsdp", [FSDPConfig(), FSDPConfig(param_offload=True, optimizer_offload=True)])
def test_a_blocking_save_waits_once_a_file_and_one_beside_training_once(
    folder: str, tmp_path: Path, fsdp: FSDPConfig
) -> None:
    worker = StatefulWorker(trained(folder, fsdp))
    with counts.phase("blocking") as blocking:
        worker.save(str(tmp_path / "blocking"), PARTS)
    with counts.phase("beside") as beside:
        worker.start_save(str(tmp_path / "beside"), PARTS)
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.add_(1.0)  # training goes on
    worker.finish_save()
    saved = contents(tmp_path / "blocking")
    assert saved == contents(tmp_path / "beside") and len(saved[shard_file("model", 0, 1)]) > 10_000
    if PINS:
        assert blocking.num_waits <= 2 and beside.num_waits == 1, (blocking.waits, beside.waits)


def test_the_bytes_are_those_that_the_host_would_write(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of tensors with gaps, in another order, and of groups of a few tensors."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(16, 24, generator=generator)
    views = {
        "rows": table[3:9],
        "turned": table.t(),
        "gaps": table[:, ::2],
        "number": table[0, 0],
        "no": table[:0],
    }
    host = {**views, "half": table.bfloat16(), "steps": torch.arange(5)}
    device = table.to(SIM)
    there = {
        "rows": device[3:9],
        "turned": device.t(),
        "gaps": device[:, ::2],
        "number": device[0, 0],
        "no": device[:0],
        "half": device.bfloat16(),
        "steps": torch.arange(5).to(SIM),
    }
    wanted = state.write_tensors(tmp_path / "host", host)
    for size in (state.GROUP_BYTES, 1500):
        monkeypatch.setattr(state, "GROUP_BYTES", size)
        with counts.phase(f"groups of {size}") as phase:
            assert state.write_tensors(tmp_path / f"{size}", there) == wanted
        assert phase.num_waits == (1 if size > 1500 else 2) or not PINS


def test_buffers_are_page_locked_only_where_that_serves_the_device() -> None:
    buffers = HostBuffers()
    values = torch.arange(6.0).to(SIM)
    first = buffers.copy("values", values)
    buffers.wait()
    assert first.is_pinned() == PINS and first.tolist() == list(range(6))
    second = buffers.copy("values", values * 2)
    buffers.wait()
    assert second.data_ptr() == first.data_ptr() and second.tolist() == [0, 2, 4, 6, 8, 10]
    assert buffers.copy("values", values[:3]).shape == (3,)
    host = torch.ones(2)
    assert buffers.copy("host", host).data_ptr() == host.data_ptr()
