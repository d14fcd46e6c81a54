"""Properties of advantage estimators.

PropertyOutcome rewards stand on the last sampled token of a row. References are computed in float64.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.invariants.checking import AdapterCall, close, finite, holds, same, that

BY_GROUP = "grpo dr_grpo rloo"
BY_TOKEN = "gae reinforce_plus_plus remax"
SCORES = (1.0, 0.0, 0.5, 2.0)
PAIRS = ("a", "a", "b", "b")


@holds("advantages", "verl #7150", BY_GROUP)
def groups_by_any_label(call: AdapterCall) -> None:
    """Groups are told apart by equality alone, whatever hashable value their label is."""
    wanted = _of_rows(call, SCORES, PAIRS)
    numbers = [(-1, 3), (1.0000001, 1.0), (2**70, 2**71)]
    others = [("7", "07"), (("x", 1), ("x", 2)), ("", " "), (True, "True")]
    for first, second in [*numbers, *others]:
        same(_of_rows(call, SCORES, (first, first, second, second)), wanted)


@holds("advantages", "verl #6452, OpenRLHF #1239, AReaL #1351", BY_GROUP)
def a_masked_row_takes_no_part(call: AdapterCall) -> None:
    """The score of a row without a sampled token does not move the other rows of its group."""
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]]).bool()
    alone = _of_rows(call, (1.0, 0.0), "aa")
    first = _of_rows(call, (1.0, 0.0, 100.0), "aaa", mask)[:2]
    close(first, alone)
    same(_of_rows(call, (1.0, 0.0, 1e6), "aaa", mask)[:2], first)


@holds("advantages", "NeMo-RL #4158", BY_GROUP)
def equal_scores_give_nothing(call: AdapterCall) -> None:
    """A group whose scores are all equal has the advantage 0, without a residue of rounding."""
    for score, size in ((0.1, 3), (0.95, 7), (1 / 3, 5), (1000.1, 8)):
        close(_of_rows(call, (score,) * size, "a" * size), torch.zeros(size), atol=1e-3)


@holds("advantages", "verl #7581", BY_GROUP)
def a_row_alone_gets_nothing(call: AdapterCall) -> None:
    """A row that is alone in its group has nothing to be compared with, and gets 0."""
    close(_of_rows(call, (2.0, -0.25, -2.75, 0.875), "aaab")[3], torch.tensor(0.0))


@holds("advantages", "verl #6348", BY_GROUP)
def an_offset_changes_nothing(call: AdapterCall) -> None:
    """A constant that is added to all scores of a group changes no advantage."""
    scores = (0.0, 0.125, 1.0, 0.5)  # exact in float32 with the offset
    close(
        _of_rows(call, [score + 1000.0 for score in scores], "aaaa"), _reference(call.kind, scores), rtol=2e-3
    )


@holds("advantages", "verl #6348", BY_GROUP)
def a_scale_divides_out_or_stays(call: AdapterCall) -> None:
    """Scores a hundred times as large give the same advantages where the estimator divides by the deviation,
    and a hundred times as large ones where it does not.
    """
    factor = 1.0 if call.kind == "grpo" else 100.0
    wanted = factor * _of_rows(call, SCORES, "aaaa")
    close(_of_rows(call, [100.0 * score for score in SCORES], "aaaa"), wanted, rtol=2e-3)


@holds("advantages", "NeMo-RL #4158", BY_GROUP)
def one_other_score_among_equals(call: AdapterCall) -> None:
    """One score that differs from seven equal ones gives bounded advantages, those of float64."""
    scores = (0.0, *[0.95] * 7)
    close(_of_rows(call, scores, "a" * 8), _reference(call.kind, scores), rtol=2e-3)


@holds("advantages", "verl #6348", BY_GROUP)
def scores_that_differ_by_little(call: AdapterCall) -> None:
    """Scores of 100 that differ by a hundredth give the advantages of float64, to 5 % for the epsilon."""
    scores = [100.0 + 0.01 * number / 7 for number in range(8)]
    close(_of_rows(call, scores, "a" * 8), _reference(call.kind, scores), rtol=0.05)


@holds("advantages", "Seg-Zero #104, ms-swift #3877", BY_GROUP)
def prompts_do_not_mix(call: AdapterCall) -> None:
    """The scores of one prompt's responses do not move the advantages of another prompt's."""
    same(_of_rows(call, (1.0, 0.0, 50.0, -7.0), PAIRS)[:2], _of_rows(call, (1.0, 0.0, 0.5, 2.0), PAIRS)[:2])


@holds("advantages", "TRL #7024", f"{BY_GROUP} {BY_TOKEN}")
def wider_padding_changes_no_advantage(call: AdapterCall) -> None:
    """More columns of padding change no advantage."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    narrow = _of_tokens(call, mask, _at_the_end(SCORES, mask))
    wide = torch.cat([mask, torch.zeros_like(mask)], dim=1)
    close(_of_tokens(call, wide, _at_the_end(SCORES, wide))[:, :3] * mask, narrow * mask)


@holds("advantages", "verl #7150", f"{BY_GROUP} {BY_TOKEN}")
def the_order_of_rows_means_nothing(call: AdapterCall) -> None:
    """Rows in another order, those of a prompt apart from each other, have the same advantages."""
    order = [2, 0, 3, 1]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    there = _of_tokens(call, mask, _at_the_end(SCORES, mask))
    rewards = _at_the_end(SCORES, mask)[order]
    close((_of_tokens(call, mask[order], rewards, [PAIRS[row] for row in order])), there[order])


@holds("advantages", "OpenRLHF #1240", f"{BY_GROUP} {BY_TOKEN}")
def junk_behind_the_mask_reaches_no_advantage(call: AdapterCall) -> None:
    """NaN or a number in a reward or a value outside of the mask changes no advantage."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool()
    rewards = _at_the_end(SCORES, mask)
    values = torch.full(mask.shape, 0.25)
    wanted = _of_tokens(call, mask, rewards, values=values)[mask]
    finite(wanted)
    for junk in (7.0, torch.nan, torch.inf):
        found = _of_tokens(call, mask, rewards.where(mask, junk), values=values.where(mask, junk))
        close(found[mask], wanted)


@holds("advantages", "TRL #7024", "remax reinforce_plus_plus")
def padding_adds_nothing_to_a_return(call: AdapterCall) -> None:
    """Rewards 1.5, 1, 2, 2 of which the last two are padding give the returns 2.5 and 1."""
    mask = torch.tensor([[1, 1, 0, 0]]).bool()
    rewards = torch.tensor([[1.5, 1.0, 2.0, 2.0]])
    close(
        _of_tokens(call, mask, rewards, "a")[mask], _by_recursion(call.kind, rewards, mask)[mask], rtol=1e-4
    )


@holds("advantages", "verl #7278", "gae reinforce_plus_plus remax")
def a_given_token_is_no_step(call: AdapterCall) -> None:
    """A token that a tool wrote amid a response is no step: the return passes it unchanged."""
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 1, 0]]).bool()
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5, 0.0]])
    wanted = _by_recursion(call.kind, rewards, mask, 0.9, 0.8)
    found = _of_tokens(call, mask, rewards, "ab", values=torch.zeros(2, 5), gamma=0.9, lam=0.8)
    close(found[mask], wanted[mask], rtol=1e-4)


@holds("advantages", "formula of 1506.02438", "gae")
def gae_is_its_recursion(call: AdapterCall) -> None:
    """Advantages of GAE are the recursion's in float64, whitened over sampled tokens."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    rewards = torch.tensor([[0.1, -0.2, 1.0, 0.0], [0.0, 0.3, 0.0, -1.0]])
    values = torch.tensor([[0.5, 0.1, -0.3, 0.0], [0.2, 0.4, 0.6, 0.8]])
    wanted = _by_recursion("gae", rewards, mask, 0.95, 0.7, values)
    close(
        _of_tokens(call, mask, rewards, "ab", values=values, gamma=0.95, lam=0.7)[mask],
        wanted[mask],
        rtol=1e-4,
    )


@holds("advantages", "formula of 2310.10505", "remax")
def the_greedy_score_is_subtracted(call: AdapterCall) -> None:
    """ReMax subtracts the score of the greedy response from the return of each token."""
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    found = _of_tokens(call, mask, _at_the_end((1.0, 0.0), mask), "ab", baselines=torch.tensor([0.25, 0.75]))
    close(found[mask], torch.tensor([0.75, 0.75, -0.75]))


def _of_rows(
    call: AdapterCall, scores: Sequence[float], groups: Sequence[Hashable], mask: Tensor | None = None
) -> Tensor:
    """Return the advantage [B] of each row, and demand that all of its tokens have it."""
    if mask is None:
        mask = torch.ones(len(scores), 2, dtype=torch.bool)
    found = _of_tokens(call, mask, _at_the_end(scores, mask), groups)
    uneven = (found != found[:, :1]) & mask
    that(not bool(uneven.any()), found, "the same advantage on all tokens of a row")
    return found[:, 0]


def _of_tokens(
    call: AdapterCall, mask: Tensor, rewards: Tensor, groups: Sequence[Hashable] = PAIRS, **named: Any
) -> Tensor:
    """Return the advantages [B, R]; what is not named is neutral."""
    defaults = {"values": torch.zeros(mask.shape), "baselines": torch.zeros(len(mask))}
    found: Tensor = call(rewards, mask, list(groups), **{**defaults, "gamma": 1.0, "lam": 1.0, **named})
    that(found.shape == mask.shape, list(found.shape), f"advantages of the shape {list(mask.shape)}")
    return found


def _at_the_end(scores: Sequence[float], mask: Tensor) -> Tensor:
    """Return rewards [B, R] with each score on the last token of its row's mask, or on the first column."""
    rewards = torch.zeros(mask.shape)
    last = (mask.int().cumsum(1) * mask.int()).argmax(1)
    rewards[torch.arange(len(mask)), last] = torch.tensor(list(scores))
    return rewards


def _reference(kind: str, scores: Sequence[float]) -> Tensor:
    """Return the advantages [n] of one group by the formulas, in float64 from float32 scores."""
    exact = torch.tensor(list(scores)).double()
    centred = exact - exact.mean()
    if kind == "grpo":
        return centred / exact.std()
    return centred * len(exact) / (len(exact) - 1) if kind == "rloo" else centred


def _by_recursion(
    kind: str,
    rewards: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    values: Tensor | None = None,
) -> Tensor:
    """Return advantages [B, R] float64 by plain loops over sampled tokens: GAE's, or those of returns."""
    gamma = 1.0 if kind == "remax" else gamma
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        following = next_value = 0.0
        for place in reversed(mask[row].nonzero().flatten().tolist()):
            value = float(values[row, place]) if kind == "gae" and values is not None else 0.0
            delta = float(rewards[row, place]) + gamma * next_value - value
            following = delta + gamma * (lam if kind == "gae" else 1.0) * following
            next_value = value
            found[row, place] = following
    if kind != "remax":
        found = (found - found[mask].mean()) / found[mask].std()
    return found
