"""Properties of masks, conversations and packed rows, of learning rates and data after a resume, and of the
metrics of a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from hybridflow.invariants.checking import AdapterCall, close, holds, same, that

CONVERSATION = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "alpha"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "gamma"},
)
ROWS = ([3, 14, 15, 9, 2], [6, 5, 3, 5])
RESUMES = ((4,), (4, 6), (2, 4, 7))


@holds("response_mask", "TRL #4974")
def an_end_that_is_padding_is_learned(call: AdapterCall) -> None:
    """Where the end token is the padding token too, the mask covers the sampled end and no padding."""
    found = call([[5, 6, 7, 2], [5, 2]], eos=2, pad=2)
    same(found.bool(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool())


@holds("response_mask", "TRL #4974")
def a_response_without_end_is_whole(call: AdapterCall) -> None:
    """A response that was cut at the limit is in the mask to its last token."""
    found = call([[5, 6, 7], [5, 2]], eos=2, pad=0)
    same(found.bool(), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool())


@holds("conversation", "slime #1563, slime #1418")
def both_answers_are_learned(call: AdapterCall) -> None:
    """Both answers of a conversation of two are learned, each as a run, and no question is."""
    runs = _learned(call)
    told = len(runs) == 2 and "alpha" in runs[0] and "gamma" in runs[1]
    that(told and not any("one" in run or "two" in run for run in runs), runs, "two runs, alpha and gamma")


@holds("conversation", "prime-rl #2471")
def the_role_is_not_learned(call: AdapterCall) -> None:
    """Learning of a turn begins with its first word, not with the opening that the template writes."""
    runs = _learned(call)
    opened = [run.lstrip().startswith(word) for run, word in zip(runs, ("alpha", "gamma"))]
    that(all(opened), runs, "runs that begin with alpha and gamma")


@holds("conversation", "prime-rl #2471, TRL #4974")
def the_end_of_a_turn_is_learned(call: AdapterCall) -> None:
    """The token that ends a turn is learned with it: else the model does not learn to stop."""
    runs = _learned(call)
    ended = [run.strip() != word and word in run for run, word in zip(runs, ("alpha", "gamma"))]
    that(len(ended) == 2 and all(ended), runs, "runs that go on after alpha and gamma")


@holds("packed_positions", "NeMo-RL #4167")
def positions_begin_anew_in_each_row(call: AdapterCall) -> None:
    """Packed rows count their positions from 0."""
    found = list(map(int, call([3, 1, 2])))
    that(found == [0, 1, 2, 0, 0, 1], found, "[0, 1, 2, 0, 0, 1]")


@holds("packed_outputs", "NeMo-RL #4167")
def packed_rows_do_not_see_each_other(call: AdapterCall) -> None:
    """Another first row changes no bit of the second row's outputs."""
    same(call([list(ROWS[0]), list(ROWS[1])])[1], call([[8, 8, 8, 8, 8], list(ROWS[1])])[1])


@holds("packed_outputs", "NeMo-RL #4167")
def a_packed_row_is_the_row_alone(call: AdapterCall) -> None:
    """A row's outputs behind another row are those that it has alone."""
    close(call([list(ROWS[0]), list(ROWS[1])])[1], call([list(ROWS[1])])[0], rtol=1e-4, atol=1e-5)


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


def _learned(call: AdapterCall) -> Sequence[str]:
    """Return the text of each run of learned tokens of the conversation."""
    tokens = call([dict(message) for message in CONVERSATION])
    runs = itertools.groupby(tokens, key=lambda token: int(token[1]))
    return ["".join(text for text, _ in run) for learned, run in runs if learned]


def _numbers(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[int(row) for row in batch] for batch in batches]


def _close_numbers(got: Sequence[float], wanted: Sequence[float]) -> None:
    found = list(map(float, got))
    equal = len(found) == len(wanted) and all(
        math.isclose(mine, theirs, rel_tol=1e-5, abs_tol=1e-9) for mine, theirs in zip(found, wanted)
    )
    that(equal, found, f"{wanted}")
