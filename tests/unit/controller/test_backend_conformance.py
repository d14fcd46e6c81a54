"""What every backend owes the driver. A backend joins by one line in BACKENDS; the tests know nothing else of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from hybridflow.controller import Backend, Dispatch, LocalBackend, RankInfo, Worker, WorkerFactory, WorkerGroup, register
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto, DataProtoFuture

BACKENDS: dict[str, Callable[[Mapping[str, WorkerFactory]], Backend]] = {
    "local": LocalBackend,
}


class Counter(Worker):
    """Holds a number; no call of the base constructor, as real workers."""

    def __init__(self, start: int) -> None:
        self.value = start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def place(self) -> tuple[str, int, int]:
        return self.role, self.rank, self.world_size

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto, *, plus: float = 0.0) -> DataProto:
        return DataProto.from_dict({"doubled": batch.batch["x"] * 2 + plus}, {"uid": batch.non_tensor_batch["uid"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS)
    def mean(self, batch: DataProto) -> Metrics:
        metrics = Metrics()
        metrics.add_mean("x", batch.batch["x"].sum(), batch.batch["x"].numel())
        return metrics

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def greet(self, name: str) -> str:
        return f"{name} at {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def slow_add(self, amount: int) -> int:
        return self.add(amount)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ValueError("no luck")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rearrange(self, batch: DataProto) -> DataProto:
        batch.batch["new"] = batch.batch["x"] + 1
        del batch.batch["x"]
        batch.non_tensor_batch["uid"][0] = "changed"
        batch.meta_info["facts"]["a"] = 2
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scribble(self, batch: DataProto) -> DataProto:
        batch.batch["x"].add_(1)
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tamper(self, state: dict[str, list[int]]) -> None:
        state["steps"].append(9)
        state["more"] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def history(self) -> list[int]:
        self.kept = getattr(self, "kept", [1])
        return self.kept

    def private(self) -> int:
        return self.value


class CounterGroup(WorkerGroup[Counter]):
    def double(self, batch: DataProto, plus: float = 0.0) -> DataProto:
        return self.call(Counter.double, batch, plus=plus)


def make_counter(info: RankInfo) -> Counter:
    return Counter(10)


@pytest.fixture(params=list(BACKENDS))
def group(request: pytest.FixtureRequest) -> Iterator[CounterGroup]:
    backend = BACKENDS[request.param]({"counter": make_counter, "other": make_counter})
    yield CounterGroup(backend, "counter")
    backend.shutdown()


def rows(n: int = 5) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(float(n))}, {"uid": [f"u{i}" for i in range(n)]}, {"facts": {"a": 1}})


def test_one_to_all_takes_keywords_and_keeps_state(group: CounterGroup) -> None:
    assert group.call(Counter.add, 2, times=3) == 16
    assert group.call(Counter.add, amount=1) == 17


def test_roles_are_apart(group: CounterGroup) -> None:
    other = WorkerGroup[Counter](group.backend, "other")
    group.call(Counter.add, 5)
    assert other.call(Counter.add, 0) == 10


def test_rank_zero_knows_its_place(group: CounterGroup) -> None:
    assert group.call(Counter.place) == ("counter", 0, group.world_size)


def test_rows_come_back_in_order(group: CounterGroup) -> None:
    result = group.double(rows(5), plus=1.0)
    assert result.batch["doubled"].tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert list(result.non_tensor_batch["uid"]) == ["u0", "u1", "u2", "u3", "u4"]


def test_metrics_are_merged(group: CounterGroup) -> None:
    assert group.call(Counter.mean, rows(5)).to_floats() == {"x": 2.0}


def test_all_to_all_has_one_entry_a_rank(group: CounterGroup) -> None:
    names = [f"n{rank}" for rank in range(group.world_size)]
    assert group.call_each(Counter.greet, names) == [f"n{rank} at {rank}" for rank in range(group.world_size)]
    with pytest.raises(AssertionError, match="entries for"):
        group.call_each(Counter.greet, [*names, "one too many"])
    with pytest.raises(AssertionError, match="use call_each"):
        group.call(Counter.greet, "x")


def test_non_blocking_gives_a_future(group: CounterGroup) -> None:
    future = group.submit(Counter.slow_add, 1)
    assert future.result(timeout=60) == 11
    assert future.done()
    with pytest.raises(AssertionError, match="use submit"):
        group.call(Counter.slow_add, 1)


def test_future_of_rows_feeds_a_data_proto_future(group: CounterGroup) -> None:
    joined = DataProtoFuture.concat([group.submit(Counter.double, rows(2)), group.submit(Counter.double, rows(3))])
    assert joined.get().batch["doubled"].tolist() == [0.0, 2.0, 0.0, 2.0, 4.0]


def test_call_one_is_awaitable(group: CounterGroup) -> None:
    async def both() -> list[int]:
        return list(await asyncio.gather(group.call_one(0, Counter.add, 1), group.call_one(0, Counter.add, 1, times=2)))

    assert asyncio.run(both()) == [11, 13]
    with pytest.raises(AssertionError, match="has no rank"):
        group.call_one(group.world_size, Counter.add, 1)


def test_failure_comes_through_with_its_place(group: CounterGroup) -> None:
    with pytest.raises(ValueError, match="no luck") as caught:
        group.call(Counter.fail)
    assert any("counter.fail, rank 0" in note for note in caught.value.__notes__)
    future = group.submit(Counter.fail)
    with pytest.raises(ValueError, match="no luck"):
        future.result()


def test_fields_a_worker_changes_never_reach_the_driver(group: CounterGroup) -> None:
    batch = rows(3)
    result = group.call(Counter.rearrange, batch)
    assert set(batch.batch.keys()) == {"x"} and set(result.batch.keys()) == {"new"}
    assert list(batch.non_tensor_batch["uid"]) == ["u0", "u1", "u2"]
    assert batch.meta_info == {"facts": {"a": 1}}


def test_containers_a_worker_changes_never_reach_the_driver(group: CounterGroup) -> None:
    state = {"steps": [1, 2]}
    group.call(Counter.tamper, state)
    assert state == {"steps": [1, 2]}


def test_result_changed_by_the_driver_never_reaches_the_worker(group: CounterGroup) -> None:
    group.call(Counter.history).append(2)
    assert group.call(Counter.history) == [1]


def test_values_written_in_place_never_reach_the_driver_unnoticed(group: CounterGroup) -> None:
    batch = rows(3)
    try:
        group.call(Counter.scribble, batch)
    except AssertionError as error:  # one process: the tensor is shared, so it is refused
        assert "counter.scribble" in str(error) and " x " in str(error)
    else:  # another process wrote into its own copy
        assert batch.batch["x"].tolist() == [0.0, 1.0, 2.0]


def test_a_method_without_a_rule_is_refused(group: CounterGroup) -> None:
    with pytest.raises(AssertionError, match=r"private cannot be called by the driver"):
        group.call(Counter.private)
