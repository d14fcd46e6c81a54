"""Order and resume: keyed shuffling, batches, samplers, reading ahead, states that go on exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybridflow.data.loader import SequentialSampler, ShuffledSampler, StatefulLoader
from hybridflow.errors import CheckpointError, ConfigError, DataError

ROWS = list(range(100, 123))


def epochs(loader: StatefulLoader[int], count: int) -> list[list[int]]:
    return [batch for _ in range(count) for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def shuffled(seed: int = 0, batch_size: int = 5, **options: Any) -> StatefulLoader[int]:
    return StatefulLoader(ROWS, ShuffledSampler(ROWS, seed), batch_size, **options)


def test_epochs_are_shuffled_anew_and_keyed_by_the_seed() -> None:
    loader = shuffled()
    first, second = list(loader), list(loader)
    assert sorted(flat(first)) == sorted(flat(second)) == ROWS
    assert first != second and loader.epoch == 2
    assert list(shuffled()) == first and list(shuffled(seed=1)) != first


def test_no_global_random_stream_is_used() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    epochs(shuffled(), 2)
    epochs(shuffled(num_workers=1), 1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [5, 5, 5, 5]), (False, [5, 5, 5, 5, 3])])
def test_last_partial_batch(drop_last: bool, sizes: list[int]) -> None:
    loader = StatefulLoader(ROWS, SequentialSampler(ROWS), 5, drop_last=drop_last)
    batches = list(loader)
    assert [len(batch) for batch in batches] == sizes and len(loader) == len(sizes)
    assert flat(batches) == ROWS[: sum(sizes)]


def test_fewer_rows_than_a_batch() -> None:
    with pytest.raises(
        DataError, match=r"23 usable rows, fewer than data.train_batch_size=24.*train_batch_size=23 or less"
    ):
        StatefulLoader(ROWS, SequentialSampler(ROWS), 24, drop_last=True)
    assert list(StatefulLoader(ROWS, SequentialSampler(ROWS), 24)) == [ROWS]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_resume_goes_on_exactly_from_every_step(num_workers: int, drop_last: bool) -> None:
    whole = epochs(shuffled(drop_last=drop_last), 3)
    steps_to_stop = [7 if drop_last else 4] if num_workers else range(len(whole))  # processes start slowly
    for stop in steps_to_stop:
        loader, done = shuffled(drop_last=drop_last, num_workers=num_workers), 0
        state = loader.state_dict()
        while done < stop:
            for _ in loader:
                done += 1
                state = loader.state_dict()
                if done == stop:
                    break
        again = shuffled(drop_last=drop_last, num_workers=num_workers)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert epochs(again, 3 - again.epoch) == whole[stop:], f"stopped after {stop} batches"


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_resume_in_the_second_epoch_goes_on_in_the_order_of_the_second(drop_last: bool) -> None:
    """Ten rows in batches of three, stopped after five batches."""

    def loader() -> StatefulLoader[int]:
        rows = ROWS[:10]
        return StatefulLoader(rows, ShuffledSampler(rows, 0), 3, drop_last=drop_last)

    whole = epochs(loader(), 3)
    first, state, done = loader(), {}, 0
    while done < 5:
        for _ in first:
            state, done = first.state_dict(), done + 1
            if done == 5:
                break
    again = loader()
    again.load_state_dict(json.loads(json.dumps(state)))
    found = next(iter(again))
    assert found == whole[5] and found not in whole[:5]


def test_an_abandoned_epoch_goes_on_in_the_next_loop() -> None:
    loader, whole = shuffled(), list(shuffled())
    for _ in loader:
        break
    assert list(loader) == whole[1:]


def test_changed_data_is_said_at_resume(caplog: pytest.LogCaptureFixture) -> None:
    state = shuffled().state_dict()
    StatefulLoader(ROWS[:20], ShuffledSampler(ROWS[:20], 1), 4).load_state_dict(state)
    assert "number of rows was 23 and is 20, batch size was 5 and is 4, seed was 0 and is 1" in caplog.text
    caplog.clear()
    shuffled().load_state_dict(state)
    assert not caplog.text


def test_epochs_follow_each_other_without_end_until_one_is_empty() -> None:
    batches = shuffled().endless()
    assert [next(batches) for _ in range(10)] == epochs(shuffled(), 3)[:10]

    class Emptied(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            self.size = 4 if epoch else 23

    loader = StatefulLoader(ROWS, Emptied(ROWS), 5, drop_last=True)
    loader.epoch = 1
    with pytest.raises(
        DataError, match=r"epoch 1 gives no batch: Emptied has 4 rows in it, and data\.train_batch_size=5"
    ):
        next(loader.endless())


class Hardest:
    """A curriculum: what was told last decides what comes next; keeps its own place."""

    def __init__(self, dataset: list[int], seed: int) -> None:
        self.size, self.left, self.offset = len(dataset), list(range(len(dataset))), 0

    def set_epoch(self, epoch: int) -> None:
        self.left = list(range(self.size))

    def update(self, batch: list[int]) -> None:
        self.offset += sum(batch)

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop(self.offset % len(self.left))

    def __len__(self) -> int:
        return self.size

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left), "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.offset = list(state["left"]), state["offset"]


def test_curriculum_sampler_steers_and_resumes() -> None:
    def run(loader: StatefulLoader[int], sampler: Hardest, steps: int, log: list[Any]) -> None:
        while steps:
            for batch in loader:
                sampler.update(batch)
                log.append((batch, json.loads(json.dumps(loader.state_dict()))))
                steps -= 1
                if not steps:
                    return

    sampler = Hardest(ROWS, 0)
    whole: list[Any] = []
    run(StatefulLoader(ROWS, sampler, 5, drop_last=True), sampler, 12, whole)
    assert [batch for batch, _ in whole[:4]] != [ROWS[i : i + 5] for i in range(0, 20, 5)], (
        "update must have changed the order"
    )
    for stop in range(1, 12):
        other = Hardest(ROWS, 0)
        loader = StatefulLoader(ROWS, other, 5, drop_last=True)
        loader.load_state_dict(whole[stop - 1][1])
        rest: list[Any] = []
        run(loader, other, 12 - stop, rest)
        assert rest == whole[stop:], f"resumed after {stop}"


def test_sampler_mistakes() -> None:
    with pytest.raises(ConfigError, match="dataloader_num_workers=0"):
        StatefulLoader(ROWS, Hardest(ROWS, 0), 5, num_workers=1)
    with pytest.raises(CheckpointError, match=r"made without a sampler that keeps a state.*Hardest"):
        StatefulLoader(ROWS, Hardest(ROWS, 0), 5).load_state_dict(shuffled().state_dict())

    class Short(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            yield from range(7)

    with pytest.raises(DataError, match="Short ended 16 rows early"):
        list(StatefulLoader(ROWS, Short(ROWS), 5))
