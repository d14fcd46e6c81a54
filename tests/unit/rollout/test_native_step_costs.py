"""What a quiet decode step costs beside the arithmetic: waits for the device, loops over rows, operations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from far_device import FarDevice
from rollout_models import VOCABULARY, prompts, requests_for, run, tiny_engine, tiny_hf
from test_native_graphs import Again, recorded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import GenerationOutput
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native import session as session_module
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.native.session import Session


class Unwatched(Again):
    """Reads no addresses itself."""

    def addresses(self) -> list[int]:
        return []


def far_engine(
    device: FarDevice, *, layers: int = 2, vocabulary: int = VOCABULARY, **settings: Any
) -> NativeEngine:
    """An engine on the device, as on CUDA: blocks taken at once, a kernel, and look-ahead."""
    hf = tiny_hf(num_hidden_layers=layers, vocab_size=vocabulary)
    device.move(hf)
    settings = {"eos_token_ids": [], "enforce_eager": True, "block_size": 64, "max_num_seqs": 16, **settings}
    engine = NativeEngine(PolicyModel(hf), **settings)
    assert engine.look_ahead == settings.get("look_ahead", True) and engine.reserve_cache
    return engine


def running(engine: NativeEngine, rows: int, steps: int = 3, **params: Any) -> Session:
    """A session in which so many rows decode, and have done so for a few steps."""
    session = engine.open()
    session.add(requests_for(prompts(rows), **{"max_tokens": 60, **params}))
    for _ in range(steps):
        session.step()
    assert session.num_running == rows
    return session


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "min_tokens": 50}, {"temperature": 0.0, "repetition_penalty": 1.2}]
)
def test_a_quiet_step_waits_for_no_newer_step_than_the_one_before(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    with FarDevice(monkeypatch) as device:
        session = running(far_engine(device), 4, **params)
        for _ in range(5):
            device.waits.clear()
            assert session.step() == []
            assert device.waits == ["older"]
        session.close()


@pytest.mark.parametrize("leaders", [4, 1024])
@pytest.mark.parametrize(
    "limits", [{"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {"top_k": 100}, {"top_k": 1050}], ids=str
)
def test_whether_the_leaders_suffice_is_not_waited_for(
    limits: dict[str, Any], leaders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they do not, so that rows are taken back and draw a token again."""
    monkeypatch.setattr(sampling, "MANY_LEADERS", leaders)
    with FarDevice(monkeypatch) as device:
        session = running(far_engine(device, vocabulary=1100), 3, **limits)
        for _ in range(6):
            device.waits.clear()
            session.step()
            assert device.waits == ["older"]
        taken_back = sum(row.num_taken_back for row in session.rows.rows)
        assert bool(taken_back) == (leaders == 4 and limits == {"top_p": 0.9})
        session.close()


def test_without_look_ahead_it_waits_once_for_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with FarDevice(monkeypatch) as device:
        session = running(far_engine(device, look_ahead=False), 4)
        device.waits.clear()
        session.step()
        assert device.waits == ["newest"]


@pytest.mark.parametrize("kind", ["paged", "slots"])
def test_prompts_that_enter_beside_running_rows_wait_for_older_steps_alone(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    with FarDevice(monkeypatch) as device:
        session = running(far_engine(device, kv_cache=kind), 4)
        more = requests_for(prompts(7, seed=5), max_tokens=20)[4:]  # of several lengths
        session.add(more)
        device.waits.clear()
        session.step()
        assert session.num_running == 7 and set(device.waits) == {"older"}
        session.close()


@pytest.mark.parametrize("kind", ["paged", "slots"])
def test_rows_that_end_or_enter_cost_no_wait_more(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    with FarDevice(monkeypatch) as device:
        engine = far_engine(device, max_num_seqs=4, kv_cache=kind)
        session = engine.open()
        requests = requests_for(prompts(4), n=2, max_tokens=8)
        session.add([*requests_for(prompts(4), max_tokens=12)[:2], *requests[2:4]])
        ended = 0
        while not session.idle:
            device.waits.clear()
            outputs = session.step()
            if outputs and session.num_running:
                ended += len(outputs)
                assert device.waits == ["older"]
        assert ended == 2


def test_the_host_waits_for_the_device_that_has_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device of the process may be another one."""
    with FarDevice(monkeypatch) as device:
        session = running(far_engine(device), 2, steps=1)
        assert device.newest is not None and device.newest.stream == ("stream of", torch.device("meta"))
        session.close()


def outputs_of(engine: NativeEngine) -> dict[int, GenerationOutput]:
    return run(engine, requests_for(prompts(6), n=2, max_tokens=14, stop_token_ids=(5, 9)))


def test_the_device_gives_the_tokens_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is counted here is the work that gives them."""
    wanted = outputs_of(tiny_engine(eos=()))
    with FarDevice(monkeypatch) as device:
        got = outputs_of(far_engine(device, max_num_seqs=5))
    assert {number: one.token_ids for number, one in got.items()} == {
        number: one.token_ids for number, one in wanted.items()
    }
    assert {one.finish_reason for one in got.values()} == {"stop", "length"}


def opcodes(call: Callable[[], object]) -> int:
    """Number of Python instructions that a call executes: a loop over rows would add some for each row."""
    count = 0

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["slots", "paged"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_quiet_step_has_no_loop_over_rows(kind: Any, params: dict[str, Any], look_ahead: bool) -> None:
    counts = []
    for rows in (3, 15):
        engine = tiny_engine(
            eos=(), kv_cache=kind, block_size=128, max_num_seqs=16, look_ahead=look_ahead, reserve_cache=False
        )
        session = running(engine, rows, **params)
        counts.append(opcodes(session.step))
        session.close()
    assert counts[0] == counts[1] > 1000


def test_addresses_are_read_when_something_may_have_moved_and_not_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = recorded(recorder=Unwatched, max_num_seqs=4)
    session = running(engine, 4)
    weights = [*engine.policy.parameters(), *engine.policy.buffers()]
    read: list[Tensor] = []
    own = Tensor.data_ptr
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: read.append(tensor) or own(tensor))  # type: ignore[func-returns-value]
    place = session.cache.place
    session.step()
    assert not read and session.cache.place == place
    engine.set_version(1)
    session.step()
    session.step()
    assert len(read) == len(weights) + len(session.cache.tensors())
    session.close()


def operations(monkeypatch: pytest.MonkeyPatch, layers: int, *, states: bool = True) -> int:
    """Number of operations of a quiet step on the device; without `states`, of what follows the layers."""
    with FarDevice(monkeypatch) as device:
        engine = far_engine(device, layers=layers)
        session = running(engine, 4)
        if not states:
            hidden = torch.zeros(4, 32, device="meta")
            monkeypatch.setattr(session_module, "decode_rows", lambda *arguments: hidden)
        device.operations.clear()
        session.step()
        session.close()
        return device.operations.total()


def test_operations_of_a_step_are_no_more_than_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views aside. `test_compiled_decoder.py` counts the fused ones, of which the goal is 16 a layer.

    A graph of CUDA has those of the layers and before them, so that the host begins only those after them.
    """
    few, many = (operations(monkeypatch, layers) for layers in (2, 4))
    per_layer, rest = divmod(many - few, 2)
    assert (per_layer, rest) == (31, 0)
    assert few - 2 * per_layer <= 67
    assert operations(monkeypatch, 2, states=False) <= 50


class Reads(TorchDispatchMode):
    """Bytes that operations take from given memory, by name; views and lookups of a few rows aside."""

    def __init__(self, memory: dict[int, str]) -> None:
        super().__init__()
        self.memory = memory
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("embedding", "index_copy_"):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and each.untyped_storage().data_ptr() in self.memory:
                    self.bytes[self.memory[each.untyped_storage().data_ptr()]] += each.nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [3, 7])
def test_a_step_reads_each_weight_and_each_key_once(rows: int) -> None:
    """On a CPU: whole slots, whose capacity follows the longest row."""
    engine = tiny_engine(eos=(), max_num_seqs=8)
    session = running(engine, rows)
    weights = {name: each for name, each in engine.policy.named_parameters() if "embed_tokens" not in name}
    memory = {each.untyped_storage().data_ptr(): "weights" for each in weights.values()}
    memory |= {each.untyped_storage().data_ptr(): "cache" for each in session.cache.tensors()}
    with Reads(memory) as reads:
        session.step()
    capacity = session.cache.capacity
    session.close()
    assert reads.bytes["weights"] == sum(each.nbytes for each in weights.values())
    layers, kv_heads, head_dim = 2, 2, 8
    assert reads.bytes["cache"] == rows * capacity * layers * 2 * kv_heads * head_dim * 4
