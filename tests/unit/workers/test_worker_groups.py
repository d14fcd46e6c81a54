"""Worker groups on the local backend: which columns come back, what an update leaves behind, what a state
holds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worker_house import ENGINE_STATE, PLAN, House, prepared, rows

from hybridflow.config.actor_rollout_ref import ActorConfig, PolicyLossConfig
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.workers.mini_batches import MiniBatchPlan


def test_columns_that_forwards_add() -> None:
    batch = prepared(House())
    for name in ("old_log_probs", "entropys", "ref_log_prob", "values"):
        column = batch.batch[name]
        assert (
            column.shape == batch.batch["responses"].shape
            and column.dtype == torch.float32
            and not column.requires_grad
        )
        assert not column[~batch.batch["response_mask"]].any()
    assert torch.equal(batch.batch["ref_log_prob"], batch.batch["old_log_probs"]), (
        "the reference is where the actor starts"
    )
    assert not batch.batch["values"].any(), "a fresh critic expects nothing"
    assert batch.batch["entropys"].max() < torch.log(torch.tensor(32.0))


def test_updates_move_actor_and_critic_and_not_the_reference() -> None:
    house = House()
    batch = prepared(house)
    columns = set(batch.batch.keys())
    actor, critic = (
        metrics.to_floats() for metrics in (house.actor.update(batch, PLAN), house.critic.update(batch, PLAN))
    )
    assert actor["actor/num_updates"] == critic["critic/num_updates"] == 4.0
    assert (
        actor["actor/num_skipped_steps"] == 0.0 and actor["actor/grad_norm"] > 0 and actor["actor/lr"] == 1e-2
    )
    assert (
        "actor/entropy_loss" not in actor
        and {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl"} <= actor.keys()
    )
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm"} <= critic.keys()
    assert set(batch.batch.keys()) == columns
    after = rows()
    after |= house.actor.log_probs(after)
    assert not torch.equal(after.batch["old_log_probs"], batch.batch["old_log_probs"])
    assert torch.equal(house.reference.log_probs(after).batch["ref_log_prob"], batch.batch["ref_log_prob"])
    assert house.critic.values(after).batch["values"].any()


def test_the_first_mini_batch_is_on_policy() -> None:
    """Old log-probs and the loss's own come from the same function: the ratio is 1 to rounding, the clip
    touches nothing.
    """
    house = House()
    found = house.actor.update(
        prepared(house), MiniBatchPlan(groups=3, epochs=1, shuffle=True, seed=0, step=1)
    ).to_floats()
    assert abs(found["actor/ppo_kl"]) < 1e-6 and found["actor/pg_clipfrac"] == 0.0


def test_a_state_goes_from_group_to_group(tmp_path: Path) -> None:
    first, second = House(), House()
    batch = prepared(first)
    first.actor.update(batch, PLAN)
    first.actor.save(tmp_path, ENGINE_STATE)
    second.actor.load(tmp_path, ENGINE_STATE)
    ours, theirs = (house.actor.update(batch, PLAN).to_floats() for house in (first, second))
    assert ours == theirs
    assert all(
        torch.equal(a, b) for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True)
    )


def test_rollout_answers_in_the_order_of_the_requests_with_the_weights_of_now() -> None:
    house = House()
    sampling = SamplingParams(max_tokens=6, temperature=0.7, ignore_eos=True)
    requests = [GenerationRequest(row, Prompt((3 + row, 4)), sampling, seed=row) for row in (7, 3, 5)]
    house.rollout.update_from(house.actor, 4)
    made = house.rollout.generate(requests)
    outputs = made.outputs
    assert [output.request_id for output in outputs] == [7, 3, 5]
    assert all(output.policy_versions == [4] * 6 for output in outputs)
    stats = made.stats.as_metrics()
    assert (stats["rollout/generated_tokens"], stats["rollout/max_rows"], stats["rollout/decode_steps"]) == (
        18.0,
        3.0,
        5.0,
    )
    pointers = [parameter.data_ptr() for parameter in house.policy.parameters()]
    house.actor.update(prepared(house), PLAN)
    house.rollout.update_from(house.actor, 5)
    again = house.rollout.generate(requests).outputs
    assert [parameter.data_ptr() for parameter in house.policy.parameters()] == pointers
    columns = make_rows(
        [list(request.prompt_token_ids) for request in requests],
        [output.token_ids for output in again],
        pad_id=0,
    )
    trained = house.actor.log_probs(DataProto.from_dict(columns, {"uid": [*"abc"]})).batch["old_log_probs"]
    assert (torch.tensor([output.log_probs for output in again]) - trained).abs().max() < 1e-4
    assert [output.log_probs for output in outputs] != [output.log_probs for output in again]


def test_sft_update_and_evaluate_agree() -> None:
    house = House()
    batch = rows()
    before = house.sft.evaluate(batch).to_floats()["val/loss"]
    assert house.sft.update(batch).to_floats()["train/loss"] == pytest.approx(before, rel=1e-5)
    parts = house.sft.evaluate(batch.select_idxs([0, 1]))
    parts.update(house.sft.evaluate(batch.select_idxs([2, 3, 4, 5])))
    assert parts.to_floats()["val/loss"] == pytest.approx(
        house.sft.evaluate(batch).to_floats()["val/loss"], rel=1e-6
    )
    assert house.sft.evaluate(batch).to_floats()["val/loss"] < before


LOSS = """
from hybridflow.algorithms.aggregation import LossOutput
def mine(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None, **_):
    return LossOutput(log_prob.sum() * 0.0 + {value}, {{}})
"""


def test_a_users_loss_stays_what_it_was_when_the_run_began(tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    file.write_text(LOSS.format(value=1.0))
    house = House(ActorConfig(policy_loss=PolicyLossConfig(loss_mode=f"{file}:mine")))
    batch = prepared(house)
    file.write_text(LOSS.format(value=2.0))
    assert house.actor.update(batch, PLAN).to_floats()["actor/pg_loss"] == 1.0
