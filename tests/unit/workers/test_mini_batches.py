"""Mini-batches: whole groups, each row once an epoch, an order that only (seed, step, epoch) decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.algorithms.resampling import resample_rows
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.mini_batches import MiniBatchPlan, add_update, mini_batch_rows, mini_batches

UIDS = [*"aabbb", *"c", *"dddd", *"ee", *"ff", *"gg"]
PLAN = MiniBatchPlan(groups=3, epochs=1, shuffle=True, seed=1, step=5)


def updated(
    batch: DataProto, plan: MiniBatchPlan, update: Callable[[DataProto, LossScale], Metrics], **keys: Any
) -> Metrics:
    """What a group does with the mini-batches of a batch."""
    metrics = Metrics()
    for mini, scale in mini_batches(batch, plan, metrics, **keys):
        add_update(metrics, update(mini, scale))
    return metrics


def groups_of(rows: list[int], uids: list[str] = UIDS) -> set[str]:
    return {uids[row] for row in rows}


def test_groups_stay_whole_and_the_last_may_be_smaller() -> None:
    parts = list(mini_batch_rows(UIDS, PLAN))
    assert [len(groups_of(rows)) for rows in parts] == [3, 3, 1]
    for rows in parts:
        assert sorted(rows) == [row for row, uid in enumerate(UIDS) if uid in groups_of(rows)]


def test_scattered_rows_of_a_group_meet() -> None:
    uids = [*"abcabcab"]
    parts = list(mini_batch_rows(uids, replace(PLAN, groups=1)))
    assert sorted(map(sorted, parts)) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_each_row_once_an_epoch_in_a_new_order_each_epoch() -> None:
    parts = list(mini_batch_rows(UIDS, replace(PLAN, epochs=3)))
    epochs = [[row for part in parts[start : start + 3] for row in part] for start in (0, 3, 6)]
    assert all(sorted(rows) == list(range(len(UIDS))) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3


def test_the_order_depends_on_seed_step_and_epoch_alone() -> None:
    order = list(mini_batch_rows(UIDS, PLAN))
    torch.manual_seed(123)
    assert list(mini_batch_rows(UIDS, PLAN)) == order
    assert list(mini_batch_rows(UIDS, replace(PLAN, epochs=2)))[:3] == order
    assert list(mini_batch_rows([uid.upper() for uid in UIDS], PLAN)) == order, "not on the names"
    assert list(mini_batch_rows(UIDS, replace(PLAN, seed=2))) != order
    assert list(mini_batch_rows(UIDS, replace(PLAN, step=6))) != order


def test_without_shuffling_rows_come_as_they_are() -> None:
    parts = list(mini_batch_rows(UIDS, replace(PLAN, shuffle=False, epochs=2)))
    assert parts == [list(range(6)), list(range(6, 14)), [14, 15]] * 2


@pytest.mark.parametrize(
    ("prompts", "n", "groups", "right"),
    [(256, 1, 64, 0.1), (64, 8, 16, 0.21), (10, 8, 4, 0.5), (64, 8, 16, 0.0)],
)
def test_rows_that_were_drawn_again_make_as_many_mini_batches_of_the_same_sizes(
    prompts: int, n: int, groups: int, right: float
) -> None:
    rng = torch.Generator().manual_seed(3)
    scores = (torch.rand(prompts * n, generator=rng) < right).float()
    uids = [str(row // n) for row in range(prompts * n)]
    drawn = resample_rows(scores, method="pow", weight_pow=2.0, generator=rng).tolist()
    plan = replace(PLAN, groups=groups)
    wanted = [len(rows) for rows in mini_batch_rows(uids, plan)]
    found = list(mini_batch_rows(range(len(drawn)), replace(plan, drawn_from=prompts)))
    assert [len(rows) for rows in found] == wanted and wanted[0] == groups * n
    assert sorted(row for rows in found for row in rows) == list(range(prompts * n))


def test_rows_drawn_from_groups_that_lost_some_keep_the_number_of_mini_batches() -> None:
    parts = list(mini_batch_rows(range(482), replace(PLAN, groups=16, drawn_from=64)))
    assert [len(rows) for rows in parts] == [120, 121, 120, 121]
    assert list(mini_batch_rows([], replace(PLAN, drawn_from=0))) == list(mini_batch_rows([], PLAN)) == []


def batch_of(uids: list[str]) -> DataProto:
    mask = torch.ones(len(uids), 2, dtype=torch.bool)
    return DataProto.from_dict({"loss_mask": mask, "x": torch.arange(len(uids))}, {"uid": uids})


def test_updates_get_their_rows_and_the_counts_of_them() -> None:
    batch = batch_of(UIDS)
    batch.batch["loss_mask"][3] = False
    batch.batch["loss_mask"][5, 0] = False
    seen: list[list[int]] = []

    def update(mini: DataProto, scale: LossScale) -> Metrics:
        mask = mini.batch["loss_mask"]
        assert scale == LossScale(float(mask.sum()), float(mask.any(-1).sum()))
        seen.append(mini.batch["x"].tolist())
        metrics = Metrics()
        metrics.add_sum("actor/pg_loss", float(len(mini)))
        metrics.add_sum("actor/pg_loss", 1.0)
        metrics.add_mean("other", scale.num_tokens, 10.0)
        return metrics

    metrics = updated(batch, replace(PLAN, epochs=2), update, name="actor").to_floats()
    learned = [[row for row in rows if row != 3] for rows in mini_batch_rows(UIDS, replace(PLAN, epochs=2))]
    assert seen == learned, "a row with nothing to learn from stays behind"
    assert metrics["actor/pg_loss"] == pytest.approx(2 * (len(UIDS) - 1) / 6 + 1), (
        "the mean of the losses of six mini-batches"
    )
    assert metrics["other"] == pytest.approx(2 * (2 * len(UIDS) - 3) / 60)


def test_a_mini_batch_with_nothing_to_learn_is_left_out_and_counted() -> None:
    batch = batch_of([*"aabbcc"])
    batch.batch["loss_mask"][2:4] = False
    plan = MiniBatchPlan(groups=1, epochs=2, shuffle=False, seed=0, step=1)
    seen: list[list[int]] = []

    def update(mini: DataProto, scale: LossScale) -> Metrics:
        seen.append(mini.batch["x"].tolist())
        return Metrics()

    metrics = updated(batch, plan, update, name="critic").to_floats()
    assert seen == [[0, 1], [4, 5]] * 2
    assert metrics == {"critic/num_empty_mini_batches": 2.0}


def test_a_hook_sees_each_mini_batch_whole_before_it_is_counted() -> None:
    plan = MiniBatchPlan(groups=2, epochs=1, shuffle=False, seed=0, step=1)
    counts: list[float] = []

    def prepare(mini: DataProto, number: int) -> tuple[DataProto, Metrics]:
        keep = torch.zeros(len(mini), 2, dtype=torch.bool)
        keep[: number + 1, 0] = True
        mini.narrow_loss_mask(keep)
        metrics = Metrics()
        metrics.add_sum("seen", float(len(mini)))
        return mini | DataProto.from_dict({"number": torch.full((len(mini),), number)}), metrics

    def update(mini: DataProto, scale: LossScale) -> Metrics:
        assert mini.batch["number"].tolist() == [len(counts)] * len(mini)
        counts.append(scale.num_tokens)
        return Metrics()

    batch = batch_of([*"aabbcc"])
    batch |= DataProto.from_dict({"response_mask": batch.batch["loss_mask"].clone()})
    metrics = updated(batch, plan, update, name="actor", prepare=prepare)
    assert counts == [1.0, 2.0] and metrics.to_floats() == {"seen": 6.0}
    assert bool(batch.batch["loss_mask"].all()), (
        "the step's batch keeps its mask: rejection under new weights is per update"
    )
