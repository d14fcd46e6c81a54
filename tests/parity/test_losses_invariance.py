"""No loss, gradient or metric depends on how a mini-batch is cut, dealt to ranks, ordered or padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import EXACT, FACTOR, MODES, columns, far, with_gradient
from ragged_batches import Ragged, ragged
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from hybridflow.algorithms.positive_examples import positive_example_loss
from hybridflow.algorithms.value_loss import value_loss

ROWS = list(range(7))
POSITIVE = torch.tensor([True, False, True, True, False, True, False])
LOSSES = (*POLICY_LOSSES, "value", "positive examples")
Found = tuple[Tensor, Tensor, dict[str, tuple[float, float]]]
Loss = Callable[[Tensor, Sequence[int]], LossOutput]


def loss_of(
    name: str, b: Ragged, mode: str, positive: Tensor = POSITIVE, chosen: dict[str, Tensor] | None = None
) -> Loss:
    """The loss of some rows, under the counts and the selection of all of them."""
    scale = LossScale.count(b.mask, positive)
    if name == "value":
        return lambda x, rows: value_loss(
            x[rows],
            b.old_values[rows],
            b.returns[rows],
            b.mask[rows],
            scale,
            clip_range=0.3,
            loss_agg_mode=mode,
            loss_scale_factor=FACTOR,
        )
    if name == "positive examples":
        return lambda x, rows: LossOutput(
            positive_example_loss(x[rows], b.mask[rows], positive[rows], scale), {}
        )
    record, of_batch = POLICY_LOSSES[name], columns(POLICY_LOSSES[name], b) if chosen is None else chosen

    def loss(x: Tensor, rows: Sequence[int]) -> LossOutput:
        keys = {key: column[rows] for key, column in of_batch.items()}
        a, mask, weights = b.advantages[rows], b.mask[rows], b.weights[rows]
        inputs = LossInputs(x[rows], b.old_log_prob[rows], a, mask, scale, weights, FACTOR)
        return record.function(inputs, **keys, loss_agg_mode=mode)

    return loss


def in_pieces(x: Tensor, loss: Loss, pieces: Sequence[Sequence[int]]) -> Found:
    """Loss, gradient and metrics as micro-batches add them up."""
    metrics: dict[str, tuple[float, float]] = {}

    def added_up(leaf: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in pieces:
            out = loss(leaf, rows)
            total = total + out.loss
            for key, (n, d) in out.metrics.items():
                before = metrics.get(key, (0.0, 0.0))
                metrics[key] = (before[0] + float(n), before[1] + float(d))
        return total

    return *with_gradient(x, added_up), metrics


def same(found: Found, expected: Found) -> None:
    torch.testing.assert_close(found[0], expected[0], **EXACT)
    torch.testing.assert_close(found[1], expected[1], **EXACT)
    for name, (numerator, denominator) in expected[2].items():
        assert found[2][name][1] == denominator, name
        assert abs(found[2][name][0] - numerator) < 1e-9 * max(1.0, abs(numerator)), name


def cut(name: str, b: Ragged, order: Sequence[int], cuts: set[int]) -> list[list[int]]:
    """Pieces of the rows in this order; rows of a group together where the loss asks for it."""
    pieces = [list(order[start:end]) for start, end in pairwise([0, *sorted(cuts), len(order)])]
    if not (name in POLICY_LOSSES and POLICY_LOSSES[name].keeps_groups):
        return pieces
    whole: dict[int, list[int]] = {}
    for row in order:
        whole.setdefault(int(b.groups[row]), []).append(row)
    groups = list(whole.values())
    edges = sorted({0, *(c for c in cuts if c < len(groups)), len(groups)})
    return [[row for group in groups[start:end] for row in group] for start, end in pairwise(edges)]


batches = st.builds(lambda make, seed: make(seed), st.sampled_from((ragged, far)), st.integers(0, 10_000))
orders, cut_sets, modes = st.permutations(ROWS), st.sets(st.integers(1, 6)), st.sampled_from(MODES)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches, orders, cut_sets, modes)
def test_cutting_into_micro_batches_changes_no_loss_gradient_or_metric(
    b: Ragged, order: list[int], cuts: set[int], mode: str
) -> None:
    for name in LOSSES:
        loss = loss_of(name, b, mode)
        same(in_pieces(b.log_prob, loss, cut(name, b, order, cuts)), in_pieces(b.log_prob, loss, [ROWS]))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches, orders, cut_sets, st.integers(1, 4), modes)
def test_dealing_to_ranks_changes_nothing(
    b: Ragged, order: list[int], cuts: set[int], ranks: int, mode: str
) -> None:
    """Gradients are averaged over ranks, and the engine multiplies by their number; a rank may be empty."""
    for name in LOSSES:
        loss, pieces = loss_of(name, b, mode), cut(name, b, order, cuts)
        shares = [
            in_pieces(b.log_prob, loss, pieces[rank::ranks]) for rank in range(ranks) if pieces[rank::ranks]
        ]
        gradient = ranks * (sum((share[1] for share in shares), torch.zeros_like(b.log_prob)) / ranks)
        metrics: dict[str, tuple[float, float]] = {}
        for _, _, found in shares:
            metrics |= {
                key: (metrics.get(key, (0.0, 0.0))[0] + n, metrics.get(key, (0.0, 0.0))[1] + d)
                for key, (n, d) in found.items()
            }
        value = sum((share[0] for share in shares), torch.zeros((), dtype=torch.float64))
        same((value, gradient, metrics), in_pieces(b.log_prob, loss, [ROWS]))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches, orders, modes)
def test_the_order_of_rows_changes_nothing(b: Ragged, order: list[int], mode: str) -> None:
    moved = Ragged(**{key: value[order] for key, value in vars(b).items()})
    for name in LOSSES:
        # what Clip-Cov draws is keyed by the order of the mini-batch, which is itself seeded: its column
        # moves along
        chosen = None
        if name == "clip_cov":
            chosen = {key: column[order] for key, column in columns(POLICY_LOSSES[name], b).items()}
        plain = in_pieces(b.log_prob, loss_of(name, b, mode), [ROWS])
        found = in_pieces(moved.log_prob, loss_of(name, moved, mode, POSITIVE[order], chosen), [ROWS])
        same(found, (plain[0], plain[1][order], plain[2]))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches, st.integers(1, 4), modes)
def test_padding_changes_nothing(b: Ragged, more: int, mode: str) -> None:
    """Columns, and rows with an empty mask in groups of their own and of others, with NaN in both."""

    def pad(x: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, more, 0, 2) if x.dim() == 2 else (0, 2), value=fill)

    wide = Ragged(**{k: pad(v, 0 if k in ("mask", "groups") else float("nan")) for k, v in vars(b).items()})
    wide.groups[-1] = b.groups[3]
    rows = [*ROWS, 7, 8]
    positive = torch.cat([POSITIVE, torch.tensor([True, False])])
    assert LossScale.count(wide.mask, positive) == LossScale.count(b.mask, POSITIVE)
    for name in LOSSES:
        plain = in_pieces(b.log_prob, loss_of(name, b, mode), [ROWS])
        found = in_pieces(wide.log_prob, loss_of(name, wide, mode, positive), [rows])
        same(found, (plain[0], pad(plain[1], 0.0), plain[2]))
