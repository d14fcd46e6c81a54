"""Properties of what a run keeps and reports: learning rates and data after a resume, metrics of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hybridflow.invariants.checking import AdapterCall, holds, that

RESUMES = ((4,), (4, 6), (2, 4, 7))


@holds("learning_rates", "slime #1547, slime #1546")
def a_resumed_rate_is_where_it_was(call: AdapterCall) -> None:
    """After one, two and three resumes each step has the learning rate of a run without any."""
    wanted = list(map(float, call(10, ())))
    that(len(wanted) == 10 and wanted[2] > wanted[8], wanted, "ten rates that fall")
    for resumes in RESUMES:
        _close_numbers(list(call(10, resumes)), wanted)


@holds("data_order", "accelerate #2016, open-instruct #910")
def a_resumed_run_reads_the_rows_that_follow(call: AdapterCall) -> None:
    """After one, two and three resumes, also in the second epoch, batches are those of a run without any."""
    wanted = _numbers(call(10, 3, 8, ()))
    for resumes in ((1,), (5,), (3, 4), (2, 3, 5)):
        found = _numbers(call(10, 3, 8, resumes))
        that(found == wanted, found, f"{wanted}, as without a resume")


@holds("data_order", "accelerate #2016")
def each_row_is_read_once_an_epoch(call: AdapterCall) -> None:
    """An epoch has each row once, with a resume amid it as well."""
    for resumes in ((), (1,), (3,)):
        found = _numbers(call(8, 2, 8, resumes))
        for start in (0, 4):
            epoch = sorted(row for batch in found[start : start + 4] for row in batch)
            that(epoch == list(range(8)), found, "the rows 0 to 7 once in batches 1–4, and in 5–8")


@holds("data_order", "accelerate #2016")
def a_resumed_epoch_has_an_order_of_its_own(call: AdapterCall) -> None:
    """The second epoch is in another order than the first, also after a resume at its beginning."""
    for resumes in ((), (4,), (5,)):
        found = _numbers(call(8, 2, 8, resumes))
        that(found[:4] != found[4:], found, "another order in batches 5–8 than in 1–4")


@holds("mean_metric", "SkyRL #1504, prime-rl #2358")
def a_metric_does_not_depend_on_the_cut(call: AdapterCall) -> None:
    """Micro-batches of 3 tokens and of 1 report the mean over their four tokens."""
    values = [torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[5.0, 7.0, 7.0]])]
    masks = [torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, False, False]])]
    _close_numbers([call(values, masks)], [2.0])


@holds("mean_metric", "SkyRL #1863")
def padding_does_not_drag_a_metric(call: AdapterCall) -> None:
    """A micro-batch that is all padding leaves the reported mean where it was."""
    masks = [torch.ones(1, 2, dtype=torch.bool)] * 2 + [torch.zeros(1, 2, dtype=torch.bool)]
    _close_numbers([call([torch.ones(1, 2)] * 3, masks)], [1.0])


@holds("mean_length", "TRL #3476")
def a_length_is_that_of_the_response(call: AdapterCall) -> None:
    """A row that the loss leaves out keeps its length in the report."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    left_out = mask.clone()
    left_out[0] = False
    _close_numbers([call(mask, left_out)], [3.0])


def _numbers(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[int(row) for row in batch] for batch in batches]


def _close_numbers(got: Sequence[float], wanted: Sequence[float]) -> None:
    found = list(map(float, got))
    equal = len(found) == len(wanted) and all(
        math.isclose(mine, theirs, rel_tol=1e-5, abs_tol=1e-9) for mine, theirs in zip(found, wanted)
    )
    that(equal, found, f"{wanted}")
