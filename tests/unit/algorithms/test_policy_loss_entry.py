"""The table entry of a policy loss: arguments are filled by name, and a result that is no loss is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses import PolicyLoss
from hybridflow.algorithms.policy_losses.types import GIVEN
from hybridflow.errors import ConfigError

AVAILABLE: dict[str, Any] = {name: float(place) for place, name in enumerate(GIVEN)} | {"clip_low": 0.2}
ZERO = LossOutput(torch.tensor(0.0), {})


def called(entry: PolicyLoss) -> LossOutput:
    """What a worker makes of an entry and the columns of its rows."""
    places, named = entry.arguments(AVAILABLE)
    return entry.checked(entry.function(*places, **named))


def test_arguments_are_filled_by_name() -> None:
    seen: dict[str, Any] = {}

    def own(advantages: Any, *, clip_low: float, absent: float = 0.5) -> LossOutput:
        seen.update(advantages=advantages, clip_low=clip_low, absent=absent)
        return ZERO

    entry = PolicyLoss(own)
    assert entry.keywords == ("clip_low", "absent") and entry.select_keywords == ()
    assert called(entry) is ZERO
    assert seen == {"advantages": AVAILABLE["advantages"], "clip_low": 0.2, "absent": 0.5}


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
    assert seen == [*(AVAILABLE[name] for name in GIVEN), 0.2, {}]


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
