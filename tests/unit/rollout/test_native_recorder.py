"""The recorder of CUDA graphs over a stand-in for `torch.cuda`, and what it refuses to record."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.distributed import cuda as room
from hybridflow.distributed.cuda import CudaRecorder


def waiting_is_refused() -> bool:
    """Whether an operation of this thread that would wait for a device fails."""
    try:
        torch.zeros(2, device="meta").cpu()
    except RuntimeError as error:
        return "waits for the device" in str(error)
    except NotImplementedError:  # what torch has to say of it
        return False
    raise AssertionError("nothing is on the meta device")


class FakeCuda:
    """Stands in for `torch.cuda`: notes what is called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        calls = self.calls

        def forbidden(*_: Any) -> None:
            raise AssertionError("it concerns all threads of the process")

        class Stream:
            def __init__(self, *_: Any) -> None: ...

            def wait_stream(self, other: Any) -> None:
                calls.append("wait")

            def synchronize(self) -> None:
                calls.append("synchronize")

        class Graph:
            def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                assert room._RECORDING.locked()
                calls.append("begin")

            def capture_end(self) -> None:
                calls.append("end")
                if "run fails" in calls:
                    raise RuntimeError("the recording was invalidated")

            def replay(self) -> None:
                calls.append("replay")

        stand_ins = {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "stream": lambda stream: nullcontext(),
            "current_stream": Stream,
            "graph_pool_handle": lambda: "pool",
            "synchronize": forbidden,
            "set_sync_debug_mode": forbidden,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


def test_a_graph_is_recorded_after_two_runs_the_second_of_which_may_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, output = FakeCuda(monkeypatch), torch.zeros(1)

    def work() -> Tensor:
        cuda.calls.append(f"run {waiting_is_refused()}")
        return output

    replay = CudaRecorder(torch.device("cuda")).record(work)
    assert cuda.calls == [
        *("wait", "run False", "run True"),
        *("synchronize", "begin", "run False", "end", "wait"),
    ]
    assert replay() is output and cuda.calls[-1] == "replay"


@pytest.mark.parametrize(
    ("fails_in", "calls"),
    [
        (2, ["wait", "run"]),
        (3, ["wait", "run", "run", "synchronize", "begin", "run fails", "end"]),
    ],
)
def test_a_recording_that_fails_is_ended_and_tells_its_first_error(
    fails_in: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, runs = FakeCuda(monkeypatch), [0]

    def work() -> Tensor:
        runs[0] += 1
        if runs[0] == fails_in:
            if fails_in == 3:
                cuda.calls.append("run fails")
            raise RuntimeError("the cause")
        cuda.calls.append("run")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="the cause"):
        CudaRecorder(torch.device("cuda")).record(work)
    assert cuda.calls == calls
    assert not room._RECORDING.locked() and not waiting_is_refused()


def test_what_waits_for_a_device_is_refused_and_nothing_else() -> None:
    far = torch.zeros(4, device="meta")
    near = torch.zeros(4)
    places = torch.zeros(2, dtype=torch.int64, device="meta")
    mask = torch.zeros(4, dtype=torch.bool, device="meta")
    waiting: list[Callable[[], Any]] = [
        lambda: torch.ops.aten._local_scalar_dense(far[0]),
        lambda: torch.equal(far, far),
        lambda: far.nonzero(),
        lambda: far[mask],
        lambda: far.__setitem__(mask, near),
        lambda: far[places.cpu()],
        lambda: far[torch.zeros(2, dtype=torch.int64)],
        lambda: far.masked_select(mask),
        lambda: far.repeat_interleave(mask.long()),
        lambda: far.cpu(),
        lambda: far.copy_(near),
        lambda: torch.tensor([1.0], device="cpu").to("meta"),
    ]
    going_on: list[Callable[[], Any]] = [
        lambda: far * near[0],
        lambda: far.masked_fill(mask, 0.0),
        lambda: far[places],
        lambda: far.__setitem__(places, 0.0),
        lambda: far.to(torch.float64),
        lambda: far.copy_(far),
        lambda: far.copy_(near, non_blocking=True),
        lambda: near.to("meta", non_blocking=True),
        lambda: near[near > 0].tolist(),
        lambda: float(near.sum()),
        lambda: torch.zeros(2, device="meta").softmax(-1).topk(1),
    ]
    with room._RefuseWaiting():
        for call in waiting:
            with pytest.raises(RuntimeError, match="waits for the device"):
                call()
        for call in going_on:
            call()


def test_other_threads_may_wait_while_one_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of one process record at any time; what the one is doing does not fail the other."""
    cuda = FakeCuda(monkeypatch)
    meeting = threading.Barrier(2, timeout=60)
    found: list[bool] = []

    def record() -> Callable[[], Tensor]:
        return CudaRecorder(torch.device("cuda")).record(work)

    def work() -> Tensor:
        if waiting_is_refused():
            meeting.wait()  # the other thread looks now
            meeting.wait()
        return torch.zeros(1)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(record)
        meeting.wait()
        found.append(waiting_is_refused())
        meeting.wait()
        first.result(60)
        assert found == [False]
        with room._RECORDING:
            second = pool.submit(record)
            meeting.wait()
            meeting.wait()
            begun = cuda.calls.count("begin")
            with pytest.raises(TimeoutError):
                second.result(0.2)  # it waits for the lock
            assert cuda.calls.count("begin") == begun == 1
        second.result(60)
        assert cuda.calls.count("begin") == 2
