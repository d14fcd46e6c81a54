"""Losses, values and gradients, against the slow references, to 1e-9 in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference_losses
import reference_maths as reference
import torch
from loss_cases import (
    CASES,
    EXACT,
    FACTOR,
    MODES,
    NAMES,
    SELECTION,
    columns,
    far,
    floats,
    reference_of,
    same_value_and_gradient,
    with_gradient,
)
from ragged_batches import Ragged, each_seed, ragged
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale, aggregate
from hybridflow.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from hybridflow.algorithms.policy_losses.entropy_cov import select_clip_cov, select_kl_cov
from hybridflow.algorithms.positive_examples import positive_example_loss
from hybridflow.algorithms.value_loss import value_loss


@each_seed
@pytest.mark.parametrize("mode", MODES)
def test_aggregation(seed: int, mode: str) -> None:
    b = ragged(seed)
    mask = b.mask.tolist()
    same_value_and_gradient(
        b.values,
        lambda x: aggregate(x, b.mask, mode, LossScale.count(b.mask), FACTOR),
        lambda x: reference.aggregate(lambda i, t: x[i, t], mask, mode, FACTOR),
    )


def run(
    name: str,
    x: Tensor,
    b: Ragged,
    of_batch: dict[str, Tensor],
    mode: str | None,
    weights: Tensor | None,
    **keys: Any,
) -> LossOutput:
    scale = LossScale.count(b.mask)
    inputs = LossInputs(x, b.old_log_prob, b.advantages, b.mask, scale, weights, FACTOR)
    if mode is not None:
        keys["loss_agg_mode"] = mode
    return POLICY_LOSSES[name].function(inputs, **of_batch, **keys)


@pytest.mark.parametrize("number", range(len(MODES)), ids=MODES)
@pytest.mark.parametrize(("name", "parameters"), CASES, ids=NAMES)
def test_policy_losses(name: str, parameters: dict[str, Any], number: int) -> None:
    """Near and far log-ratios, with importance weights and without: the modes share the four of them."""
    mode = MODES[number]
    seed = (number + CASES.index((name, parameters))) % 4
    b, weights = (ragged, far)[seed % 2](seed), (None, ragged(seed).weights)[seed // 2]
    of_batch = columns(POLICY_LOSSES[name], b, seed)
    plain = floats(b, of_batch)

    def expected(x: Tensor) -> Tensor:
        token = reference_of(name)(x, plain, **parameters)
        weigh = [[1.0] * len(row) for row in plain.mask] if weights is None else weights.tolist()
        return reference.aggregate(lambda i, t: token(i, t) * weigh[i][t], plain.mask, mode, FACTOR)

    same_value_and_gradient(
        b.log_prob, lambda x: run(name, x, b, of_batch, mode, weights, **parameters).loss, expected
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_each_loss_honours_each_aggregation_and_has_its_papers_for_none(name: str) -> None:
    """The five modes give five numbers (each proven above), and no mode gives that of the table."""
    b = ragged(1)
    of_batch = columns(POLICY_LOSSES[name], b)
    found = {mode: float(run(name, b.log_prob, b, of_batch, mode, b.weights).loss) for mode in (None, *MODES)}
    assert found[None] == found[POLICY_LOSSES[name].agg_mode]
    assert len({round(found[mode], 9) for mode in MODES}) == len(MODES), found


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_learn_from(name: str, mode: str) -> None:
    """An empty mask over junk: loss 0, gradient 0, metrics 0 of 0."""
    b = ragged(2)
    junk = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -3.0, 7.0], dtype=torch.float64).expand_as(
        b.mask
    )
    nothing = Ragged(
        **{k: torch.zeros_like(v) if k == "mask" else junk if v.dim() == 2 else v for k, v in vars(b).items()}
    )
    of_batch = columns(POLICY_LOSSES[name], nothing)
    out = run(name, nothing.log_prob, nothing, of_batch, mode, nothing.weights)
    value, gradient = with_gradient(
        nothing.log_prob, lambda x: run(name, x, nothing, of_batch, mode, nothing.weights).loss
    )
    assert float(value) == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))
    assert all(float(n) == float(d) == 0.0 for n, d in out.metrics.values()), out.metrics


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_ppo_kl_is_the_mean_of_the_clamped_log_ratios(name: str) -> None:
    b = far(3)
    numerator, denominator = run(
        name, b.log_prob, b, columns(POLICY_LOSSES[name], b), None, b.weights
    ).metrics["actor/ppo_kl"]
    kept = [
        float(reference_losses.log_ratio(b.log_prob[i, t], float(b.old_log_prob[i, t])))
        for i, t in b.mask.nonzero().tolist()
    ]
    torch.testing.assert_close(numerator, torch.tensor(-math.fsum(kept), dtype=torch.float64), **EXACT)
    assert int(denominator) == len(kept)


@each_seed
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_what_clip_cov_selects(seed: int, ratio: float) -> None:
    b = ragged(seed)
    keys = {key: value for key, value in SELECTION.items() if key != "kl_cov_ratio"} | {
        "clip_cov_ratio": ratio
    }

    def select(number: int) -> Tensor:
        rng = torch.Generator().manual_seed(number)
        return select_clip_cov(b.log_prob, b.old_log_prob, b.advantages, b.mask, rng, **keys)[
            "clip_cov_selected"
        ]

    candidates = reference_losses.clip_cov_candidates(b.log_prob, floats(b, {}), 0.2, 0.28, 0.05, 5.0)
    draws = [{(i, t) for i, t in select(number).nonzero().tolist()} for number in range(20)]
    assert candidates and all(draw <= candidates for draw in draws)
    assert {len(draw) for draw in draws} == {min(len(candidates), max(1, int(ratio * int(b.mask.sum()))))}
    # seeded, and each of them may be drawn
    assert torch.equal(select(5), select(5)) and set().union(*draws) == candidates


@each_seed
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_what_kl_cov_selects(seed: int, ratio: float) -> None:
    b = ragged(seed)
    found = select_kl_cov(
        b.log_prob, b.old_log_prob, b.advantages, b.mask, torch.Generator(), kl_cov_ratio=ratio
    )["kl_cov_selected"]
    covs = reference_losses.covariances(b.log_prob, floats(b, {}))
    expected = sorted(covs, key=lambda place: -covs[place])[: max(1, int(ratio * len(covs)))]
    assert {(i, t) for i, t in found.nonzero().tolist()} == set(expected)


@each_seed
def test_positive_examples(seed: int) -> None:
    b, positive = ragged(seed), [True, False, True, True, False, True, False]
    scale = LossScale.count(b.mask, torch.tensor(positive))
    places = [(i, t) for i, t in b.mask.nonzero().tolist() if positive[i]]
    assert scale.num_positive_tokens == len(places)
    same_value_and_gradient(
        b.log_prob,
        lambda x: positive_example_loss(x, b.mask, torch.tensor(positive), scale),
        lambda x: -reference_losses.total([x[i, t] for i, t in places]) / len(places),
    )


@each_seed
@pytest.mark.parametrize("clip", [0.5, 0.05, None])
@pytest.mark.parametrize("mode", MODES)
def test_value_loss(seed: int, clip: float | None, mode: str) -> None:
    b = ragged(seed)

    def token(x: Tensor, i: int, t: int) -> Tensor:
        return reference.value_token(x[i, t], float(b.old_values[i, t]), float(b.returns[i, t]), clip)

    scale = LossScale.count(b.mask)
    same_value_and_gradient(
        b.values,
        lambda x: (
            value_loss(
                x,
                b.old_values,
                b.returns,
                b.mask,
                scale,
                clip_range=clip,
                loss_agg_mode=mode,
                loss_scale_factor=FACTOR,
            ).loss
        ),
        lambda x: reference.aggregate(lambda i, t: token(x, i, t), b.mask.tolist(), mode, FACTOR),
    )
