"""The table entry of a policy loss: arguments are filled by name, and a result that is no loss is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.catalog import LOSS_ARGUMENTS
from hybridflow.algorithms.policy_losses import LossInputs, PolicyLoss
from hybridflow.errors import ConfigError

X = torch.zeros(2, 3)
MASK = torch.ones(2, 3, dtype=torch.bool)
INPUTS = LossInputs(X, X + 1, X + 2, MASK, LossScale(6.0, 2.0), X + 3, 8.0)
OTHERS: dict[str, Any] = {"clip_low": 0.2, "loss_agg_mode": None}
AVAILABLE: dict[str, Any] = {name: getattr(INPUTS, name) for name in LOSS_ARGUMENTS} | OTHERS
ZERO = LossOutput(torch.tensor(0.0), {})


def called(entry: PolicyLoss) -> LossOutput:
    """What a worker makes of an entry and the columns of its rows."""
    places, named = entry.arguments(INPUTS, OTHERS)
    return entry.checked(entry.function(*places, **named))


def test_arguments_are_filled_by_name() -> None:
    seen: dict[str, Any] = {}

    def own(advantages: Any, *, clip_low: float, absent: float = 0.5) -> LossOutput:
        seen.update(advantages=advantages, clip_low=clip_low, absent=absent)
        return ZERO

    entry = PolicyLoss(own)
    assert entry.keywords == ("clip_low", "absent") and entry.select_arguments(OTHERS) == {}
    assert called(entry) is ZERO
    assert seen == {"advantages": INPUTS.advantages, "clip_low": 0.2, "absent": 0.5}


def test_inputs_come_as_one_and_the_aggregation_of_its_paper_is_left_to_the_loss() -> None:
    seen: dict[str, Any] = {}

    def own(inputs: Any, *, clip_low: float, loss_agg_mode: str = "token-sum") -> LossOutput:
        seen.update(inputs=inputs, clip_low=clip_low, loss_agg_mode=loss_agg_mode)
        return ZERO

    entry = PolicyLoss(own)
    assert entry.keywords == ("clip_low", "loss_agg_mode") and called(entry) is ZERO
    assert seen == {"inputs": INPUTS, "clip_low": 0.2, "loss_agg_mode": "token-sum"}
    _, named = entry.arguments(INPUTS, {"clip_low": 0.2, "loss_agg_mode": "token-mean"})
    assert named["loss_agg_mode"] == "token-mean"


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("advantages", torch.zeros(2), r"\[2\]"),
        ("old_log_prob", torch.zeros(2, 4), r"\[2, 4\]"),
        ("rollout_is_weights", torch.zeros(1, 3), r"\[1, 3\]"),
    ],
)
def test_a_tensor_of_another_shape_is_named_at_the_door(name: str, tensor: torch.Tensor, shape: str) -> None:
    says = rf"{name} got the shape {shape}, wanted \[B, R\].* response_mask, which is \[2, 3\]"
    with pytest.raises(ConfigError, match=says):
        replace(INPUTS, **{name: tensor})  # type: ignore[arg-type]


def test_rest_takes_all_that_is_there() -> None:
    seen: dict[str, Any] = {}

    def own(log_prob: Any, **rest: Any) -> LossOutput:
        seen.update(rest, log_prob=log_prob)
        return ZERO

    assert called(PolicyLoss(own)) is ZERO and seen == AVAILABLE


def test_a_wrapper_gets_the_usual_arguments_by_position() -> None:
    seen: list[Any] = []

    def own(*places: Any, clip_low: float, **rest: Any) -> LossOutput:
        seen.extend([*places, clip_low, rest])
        return ZERO

    assert called(PolicyLoss(own)) is ZERO
    assert seen == [*(AVAILABLE[name] for name in LOSS_ARGUMENTS), 0.2, {}]


def test_an_argument_that_is_not_there_is_named() -> None:
    def own(log_prob: Any, uid: Any) -> LossOutput:
        return ZERO

    with pytest.raises(ConfigError, match=r"policy loss own needs uid; there are advantages, clip_low, "):
        called(PolicyLoss(own))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((torch.tensor(0.0), {}), r"a tuple, wanted LossOutput\(loss, metrics\)"),
        (LossOutput(0.0, {}), "a float as its loss, wanted a tensor of one number"),  # type: ignore[arg-type]
        (LossOutput(torch.zeros(2, 3), {}), r"a loss of the shape \[2, 3\], wanted one number"),
        (
            LossOutput(torch.tensor(0.0), {"gap": torch.tensor(1.0)}),
            "a Tensor as the metric gap, wanted a pair",
        ),
        (LossOutput(torch.tensor(0.0), {"gap": (torch.tensor(1.0),)}), "a tuple as the metric gap"),
    ],
)
def test_a_result_that_is_no_loss_is_refused(result: Any, message: str) -> None:
    def own(log_prob: Any) -> Any:
        return result

    with pytest.raises(ConfigError, match=f"policy loss own returned {message}"):
        called(PolicyLoss(own))


def test_a_loss_with_a_metric_is_taken() -> None:
    good = LossOutput(torch.tensor(0.0), {"gap": (torch.tensor(1.0), torch.tensor(2.0))})

    def own(log_prob: Any) -> LossOutput:
        return good

    assert called(PolicyLoss(own)) is good
