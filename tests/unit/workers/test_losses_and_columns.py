"""Losses and the driver's columns, by hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS
from hybridflow.algorithms.aggregation import LossScale
from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig, PolicyLossConfig
from hybridflow.config.algorithm import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig
from hybridflow.config.root import CriticConfig, DistillationLossConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.columns import (
    apply_kl_penalty,
    estimate_advantages,
    explained_variance,
    find_estimator,
    group_ids,
    identify,
    kl_controller,
    leave_out_unpaired,
    select_tokens,
)
from hybridflow.workers.correction import complete_correction, correct_rollout, measure_correction
from hybridflow.workers.losses import LOSS_SHARES, critic_loss, find_policy_loss, policy_loss, sft_loss

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1]]).bool()


def rows(uids: str = "aabb", **columns: Any) -> DataProto:
    tensors = {"response_mask": MASK.clone(), "loss_mask": MASK.clone(), **columns}
    return DataProto.from_dict(tensors, {"uid": list(uids)})


def advantages_of(batch: DataProto, config: AlgorithmConfig) -> DataProto:
    return estimate_advantages(batch, PPOConfig(algorithm=config), find_estimator(config))


def field(*values: tuple[float, float, float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ---- KL in the reward
# ---------------------------------------------------------------------------------------------

OLD = field((-1.0, -2.0, NAN), (-1.0, NAN, -1.0), (NAN, NAN, NAN), (-1.0, -1.0, -1.0))
REF = field((-1.5, -2.5, 0.0), (-2.0, 0.0, -1.0), (0.0, 0.0, 0.0), (-1.0, -1.0, -1.3))
SCORES = field((0.0, 1.0, 0.0), (0.0, 0.0, 2.0), (0.0, 0.0, 0.0), (0.0, 0.0, 3.0))
KL = field((0.5, 0.5, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.3))
MEAN_KL = (0.5 + 0.5 + 0.1) / 3  # of the rows' token means; the row without a sampled token does not count


def kl_rows() -> DataProto:
    return rows(old_log_probs=OLD, ref_log_prob=REF, token_level_scores=SCORES)


def test_a_fixed_coefficient_is_taken_off_each_sampled_token() -> None:
    config = AlgorithmConfig(use_kl_in_reward=True, kl_penalty="kl", kl_ctrl=KLControlConfig(kl_coef=0.1))
    controller = kl_controller(config)
    batch, metrics = apply_kl_penalty(kl_rows(), config, controller)
    torch.testing.assert_close(batch.batch["token_level_rewards"], SCORES - 0.1 * KL)
    assert metrics.to_floats() == pytest.approx(
        {"actor/reward_kl_penalty": MEAN_KL, "actor/reward_kl_penalty_coeff": 0.1}
    )
    assert controller.value == 0.1


def test_an_adaptive_coefficient_moves_after_use() -> None:
    config = AlgorithmConfig(
        use_kl_in_reward=True,
        kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.1, horizon=40, target_kl=0.1),
    )
    controller = kl_controller(config)
    for beta in (0.1, 0.1 * 1.02, 0.1 * 1.02**2):  # error clipped to 0.2, times 4 rows / 40
        batch, metrics = apply_kl_penalty(kl_rows(), config, controller)
        torch.testing.assert_close(batch.batch["token_level_rewards"], SCORES - beta * KL)
        assert metrics.to_floats()["actor/reward_kl_penalty_coeff"] == pytest.approx(beta)
    assert controller.value == pytest.approx(0.1 * 1.02**3)


def test_rows_of_earlier_steps_are_penalised_and_do_not_move_the_coefficient() -> None:
    config = AlgorithmConfig(
        use_kl_in_reward=True,
        kl_penalty="kl",
        kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.1, horizon=40, target_kl=0.1),
    )
    controller = kl_controller(config)
    batch, metrics = apply_kl_penalty(kl_rows(), config, controller, 2)
    torch.testing.assert_close(batch.batch["token_level_rewards"], SCORES - 0.1 * KL)
    assert metrics.to_floats()["actor/reward_kl_penalty"] == pytest.approx((0.5 + 0.5) / 2)
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 40)), "of two rows"


def test_tokens_at_the_clamp_of_k3_in_the_reward_are_counted_over_the_steps_own_rows() -> None:
    batch = kl_rows()
    batch.batch["ref_log_prob"] = field((9, 0, 0), (-1, 0, 9), (9, 9, 9), (9, 9, 9))
    config = AlgorithmConfig(use_kl_in_reward=True, kl_penalty="low_var_kl")
    for num_new, share in ((None, 5 / 7), (2, 2 / 4)):
        _, metrics = apply_kl_penalty(batch, config, kl_controller(config), num_new)
        assert metrics.to_floats()["actor/reward_kl_clamped_fraction"] == pytest.approx(share)
    config = AlgorithmConfig(use_kl_in_reward=True, kl_penalty="k2")
    _, metrics = apply_kl_penalty(batch, config, kl_controller(config))
    assert "actor/reward_kl_clamped_fraction" not in metrics.to_floats()


def test_without_kl_in_the_reward_scores_are_rewards() -> None:
    config = AlgorithmConfig()
    batch, metrics = apply_kl_penalty(rows(token_level_scores=SCORES), config, kl_controller(config))
    assert torch.equal(batch.batch["token_level_rewards"], SCORES) and metrics.to_floats() == {}


def test_no_sampled_token_at_all_leaves_the_coefficient_finite() -> None:
    config = AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.1))
    batch = kl_rows()
    batch.batch["response_mask"] = torch.zeros_like(MASK)
    rewards, metrics = apply_kl_penalty(batch, config, kl_controller(config))
    assert torch.equal(rewards.batch["token_level_rewards"], SCORES)
    assert metrics.to_floats()["actor/reward_kl_penalty"] == 0.0


# ---- advantages
# ---------------------------------------------------------------------------------------------------


def test_groups_are_numbered_in_order_of_appearance() -> None:
    assert group_ids(rows("xyxz")).tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    "labels",
    [
        ["7", "7", "9", "9"],
        ["7", "7", "07", "07"],
        [-1, -1, 3, 3],
        [1.0000001, 1.0000001, 1.0, 1.0],
        [2**63, 2**63, -1, -1],
        [("a", 1), ("a", 1), ("a", 2), ("a", 2)],
        ["", "", " ", " "],
        [True, True, "True", "True"],
    ],
)
def test_labels_of_groups_are_told_apart_as_they_are(labels: list[Any]) -> None:
    """Any labels that can be keys: none is read as a number, and none is rounded."""

    def advantages(uids: list[Any]) -> Tensor:
        batch = rows(token_level_rewards=SCORES)
        batch.non_tensor_batch["uid"] = np.fromiter(uids, dtype=object, count=4)
        return advantages_of(batch, AlgorithmConfig(adv_estimator="grpo")).batch["advantages"]

    wanted = advantages([*"aabb"])
    assert torch.equal(advantages(labels), wanted) and wanted.any()
    assert torch.equal(advantages([labels[at] for at in (0, 2, 0, 2)]), advantages([*"abab"]))


def test_an_estimator_from_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from hybridflow.algorithms.advantages import Advantages\n"
        "def centred(token_level_rewards, response_mask, group_ids, *, weight, rollout_log_probs, "
        "absent=None, **fields):\n"
        "    assert absent is None and 'gamma' in fields and 'loss_mask' in fields\n"
        "    a = weight * group_ids[:, None] * response_mask + rollout_log_probs\n"
        "    return a, token_level_rewards\n"
    )
    batch = rows("aabb", token_level_rewards=SCORES, rollout_log_probs=torch.full((4, 3), 0.5))
    spec = f"{tmp_path / 'mine.py'}:centred"
    found = advantages_of(batch, AlgorithmConfig(adv_estimator=spec, options={"weight": 3.0})).batch
    assert torch.equal(found["advantages"], 3.0 * torch.tensor([[0], [0], [1], [1]]) * MASK + 0.5)
    assert torch.equal(found["returns"], SCORES)
    with pytest.raises(ConfigError, match="needs weight"):
        advantages_of(batch, AlgorithmConfig(adv_estimator=spec))


# ---- losses
# -------------------------------------------------------------------------------------------------------

ADVANTAGES = field((1, 2, NAN), (-1, NAN, 3), (NAN,) * 3, (0.5, 1, 1))


def loss_rows() -> DataProto:
    zeros = torch.zeros(4, 3)
    columns = {
        "advantages": ADVANTAGES,
        "ref_log_prob": zeros.clone(),
        "values": zeros.clone(),
        "returns": ADVANTAGES,
    }
    return rows(old_log_probs=zeros, **columns)


def evaluate(
    config: ActorConfig, batch: DataProto, log_prob: float = 0.0, **outputs: Tensor
) -> tuple[float, dict[str, float]]:
    loss = policy_loss(config, LossScale.count(batch.batch["loss_mask"]), find_policy_loss(config))
    value, metrics = loss({"log_probs": torch.full((4, 3), log_prob), **outputs}, batch)
    return float(value), metrics.to_floats()


def test_entropy_and_kl_terms_by_hand() -> None:
    config = ActorConfig(
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.5,
        kl_loss_type="k2",
        loss_agg_mode="seq-mean-token-sum",
    )
    value, metrics = evaluate(config, loss_rows(), 0.1, entropy=torch.full((4, 3), 2.0))
    entropy, kl = 2.0 * 7 / 3, 0.005 * 7 / 3
    assert metrics["actor/entropy_loss"] == pytest.approx(entropy)
    assert metrics["actor/kl_loss"] == pytest.approx(kl, rel=1e-5) and metrics["actor/kl_coef"] == 0.5
    assert value == pytest.approx(metrics["actor/pg_loss"] - 0.1 * entropy + 0.5 * kl, rel=1e-5)


def test_a_divergence_is_a_term_or_takes_the_place_of_the_policy_loss() -> None:
    config = ActorConfig(loss_agg_mode="seq-mean-token-sum")
    batch = loss_rows()
    outputs = {"log_probs": torch.full((4, 3), 0.1), "divergence": torch.full((4, 3), 2.0)}
    alone, _ = evaluate(config, batch, 0.1)
    for kept, clamp, counted in ((True, None, 2.0), (False, None, 2.0), (False, 0.5, 0.5)):
        taught = DistillationLossConfig(
            loss_mode="jsd", distillation_loss_coef=3.0, use_task_rewards=kept, loss_max_clamp=clamp
        )
        scale = LossScale.count(batch.batch["loss_mask"])
        value, told = policy_loss(config, scale, find_policy_loss(config), None, taught)(outputs, batch)
        metrics = told.to_floats()
        assert metrics["actor/distillation_loss"] == pytest.approx(counted * 7 / 3), (
            "seven tokens of three rows"
        )
        assert float(value) == pytest.approx(kept * alone + 3 * counted * 7 / 3, rel=1e-5)
        assert ("actor/pg_loss" in metrics) == kept


def test_tokens_at_the_clamp_of_k3_in_the_loss_are_counted() -> None:
    batch = loss_rows()
    batch.batch["ref_log_prob"] = field((3, 2.5, 9), (0, 9, -12), (9, 9, 9), (3, 0, 0))
    name = "actor/kl_clamped_fraction"
    for kind, share in (("low_var_kl", 3 / 7), ("k3", 3 / 7), ("k3+", None), ("k2", None)):
        found = evaluate(ActorConfig(use_kl_loss=True, kl_loss_type=kind), batch)[1]
        assert found.get(name) == (None if share is None else pytest.approx(share))
    assert name not in evaluate(ActorConfig(), batch)[1]


def test_a_policy_loss_from_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from hybridflow.algorithms.aggregation import LossOutput, aggregate\n"
        "def plain(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None, *, "
        "sharpness,\n"
        "          loss_agg_mode=None, loss_scale_factor=None):\n"
        "    loss = aggregate(-sharpness * advantages * log_prob, response_mask, loss_agg_mode or "
        "'token-sum', scale, loss_scale_factor)\n"
        "    return LossOutput(loss, {'actor/mine': (loss.detach(), response_mask.sum())})\n"
    )
    mine = PolicyLossConfig(loss_mode=f"{tmp_path / 'mine.py'}:plain", options={"sharpness": 2.0})
    value, metrics = evaluate(ActorConfig(policy_loss=mine), loss_rows(), -1.0)
    assert value == pytest.approx(2.0 * 7.5) and metrics["actor/mine"] == pytest.approx(2.0 * 7.5 / 7)
    value, _ = evaluate(ActorConfig(policy_loss=mine, loss_agg_mode="token-mean"), loss_rows(), -1.0)
    assert value == pytest.approx(2.0 * 7.5 / 7)


def test_value_loss_by_hand() -> None:
    loss = critic_loss(CriticConfig(cliprange_value=0.5), LossScale.count(MASK), None)
    value, metrics = loss({"values": torch.ones(4, 3)}, loss_rows())
    targets = ADVANTAGES[MASK]
    errors = torch.maximum((1 - targets) ** 2, (0.5 - targets) ** 2)
    assert float(value) == pytest.approx(0.5 * float(errors.mean()))
    found = metrics.to_floats()
    assert found["critic/vf_loss"] == pytest.approx(float(value)) and found["critic/vpred_mean"] == 1.0


def test_sft_loss_is_the_mean_over_all_tokens_to_learn() -> None:
    value, metrics = sft_loss(LossScale.count(MASK))({"log_probs": ADVANTAGES}, loss_rows())
    assert float(value) == pytest.approx(-7.5 / 7) and metrics.to_floats()["train/loss"] == pytest.approx(
        -7.5 / 7
    )


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[3], [0, 2], [1]], [[2], [1, 0, 3]]])
def test_metrics_do_not_depend_on_how_rows_are_cut(parts: list[list[int]]) -> None:
    batch, log_prob = loss_rows(), 0.3 * torch.arange(12.0).reshape(4, 3) - 1.0
    scale = LossScale.count(MASK)

    def all_metrics(cuts: list[list[int]]) -> dict[str, float]:
        joined = Metrics()
        for indices in cuts:
            micro, outputs = (
                batch.select_idxs(indices),
                {"log_probs": log_prob[indices], "values": log_prob[indices]},
            )
            joined.update(
                policy_loss(ActorConfig(use_kl_loss=True), scale, find_policy_loss(ActorConfig()))(
                    outputs, micro
                )[1]
            )
            joined.update(critic_loss(CriticConfig(), scale, None)(outputs, micro)[1])
        joined.average_sums(LOSS_SHARES)
        return joined.to_floats()

    whole = all_metrics([[0, 1, 2, 3]])
    assert 0 < whole["actor/pg_clipfrac"] < 1 and whole["actor/pg_loss"] != 0
    assert all_metrics(parts) == pytest.approx(whole, rel=1e-5)


def test_explained_variance() -> None:
    returns, values = field((0, 2, 9), (4, 9, 6), (9, 9, 9), (0, 2, 4)), torch.zeros(4, 3)
    assert explained_variance(values, returns, MASK) == pytest.approx(0.0)
    assert explained_variance(returns, returns, MASK) == pytest.approx(1.0)
    assert explained_variance(values, torch.ones(4, 3), MASK) == 0.0
    off_by_one = returns + torch.where(torch.arange(12).reshape(4, 3) % 2 == 0, 1.0, -1.0)
    exact = 1 - (off_by_one - returns)[MASK].var(unbiased=False) / returns[MASK].var(unbiased=False)
    assert explained_variance(off_by_one, returns, MASK) == pytest.approx(float(exact))


# ---- what later stages read
# ---------------------------------------------------------------------------------------


def test_right_rows_by_acc_and_by_score_where_there_is_none() -> None:
    batch = rows("aabb", token_level_scores=SCORES)
    assert identify(batch).batch["positive"].tolist() == [True, True, False, True]
    batch.non_tensor_batch["acc"] = np.array([0.0, 1.0, 1.0, NAN], dtype=object)
    found = identify(batch).batch
    assert found["positive"].tolist() == [False, True, True, True] and found["group_ids"].tolist() == [
        0,
        0,
        1,
        1,
    ]


def test_reward_components_by_their_keys() -> None:
    batch = rows("aabb", token_level_rewards=SCORES, token_level_scores=SCORES)
    batch.non_tensor_batch["fmt"] = np.array([1.0, 0.0, 1.0, 1.0], dtype=object)
    config = AlgorithmConfig(
        adv_estimator="gdpo", gdpo_reward_keys=["score", "fmt"], gdpo_reward_weights=[1.0, 0.0]
    )
    by_score = advantages_of(batch, config).batch["advantages"]
    assert by_score[1, 0] > by_score[0, 0]
    other = advantages_of(batch, replace(config, gdpo_reward_weights=[0.0, 1.0])).batch["advantages"]
    assert other[1, 0] < other[0, 0]
    with pytest.raises(ConfigError, match="names nothing_such, which the reward does not return"):
        advantages_of(batch, replace(config, gdpo_reward_keys=["nothing_such"]))
    batch.non_tensor_batch["fmt"][2] = None
    with pytest.raises(
        RewardError,
        match="fmt is None for 1 rows, wanted a number for every row; rows whose reward failed have none",
    ):
        advantages_of(batch, config)
    del batch.non_tensor_batch["fmt"]
    batch.narrow_loss_mask(torch.zeros_like(batch.batch["loss_mask"]))
    assert not advantages_of(batch, config).batch["advantages"].any(), (
        "every reward failed: nothing is learned, nothing is missing"
    )


@pytest.mark.parametrize("value", [1e39, -1e39, 10**60, float("inf")])
def test_reward_components_beyond_float32_are_refused(value: float) -> None:
    batch = rows("aabb", token_level_rewards=SCORES, token_level_scores=SCORES)
    batch.non_tensor_batch["fmt"] = np.array([1.0, value, 1.0, 1.0], dtype=object)
    config = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["score", "fmt"])
    with pytest.raises(
        RewardError, match=r"fmt is .* for 1 rows, wanted a finite number that float32 can hold"
    ):
        advantages_of(batch, config)


def test_correction_weights_and_rejects_what_the_policy_sampled_only() -> None:
    batch = rows(
        rollout_log_probs=torch.zeros(4, 3), is_demonstration=torch.tensor([False, True, False, False])
    )
    trained = field((0.5, 2.0, NAN), (9, NAN, 9), (NAN, NAN, NAN), (0, 0, 0))
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=2.0, rollout_rs="token_k1", rollout_rs_threshold="0.5_5.0"
    )
    found = correct_rollout(batch, config, trained)
    assert found.weights is not None and found.keep is not None
    # k1 tests π_rollout/π_old: e^-2 is below 0.5
    expected = field((0.5, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)).exp() * MASK
    expected[0, 1], expected[1] = 2.0, MASK[1].float()
    torch.testing.assert_close(found.weights, expected)
    assert found.keep.tolist() == [[True, False, False], MASK[1].tolist(), [False] * 3, [True] * 3]
    assert found.metrics.to_floats()["rollout_corr/kl"] == pytest.approx(-2.5 / 5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_row_left_out_of_the_loss_keeps_its_weight_and_its_place_in_the_baseline(
    level: Any, normalize: bool
) -> None:
    mask = torch.tensor([[True], [True], [True]])
    trained = torch.log(torch.tensor([[0.5], [0.5], [0.5]]))
    batch = DataProto.from_dict(
        {
            "response_mask": mask,
            "loss_mask": mask & torch.tensor([[True], [True], [False]]),
            "rollout_log_probs": trained.clone(),
            "old_log_probs": trained,
            "sum_pi_squared": torch.full((3, 1), 0.5),
            "token_level_rewards": torch.tensor([[1.0], [0.0], [2.0]]),
            "token_level_scores": torch.tensor([[1.0], [0.0], [2.0]]),
        },
        {"uid": list("aaa")},
    )
    correction = RolloutCorrectionConfig(rollout_is=level, rollout_is_batch_normalize=normalize)
    found = correct_rollout(batch, correction, trained)
    assert found.weights is not None
    batch |= DataProto.from_dict({"rollout_is_weights": found.weights})
    config = AlgorithmConfig(adv_estimator="optimal_token_baseline", rollout_correction=correction)
    advantages = advantages_of(batch, config).batch["advantages"][:2, 0]
    torch.testing.assert_close(advantages, torch.tensor([0.0, -1.0]))
    assert found.metrics.to_floats()["rollout_corr/rollout_is_mean"] == 1.0


@pytest.mark.parametrize("scale", [1.0, 1e-7, 0.0])
@pytest.mark.parametrize("several", [False, True])
def test_parts_of_a_batch_are_measured_as_the_whole_is(scale: float, several: bool) -> None:
    """Also the standard deviation, of ratios that are far from 1, within rounding of it and 1 itself."""
    batch = rows("aabb", rollout_log_probs=torch.linspace(-1.0, -0.5, 12).reshape(4, 3))
    if several:
        batch |= DataProto.from_dict({"trajectory_id": torch.tensor([4, 4, 5, 6])})
    apart = scale * torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(4, 3)
    trained = batch.batch["rollout_log_probs"].double() + apart
    batch |= DataProto.from_dict({"old_log_probs": trained})
    expected = correct_rollout(batch, RolloutCorrectionConfig(), trained).metrics.to_floats()
    for cuts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[2, 3], [], [0, 1]]):
        parts = [measure_correction(batch.select_idxs(cut), (None, 2.0)) for cut in cuts]
        found = complete_correction(Metrics.merge(parts)).to_floats()
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)
    nothing = Metrics()
    nothing.add_sum("other", 1.0)
    assert complete_correction(nothing).to_floats() == {"other": 1.0}


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_spread_and_sample_size_of_mini_batches_are_weighed_by_what_they_count(level: Any) -> None:
    batch = rows("abcd", rollout_log_probs=torch.zeros(4, 3))
    trained = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
    correction = RolloutCorrectionConfig(rollout_is=level)
    parts = [correct_rollout(batch.select_idxs(cut), correction, trained[cut]) for cut in ([0], [1, 2, 3])]
    joined = Metrics.merge(part.metrics for part in parts).to_floats()
    first, second = (part.metrics.to_floats() for part in parts)
    counts = (2, 5) if level == "token" else (1, 2)
    for name in ("rollout_is_std", "rollout_is_eff_sample_size"):
        key = f"rollout_corr/{name}"
        mean = (first[key] * counts[0] + second[key] * counts[1]) / sum(counts)
        assert joined[key] == pytest.approx(mean) and first[key] != pytest.approx(second[key])
    assert joined["rollout_corr/rollout_is_max"] == second["rollout_corr/rollout_is_max"]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_normalised_over_what_is_learned_from(level: Any) -> None:
    batch = rows("abcd", rollout_log_probs=torch.zeros(4, 3))
    batch.batch["loss_mask"][3] = False
    trained = torch.log(torch.tensor([1.0, 0.5, 1.0, 0.25])).unsqueeze(-1) * torch.tensor([1.0, 0.0, 0.0])
    correction = RolloutCorrectionConfig(rollout_is=level, rollout_is_batch_normalize=True)
    weights = correct_rollout(batch, correction, trained).weights
    assert weights is not None
    mean = {"token": (1.0 + 1.0 + 0.5 + 1.0) / 4, "sequence": (1.0 + 0.5) / 2}[level]
    assert weights[0, 0] == pytest.approx(1.0 / mean) and weights[1, 0] == pytest.approx(0.5 / mean)
    assert weights[3, 0] == pytest.approx(0.25 / mean), "left out of the loss, yet weighed"


def test_without_correction_the_difference_is_measured_all_the_same() -> None:
    batch = rows(rollout_log_probs=torch.zeros(4, 3))
    found = correct_rollout(batch, RolloutCorrectionConfig(), torch.full((4, 3), -0.1))
    assert found.weights is None and found.keep is None
    assert found.metrics.to_floats()["rollout_corr/kl"] == pytest.approx(0.1)


def test_tokens_are_selected_over_the_whole_mini_batch_and_left_out_by_the_loss() -> None:
    config = ActorConfig(
        policy_loss=PolicyLossConfig(
            loss_mode="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.0, clip_cov_ub=100.0
        )
    )
    batch, base = loss_rows(), find_policy_loss(config)
    log_prob = torch.arange(12.0).reshape(4, 3) * 0.01
    drawn = [
        select_tokens(batch, config, base, log_prob, generator(1, "select_tokens", 1, 0)) for _ in range(2)
    ]
    columns = drawn[0].batch
    names = list(columns.keys())
    assert all(torch.equal(columns[name], drawn[1].batch[name]) for name in names), (
        "the same seed draws the same tokens"
    )
    chosen = next(iter(columns.values())).bool()
    assert 1 <= int(chosen.sum()) < int(MASK.sum()) and not bool((chosen & ~MASK).any())
    log_prob.requires_grad_()
    scale = LossScale.count(batch.batch["loss_mask"])
    value, _ = policy_loss(config, scale, base)({"log_probs": log_prob}, batch | drawn[0])
    (gradient,) = torch.autograd.grad(value, log_prob)
    assert not bool(gradient[chosen].any()) and bool(gradient[MASK & ~chosen].all())


@pytest.mark.parametrize("orphan", [False, True])
def test_dpo_gives_a_pair_the_same_loss_beside_a_row_without_a_partner(orphan: bool) -> None:
    mask = torch.ones(4, 1, dtype=torch.bool)
    log_prob = torch.tensor([[-2.0], [-1.0], [-1.5], [-1.5]])
    batch = DataProto.from_dict(
        {
            "response_mask": mask,
            "loss_mask": mask & torch.tensor([[True], [True], [orphan], [False]]),  # the last was rejected
            "advantages": torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]),
            "old_log_probs": log_prob,
            "ref_log_prob": torch.full((4, 1), -1.5),
            "group_ids": torch.tensor([0, 0, 1, 1]),
        }
    )
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dpo", dpo_beta=0.2))
    base = find_policy_loss(config)
    leave_out_unpaired(batch, base)
    scale = LossScale.count(batch.batch["loss_mask"])
    value, _ = policy_loss(config, scale, base)({"log_probs": log_prob}, batch)
    assert float(value) == pytest.approx(np.log1p(np.exp(0.2))), "−log σ(0.2 · (−0.5 − 0.5))"
    assert batch.batch["loss_mask"][:, 0].tolist() == [True, True, False, False]


def test_the_positive_example_term() -> None:
    batch = loss_rows() | DataProto.from_dict({"positive": torch.tensor([True, False, True, False])})
    config = ActorConfig(positive_lm_loss_coef=0.5)
    scale = LossScale.count(batch.batch["loss_mask"], batch.batch["positive"])
    value, metrics = policy_loss(config, scale, find_policy_loss(config))(
        {"log_probs": torch.full((4, 3), -0.2)}, batch
    )
    found = metrics.to_floats()
    assert found["actor/positive_lm_loss"] == pytest.approx(0.2), "the mean over the tokens of right rows"
    assert float(value) == pytest.approx(found["actor/pg_loss"] + 0.1)


def gradient_of(config: ActorConfig) -> Tensor:
    """The gradient of the actor's loss in a number of each token, on which log-prob and entropy depend.

    The first mini-batch of a step has ratios of 1; here some are far from it, on both sides.
    """
    far = field((-1.5, 0.4, 0), (0.3, 0, -0.9), (0, 0, 0), (1.6, -0.2, 0.5))
    positive = torch.tensor([True, False, True, False])
    batch = rows(
        old_log_probs=-1 - far,
        ref_log_prob=-1 + 0.5 * far,
        group_ids=torch.tensor([0, 0, 1, 1]),
        advantages=field((1, 0.5, 1), (-1, -1, -2), (1, 1, 1), (-1, 1, -1)),
        positive=positive,
    )
    x = (0.1 * torch.arange(1.0, 13.0).reshape(4, 3)).requires_grad_()
    outputs = {"log_probs": -1 - 0.1 * x.square()}
    base = find_policy_loss(config)
    if base.select is not None:
        batch |= select_tokens(batch, config, base, outputs["log_probs"].detach(), generator(0, "x"))
    scale = LossScale.count(batch.batch["loss_mask"], positive)
    if config.entropy_coeff:
        outputs["entropy"] = x.sin()
    loss, _ = policy_loss(config, scale, base)(outputs, batch)
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "reinforce"])
def test_where_all_scores_are_equal_nothing_but_the_kl_term_is_learned(name: str) -> None:
    x = (0.1 * torch.arange(1.0, 13.0).reshape(4, 3)).requires_grad_()
    batch = rows(old_log_probs=torch.full((4, 3), -1.0), ref_log_prob=torch.full((4, 3), -1.5))
    batch.batch["token_level_rewards"] = field((0, 1, 0), (0, 0, 1), (0, 0, 1), (0, 0, 1))
    batch |= advantages_of(batch, AlgorithmConfig(adv_estimator="grpo"))
    found = []
    for term in ({}, {"use_kl_loss": True, "kl_loss_coef": 0.0}, {"use_kl_loss": True, "kl_loss_coef": 0.5}):
        config = loss_config(name, term)
        loss, metrics = policy_loss(config, LossScale.count(MASK), find_policy_loss(config))(
            {"log_probs": -1 - x}, batch
        )
        found.append((torch.autograd.grad(loss, x)[0], metrics.to_floats()))
    (without, none), (zero, weightless), (pulled, told) = found
    assert not without.any() and not zero.any() and bool((pulled[MASK] != 0).all())
    assert "actor/kl_loss" not in none and told["actor/kl_loss"] == weightless["actor/kl_loss"] > 0


def loss_config(name: str, changes: dict[str, Any]) -> ActorConfig:
    own = {key: value for key, value in changes.items() if key in vars(PolicyLossConfig())}
    others = {key: value for key, value in changes.items() if key not in own}
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **own), **others)


TERMS = (
    {"entropy_coeff": 0.1},
    {"use_kl_loss": True, "kl_loss_coef": 0.5},
    {"positive_lm_loss_coef": 0.5},
)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: next(iter(term)))
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_each_term_of_the_loss_moves_the_gradient_of_every_policy_loss(
    name: str, term: dict[str, Any]
) -> None:
    plain, moved = (gradient_of(loss_config(name, changes)) for changes in ({}, term))
    assert float((moved - plain).abs().max()) > 1e-4 and not (moved - plain)[~MASK].any()


NORM = {"loss_agg_mode": "seq-mean-token-sum-norm"}
WIDE = {"clip_cov_ratio": 1.0, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("vanilla", {}, {"clip_ratio": 3.0}),
        ("vanilla", {}, {"clip_ratio_low": 0.9}),
        ("vanilla", {}, {"clip_ratio_high": 3.0}),
        ("vanilla", {}, {"clip_ratio_c": 1.1}),
        ("vanilla", {}, {"loss_agg_mode": "seq-mean-token-mean"}),
        ("vanilla", {**NORM, "loss_scale_factor": 4.0}, {**NORM, "loss_scale_factor": 8.0}),
        ("gspo", {"clip_ratio": 3.0}, {"clip_ratio": 0.01}),
        ("cispo", {}, {"clip_ratio_high": 3.0}),
        ("geo_mean", {"clip_ratio": 3.0}, {"clip_ratio": 0.01}),
        ("sapo", {}, {"tau_pos": 3.0}),
        ("sapo", {}, {"tau_neg": 3.0}),
        ("clip_cov", WIDE, {**WIDE, "clip_cov_ratio": 0.0}),
        ("clip_cov", WIDE, {**WIDE, "clip_cov_lb": 8.0}),
        ("clip_cov", WIDE, {**WIDE, "clip_cov_ub": -8.0}),
        ("kl_cov", {"kl_cov_ratio": 0.3}, {"kl_cov_ratio": 0.9}),
        ("kl_cov", {"kl_cov_ratio": 0.9}, {"kl_cov_ratio": 0.9, "ppo_kl_coef": 1.0}),
        ("dppo_tv", {}, {"clip_ratio": 0.9}),
        ("dppo_kl", {}, {"clip_ratio": 0.9}),
        ("dro", {}, {"dro_beta": 1.0}),
        ("dpo", {}, {"dpo_beta": 1.0}),
        ("dpo", {}, {"dpo_loss": "ipo"}),
        ("dpo", {}, {"dpo_label_smoothing": 0.3}),
        ("vanilla", {"use_kl_loss": True, "kl_loss_coef": 1.0},
         {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k2"}),
    ],
)  # fmt: skip
def test_a_key_of_the_loss_moves_its_gradient(
    name: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    first, second = (gradient_of(loss_config(name, changes)) for changes in (before, after))
    assert float((first - second).abs().max()) > 1e-5


def test_options_that_a_loss_does_not_take_are_refused() -> None:
    says = r"loss_mode=vanilla: policy_loss\.options has sharpness, which it does not take"
    with pytest.raises(ConfigError, match=says):
        find_policy_loss(ActorConfig(policy_loss=PolicyLossConfig(options={"sharpness": 1.0})))


REGISTERED = """
from hybridflow.algorithms.advantages import register_adv_est
from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses import register_policy_loss

@register_adv_est("registered_here")
def plain(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards

@register_policy_loss("registered_here", agg_mode="token-sum", keeps_groups=True)
def compares(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None):
    return LossOutput(log_prob.sum(), {})
"""


def test_what_a_users_file_registers_is_known_of_its_functions_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REGISTERED)
    try:
        estimator = find_estimator(AlgorithmConfig(adv_estimator=f"{tmp_path}/mine.py:plain"))
        assert estimator.needs == ("token_level_rewards", "response_mask")
        loss = find_policy_loss(
            ActorConfig(policy_loss=PolicyLossConfig(loss_mode=f"{tmp_path}/mine.py:compares"))
        )
        assert loss.keeps_groups and loss.agg_mode == "token-sum"
    finally:
        ADVANTAGE_ESTIMATORS.pop("registered_here", None)
        POLICY_LOSSES.pop("registered_here", None)


def test_bypass_mode_is_measured_in_the_updates() -> None:
    batch = loss_rows() | DataProto.from_dict({"rollout_log_probs": torch.zeros(4, 3)})
    scale = LossScale.count(MASK)
    whole, parts = Metrics(), Metrics()
    log_prob = torch.arange(12.0).reshape(4, 3) * 0.1
    for joined, cuts in ((whole, [[0, 1, 2, 3]]), (parts, [[0], [2, 3], [1]])):
        for rows_of_it in cuts:
            micro = batch.select_idxs(rows_of_it)
            joined.update(
                policy_loss(ActorConfig(), scale, find_policy_loss(ActorConfig()))(
                    {"log_probs": log_prob[rows_of_it]}, micro
                )[1]
            )
        joined.average_sums(LOSS_SHARES)
    found = whole.to_floats()
    assert found["rollout_corr/kl"] == pytest.approx(-float(log_prob[MASK].mean()))
    assert "rollout_corr/k3_kl" in found and "rollout_corr/rollout_is_max" not in found
    assert parts.to_floats() == pytest.approx(found, rel=1e-5)
