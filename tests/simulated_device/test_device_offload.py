"""Offload: the bits of a run without, memory that is given back, and at most one wait a phase."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from sharded_runs import Run, build, dealt, save_tiny, spec, whole
from simulated_accelerator import counts, memory
from torch import Tensor

from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.distributed.accelerators import features
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.engines.fsdp.offload import ActivationOffload
from hybridflow.models.attention.kernels import _varlen_groups
from ranks import Ranks

SIM = torch.device("sim", 0)
OFFLOAD = FSDPConfig(param_offload=True, optimizer_offload=True)
PINS = features("sim").pins_memory
QUICK = (("AdamW", "bfloat16"), ("Muon", "float32"))
"""Optimizers and dtypes that are not slow tests: masters of their own and none, moments of two kinds."""
pinned = pytest.mark.skipif(not PINS, reason="each copy waits on a device that pins no memory")


@pytest.fixture(scope="module", autouse=True)
def tried_kernels() -> None:
    """A kernel is tried once a process, with waits that are none of a mini-batch."""
    _varlen_groups(SIM, torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("untied"), tied=False)


def a_run(folder: str, dtype: str = "float32", **changes: Any) -> Run:
    model = {"device": SIM, "dtype": dtype}
    return replace(Run(folder, model=model, deal=(tuple(range(7)),)), **changes)


def taken() -> int:
    gc.collect()
    return memory.taken()


def steps(engine: FSDPEngine, run: Run, number: int = 3) -> list[counts.Counts]:
    """Train, and return what each mini-batch counted."""
    found = []
    for _ in range(number):
        batch, loss = dealt(run, engine)
        with counts.phase(f"mini-batch {len(counts.phases)}") as phase:
            engine.train_mini_batch(batch, spec(run), loss, run.limits)
        found.append(phase)
    return found


def state_of(engine: FSDPEngine) -> dict[str, Tensor]:
    """Weights and the optimizer's state, in main memory."""
    state = engine.state_dict()
    found = {f"model {name}": whole(tensor).cpu() for name, tensor in state["model"].items()}
    for name, entry in state["optimizer"].items():
        found |= {f"{key} {name}": whole(value).cpu() for key, value in entry.items()}
    return found


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        pytest.param(optimizer, dtype, marks=[pytest.mark.slow] * ((optimizer, dtype) not in QUICK))
        for optimizer in ("AdamW", "AdamW8bit", "Muon", "SGD")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_offload_changes_no_bit_and_a_mini_batch_waits_once_for_it(
    folder: str, dtype: str, optimizer: str
) -> None:
    optim = OptimConfig(lr=3e-3, eps=1e-5, optimizer=optimizer)
    run = a_run(folder, dtype, optim=optim)
    offloaded = replace(run, fsdp=OFFLOAD)
    plain = build(run, 1)
    engine = build(offloaded, 1)
    parameters = dict(engine.module.named_parameters())
    without = steps(plain, run)
    waits = steps(engine, offloaded)
    assert_same_bits(state_of(plain), state_of(engine))
    assert {name: id(p) for name, p in engine.module.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    assert all(p.device.type == "cpu" and p.is_pinned() == PINS for p in parameters.values())
    if PINS:
        assert [each.num_waits - other.num_waits for each, other in zip(waits, without, strict=True)] == [
            1,
            1,
            1,
        ]


@pinned
def test_buffers_are_kept_from_phase_to_phase(folder: str) -> None:
    run = a_run(folder, "bfloat16", fsdp=OFFLOAD)
    engine = build(run, 1)
    assert engine.optimizer is not None

    optimizer = engine.optimizer

    def places() -> set[int]:
        held = [*engine.module.parameters(), *optimizer.masters.values()]
        for entry in optimizer.rules[0].state.values():
            held += entry.values()
        return {each.data_ptr() for each in held if each.device.type == "cpu"}

    steps(engine, run, 1)
    before = places()
    steps(engine, run, 2)
    assert len(before) == 4 * len(optimizer.masters) and places() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_the_device_is_given_back(folder: str, dtype: str) -> None:
    before = taken()
    run = a_run(folder, dtype, fsdp=OFFLOAD)
    engine = build(run, 1)
    assert taken() == before
    steps(engine, run, 2)
    assert engine.optimizer is not None
    counters = memory.ROUND * len(engine.optimizer.masters)  # step counts stay
    assert taken() - before <= counters
    engine.onload()
    size = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    assert taken() - before >= size
    with counts.phase("offload") as phase:
        engine.offload()
    assert taken() - before <= counters
    assert phase.num_waits == 1 or not PINS
    with counts.phase("onload") as phase:
        engine.onload()
    assert phase.num_waits == 0 or not PINS


def test_a_state_that_is_loaded_at_rest_is_trained_on(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(folder)
    offloaded = replace(run, fsdp=OFFLOAD)
    plain = build(run, 1)
    engine = build(offloaded, 1)
    steps(plain, run, 1)
    state = plain.state_dict()
    state["model"] = {name: tensor.cpu() for name, tensor in state["model"].items()}
    state["optimizer"] = {
        name: {key: value.cpu() for key, value in entry.items()} for name, entry in state["optimizer"].items()
    }
    engine.load_state_dict(state)
    steps(plain, run, 2)
    lone: list[torch.Size] = []
    plain_pin = Tensor.pin_memory

    def noting(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not tensor.is_pinned():
            lone.append(tensor.shape)
        return plain_pin(tensor)

    monkeypatch.setattr(Tensor, "pin_memory", noting)
    waits = steps(engine, offloaded, 2)
    assert_same_bits(state_of(plain), state_of(engine))
    weights = {parameter.shape for parameter in engine.module.parameters() if parameter.ndim > 1}
    assert not weights & set(lone), "moments go through the buffers to which they come back"
    if PINS:
        assert waits[0].num_waits == waits[1].num_waits


@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_wait_in_main_memory_without_a_wait_of_the_host(
    folder: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActivationOffload, "smallest", 1)
    run = a_run(folder, "bfloat16")
    run = replace(run, model={**run.model, "gradient_checkpointing": checkpointing})
    offloaded = replace(run, activation_offload=True)
    plain = build(run, 1)
    engine = build(offloaded, 1)
    without = steps(plain, run)
    waits = steps(engine, offloaded)
    assert_same_bits(state_of(plain), state_of(engine))
    assert waits[1].to_host - without[1].to_host > 10_000
    if PINS:
        assert [each.num_waits for each in waits] == [each.num_waits for each in without]


@pytest.mark.skipif(not features("sim").varlen_attention, reason="it has no such kernel")
def test_a_kernel_is_first_tried_within_a_layer_that_is_computed_again(folder: str) -> None:
    """The trial has a backward pass of its own, which is none of the layer's."""
    _varlen_groups.cache_clear()
    run = a_run(folder, "bfloat16")
    run = replace(run, model={**run.model, "gradient_checkpointing": True})
    found = steps(build(run, 1), run, 2)
    assert _varlen_groups.cache_info().misses == 1
    assert found[1].launches["_flash_attention_forward"] > 0


def train_sharded(rank: int, run: Run, offload: bool) -> dict[str, Any]:
    """Train on one of two ranks of the device; uneven shards are padded."""
    if offload:
        run = replace(run, fsdp=OFFLOAD)
    counts.forget()
    before = taken()
    engine = build(run, 2)
    phases = steps(engine, run)
    rest = taken() - before
    return {
        "state": state_of(engine),
        "waits": [phase.num_waits for phase in phases],
        "faults": set(counts.faults),
        "rest": rest,
        "parameters": len(list(engine.module.parameters())),
    }


def test_shards_offload_with_the_same_bits_and_give_their_memory_back(folder: str, ranks: Ranks) -> None:
    run = replace(a_run(folder), deal=((0, 2, 4, 6), (1, 3, 5)))
    plain = ranks.run(train_sharded, run, False)
    offloaded = ranks.run(train_sharded, run, True)
    for without, rank in zip(plain, offloaded, strict=True):
        assert rank["faults"] <= without["faults"]  # FSDP's own gathered memory
        assert_same_bits(without["state"], rank["state"])
        assert rank["rest"] == memory.ROUND * rank["parameters"] < without["rest"], "step counts stay"
        if PINS:
            assert [a - b for a, b in zip(rank["waits"], without["waits"], strict=True)] == [1, 1, 1]
