"""The rows of a step of two runs, compared column by column in the order in which one follows from another.

rows of A ─┐
           ├─ which rows ─► prompts ─► tokens ─► rollout's log-probs ─► rewards ─► log-probs ─► advantages
rows of B ─┘
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridflow.protocol import DataProto
from hybridflow.protocol.fields import FIELDS
from hybridflow.trainer.replay.difference import MISSING, Difference, first_place, first_unequal
from hybridflow.trainer.replay.kept_rows import KeptStep

STAGES: dict[str, tuple[str, ...]] = {
    "row": ("uid", "trajectory_id", "lineage", "row_id"),
    "prompt": ("prompts", "data_source", "reward_model", "ground_truth", "extra_info"),
    "token": ("responses", "response_mask", "call", "is_demonstration", "solution_str", "finish_reason"),
    "version": ("policy_version",),
    "rollout log-prob": ("rollout_log_probs",),
    "reward": ("token_level_scores", "rm_scores", "reward_baselines", "overlong_reward", "positive"),
    "log-prob": ("old_log_probs", "ref_log_prob", "teacher_log_probs", "entropys", "sum_pi_squared"),
    "value": ("values", "process_rewards"),
    "penalised reward": ("token_level_rewards",),
    "mask": ("rollout_is_weights", "loss_mask"),
    "advantage": ("advantages", "returns", "reward_components"),
}
"""The columns of each kind, in causal order. Other columns are what the reward has returned."""

FOLLOW = {"input_ids", "attention_mask", "group_ids"}
"""Columns that follow from compared ones."""

_KIND_OF = {name: kind for kind, names in STAGES.items() for name in names}


def row_differences(first: KeptStep, second: KeptStep) -> Iterator[Difference]:
    """Give the first difference of each column, in causal order; where rows are others, of these alone."""
    step = first.step
    if len(first.rows) != len(second.rows):
        yield Difference("row", "number of rows", len(first.rows), len(second.rows), step)
        return
    names = dict.fromkeys([*first.rows.names(), *second.rows.names()])
    for kind in STAGES:
        own = [name for name in STAGES[kind] if name in names]
        if kind == "reward":
            own += [name for name in names if name not in _KIND_OF and name not in FOLLOW]
        different = False
        for name in own:
            found = _column(first.rows, second.rows, kind, name, step)
            if found is not None:
                different = True
                yield found
        if kind == "row" and different:
            return


def _column(a: DataProto, b: DataProto, kind: str, name: str, step: int) -> Difference | None:
    if name not in a or name not in b:
        values = ["there" if name in rows else MISSING for rows in (a, b)]
        return Difference(kind, name, values[0], values[1], step)
    if name in a.non_tensor_batch or name in b.non_tensor_batch:
        ones = a.non_tensor_batch.get(name, [MISSING] * len(a))
        others = b.non_tensor_batch.get(name, [MISSING] * len(b))
        for row, (one, other) in enumerate(zip(ones, others, strict=True)):
            found = first_unequal(one, other)
            if found is not None:
                path, *values = found
                label = f"{name}/{path}" if path else name
                return Difference(kind, label, values[0], values[1], step, row, row_id=_row_id(a, row))
        return None
    if name == "prompts":
        return _prompts(a, b, step)
    axes = FIELDS[name].axes if name in FIELDS else ""
    one = a.batch[name]
    other = b.batch[name]
    if axes == "B,R" or (not axes and one.shape == a.batch["response_mask"].shape):
        return _tokens(a, b, one, other, kind, name, step)
    found = first_unequal(one, other)
    if found is None:
        return None
    if one.shape != other.shape or one.dtype != other.dtype:
        return Difference(kind, name, found[1], found[2], step)
    place = first_place(one, other) or (0,)
    rest = place[1:] or None
    return Difference(kind, name, found[1], found[2], step, place[0], rest, _row_id(a, place[0]))


def _prompts(a: DataProto, b: DataProto, step: int) -> Difference | None:
    """Compare the prompts without their padding, which is on the left and may be wider in one run."""
    for row, (one, other) in enumerate(zip(_prompt_tokens(a), _prompt_tokens(b), strict=True)):
        if one == other:
            continue
        position = next(
            (place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]),
            min(len(one), len(other)),
        )
        values = [tokens[position] if position < len(tokens) else MISSING for tokens in (one, other)]
        return Difference("prompt", "prompts", values[0], values[1], step, row, position, _row_id(a, row))
    return None


def _prompt_tokens(rows: DataProto) -> list[list[int]]:
    prompts = rows.batch["prompts"]
    attended = rows.batch["attention_mask"][:, : prompts.shape[1]].bool()
    return [tokens[here].tolist() for tokens, here in zip(prompts, attended, strict=True)]


def _tokens(
    a: DataProto, b: DataProto, one: Tensor, other: Tensor, kind: str, name: str, step: int
) -> Difference | None:
    """Compare values [B, R] of response tokens, whose padding on the right may be wider in one run."""
    if one.dtype != other.dtype:
        return Difference(kind, name, str(one.dtype), str(other.dtype), step)
    there = _widened(_written(a), _written(b))
    values = _widened(one, other)
    differs = there[0] != there[1]
    both = there[0] & there[1]
    blank = torch.zeros((), dtype=one.dtype)
    place = first_place(torch.where(both, values[0], blank), torch.where(both, values[1], blank))
    if name == "responses" and bool(differs.any()):
        ended = first_place(there[0], there[1])
        place = min(place or ended or (0, 0), ended or (0, 0))
    if place is None:
        return None
    row, position = place
    shown: list[Any] = [
        value[place].item() if bool(mask[place]) else MISSING
        for value, mask in zip(values, there, strict=True)
    ]
    return Difference(kind, name, shown[0], shown[1], step, row, position, _row_id(a, row))


def _written(rows: DataProto) -> Tensor:
    """Return [B, R] bool: the tokens of the responses, without padding."""
    width = rows.batch["responses"].shape[1]
    attended: Tensor = rows.batch["attention_mask"].bool()
    return attended[:, attended.shape[1] - width :]


def _widened(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    width = max(one.shape[1], other.shape[1])
    return _padded(one, width), _padded(other, width)


def _padded(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


def _row_id(rows: DataProto, row: int) -> int | None:
    return int(rows.batch["row_id"][row]) if "row_id" in rows else None
