"""The table of accelerators, and the devices that `trainer.device` means on machines that are not here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hybridflow.config import SFTConfig
from hybridflow.config.load import load_config
from hybridflow.controller.ray.preflight import device_of
from hybridflow.distributed import accelerators
from hybridflow.distributed.accelerators import check_package, features, is_accelerator, num_by_files
from hybridflow.distributed.device import resolve_device, set_current
from hybridflow.distributed.facilities import Facilities, facilities
from hybridflow.errors import ConfigError
from hybridflow.models.files.build import resolve_dtype


def test_the_key_takes_every_device_of_the_table() -> None:
    for name in ("auto", *accelerators.accelerators()):
        assert load_config(SFTConfig, [f"trainer.device={name}"]).config.trainer.device == name
    with pytest.raises(ConfigError, match=r"device: got 'cdua' .*'cuda', 'npu' \(did you mean 'cuda'\?"):
        load_config(SFTConfig, ["trainer.device=cdua"])


def test_what_differs() -> None:
    assert [features(kind).resource for kind in ("cpu", "cuda", "npu")] == ["CPU", "GPU", "NPU"]
    assert [features(kind).backend for kind in ("cpu", "cuda", "npu")] == ["gloo", "nccl", "hccl"]
    assert [is_accelerator(kind) for kind in ("cpu", "cuda", "npu", "meta")] == [False, True, True, False]
    assert resolve_dtype("auto", "cpu") == torch.float32 == resolve_dtype("auto", "meta")
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    assert features("cuda").visible[0] == "CUDA_VISIBLE_DEVICES"
    assert not features("npu").triton and not features("npu").records_steps


def test_a_cluster_shows_its_kind_by_its_resources() -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, object]:
        return {"Alive": alive, "Resources": {"CPU": 8.0, **resources}}

    def num_here(kind: str) -> int:
        return 0

    assert device_of([node()], num_here) == "cpu"
    assert device_of([node(), node(GPU=8.0)], num_here) == "cuda"
    assert device_of([node(), node(NPU=8.0)], num_here) == "npu"
    assert device_of([node(alive=False, NPU=8.0), node()], num_here) == "cpu"
    assert device_of([node(GPU=1.0), node(NPU=8.0)], num_here) == "cuda"
    assert device_of([node(GPU=1.0), node(NPU=8.0)], lambda kind: int(kind == "npu")) == "npu"


def test_devices_are_counted_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "ROOT", tmp_path)
    assert [num_by_files(kind) for kind in ("cuda", "npu", "cpu")] == [0, 0, None]
    for name in ("nvidia0", "nvidia1", "nvidiactl", "davinci0", "davinci_manager"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert [num_by_files(kind) for kind in ("cuda", "npu")] == [2, 1]


def test_an_npu_without_its_package_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch_npu is not installed"):
        check_package("npu")
    with pytest.raises(ConfigError, match="torch_npu is not installed"):
        resolve_device("npu")
    for name in ("auto", "cpu", "cuda"):
        check_package(name)


def fake_npus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """As with torch_npu and `count` devices; torch itself still cannot make such a device."""
    current: list[torch.device] = []
    module = SimpleNamespace(
        is_available=lambda: count > 0, device_count=lambda: count, set_device=current.append
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(accelerators, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    return current


def test_an_npu_with_its_package_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npus(monkeypatch, 0)
    with pytest.raises(ConfigError, match="no such device is usable here"):
        resolve_device("npu")
    fake_npus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="local rank 2 has no NPU: this machine shows 2"):
        resolve_device("npu", local_rank=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made: list[tuple[str, int]] = []
    monkeypatch.setattr(torch, "device", lambda kind, index=0: made.append((kind, index)))
    resolve_device("auto", local_rank=1)
    assert made == [("npu", 1)], "auto finds it"


def test_the_current_device_is_set_on_accelerators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    current = fake_npus(monkeypatch, 1)
    set_current(torch.device("cpu"))
    assert current == []


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="wanted one of 'auto', 'cpu', 'cuda', 'npu'"):
        resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu") == resolve_device("cpu")
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda, but no such device is usable here"):
        resolve_device("cuda")


PROMISES = {
    "records_steps": ("recorder",),
    "shares_memory": ("share_memory", "open_memory"),
    "torch_memory": ("start_memory_history", "write_memory_history"),
    "nsys": ("start_capture_range", "stop_capture_range"),
}
"""Methods of the facilities by what a row promises them with."""


@pytest.mark.parametrize("device", accelerators.accelerators())
def test_what_a_row_promises_its_facilities_have(device: str) -> None:
    row = features(device)
    kind = type(facilities(device))
    for promise, methods in PROMISES.items():
        for method in methods:
            has = getattr(kind, method) is not getattr(Facilities, method)
            assert has == (getattr(row, promise, False) or promise in row.profilers), (promise, method)


def test_a_facility_that_is_not_there_says_which_promise_was_wrong() -> None:
    none = Facilities()
    with pytest.raises(
        NotImplementedError, match=r"records no steps \(Facilities\), .* must not set records_steps"
    ):
        none.recorder(torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="must not set shares_memory"):
        none.open_memory({})
    with pytest.raises(NotImplementedError, match="must not set profilers"):
        none.stop_capture_range()
    assert none.card_name() is None and none.cards() == [] and none.process_group(None, 0, 1, 1.0) is None
