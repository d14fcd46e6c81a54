"""A step does not depend on how a mini-batch is cut, padded or ordered, to 1e-10 in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from engine_zoo import (
    ENGINES,
    EngineMaker,
    Gradients,
    row_tokens,
    tiny_policy,
    tiny_value,
    training_rows,
    weights,
)
from torch import Tensor, nn

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.algorithms.catalog import AGGREGATIONS
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.model import OptimConfig
from hybridflow.config.root import CriticConfig
from hybridflow.engines import BatchLimits, LossFn, OutputSpec
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import critic_loss, find_policy_loss, policy_loss

TOLERANCE = 1e-10
WHOLE = BatchLimits(max_tokens=1000)
ORDER = [4, 2, 6, 0, 5, 1, 3]
CUTS = {
    "one row": (training_rows, BatchLimits(1000, max_rows=1)),
    "three rows": (training_rows, BatchLimits(1000, max_rows=3)),
    "tight token cap": (training_rows, BatchLimits(max(row_tokens()))),
    "both limits": (training_rows, BatchLimits(25, max_rows=2)),
    "whole groups": (lambda: training_rows().select_idxs(ORDER), BatchLimits(25, keep_groups=True)),
    "wider prompts": (lambda: training_rows(extra_prompt=5), WHOLE),
    "wider responses": (lambda: training_rows(extra_response=4), WHOLE),
    "another order": (lambda: training_rows().select_idxs(ORDER), WHOLE),
    "all at once": (
        lambda: training_rows(extra_prompt=2, extra_response=3).select_idxs(ORDER),
        BatchLimits(20, max_rows=2),
    ),
}


class Case(NamedTuple):
    """A model, what is asked of it, and the loss."""

    model: Callable[[torch.dtype], nn.Module]
    spec: OutputSpec
    loss: Callable[[LossScale], LossFn]


def actor_case(config: ActorConfig) -> Case:
    return Case(
        tiny_policy,
        OutputSpec(log_probs=True, entropy=config.entropy_coeff != 0.0, temperature=0.8),
        lambda scale: policy_loss(config, scale, find_policy_loss(config)),
    )


BASE = ActorConfig(clip_ratio_high=0.28, clip_ratio_c=1.5, loss_scale_factor=10.0)
CASES = {
    **{mode: actor_case(replace(BASE, loss_agg_mode=mode)) for mode in AGGREGATIONS},
    "entropy bonus": actor_case(replace(BASE, entropy_coeff=0.3)),
    "kl loss": actor_case(replace(BASE, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="low_var_kl")),
    "everything": actor_case(
        replace(
            BASE,
            entropy_coeff=0.1,
            use_kl_loss=True,
            kl_loss_coef=0.5,
            kl_loss_type="k3+",
            loss_agg_mode="seq-mean-token-mean",
        )
    ),
    "value": Case(
        tiny_value, OutputSpec(values=True), lambda scale: critic_loss(CriticConfig(), scale, None)
    ),
    "value by rows": Case(
        tiny_value,
        OutputSpec(values=True),
        lambda scale: critic_loss(CriticConfig(loss_agg_mode="seq-mean-token-sum-norm"), scale, 8.0),
    ),
}


class Outcome(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: dict[str, float]


def train_once(make: EngineMaker, case: Case, batch: DataProto, limits: BatchLimits) -> Outcome:
    module = case.model(torch.float64)
    engine = make(module, OptimConfig(lr=1e-3, eps=1e-6), grad_clip=1.0)
    gradients, shares = Gradients(module), list[float]()
    loss = case.loss(LossScale.count(batch.batch["loss_mask"]))

    def noting(outputs: dict[str, Tensor], micro: DataProto):
        share, metrics = loss(outputs, micro)
        shares.append(share.item())
        return share, metrics

    metrics = engine.train_mini_batch(batch, case.spec, noting, limits).to_floats()
    assert metrics["actor/num_updates"] == 1.0
    return Outcome(sum(shares), gradients.found, weights(module), metrics)


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_one_step_is_the_same_however_the_mini_batch_is_cut(engine: str, name: str) -> None:
    make, case = ENGINES[engine], CASES[name]
    whole = train_once(make, case, training_rows(), WHOLE)
    assert abs(whole.loss) > 1e-3 and max(float(g.abs().max()) for g in whole.gradients.values()) > 1e-3
    assert largest_difference(whole.weights, weights(case.model(torch.float64))) > 1e-4
    for cut, (rows, limits) in CUTS.items():
        other = train_once(make, case, rows(), limits)
        assert abs(other.loss - whole.loss) < TOLERANCE, cut
        assert largest_difference(other.gradients, whole.gradients) < TOLERANCE, cut
        assert largest_difference(other.weights, whole.weights) < TOLERANCE, cut
        assert other.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=TOLERANCE), cut


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_outside_the_loss_changes_nothing(engine: str) -> None:
    case, rows = CASES["seq-mean-token-mean"], training_rows()
    whole = train_once(ENGINES[engine], case, rows, WHOLE)
    without = train_once(ENGINES[engine], case, rows.select_idxs([0, 1, 2, 3, 5, 6]), WHOLE)
    assert abs(whole.loss - without.loss) < TOLERANCE
    assert largest_difference(whole.gradients, without.gradients) < TOLERANCE


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("limits", [WHOLE, BatchLimits(20), BatchLimits(1000, max_rows=2)])
def test_forward_of_packed_rows_equals_rows_alone(engine: str, limits: BatchLimits) -> None:
    for module, spec in (
        (tiny_policy(torch.float64), OutputSpec(log_probs=True, entropy=True)),
        (tiny_value(torch.float64), OutputSpec(values=True)),
    ):
        tested = ENGINES[engine](module, None)
        rows = training_rows(extra_prompt=1, extra_response=2)
        together = tested.forward(rows, spec, limits)
        sampled = rows.batch["response_mask"]
        for key, values in together.items():
            assert values.dtype == torch.float64
            assert values.shape == sampled.shape
            assert not values.requires_grad
            assert not values[~sampled].any() and values[sampled].abs().min() > 0
            alone = torch.cat(
                [tested.forward(rows.select_idxs([row]), spec, WHOLE)[key] for row in range(len(rows))]
            )
            assert (values - alone).abs().max() < TOLERANCE


def of_lengths(*lengths: int) -> DataProto:
    """Copies of one row, with so many tokens to learn."""
    rows = training_rows(extra_response=3).select_idxs([3] * len(lengths))
    mask = rows.batch["response_mask"]
    rows.batch["loss_mask"] = mask & (mask.cumsum(-1) <= torch.tensor(lengths)[:, None])
    assert rows.batch["loss_mask"].sum(-1).tolist() == list(lengths)
    return rows


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_rows_of_few_and_many_tokens_weigh_the_same_in_passes_of_1_2_and_4(engine: str, mode: str) -> None:
    case = actor_case(replace(BASE, loss_agg_mode=mode))
    rows = of_lengths(1, 2, 3, 7, 0)
    whole = train_once(ENGINES[engine], case, rows, WHOLE)
    without = train_once(ENGINES[engine], case, of_lengths(1, 2, 3, 7), WHOLE)
    cuts = [train_once(ENGINES[engine], case, rows, BatchLimits(1000, max_rows=size)) for size in (1, 2, 4)]
    for other in (without, *cuts):
        assert largest_difference(other.gradients, whole.gradients) < TOLERANCE
        assert other.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=TOLERANCE)
