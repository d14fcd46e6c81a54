"""The implicit process reward model: q_t of its log-probs, an update that learns from outcomes, a state that
goes on to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from worker_house import ENGINE_STATE, House, rows

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config.reward import ProcessRewardModelConfig
from hybridflow.protocol import DataProto
from hybridflow.workers.mini_batches import MiniBatchPlan
from hybridflow.workers.process_reward import outcome_loss

WHOLE = MiniBatchPlan(groups=3, epochs=1, shuffle=True, seed=0, step=1)
"""One optimizer step on all rows."""


def judged(house: House) -> DataProto:
    batch = rows()
    return batch | house.reference.log_probs(batch)


@pytest.mark.parametrize("granularity", ["token", "whole"])
def test_rewards_are_beta_times_the_log_ratio(granularity: Literal["token", "whole"]) -> None:
    house = House(process=ProcessRewardModelConfig(beta=0.5, granularity=granularity))
    batch = judged(house)
    mask = batch.batch["response_mask"]
    batch.batch["ref_log_prob"] = batch.batch["ref_log_prob"] - torch.where(mask, 0.2, 7.0)
    rewards = house.process_reward.rewards(batch).batch["process_rewards"]
    assert rewards.shape == mask.shape and rewards.dtype == torch.float32 and not rewards[~mask].any()
    torch.testing.assert_close(rewards.sum(-1), 0.1 * mask.sum(-1).float(), atol=1e-5, rtol=0)
    assert int((rewards != 0).sum()) == (int(mask.sum()) if granularity == "token" else len(batch))


def test_it_learns_which_responses_were_right() -> None:
    """At the reference every row has probability ½: the loss is ln 2. After some steps it tells right from
    wrong.
    """
    house = House(process=ProcessRewardModelConfig(beta=0.5))
    batch = judged(house)
    first = house.process_reward.update(batch, WHOLE).to_floats()
    assert first["process_reward/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert first["process_reward/grad_norm"] > 0 and first["process_reward/num_updates"] == 1.0
    for _ in range(8):
        last = house.process_reward.update(batch, WHOLE).to_floats()
    assert last["process_reward/loss"] < 0.5 and last["process_reward/accuracy"] == 1.0
    totals = house.process_reward.rewards(batch).batch["process_rewards"].sum(-1)
    assert torch.equal(totals > 0, batch.batch["positive"])
    assert torch.equal(house.reference.log_probs(batch).batch["ref_log_prob"], batch.batch["ref_log_prob"])


def test_a_row_that_is_not_learned_from_is_left_out_and_a_token_is_not() -> None:
    """A narrower loss_mask drops whole rows; what is left of a row is still judged by all of its sampled
    tokens.
    """
    whole, narrow = House(), House()
    batch, few = judged(whole), judged(narrow)
    few.batch["loss_mask"] = few.batch["loss_mask"].clone()
    few.batch["loss_mask"][:, 1:] = False
    ours, theirs = (
        house.process_reward.update(rows, WHOLE).to_floats()
        for house, rows in ((whole, batch), (narrow, few))
    )
    assert ours == theirs
    few.batch["loss_mask"][2] = False
    without = judged(House()).select_idxs([0, 1, 3, 4, 5])
    left, right = House(), House()
    found = [
        house.process_reward.update(rows, WHOLE).to_floats()
        for house, rows in ((left, few), (right, without))
    ]
    assert found[0]["process_reward/loss"] == pytest.approx(found[1]["process_reward/loss"], rel=1e-6)
    assert found[0]["process_reward/grad_norm"] == pytest.approx(
        found[1]["process_reward/grad_norm"], rel=1e-5
    )


def test_shares_of_micro_batches_add_up() -> None:
    house = House()
    batch = judged(house)
    log_probs = (
        house.actor.log_probs(batch).batch["old_log_probs"].double()
        + 0.3 * batch.batch["advantages"].double()
    )
    loss = outcome_loss(0.5, LossScale.count(batch.batch["loss_mask"]))
    whole = loss({"log_probs": log_probs}, batch)[0]
    parts = [
        loss({"log_probs": log_probs[part]}, batch.select_idxs(part))[0] for part in ([0, 3], [1], [5, 2, 4])
    ]
    assert float(whole) > 0 and float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)


def test_a_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    first, second = House(), House()
    batch = judged(first)
    first.process_reward.update(batch, WHOLE)
    first.process_reward.save(tmp_path, ENGINE_STATE)
    second.process_reward.load(tmp_path, ENGINE_STATE)
    assert (
        first.process_reward.update(batch, WHOLE).to_floats()
        == second.process_reward.update(batch, WHOLE).to_floats()
    )
    rewards = [house.process_reward.rewards(batch).batch["process_rewards"] for house in (first, second)]
    assert torch.equal(*rewards) and rewards[0].any()
