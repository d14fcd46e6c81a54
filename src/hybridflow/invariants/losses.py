"""Properties of the losses: of the policy's, of the critic's, and of how they are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.invariants.checking import AdapterCall, close, finite, holds, same, that

LOSSES = "ppo gspo reinforce"
CLIP = (0.2, 0.28)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.7, -3.0]])
NOW = OLD + torch.tensor([[0.1, -0.05, 0.0], [0.02, -0.1, 0.15]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-0.5, -0.5, -0.5]])
BAD = (torch.nan, torch.inf, -torch.inf, 1e30)


@holds("policy_loss", "OpenRLHF #1240, slime", LOSSES)
def junk_behind_the_mask_reaches_no_loss(call: AdapterCall) -> None:
    """NaN, infinity or 1e30 outside of the mask, in log-probs or advantages, changes neither the loss nor its
    gradient.
    """
    loss, gradient = _share(call, NOW, OLD, ADVANTAGES, MASK)
    finite(loss, gradient)
    for bad in BAD:
        for number in range(3):
            tensors = [NOW, OLD, ADVANTAGES]
            tensors[number] = tensors[number].where(MASK, bad)
            now, old, advantages = tensors
            found, slope = _share(call, now, old, advantages, MASK)
            close(found, loss)
            close(slope, gradient)


@holds("policy_loss", "OpenRLHF #1335, TRL #3015", LOSSES)
def far_ratios_stay_finite(call: AdapterCall) -> None:
    """Log-ratios of 50 to 10,000 nats, up or down, give a finite loss and a finite gradient."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    for moved in (50.0, 100.0, 200.0, 1e4):
        for sign in (1.0, -1.0):
            for advantage in (1.0, -1.0):
                now = torch.tensor([[-1.0 + min(sign, 0.0) * moved, -1.0]])
                old = torch.tensor([[-1.0 - max(sign, 0.0) * moved, -1.0]])
                finite(*_share(call, now, old, torch.full((1, 2), advantage), mask))


@holds("policy_loss", "formula of 1707.06347", "ppo")
def the_clip_has_its_bounds(call: AdapterCall) -> None:
    """The loss of a token is max(−A·ρ, −A·clip(ρ)), and it has no gradient where the clip decides."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for ratio in (0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0):
        for advantage in (1.5, -0.5):
            now = torch.tensor([[-2.0 + torch.tensor(ratio).log().item()]])
            loss, gradient = _share(call, now, torch.tensor([[-2.0]]), torch.tensor([[advantage]]), mask)
            bounded = min(max(ratio, 1 - CLIP[0]), 1 + CLIP[1])
            wanted = max(-advantage * ratio, -advantage * bounded)
            clipped = -advantage * bounded > -advantage * ratio
            close(loss, torch.tensor(wanted), rtol=1e-4)
            close(gradient, torch.tensor([[0.0 if clipped else -advantage * ratio]]), rtol=1e-4)


@holds("policy_loss", "formula of the policy gradient", LOSSES)
def the_first_step_is_the_policy_gradient(call: AdapterCall) -> None:
    """Where the policy has not moved, the gradient is −A/N at each of the N tokens."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    _, gradient = _share(call, OLD, OLD, ADVANTAGES, mask)
    close(gradient, -ADVANTAGES / 6)


@holds("policy_loss", "TRL #7024, SkyRL #1296", LOSSES)
def wider_padding_changes_no_loss(call: AdapterCall) -> None:
    """More columns of padding change neither the loss nor its gradient."""
    loss, gradient = _share(call, NOW, OLD, ADVANTAGES, MASK)
    now, old, advantages = (
        torch.cat([each, torch.full((2, 4), 0.5)], dim=1) for each in (NOW, OLD, ADVANTAGES)
    )
    found, slope = _share(call, now, old, advantages, torch.cat([MASK, torch.zeros(2, 4).bool()], dim=1))
    close(found, loss)
    close(slope, torch.cat([gradient, torch.zeros(2, 4)], dim=1))


@holds("policy_loss", "prime-rl #2359, open-instruct #1137, SkyRL #1296", "ppo reinforce")
def a_token_mean_does_not_depend_on_the_cut(call: AdapterCall) -> None:
    """Rows of 1, 2, 3 and 10 tokens have the same token-mean gradient in one, two or four parts, which are
    micro-batches or ranks.
    """
    _cut_changes_nothing(call, "token-mean")


@holds("policy_loss", "prime-rl #2358, NeMo-RL #212", LOSSES)
def a_sequence_mean_does_not_depend_on_the_cut(call: AdapterCall) -> None:
    """The same rows have one gradient of a mean over rows of token means, however they are cut."""
    _cut_changes_nothing(call, "seq-mean-token-mean")


@holds("policy_loss", "prime-rl #2358, NeMo-RL #212", "ppo reinforce")
def a_sequence_sum_does_not_depend_on_the_cut(call: AdapterCall) -> None:
    """The same rows have one gradient of a mean over rows of token sums, however they are cut."""
    _cut_changes_nothing(call, "seq-mean-token-sum")


@holds("policy_loss", "prime-rl #2359", "ppo")
def means_are_what_they_are_called(call: AdapterCall) -> None:
    """With the ratio 1 the loss is the mean of −A, over tokens or over rows as the mode says."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    advantages = -torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    wanted = {"token-mean": 2.5, "seq-mean-token-mean": (7 / 3 + 3) / 2, "seq-mean-token-sum": 5.0}
    for mode, mean in wanted.items():
        close(_share(call, OLD, OLD, advantages, mask, mode=mode)[0], torch.tensor(mean))


@holds("policy_loss", "NeMo-RL #212, SkyRL #1863", "ppo reinforce")
def a_masked_row_is_no_token(call: AdapterCall) -> None:
    """A row whose tokens are all masked, also alone in its part, changes no token-mean gradient."""
    now, old, advantages, mask = _four_rows()
    mask[1] = False
    whole = _share(call, now[[0, 2, 3]], old[[0, 2, 3]], advantages[[0, 2, 3]], mask[[0, 2, 3]])
    parts = [
        _share(call, now[[row]], old[[row]], advantages[[row]], mask[[row]], whole=mask, parts=4)
        for row in range(4)
    ]
    close(torch.stack([loss for loss, _ in parts]).sum(), whole[0])
    close(torch.cat([slope for _, slope in parts])[[0, 2, 3]], whole[1])
    same(parts[1][1], torch.zeros_like(parts[1][1]))


@holds("policy_loss", "NeMo-RL #212", LOSSES)
def nothing_to_learn_is_no_error(call: AdapterCall) -> None:
    """A mini-batch whose tokens are all masked gives a finite loss and the gradient 0."""
    loss, gradient = _share(call, NOW, OLD, ADVANTAGES, torch.zeros_like(MASK))
    finite(loss)
    close(gradient, torch.zeros_like(NOW))


@holds("policy_loss", "formula of 2507.18071, slime", "gspo")
def a_row_has_one_ratio(call: AdapterCall) -> None:
    """GSPO's ratio is exp of the mean log-ratio over the row's tokens, padding left out."""
    moved = ((NOW - OLD) * MASK).double().sum(1) / MASK.sum(1)
    wanted = (-ADVANTAGES[:, 0].double() * moved.exp()).mean()
    loss, _ = _share(call, NOW, OLD, ADVANTAGES, MASK, clip=(10.0, 10.0))
    close(loss, wanted)


@holds("value_loss", "OpenRLHF #1240")
def junk_behind_the_mask_reaches_no_value(call: AdapterCall) -> None:
    """NaN or infinity outside of the mask changes neither the critic's loss nor its gradient."""
    returns = OLD + 1.0
    loss, gradient = call.gradient(NOW, OLD, returns, MASK, clip=0.2)
    finite(loss, gradient)
    for bad in BAD:
        for number in range(3):
            tensors = [NOW, OLD, returns]
            tensors[number] = tensors[number].where(MASK, bad)
            found, slope = call.gradient(*tensors, MASK, clip=0.2)
            close(found, loss)
            close(slope, gradient)


@holds("value_loss", "formula of PPO's value loss")
def the_critic_is_clipped_to_the_worse(call: AdapterCall) -> None:
    """The critic's loss is half the mean of the larger of both squares, as in float64."""
    values = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.1, 0.5]])
    old = torch.tensor([[0.5, 0.9, -2.0], [0.0, 0.0, 0.5]])
    returns = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    v, anchor, target = (each.double()[MASK] for each in (values, old, returns))
    bounded = v.clamp(anchor - 0.2, anchor + 0.2)
    wanted = 0.5 * torch.maximum((v - target) ** 2, (bounded - target) ** 2).mean()
    close(call(values, old, returns, MASK, clip=0.2), wanted)


def _share(
    call: AdapterCall,
    now: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    mode: str = "",
    whole: Tensor | None = None,
    parts: int = 1,
    clip: tuple[float, float] = CLIP,
) -> tuple[Tensor, Tensor]:
    """Return the loss [] and its gradient [B, R] of rows, which are the whole mini-batch by default.

    The mode is by default that of the loss's paper: a token mean, and for gspo a mean over rows.
    """
    own = "seq-mean-token-mean" if call.kind == "gspo" else "token-mean"
    named: dict[str, Any] = {"mode": mode or own, "whole": mask if whole is None else whole, "parts": parts}
    loss, gradient = call.gradient(now, old, advantages, mask, **named, clip=clip)
    that(loss.dim() == 0, list(loss.shape), "a loss of one number")
    return loss, gradient


def _four_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs, old ones, advantages and mask [4, 10] of rows of 1, 2, 3 and 10 tokens."""
    mask = torch.arange(10)[None] < torch.tensor([[1], [2], [3], [10]])
    old = -1.0 - torch.arange(40.0).reshape(4, 10) / 20
    now = old + torch.sin(torch.arange(40.0)).reshape(4, 10) / 10
    return now, old, torch.tensor([[1.0], [-1.0], [2.0], [-0.5]]).expand(4, 10), mask


def _cut_changes_nothing(call: AdapterCall, mode: str) -> None:
    now, old, advantages, mask = _four_rows()
    loss, gradient = _share(call, now, old, advantages, mask, mode=mode)
    cuts: list[Sequence[slice]] = [[slice(0, 2), slice(2, 4)], [slice(row, row + 1) for row in range(4)]]
    for cut in cuts:
        named: dict[str, Any] = {"mode": mode, "whole": mask, "parts": len(cut)}
        shares = [_share(call, now[part], old[part], advantages[part], mask[part], **named) for part in cut]
        close(torch.cat([slope for _, slope in shares]), gradient)
        close(torch.stack([share for share, _ in shares]).sum(), loss)
