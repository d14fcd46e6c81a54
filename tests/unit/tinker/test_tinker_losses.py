"""Tinker's losses against their formulas in float64, and what is refused before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.tinker.losses import LOSSES, check_inputs, loss_of
from hybridflow.tinker.wire import Datum, Refusal

LENGTHS = (5, 3, 1)
THRESHOLDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}


def rows() -> tuple[list[Datum], list[Tensor]]:
    """Rows with everything that any loss reads, and log-probs of their targets in float64."""
    torch.manual_seed(0)
    made = []
    log_probs = []
    for length in LENGTHS:
        values = torch.randn(3, length, dtype=torch.float64)
        log_probs.append(-values[0].abs())
        mask = torch.ones(length, dtype=torch.float64)
        mask[0] = float(length == 1)
        inputs = {
            "target_tokens": torch.arange(length),
            "weights": values[1],
            "logprobs": -(values[0].abs() + 0.2 * values[2]),
            "advantages": values[1] * mask,
            "sequence_ratio_mask": mask,
        }
        made.append(Datum(torch.arange(length), inputs))
    return made, log_probs


def reference(name: str, config: dict[str, float], now: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The loss of one row, as Tinker's page of it writes it."""
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    if name == "cross_entropy":
        return -(now * given["weights"]).sum()
    old, a = given["logprobs"], given["advantages"]
    ratio = torch.exp(now - old)
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * now * a).sum()
    if name == "dro":
        return -(now * a - 0.5 * config["beta"] * (now - old) ** 2).sum()
    chosen = given["sequence_ratio_mask"] != 0
    mean = (now.detach() - old)[chosen].mean()
    ratio = torch.exp(mean + now - now.detach())
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


@pytest.mark.parametrize(
    ("name", "config", "meant"),
    [
        ("cross_entropy", {}, {}),
        ("importance_sampling", {}, {}),
        ("ppo", {}, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("ppo", THRESHOLDS, THRESHOLDS),
        ("cispo", {}, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ("cispo", THRESHOLDS, THRESHOLDS),
        ("dro", {}, {"beta": 0.05}),
        ("dro", {"beta": 0.7}, {"beta": 0.7}),
        ("gspo", THRESHOLDS, THRESHOLDS),
        ("gspo", {}, {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
    ],
)
def test_losses_and_gradients_are_those_of_the_formulas(
    name: str, config: dict[str, float], meant: dict[str, float]
) -> None:
    made, log_probs = rows()
    flat = [each.clone().requires_grad_() for each in log_probs]
    wanted = sum(reference(name, meant, each, row.inputs) for each, row in zip(flat, made, strict=True))
    assert isinstance(wanted, Tensor)
    wanted.backward()
    padded = torch.nn.utils.rnn.pad_sequence(log_probs, batch_first=True, padding_value=7.0).requires_grad_()
    found = loss_of(name, config, padded, made)
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-12)
    for place, each in enumerate(flat):
        assert padded.grad is not None and each.grad is not None
        torch.testing.assert_close(padded.grad[place, : len(each)], each.grad, rtol=1e-12, atol=1e-12)
        assert not padded.grad[place, len(each) :].any()


def test_a_loss_of_rows_is_the_sum_of_those_of_each() -> None:
    made, log_probs = rows()
    for name in LOSSES:
        whole = loss_of(name, {}, torch.nn.utils.rnn.pad_sequence(log_probs, batch_first=True), made)
        alone = [loss_of(name, {}, each[None], [row]) for each, row in zip(log_probs, made, strict=True)]
        assert float(whole) == pytest.approx(float(sum(alone)), abs=1e-12), name


def test_several_targets_at_a_place_are_flat() -> None:
    row = Datum(
        torch.arange(2), {"target_tokens": torch.arange(6).reshape(2, 3), "weights": torch.rand(2, 3)}
    )
    check_inputs("cross_entropy", {}, [row])
    log_probs = -torch.rand(1, 6)
    wanted = -(log_probs.reshape(2, 3) * row.inputs["weights"]).sum()
    assert float(loss_of("cross_entropy", {}, log_probs, [row])) == pytest.approx(float(wanted), abs=1e-6)


def changed(**inputs: Any) -> Datum:
    kept = {"target_tokens": torch.tensor([1, 2]), "logprobs": torch.zeros(2), "advantages": torch.ones(2)}
    return Datum(
        torch.tensor([5, 6]), {key: value for key, value in {**kept, **inputs}.items() if value is not None}
    )


@pytest.mark.parametrize(
    ("name", "config", "row", "told"),
    [
        ("stable_reinforce", {}, changed(), "choose from cross_entropy, importance_sampling"),
        ("ppo", {"beta": 1.0}, changed(), "'beta'=1.0: ppo reads finite numbers of clip_high_threshold"),
        ("ppo", {"clip_low_threshold": "x"}, changed(), "'clip_low_threshold'='x'"),
        ("ppo", {"clip_high_threshold": float("inf")}, changed(), "'clip_high_threshold'=inf"),
        ("dro", {"beta": float("nan")}, changed(), "'beta'=nan"),
        ("dro", {"beta": -0.1}, changed(), "beta=-0.1: wanted at least 0"),
        ("ppo", {"clip_low_threshold": 1.1}, changed(), "0 <= low <= 1 <= high"),
        ("ppo", {}, changed(advantages=None), "ppo wants advantages, logprobs, target_tokens"),
        ("ppo", {}, changed(other=torch.ones(2)), "ppo wants advantages"),
        ("ppo", {}, changed(advantages=torch.ones(3)), r"advantages has the shape \[3\], wanted \[2\]"),
        (
            "ppo",
            {},
            changed(logprobs=torch.tensor([0.0, float("nan")])),
            "logprobs has numbers that are not finite",
        ),
        ("ppo", {}, changed(target_tokens=torch.tensor([1])), r"shape \[1\] for 2 tokens"),
        ("ppo", {}, changed(target_tokens=torch.ones(2, 2).long()), r"wanted \[N\]$"),
        ("cross_entropy", {}, changed(target_tokens=torch.ones(2, 0).long()), "cross_entropy wants"),
        ("ppo", {}, changed(target_tokens=torch.ones(2)), "float32, wanted int64"),
        ("gspo", {}, changed(sequence_ratio_mask=torch.tensor([0.0, 1.0])), "advantages of 0 where"),
    ],
)
def test_refusals_say_what_is_wanted(name: str, config: dict[str, Any], row: Datum, told: str) -> None:
    with pytest.raises(Refusal, match=told):
        check_inputs(name, config, [row])


def test_weights_beside_a_policy_loss_are_not_read() -> None:
    check_inputs("ppo", {}, [changed(weights=torch.zeros(2))])
    with pytest.raises(Refusal, match="at least one row"):
        check_inputs("ppo", {}, [])
