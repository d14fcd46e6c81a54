"""`hybridflow try-algorithm`: six rows that can be checked by hand, and what must not change a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES
from hybridflow.cli.main import main

ACTOR = "actor_rollout_ref.actor.policy_loss"
TOGETHER = {
    "sppo": ["algorithm.adv_estimator=sppo", f"{ACTOR}.loss_mode=sppo"],
    "online_dpo": [f"{ACTOR}.loss_mode=dpo"],
    "spin": [f"{ACTOR}.loss_mode=dpo"],
    "dpo": ["algorithm.adv_estimator=online_dpo"],
    "gdpo": ["algorithm.gdpo_reward_keys=[score]"],
}
"""What some built-in ones want beside them."""
OWN = """
import functools
import torch
from hybridflow.algorithms.aggregation import LossOutput, aggregate


def mean_baseline(token_level_rewards, response_mask, group_ids, *, scale=1.0):
    scores = (token_level_rewards * response_mask).sum(-1)
    means = torch.stack([scores[group_ids == group].mean() for group in group_ids])
    per_token = scale * (scores - means)[:, None] * response_mask
    return per_token, per_token


def by_place(token_level_rewards, response_mask):
    per_token = torch.arange(len(response_mask))[:, None] * 1.0 * response_mask
    return per_token, per_token


def by_uid(token_level_rewards, uid):
    return token_level_rewards, token_level_rewards


def unmasked(token_level_rewards, response_mask):
    return token_level_rewards + 1.0, token_level_rewards


def own_mean(log_prob, advantages, response_mask):
    loss = -((advantages * log_prob)[response_mask]).mean()
    return LossOutput(loss, {})


def by_place_of_arguments(*arguments):
    return own_mean(*arguments[:1], *arguments[2:4])


own_partial = functools.partial(own_mean)


def in_place(token_level_rewards, response_mask):
    token_level_rewards -= 0.5
    return token_level_rewards * response_mask, token_level_rewards


def loss_in_place(log_prob, advantages, response_mask, scale):
    advantages *= 2
    return LossOutput(aggregate(-advantages * log_prob, response_mask, "token-mean", scale), {})


def per_token(log_prob):
    return LossOutput(-log_prob, {})


def number(log_prob):
    return LossOutput(1.0, {})


def odd_metric(log_prob):
    return LossOutput(log_prob.sum(), {"mean": log_prob.mean()})


def derived(log_prob, response_mask):
    loss = (log_prob * response_mask).sum()
    loss.backward()
    return LossOutput(loss, {})


def detached(log_prob, advantages, response_mask, scale):
    return LossOutput(aggregate(-advantages * log_prob.detach(), response_mask, "token-mean", scale), {})
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


@pytest.mark.parametrize("name", [*ESTIMATORS, *POLICY_LOSSES])
def test_what_is_built_in_passes_every_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["try-algorithm", name, *TOGETHER.get(name, [])])
    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "") and "WRONG" not in shown.out and shown.out.count("ok  ") == 6


def test_the_numbers_are_those_of_the_formula(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try-algorithm", f"{own}:mean_baseline", "algorithm.options={scale: 3}"]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    # scores 1, 0, 0 have the mean 1/3, and 1, 1, 1 no differences
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["a", "3", "1", "2 2 2"],
        ["a", "2", "0", "-1 -1"],
        ["a", "1", "0", "-1"],
        ["b", "3", "1", "0 0 0"],
        ["b", "2", "1", "0 0"],
        ["b", "1", "1", "0"],
    ]
    assert main(["try-algorithm", "vanilla"]) == 0
    # token-mean of −A·ρ, clipped at 1.2 where A > 0, over 12 tokens
    wanted = (3 * 1.0 - 2 * 1.2 - 0.5 - 3 * 1.0 + 2 * 1.1 + 0.9) / 12
    assert f"The loss is {wanted:.6g}." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("by_place", 1, "WRONG another order of the rows changes nothing"),
        ("unmasked", 1, "WRONG tokens outside of response_mask get 0"),
        ("own_mean", 1, "WRONG a cut into two micro-batches changes nothing"),
        ("by_place_of_arguments", 1, "WRONG a cut into two micro-batches changes nothing"),
        ("own_partial", 1, "WRONG a cut into two micro-batches changes nothing"),
        ("in_place", 1, "WRONG the columns stay as they are: got other values in token_level_rewards"),
        ("loss_in_place", 1, "WRONG the columns stay as they are: got other values in advantages"),
        ("per_token", 1, "policy loss per_token returned a loss of the shape [6, 3], wanted one number"),
        ("number", 1, "policy loss number returned a float as its loss, wanted a tensor"),
        ("odd_metric", 1, "returned a Tensor as the metric mean, wanted a pair"),
        ("derived", 1, "a loss calls no backward itself"),
        ("detached", 1, "the loss has no gradient"),
        ("by_uid", 1, "group_ids"),
        ("nothing", 1, "nothing"),
    ],
)
def test_what_is_wrong_is_told(
    name: str, status: int, told: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["try-algorithm", f"{own}:{name}"]) == status
    shown = capsys.readouterr()
    assert told in shown.out + shown.err
