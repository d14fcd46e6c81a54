"""What a quiet decode step costs the host: no loop over rows, no addresses, each weight and key read once.

Its waits and launches are counted on the simulated accelerator (`tests/simulated_device/test_counts.py`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_models import prompts, requests_for, tiny_engine
from test_native_graphs import Again, recorded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.distributed import transfers
from hybridflow.distributed.transfers import HostCopy
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.native.session import Session


class Unwatched(Again):
    """Reads no addresses itself."""

    def addresses(self) -> list[int]:
        return []


def running(engine: NativeEngine, rows: int, steps: int = 3, **params: Any) -> Session:
    """A session in which so many rows decode, and have done so for a few steps."""
    session = engine.open()
    session.add(requests_for(prompts(rows), **{"max_tokens": 60, **params}))
    for _ in range(steps):
        session.step()
    assert session.num_running == rows
    return session


def test_the_host_waits_for_the_device_that_has_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device of the process may be another one."""
    own, asked = torch.empty, []
    module = SimpleNamespace(
        Event=lambda: SimpleNamespace(record=asked.append),
        current_stream=lambda device: ("stream of", device),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **kind: own(*sizes, **kind))
    monkeypatch.setattr(transfers, "features", lambda kind: SimpleNamespace(pins_memory=True))
    tokens = torch.ones(3)
    assert torch.equal(HostCopy([tokens])._tensors[0], tokens)
    assert asked == [("stream of", tokens.device)]


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
