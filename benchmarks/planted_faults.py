"""A trainer made of formulas alone, which has every property, and a fault planted for each property.

A fault replaces one step of the formulas by a mistake that was made somewhere. `FAULTS` names it by the
property that has to find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.invariants.adapter import TrainerAdapter


class Formulas(TrainerAdapter):
    """Every function by its formula. Its further methods are the steps that faults replace."""

    def advantages(self, name, rewards, mask, groups, *, values, baselines, gamma, lam):  # type: ignore[no-untyped-def]
        kept = self.kept(rewards.double(), mask)
        if name in ("gae", "reinforce_plus_plus", "remax"):
            critic = self.kept(values.double(), mask) * (name == "gae")
            found = self.recursion(
                kept, critic, mask, 1.0 if name == "remax" else gamma, lam if name == "gae" else 1.0
            )
            if name == "remax":
                return self.kept(self.less_baseline(found, baselines), mask).float()
            return self.whitened(found, mask).float()
        scores = self.scores(kept)
        rows_of: dict[Any, list[int]] = {}
        for row, label in enumerate(self.labels(groups)):
            if self.counts(mask[row]):
                rows_of.setdefault(label, []).append(row)
        found = torch.zeros_like(scores)
        for rows in rows_of.values():
            found[rows] = self.of_group(name, scores[rows], scores)
        return (found[:, None] * mask).float()

    def kept(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.where(mask, 0.0)

    def scores(self, rewards: Tensor) -> Tensor:
        return rewards.sum(1)

    def labels(self, groups: Sequence[Any]) -> Sequence[Any]:
        return groups

    def counts(self, mask: Tensor) -> bool:
        return bool(mask.any())

    def of_group(self, name: str, scores: Tensor, all_scores: Tensor) -> Tensor:
        centred = scores - scores.mean()
        if len(scores) < 2:
            return centred
        if name == "grpo":
            return centred / (scores.std() + 1e-6)
        return centred * len(scores) / (len(scores) - 1) if name == "rloo" else centred

    def recursion(self, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
        found = torch.zeros_like(rewards)
        following = next_value = torch.zeros(len(rewards), dtype=rewards.dtype)
        for t in reversed(range(rewards.shape[1])):
            step = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * following
            following = step.where(mask[:, t], following)
            next_value = values[:, t].where(mask[:, t], next_value)
            found[:, t] = following.where(mask[:, t], 0.0)
        return found

    def less_baseline(self, returns: Tensor, baselines: Tensor) -> Tensor:
        return returns - baselines[:, None]

    def whitened(self, values: Tensor, mask: Tensor) -> Tensor:
        inside = values[mask].double()
        if len(inside) < 2:
            return torch.zeros_like(values)
        return self.kept((values.double() - inside.mean()) / (inside.std() + 1e-6), mask)

    def policy_loss(self, name, log_prob, old_log_prob, advantages, mask, *, mode, whole, parts, clip):  # type: ignore[no-untyped-def]
        now, old, a = (self.kept(each, mask) for each in (log_prob, old_log_prob, advantages))
        if name == "reinforce":
            return self.added_up(-a * now, mask, mode, whole)
        log_ratio = now - old
        if name == "gspo":
            log_ratio = self.of_row(log_ratio, mask).detach() + now - now.detach()
        ratio = self.ratio(log_ratio)
        loss = torch.maximum(-a * ratio, -a * self.bounded(ratio, clip))
        return self.added_up(loss, mask, mode, whole)

    def of_row(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)

    def ratio(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.clamp(-20.0, 20.0).exp()

    def bounded(self, ratio: Tensor, clip: tuple[float, float]) -> Tensor:
        return ratio.clamp(1 - clip[0], 1 + clip[1])

    def added_up(self, loss: Tensor, mask: Tensor, mode: str, whole: Tensor) -> Tensor:
        loss = self.kept(loss, mask)
        if mode == "token-mean":
            return loss.sum() / whole.sum().clamp(min=1)
        if mode == "seq-mean-token-mean":
            loss = loss / mask.sum(1, keepdim=True).clamp(min=1)
        return loss.sum() / whole.any(1).sum().clamp(min=1)

    def kl(self, name: str, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        x, y = (self.kept(each.double(), mask) for each in (log_prob, ref_log_prob))
        if name == "k1":
            return x - y
        return 0.5 * (x - y) ** 2 if name == "k2" else self.k3(y - x)

    def k3(self, log_ratio: Tensor) -> Tensor:
        bounded = log_ratio.clamp(-20.0, 20.0)
        return bounded.expm1() - bounded

    def value_loss(self, values, old_values, returns, mask, *, clip):  # type: ignore[no-untyped-def]
        v, old, target = (self.kept(each, mask) for each in (values, old_values, returns))
        bounded = v.clamp(old - clip, old + clip)
        return 0.5 * self.worse((v - target) ** 2, (bounded - target) ** 2).sum() / mask.sum()

    def worse(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.maximum(first, second)

    def whiten(self, values: Tensor, mask: Tensor) -> Tensor:
        return self.whitened(values, mask)

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return logits.double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    def entropy(self, logits: Tensor) -> Tensor:
        return torch.special.entr(logits.double().softmax(-1)).sum(-1)

    def response_mask(self, responses, *, eos, pad):  # type: ignore[no-untyped-def]
        lengths = torch.tensor([[len(each)] for each in responses])
        return torch.arange(int(lengths.max()))[None] < lengths

    def conversation(self, messages):  # type: ignore[no-untyped-def]
        tokens: list[tuple[str, int]] = []
        for message in messages:
            learned = int(message["role"] == "assistant")
            tokens += [
                (f"<{message['role']}>", 0),
                (message["content"], learned),
                ("</s>", learned),
                ("\n", 0),
            ]
        return tokens

    def packed_positions(self, lengths: Sequence[int]) -> list[int]:
        return [place for length in lengths for place in range(length)]

    def packed_outputs(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.tensor(row).float().cumsum(0) / torch.arange(1, len(row) + 1) for row in rows]

    def learning_rates(self, total: int, resumes: Sequence[int]) -> list[float]:
        return [0.5 * (1 + math.cos(math.pi * step / total)) for step in range(total)]

    def data_order(self, num_rows, batch_size, batches, resumes):  # type: ignore[no-untyped-def]
        each = num_rows // batch_size
        found = []
        for number in range(batches):
            order = self.order(num_rows, number // each)
            start = number % each * batch_size
            found.append(order[start : start + batch_size])
        return found

    def order(self, num_rows: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(epoch)
        return [int(row) for row in torch.randperm(num_rows, generator=generator)]

    def mean_metric(self, values: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
        return float(torch.cat([each[mask] for each, mask in zip(values, masks, strict=True)]).mean())

    def mean_length(self, response_mask: Tensor, loss_mask: Tensor) -> float:
        return float(response_mask.sum(1).float().mean())


EXACT = Formulas()
Step = Callable[..., Any]


def _rounded_variance(name: str, scores: Tensor, _: Tensor) -> Tensor:
    x = scores.float()
    return ((x - x.mean()) / ((x**2).mean() - x.mean() ** 2).clamp(min=0).sqrt()).double()


def _std_of_the_others(name: str, scores: Tensor, _: Tensor) -> Tensor:
    x = scores.float()
    others = torch.stack([torch.cat([x[:row], x[row + 1 :]]) for row in range(len(x))])
    return ((x - others.mean(1)) / (others.var(1, correction=0).sqrt() + 1e-8)).double()


def _every_column_a_step(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    return EXACT.recursion(rewards, values, torch.ones_like(mask), gamma, lam)


def _without_next_value(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    return EXACT.recursion(rewards - values, torch.zeros_like(values), mask, gamma, lam)


def _rewards_of_padding(name: str, rewards: Tensor, mask: Tensor, groups: Any, **named: Any) -> Tensor:
    return EXACT.advantages(name, rewards, torch.ones_like(mask), groups, **named)


def _own_counts(loss: Tensor, mask: Tensor, mode: str, whole: Tensor) -> Tensor:
    """Divide by what this part has, and not by what the mini-batch has."""
    return EXACT.added_up(loss, mask, mode, mask)


def _mean_of_parts(loss: Tensor, mask: Tensor, mode: str, whole: Tensor) -> Tensor:
    return _own_counts(loss, mask, mode, whole) * len(mask) / len(whole)


def _over_the_width(loss: Tensor, mask: Tensor, mode: str, whole: Tensor) -> Tensor:
    return EXACT.kept(loss, mask).sum() / whole.numel()


def _shifted_by_resumes(total: int, resumes: Sequence[int]) -> list[float]:
    """Count the steps up to a save twice after it."""
    rates = [*EXACT.learning_rates(total, ()), 0.0]
    done = 0
    found = []
    for step in range(total):
        found.append(rates[min(step + done, total)])
        done += step + 1 if step + 1 in resumes else 0
    return found


def _first_epoch_again(num_rows: int, batch_size: int, batches: int, resumes: Sequence[int]) -> Any:
    """Take the order of the first epoch after each resume."""
    whole = EXACT.data_order(num_rows, batch_size, batches, ())
    if not resumes:
        return whole
    each = num_rows // batch_size
    return [*whole[: resumes[0]], *[whole[number % each] for number in range(resumes[0], batches)]]


def _from_the_start(num_rows: int, batch_size: int, batches: int, resumes: Sequence[int]) -> Any:
    """Begin the epoch anew after each resume."""
    found = EXACT.data_order(num_rows, batch_size, batches, ())
    for resume in resumes:
        found = [*found[:resume], *found[: batches - resume]]
    return found


def _products(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask


def _to_the_first_end(responses: Sequence[Sequence[int]], *, eos: int, pad: int) -> Tensor:
    mask = EXACT.response_mask(responses, eos=eos, pad=pad)
    ids = torch.full(mask.shape, pad)
    ids[mask] = torch.tensor([token for row in responses for token in row])
    return ids != pad


def _without_the_last(responses: Sequence[Sequence[int]], *, eos: int, pad: int) -> Tensor:
    return EXACT.response_mask(responses, eos=eos, pad=pad) & ~torch.tensor(
        [
            [place == len(row) - 1 and row[-1] != eos for place in range(max(map(len, responses)))]
            for row in responses
        ]
    )


def _learned(when: Callable[[int, str, int], int]) -> Step:
    """Return a conversation whose mask is `when` of a token's number, text and right mask."""
    return lambda messages: [
        (text, when(number, text, learned))
        for number, (text, learned) in enumerate(EXACT.conversation(messages))
    ]


FAULTS: dict[str, tuple[str, dict[str, Step]]] = {
    "groups_by_any_label": (
        "labels are compared as texts",
        {"labels": lambda groups: list(map(str, groups))},
    ),
    "a_masked_row_takes_no_part": (
        "a masked row counts in its group",
        {"kept": lambda x, mask: x, "counts": lambda mask: True},
    ),
    "equal_scores_give_nothing": ("no epsilon, in float32", {"of_group": _rounded_variance}),
    "a_row_alone_gets_nothing": (
        "a row alone keeps its score",
        {"of_group": lambda name, x, every: x if len(x) < 2 else EXACT.of_group(name, x, every)},
    ),
    "an_offset_changes_nothing": ("variance as E[x²] − E[x]² in float32", {"of_group": _rounded_variance}),
    "a_scale_divides_out_or_stays": (
        "an epsilon of 1",
        {"of_group": lambda name, x, _: (x - x.mean()) / (x.std() + 1)},
    ),
    "one_other_score_among_equals": (
        "the deviation of the other rows, with a residue of rounding",
        {"of_group": _std_of_the_others},
    ),
    "scores_that_differ_by_little": (
        "a floor of 0.1 under the deviation",
        {"of_group": lambda name, x, _: (x - x.mean()) / x.std().clamp(min=0.1)},
    ),
    "prompts_do_not_mix": (
        "the deviation of all rows in place of the group's",
        {"of_group": lambda name, x, every: (x - x.mean()) / every.std()},
    ),
    "wider_padding_changes_no_advantage": (
        "a mean over the width as the score",
        {"scores": lambda rewards: rewards.mean(1)},
    ),
    "the_order_of_rows_means_nothing": (
        "groups by the place of rows",
        {"labels": lambda groups: [row // 2 for row in range(len(groups))]},
    ),
    "junk_behind_the_mask_reaches_no_advantage": ("NaN times 0", {"kept": _products}),
    "padding_adds_nothing_to_a_return": ("rewards of padding count", {"advantages": _rewards_of_padding}),
    "a_given_token_is_no_step": ("a token of a tool is a step", {"recursion": _every_column_a_step}),
    "gae_is_its_recursion": ("no value of the next state", {"recursion": _without_next_value}),
    "the_greedy_score_is_subtracted": ("no baseline", {"less_baseline": lambda returns, baselines: returns}),
    "junk_behind_the_mask_reaches_no_loss": ("NaN times 0", {"kept": _products}),
    "far_ratios_stay_finite": ("a ratio without a bound", {"ratio": torch.exp}),
    "the_clip_has_its_bounds": (
        "both bounds are the upper one's",
        {"bounded": lambda ratio, clip: ratio.clamp(1 - clip[1], 1 + clip[1])},
    ),
    "the_first_step_is_the_policy_gradient": (
        "the ratio is detached",
        {"ratio": lambda log_ratio: EXACT.ratio(log_ratio.detach()) + 0.0 * log_ratio},
    ),
    "wider_padding_changes_no_loss": ("a mean over the width", {"added_up": _over_the_width}),
    "a_token_mean_does_not_depend_on_the_cut": (
        "the mean of the parts' token means",
        {"added_up": _mean_of_parts},
    ),
    "a_sequence_mean_does_not_depend_on_the_cut": (
        "each part is divided by its own rows",
        {"added_up": _own_counts},
    ),
    "a_sequence_sum_does_not_depend_on_the_cut": (
        "each part is divided by its own rows",
        {"added_up": _own_counts},
    ),
    "means_are_what_they_are_called": (
        "a token mean in every mode",
        {"added_up": lambda loss, mask, mode, whole: EXACT.added_up(loss, mask, "token-mean", whole)},
    ),
    "a_masked_row_is_no_token": (
        "the mean of the parts' token means",
        {"added_up": _mean_of_parts},
    ),
    "nothing_to_learn_is_no_error": (
        "a division by no tokens",
        {"added_up": lambda loss, mask, mode, whole: (loss * mask).sum() / whole.sum()},
    ),
    "a_row_has_one_ratio": (
        "the mean log-ratio over the width",
        {"of_row": lambda log_ratio, mask: log_ratio.mean(1, keepdim=True)},
    ),
    "junk_behind_the_mask_reaches_no_value": ("NaN times 0", {"kept": _products}),
    "the_critic_is_clipped_to_the_worse": ("the better of both squares", {"worse": torch.minimum}),
    "equal_policies_have_no_kl": ("k3 without its −1", {"k3": lambda log_ratio: log_ratio.exp() - log_ratio}),
    "a_far_reference_stays_finite": (
        "exp without a bound",
        {"k3": lambda log_ratio: log_ratio.float().exp() - log_ratio - 1},
    ),
    "a_far_token_is_pulled_back": (
        "the estimate is cut at 10",
        {"k3": lambda log_ratio: EXACT.k3(log_ratio).clamp(max=10.0)},
    ),
    "the_mean_estimate_is_the_kl": (
        "k3 of the other direction",
        {"k3": lambda log_ratio: EXACT.k3(-log_ratio)},
    ),
    "its_mean_gradient_is_that_of_the_kl": (
        "the square without its half",
        {"kl": lambda name, x, y, mask: (x - y) ** 2},
    ),
    "a_small_kl_is_not_rounded_away": (
        "exp − 1 in float32",
        {"k3": lambda log_ratio: log_ratio.float().exp() - 1 - log_ratio.float()},
    ),
    "junk_behind_the_mask_reaches_no_kl": ("NaN times 0", {"kept": _products}),
    "log_probs_of_large_logits": (
        "softmax, then log",
        {"log_probs": lambda logits, tokens: logits.softmax(-1).log().gather(-1, tokens[..., None])[..., 0]},
    ),
    "a_forbidden_word_has_no_entropy": (
        "0 times −∞",
        {"entropy": lambda logits: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)},
    ),
    "entropy_is_that_of_float64": (
        "bits in place of nats",
        {"entropy": lambda logits: EXACT.entropy(logits) / math.log(2)},
    ),
    "equal_numbers_whiten_to_nothing": (
        "no epsilon, in float32",
        {"whiten": lambda x, mask: (x - x[mask].mean()) / x[mask].std()},
    ),
    "an_offset_whitens_away": (
        "variance as E[x²] − E[x]² in float32",
        {"whiten": lambda x, mask: (x - x.mean()) * torch.rsqrt((x**2).mean() - x.mean() ** 2)},
    ),
    "junk_behind_the_mask_whitens_nothing": (
        "NaN times 0",
        {"whiten": lambda x, mask: EXACT.whitened(x * mask, torch.ones_like(mask))},
    ),
    "one_number_whitens_to_nothing": (
        "a deviation of one number",
        {"whiten": lambda x, mask: (x - x[mask].mean()) / x[mask].std()},
    ),
    "an_end_that_is_padding_is_learned": ("padding by its id", {"response_mask": _to_the_first_end}),
    "a_response_without_end_is_whole": (
        "the last token is taken for the end",
        {"response_mask": _without_the_last},
    ),
    "both_answers_are_learned": (
        "the mask of the last turn alone",
        {"conversation": _learned(lambda number, _, learned: learned and number > 8)},
    ),
    "the_role_is_not_learned": (
        "the opening of the turn is learned",
        {"conversation": _learned(lambda _, text, learned: learned or text == "<assistant>")},
    ),
    "the_end_of_a_turn_is_learned": (
        "the end of the turn is left out",
        {"conversation": _learned(lambda _, text, learned: learned and text != "</s>")},
    ),
    "positions_begin_anew_in_each_row": (
        "positions go on",
        {"packed_positions": lambda lengths: list(range(sum(lengths)))},
    ),
    "packed_rows_do_not_see_each_other": (
        "one sum over all rows",
        {
            "packed_outputs": lambda rows: (
                torch.tensor([token for row in rows for token in row])
                .float()
                .cumsum(0)
                .split(list(map(len, rows)))
            )
        },
    ),
    "a_packed_row_is_the_row_alone": (
        "positions go on",
        {
            "packed_outputs": lambda rows: [
                each + sum(map(len, rows[:number])) for number, each in enumerate(EXACT.packed_outputs(rows))
            ]
        },
    ),
    "a_resumed_rate_is_where_it_was": (
        "a resume counts its steps twice",
        {"learning_rates": _shifted_by_resumes},
    ),
    "a_resumed_run_reads_the_rows_that_follow": (
        "a resume begins the epoch anew",
        {"data_order": _from_the_start},
    ),
    "each_row_is_read_once_an_epoch": ("a resume begins the epoch anew", {"data_order": _from_the_start}),
    "a_resumed_epoch_has_an_order_of_its_own": (
        "a resume takes the first epoch's order",
        {"data_order": _first_epoch_again},
    ),
    "a_metric_does_not_depend_on_the_cut": (
        "the mean of the means of micro-batches",
        {
            "mean_metric": lambda values, masks: float(
                torch.stack([each[mask].mean() for each, mask in zip(values, masks, strict=True)]).mean()
            )
        },
    ),
    "padding_does_not_drag_a_metric": (
        "a micro-batch of padding counts as 0",
        {
            "mean_metric": lambda values, masks: float(
                torch.stack([(v * m).sum() / m.sum().clamp(min=1) for v, m in zip(values, masks)]).mean()
            )
        },
    ),
    "a_length_is_that_of_the_response": (
        "lengths by the loss mask",
        {"mean_length": lambda response_mask, loss_mask: EXACT.mean_length(loss_mask, response_mask)},
    ),
}


def planted(name: str) -> Formulas:
    """Return the formulas with the fault that the property `name` has to find."""
    trainer = Formulas()
    for step, fault in FAULTS[name][1].items():
        setattr(trainer, step, fault)
    return trainer
