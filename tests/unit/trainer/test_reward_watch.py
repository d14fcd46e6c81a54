"""The signs of a policy that pleases the reward and nothing else, and the samples that show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.reward_watch import QUIET_STEPS, RewardWatch, repeated_share


def batch_of(responses: Sequence[Sequence[int]], **columns: Sequence[Any]) -> DataProto:
    """Return rows whose score is the number of the row."""
    width = max(map(len, responses))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in responses])
    mask = torch.tensor([[place < len(row) for place in range(width)] for row in responses])
    scores = torch.zeros(mask.shape)
    scores[:, 0] = torch.arange(len(responses)).float()
    tensors = {"responses": ids, "response_mask": mask, "loss_mask": mask, "token_level_scores": scores}
    return DataProto.from_dict(tensors, {name: list(values) for name, values in columns.items()})


VARIED = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
LOOP = [1, 2] * 8


def test_the_share_of_repeated_runs() -> None:
    rows = torch.tensor([LOOP, list(range(16)), [5] * 16, [1] * 16])
    mask = torch.ones(rows.shape, dtype=torch.bool)
    mask[3, 5:] = False  # two runs are left of the last row
    assert repeated_share(rows, mask).tolist() == [11 / 13, 0.0, 12 / 13, 0.5]
    assert repeated_share(rows[:, :3], mask[:, :3]).tolist() == [0.0] * 4
    mask[0, 7] = False  # a token that a tool wrote: nothing runs over it
    assert repeated_share(rows, mask)[0].item() == pytest.approx(7 / 9)


def test_repetition_names_its_rows_and_is_told_now_and_then() -> None:
    watch = RewardWatch()
    assert watch.look(batch_of(VARIED), {}, 1)[1] == []
    batch = batch_of([VARIED[0], LOOP, [3] * 16])
    figures, (sign,) = watch.look(batch, {}, 2)
    assert figures["reward_watch/repetition"] == pytest.approx((11 / 13 + 12 / 13) / 3)
    assert sign.name == "repetition" and sign.rows[:2] == [2, 1] and "repeat" in sign.message
    told = [step for step in range(3, 2 + QUIET_STEPS + 1) if watch.look(batch, {}, step)[1]]
    assert told == [2 + QUIET_STEPS]


def test_form_without_a_right_answer_is_a_sign() -> None:
    watch = RewardWatch()
    columns = {"format": [1.0, 1.0, 1.0, 0.0], "acc": [0.0, 1.0, 0.0, 0.0]}
    figures, signs = watch.look(batch_of(VARIED * 2, **columns), {}, 1)
    assert figures["reward_watch/format_only"] == 0.5 and not signs
    columns["acc"] = [0.0] * 4
    _, (sign,) = watch.look(batch_of(VARIED * 2, **columns), {}, 2)
    assert sign.name == "format_only" and sign.rows[3] == 3
    assert "reward_watch/format_only" not in watch.look(batch_of(VARIED), {}, 3)[0]


def test_responses_that_grow_are_a_sign() -> None:
    watch = RewardWatch()
    for step in range(1, 12):
        assert not watch.look(batch_of(VARIED), {}, step)[1]
    figures, (sign,) = watch.look(batch_of([list(range(40)), list(range(30))]), {}, 12)
    assert figures["reward_watch/length"] == 35
    assert sign.name == "length" and "4.4 times" in sign.message and sign.rows == [0, 1]


def test_a_training_score_that_leaves_the_held_out_one_is_a_sign() -> None:
    watch = RewardWatch()

    lines: dict[int, dict[str, float]] = {}

    def look(watch: RewardWatch, step: int, trained: float, held_out: float | None = None) -> list[str]:
        values = {"critic/score/mean": trained}
        if held_out is not None:
            values["val-core/math/acc/mean@1"] = held_out
        figures, signs = watch.look(batch_of(VARIED), values, step)
        lines[step] = values | figures
        return [f"{sign.name} {sign.message}" for sign in signs]

    assert not look(watch, 1, 0.2, 0.3) and not look(watch, 2, 0.4)
    assert not look(watch, 3, 0.6, 0.4)  # both rise
    assert not look(watch, 4, 0.5, 0.3)  # held out falls alone, and training not above the best look's 0.5
    again = RewardWatch()
    again.replay(lines)
    told = look(watch, 5, 0.9, 0.2)
    assert len(told) == 1 and told[0].startswith("divergence") and "0.2 and more" in told[0]
    alone = lines[5]
    assert look(again, 5, 0.9, 0.2) == told and lines[5] == alone


def test_a_validation_that_comes_late_counts_with_the_scores_up_to_its_step() -> None:
    held_out = {2: 0.4, 4: 0.1}
    trained = {1: 0.2, 2: 0.4, 3: 0.6, 4: 0.8, 5: 0.1}
    told: list[list[str]] = []
    for late in (False, True):
        watch = RewardWatch()
        watch.validated(0, {"val-core/math/acc/mean@1": 0.9})  # before the first step: no score goes with it
        found = []
        for step, score in trained.items():
            values = {"critic/score/mean": score}
            if step in held_out and not late:
                values["val-core/math/acc/mean@1"] = held_out[step]
            if step - 1 in held_out and late:
                watch.validated(step - 1, {"val-core/math/acc/mean@1": held_out[step - 1]})
            found += [sign.message for sign in watch.look(batch_of(VARIED), values, step)[1]]
        told.append(found)
    assert told[0] == told[1] and len(told[0]) == 1 and "0.3 and more" in told[0][0]
