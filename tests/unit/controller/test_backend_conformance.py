"""What every backend owes the driver.

A backend joins by an entry of its name in BACKENDS: a function that gives it with the workers of `house.py`.
The tests know nothing else of it, and run at any number of ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch
from house import Counter, CounterGroup, InTurn, make_counters, rows

from hybridflow.controller import Backend, LocalBackend, MeshInfo, WorkerGroup
from hybridflow.protocol import BatchError, DataProto, DataProtoFuture, Workload

BACKENDS: dict[str, Callable[[], Backend]] = {
    "local": lambda: LocalBackend(make_counters),
    "three ranks": lambda: InTurn(MeshInfo(3, workload=Workload())),
    "two by two": lambda: InTurn(MeshInfo(4, (("dp", 2), ("tp", 2)), Workload())),
}


@pytest.fixture(params=list(BACKENDS))
def make_backend(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    return BACKENDS[request.param]


@pytest.fixture
def group(make_backend: Callable[[], Backend]) -> Iterator[CounterGroup]:
    backend = make_backend()
    yield CounterGroup(backend, "counter")
    backend.shutdown()


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


def test_two_batches_of_one_call_are_dealt_alike(group: CounterGroup) -> None:
    batch = rows(9)
    joined = group.call(Counter.join, batch, other=group.double(batch))
    assert joined.batch["x"].tolist() == batch.batch["x"].tolist()
    assert torch.equal(joined.batch["doubled"], joined.batch["x"] * 2)


def test_fewer_rows_than_ranks(group: CounterGroup) -> None:
    assert group.double(rows(1)).batch["doubled"].tolist() == [0.0]


def test_leaders_answer_as_a_list(group: CounterGroup) -> None:
    mesh = group.mesh
    assert group.call_list(Counter.leaders, "rank") == [f"rank {rank}" for rank in mesh.leaders]
    with pytest.raises(AssertionError, match="use call_list"):
        group.call(Counter.leaders, "rank")


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
    assert future.result(timeout=600) == 11
    assert future.done()
    with pytest.raises(AssertionError, match="use submit"):
        group.call(Counter.slow_add, 1)


def test_future_of_rows_feeds_a_data_proto_future(group: CounterGroup) -> None:
    joined = DataProtoFuture.concat(
        [group.submit(Counter.double, rows(2)), group.submit(Counter.double, rows(3))]
    )
    assert joined.get().batch["doubled"].tolist() == [0.0, 2.0, 0.0, 2.0, 4.0]


def test_a_future_of_rows_is_an_argument(group: CounterGroup) -> None:
    batch = rows(9)
    other = WorkerGroup[Counter](group.backend, "other")
    doubled = other.submit(Counter.double, batch, plus=1.0)
    joined = group.call(Counter.join, batch, other=doubled.by_reference())
    assert joined.batch["x"].tolist() == batch.batch["x"].tolist()
    assert torch.equal(joined.batch["doubled"], joined.batch["x"] * 2 + 1)
    assert torch.equal(doubled.result().batch["doubled"], joined.batch["doubled"])


def test_a_future_of_each_rank_goes_rank_by_rank(group: CounterGroup) -> None:
    other = WorkerGroup[Counter](group.backend, "other")
    group.call(Counter.load, other.submit(Counter.state).by_reference())
    assert group.call_each(Counter.values) == [10 + rank for rank in range(group.world_size)]
    group.call(Counter.add, 5)
    other.call(Counter.load_nested, {"parts": [group.submit(Counter.state).by_reference()]})
    assert other.call_each(Counter.values) == [15 + 2 * rank for rank in range(group.world_size)]


def test_a_future_of_a_list_goes_to_all(group: CounterGroup) -> None:
    words = group.submit_list(Counter.leaders, "a")
    assert group.call(Counter.take_list, words.by_reference()) == ", ".join(words.result())
    greetings = group.submit_each(Counter.greet, [f"n{rank}" for rank in range(group.world_size)])
    assert group.call(Counter.take_list, words=greetings.by_reference()) == ", ".join(greetings.result())


def test_a_future_that_failed_fails_the_call_that_takes_it(group: CounterGroup) -> None:
    with pytest.raises(ValueError, match="no luck"):
        group.call(Counter.load, group.submit(Counter.fail).by_reference())  # type: ignore[arg-type]


def test_call_one_is_awaitable(group: CounterGroup) -> None:
    async def both() -> list[int]:
        return list(
            await asyncio.gather(
                group.call_one(0, Counter.add, 1), group.call_one(0, Counter.add, 1, times=2)
            )
        )

    assert asyncio.run(both()) == [11, 13]
    with pytest.raises(AssertionError, match="has no rank"):
        group.call_one(group.world_size, Counter.add, 1)


def test_a_worker_calls_a_rank_of_another_role_itself(group: CounterGroup) -> None:
    last = group.world_size - 1
    WorkerGroup[Counter](group.backend, "other").call(Counter.add, 7)
    others = group.backend.peers("other")
    assert group.call(Counter.ask, others, last) == ("other", last, 17)
    with pytest.raises(ValueError, match="no luck"):
        group.call(Counter.ask, others, last, luck=False)


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
    assert set(batch.batch.keys()) == {"x", "attention_mask"} and set(result.batch.keys()) == {
        "new",
        "attention_mask",
    }
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


WRITTEN = ["doubled", "word"]


def test_columns_that_are_kept_stay_where_they_were_made(group: CounterGroup) -> None:
    """Later calls read them all the same, on any rows, also on a rank that is dealt none."""
    batch = rows(9)
    written = group.call_and_keep(Counter.write, WRITTEN, batch)
    assert not written.names() and len(written) == 9
    claimed = batch | DataProto.from_dict({"doubled": torch.zeros(9)}) | written
    batch |= written
    for order in (list(range(9)), [8, 1, 4], [5], [1, 1]):
        for each in (batch, claimed):  # values that were sent would show
            read = group.call(Counter.read, each.select_idxs(order))
            assert read.batch["doubled"].tolist() == [2.0 * row for row in order]
            assert read.batch["x"].tolist() == [float(row) for row in order]
    assert "doubled" not in batch
    with pytest.raises(BatchError, match="'doubled'"):
        group.call(Counter.read, rows(2))


@pytest.mark.parametrize("name", WRITTEN)
def test_one_of_the_kept_columns_is_fetched(group: CounterGroup, name: str) -> None:
    batch = rows(9)
    batch |= group.call_and_keep(Counter.write, WRITTEN, batch)
    some = group.fetch(batch, {name, "another"})
    assert some.names() == [name] and not some.remote
    if name == "doubled":
        assert some.batch["doubled"].tolist() == [2.0 * row for row in range(9)]
    else:
        assert {word.split(".")[0] for word in some.non_tensor_batch["word"]} <= {"0", "1", "2", "3"}
    assert sorted(group.fetch(batch).names()) == WRITTEN
    assert not group.fetch(batch | some, {name}).names()
    assert group.fetch(batch.select_idxs([]), {"doubled"}).batch["doubled"].shape == (0,)
    assert group.fetch(batch.select_idxs([7, 2]), {"doubled"}).batch["doubled"].tolist() == [14.0, 4.0]


def test_a_call_that_failed_keeps_nothing(group: CounterGroup) -> None:
    with pytest.raises(ValueError, match="no luck"):
        group.call_and_keep(Counter.write_or_fail, ["doubled"], rows(9), rank=0)


def test_what_the_driver_keeps_is_read_by_workers(group: CounterGroup) -> None:
    batch = rows(6) | DataProto.from_dict({"doubled": torch.arange(6.0) * 2}, {"word": [*"abcdef"]})
    kept = group.keep(batch, ["doubled", "word", "nowhere"])
    assert not kept.names() and sorted(kept.remote) == WRITTEN
    assert not group.keep(batch | kept, ["doubled"]).remote, "once"
    light = rows(6) | kept
    assert group.call(Counter.read, light).batch["doubled"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert list(group.fetch(light, ["word"]).non_tensor_batch["word"]) == [*"abcdef"]


def test_a_column_that_was_kept_does_not_change(group: CounterGroup) -> None:
    batch = rows(3) | DataProto.from_dict({"doubled": torch.zeros(3)})
    batch |= group.keep(batch, ["doubled"])
    batch.batch["doubled"][0] = 9.0
    with pytest.raises(AssertionError, match="doubled was written in place"):
        group.call(Counter.read, batch)
