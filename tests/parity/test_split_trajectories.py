"""One trajectory is one sample, however many rows it has: cut into rows, with given tokens between, it gives
the same advantages, filters, baselines, corrections, metrics and losses.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import reference_advantages
import reference_maths as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS
from hybridflow.algorithms.aggregation import LossScale
from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.algorithm import (
    AlgorithmConfig,
    KLControlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from hybridflow.config.root import CriticConfig
from hybridflow.episodes.filters import filter_overlong, groups_to_keep, metric_values, shape_overlong
from hybridflow.episodes.pipeline import _baselines_as_column
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.packing import make_rows
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.columns import (
    apply_kl_penalty,
    estimate_advantages,
    find_estimator,
    identify,
    kl_controller,
    resample,
)
from hybridflow.trainer.ppo.data_metrics import batch_metrics
from hybridflow.workers.correction import correct_rollout
from hybridflow.workers.losses import critic_loss, policy_loss
from hybridflow.workers.mini_batches import MiniBatchPlan, mini_batches

GROUPS = [*"aaabbbbccdde"]
LONGEST = 9
NAN = float("nan")
FEW = settings(max_examples=12, deadline=None, derandomize=True)
SEED = st.integers(0, 10_000)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def whole(seed: int) -> DataProto:
    """Trajectories of one row each, whose sampled tokens stand without gaps; numbers are float64."""
    rng = torch.Generator().manual_seed(seed)
    count = len(GROUPS)
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=rng)
    lengths[4] = 0
    mask = torch.arange(LONGEST) < lengths[:, None]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def tokens() -> Tensor:
        return torch.where(mask, numbers(count, LONGEST), 0.0)

    rewards = torch.randint(0, 3, (count,), generator=rng).double()
    scores = torch.zeros(count, LONGEST, dtype=torch.float64)
    scores[torch.arange(count), (lengths - 1).clamp(min=0)] = rewards
    old = torch.where(mask, -numbers(count, LONGEST).abs(), 0.0)
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "loss_mask": mask & (torch.rand(count, LONGEST, generator=rng) < 0.8),
            "call": torch.zeros(count, LONGEST, dtype=torch.int32),
            "trajectory_id": torch.arange(count) * 7,
            "row_id": torch.arange(count) * 70,
            "token_level_scores": scores * mask,
            "token_level_rewards": scores * mask + 0.1 * tokens().abs(),
            "values": tokens(),
            "returns": tokens(),
            "advantages": tokens(),
            "old_log_probs": old,
            "rollout_log_probs": old + 0.2 * tokens(),
            "ref_log_prob": old + 0.3 * tokens(),
            "teacher_log_probs": old + 0.3 * tokens(),
            "log_probs": old + 0.3 * tokens(),
            "process_rewards": tokens(),
            "sum_pi_squared": tokens().abs().clamp(max=0.9),
            "reward_baselines": numbers(count),
            "is_demonstration": torch.arange(count) % 4 == 0,
        },
        {
            "uid": GROUPS,
            "acc": [float(reward > 1) for reward in rewards],
            "format": numbers(count).tolist(),
            "finish_reason": ["length" if length == LONGEST else "stop" for length in lengths.tolist()],
        },
    )


class Split:
    """The same trajectories in one to four rows each: every call is a run of sampled tokens, a row takes one
    or more of them, and between them are given tokens with junk in every column.
    """

    def __init__(self, plain: DataProto, seed: int, *, turns: bool = False) -> None:
        rng = random.Random(seed)
        self.plain = plain
        rows: list[list[tuple[int, int] | None]] = []  # (call, position in the trajectory), None: given
        owner: list[int] = []
        for sample, length in enumerate(plain.batch["response_mask"].sum(-1).tolist()):
            ends = sorted({*rng.sample(range(1, length), min(3, length - 1)), length}) if length else [0]
            made: list[list[tuple[int, int] | None]] = [[]]
            for call, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if call and rng.random() < 0.7:
                    made.append([])
                row = rng.choice(made) if turns else made[-1]
                row += [None] * rng.randrange(3) + [(call, position) for position in range(start, end)]
            made = [row for row in made if row] or [[]]
            rows += made
            owner += [sample] * len(made)
        self.owner = torch.tensor(owner)
        width = max(map(len, rows)) + 1
        self.mask = torch.tensor(
            [[x is not None for x in row] + [False] * (width - len(row)) for row in rows]
        )
        self.places = torch.tensor([x[1] for row in rows for x in row if x is not None])
        calls = torch.tensor([x[0] for row in rows for x in row if x is not None], dtype=torch.int32)
        tensors: dict[str, Any] = {
            name: self.cut(column) if column.dim() == 2 else column[self.owner]
            for name, column in plain.batch.items()
        }
        tensors["call"][self.mask] = calls
        tensors["row_id"] = tensors["row_id"] + torch.arange(len(owner))
        columns = {name: [column[i] for i in owner] for name, column in plain.non_tensor_batch.items()}
        self.batch = DataProto.from_dict(tensors, columns)

    def cut(self, column: Tensor, junk: float = NAN) -> Tensor:
        """A column [K, L] of the whole trajectories on the rows, with junk on given tokens."""
        fill = junk if column.is_floating_point() else 0
        made = column.new_full(self.mask.shape, fill)
        made[self.mask] = column[self.owner[self.mask.nonzero()[:, 0]], self.places]
        return made

    def same(self, found: Tensor, expected: Tensor) -> None:
        """Compare a column of the rows with one of the whole trajectories, sampled tokens only."""
        torch.testing.assert_close(found[self.mask], self.cut(expected)[self.mask], **CLOSE)


def algorithm(name: str, **settings: Any) -> AlgorithmConfig:
    if name == "gdpo":
        settings["gdpo_reward_keys"] = ["acc", "format", "score"]
    return AlgorithmConfig(adv_estimator=name, gamma=0.97, lam=0.9, **settings)


def advantages(batch: DataProto, name: str) -> DataProto:
    config = algorithm(name)
    return estimate_advantages(batch, PPOConfig(algorithm=config), find_estimator(config))


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
@FEW
@given(SEED)
def test_advantages_do_not_see_rows(name: str, seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    assert len(split.batch) > len(plain)
    expected = advantages(plain, name).batch
    found = advantages(split.batch, name).batch
    for column in ("advantages", "returns"):
        split.same(found[column], expected[column])
        assert not found[column][~split.mask].any(), "given tokens have none"


@FEW
@given(SEED)
def test_advantages_against_slow_references(seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    rows = plain.batch
    mask = rows["response_mask"].tolist()
    learn = rows["loss_mask"].tolist()
    rewards = rows["token_level_rewards"].tolist()
    groups = [GROUPS.index(uid) for uid in GROUPS]
    to_go = reference_advantages.to_go(rewards, mask, 0.97)
    gae, returns = reference.gae(rewards, rows["values"].tolist(), mask, 0.97, 0.9)
    expected = {
        "grpo": reference.grpo(rewards, mask, groups, True),
        "rloo": reference_advantages.rloo(rewards, mask, groups),
        "reinforce_plus_plus": reference.whiten(to_go, learn),
        "gae": reference.whiten(gae, learn),
    }
    for name, table in expected.items():
        split.same(
            advantages(split.batch, name).batch["advantages"], torch.tensor(table, dtype=torch.float64)
        )
    split.same(advantages(split.batch, "gae").batch["returns"], torch.tensor(returns, dtype=torch.float64))


@FEW
@given(SEED)
def test_branches_that_take_turns_follow_the_order_of_calls(seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed, turns=True)
    for name in ("reinforce_plus_plus", "remax", "grpo"):
        split.same(
            advantages(split.batch, name).batch["advantages"], advantages(plain, name).batch["advantages"]
        )


def test_a_critic_refuses_branches_that_take_turns() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    tensors = {name: torch.zeros(2, 2) for name in ("token_level_rewards", "values")}
    tensors |= {"response_mask": mask, "loss_mask": mask, "trajectory_id": torch.tensor([5, 5])}
    in_turn = DataProto.from_dict({**tensors, "call": torch.tensor([[0, 1], [2, 3]])}, {"uid": ["a", "a"]})
    assert not ByTrajectory(in_turn).interleaved
    advantages(in_turn, "gae")
    mixed = DataProto.from_dict({**tensors, "call": torch.tensor([[0, 2], [1, 1]])}, {"uid": ["a", "a"]})
    advantages(mixed, "reinforce_plus_plus")
    with pytest.raises(ConfigError, match=r"adv_estimator=gae .* side by side, .*grpo, rloo"):
        advantages(mixed, "gae")


@FEW
@given(SEED)
def test_what_counts_samples_counts_trajectories(seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    samples = ByTrajectory(split.batch).samples
    assert list(samples.non_tensor_batch["uid"]) == GROUPS
    for metric in ("score", "acc", "format"):
        values = metric_values(samples, metric)
        assert values == metric_values(plain, metric)
        assert groups_to_keep(GROUPS, values) == groups_to_keep(GROUPS, metric_values(plain, metric))
    for columns in (("uid", "acc"), ("uid",)):
        ours = identify(split.batch.select(None, list(columns))).batch
        theirs = identify(plain.select(None, list(columns))).batch
        assert ours["positive"].tolist() == theirs["positive"][split.owner].tolist()
        assert ours["group_ids"].tolist() == theirs["group_ids"][split.owner].tolist()
    # the metrics of prompts and of all tokens that a model reads are of rows
    for batch in (plain, split.batch):
        rows = batch.batch
        rows["responses"] = rows["response_mask"].long()
        rows["attention_mask"] = torch.cat([rows["response_mask"][:, :1], rows["response_mask"]], dim=1)
    ours = batch_metrics(split.batch, has_critic=True).to_floats()
    theirs = batch_metrics(plain, has_critic=True).to_floats()
    of_rows = {name for name in theirs if name.startswith("prompt_length")} | {"perf/total_num_tokens"}
    assert {name: ours[name] for name in theirs.keys() - of_rows} == pytest.approx(
        {name: theirs[name] for name in theirs.keys() - of_rows}
    )
    assert filter_overlong(split.batch).to_floats() == filter_overlong(plain).to_floats()
    assert not split.batch.batch["loss_mask"][
        [x == "length" for x in split.batch.non_tensor_batch["finish_reason"]]
    ].any()


@FEW
@given(SEED)
def test_the_baseline_is_the_score_of_a_whole_greedy_trajectory(seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    for batch in (plain, split.batch):
        batch.pop(["reward_baselines"])
        batch.batch["token_level_scores"].nan_to_num_(0.0)  # a dense reward, all rows of which count
        batch.batch["token_level_scores"] += batch.batch["response_mask"]
    greedy = torch.tensor([sample in (0, 3, 7, 9, 11) for sample in range(len(GROUPS))])
    expected = _baselines_as_column(plain, greedy)
    found = _baselines_as_column(split.batch, greedy[split.owner])
    samples = ByTrajectory(found).samples
    assert samples.batch["reward_baselines"].tolist() == expected.batch["reward_baselines"].tolist()
    assert len(found) == int((~greedy)[split.owner].sum())


def test_other_columns_are_those_of_the_first_row() -> None:
    tensors = make_rows([[1], [2, 3], [4]], [[5], [6, 7], [8]], 0)
    tensors |= {"trajectory_id": torch.tensor([9, 4, 9]), "x": torch.tensor([1.5, 2.5, 3.5])}
    view = ByTrajectory(DataProto.from_dict(tensors, {"uid": ["a", "b", "c"]}))
    assert view.samples.batch["responses"].tolist() == [[5, 8], [6, 7]]
    assert view.samples.batch["x"].tolist() == [1.5, 2.5]
    assert list(view.samples.non_tensor_batch["uid"]) == [
        "a",
        "b",
    ]
    assert not {"prompts", "input_ids", "attention_mask"} & {*view.samples.names()}
    assert view.first_rows.tolist() == [0, 1] and view.sample_of_row.tolist() == [0, 1, 0]
    nothing = make_rows([[1], [2]], [[], []], 0) | {"trajectory_id": torch.tensor([3, 3])}
    empty = ByTrajectory(DataProto.from_dict(nothing))
    assert not empty.samples.batch["response_mask"].any() and len(empty.samples) == 1


@FEW
@given(SEED)
def test_the_overlong_penalty_judges_a_trajectory_once(seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    limits = {"max_len": 6, "buffer_len": 3, "factor": 2.0}
    expected = shape_overlong(plain, **limits)  # type: ignore[arg-type]
    found = shape_overlong(split.batch, **limits)  # type: ignore[arg-type]
    split.same(found.batch["token_level_scores"], expected.batch["token_level_scores"])
    penalties = expected.non_tensor_batch["overlong_reward"]
    assert list(found.non_tensor_batch["overlong_reward"]) == [penalties[i] for i in split.owner.tolist()]


@FEW
@given(SEED)
def test_the_kl_penalty_and_its_controller(seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    config = algorithm(
        "grpo", use_kl_in_reward=True, kl_penalty="k3", kl_ctrl=KLControlConfig(type="adaptive", horizon=50)
    )
    controllers = [kl_controller(config), kl_controller(config)]
    expected, theirs = apply_kl_penalty(plain, config, controllers[0])
    found, ours = apply_kl_penalty(split.batch, config, controllers[1])
    split.same(found.batch["token_level_rewards"], expected.batch["token_level_rewards"])
    assert ours.to_floats() == pytest.approx(theirs.to_floats())
    assert controllers[0].value == pytest.approx(controllers[1].value, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@FEW
@given(SEED)
def test_rollout_correction(level: str, seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    config = RolloutCorrectionConfig(
        rollout_is=level,  # type: ignore[arg-type]
        rollout_is_batch_normalize=True,
        rollout_rs="seq_mean_k1,seq_max_k2",
        rollout_rs_threshold="1.1,0.2",
    )
    expected = correct_rollout(plain, config, plain.batch["old_log_probs"])
    split.batch.pop(["call"])  # mini-batches have none, and sums need no order
    found = correct_rollout(split.batch, config, split.batch.batch["old_log_probs"])
    assert found.weights is not None and expected.weights is not None
    assert found.keep is not None and expected.keep is not None
    split.same(found.weights, expected.weights)
    assert torch.equal(found.keep, split.cut(expected.keep))
    assert found.metrics.to_floats() == pytest.approx(expected.metrics.to_floats())


@FEW
@given(SEED)
def test_draws_take_all_rows_of_a_trajectory(seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    expected = resample(plain, PFPPOConfig(), generator(seed, "pf_ppo", 1))
    found = resample(split.batch, PFPPOConfig(), generator(seed, "pf_ppo", 1))
    assert len(set(found.batch["row_id"].tolist())) == len(found)
    samples = ByTrajectory(found).samples
    assert list(samples.non_tensor_batch["format"]) == list(expected.non_tensor_batch["format"])
    torch.testing.assert_close(
        samples.batch["old_log_probs"].sum(-1), expected.batch["old_log_probs"].sum(-1), **CLOSE
    )
    plan = MiniBatchPlan(groups=2, epochs=1, shuffle=True, seed=1, step=1, drawn_from=5)
    seen: list[set[int]] = []
    sizes: list[float] = []

    def update(mini: DataProto, scale: LossScale) -> Metrics:
        seen.append(set(mini.batch["trajectory_id"].tolist()))
        sizes.append(scale.num_sequences)
        return Metrics()

    for mini, scale in mini_batches(found, plan, Metrics(), name="actor"):
        update(mini, scale)
    assert sum(map(len, seen)) == len(set().union(*seen)), "all rows of a draw meet in one mini-batch"
    assert sizes == [len(each) for each in seen]


def update(batch: DataProto, seed: int, **settings: Any) -> tuple[float, Tensor]:
    """The loss of each mini-batch added up over micro-batches of random rows; its gradient by token."""
    leaf = batch.batch["log_probs"].nan_to_num(0.0).requires_grad_()
    batch = batch.select()
    batch.batch["number"] = torch.arange(len(batch))
    rng = random.Random(seed)
    total = torch.zeros((), dtype=torch.float64)
    settings = {"loss_scale_factor": 3.0, **settings}
    config = ActorConfig(use_kl_loss=True, entropy_coeff=0.1, positive_lm_loss_coef=0.2, **settings)
    critic = settings["loss_agg_mode"]

    def one(mini: DataProto, scale: LossScale) -> Metrics:
        nonlocal total
        rows = list(range(len(mini)))
        rng.shuffle(rows)
        half = rng.randrange(len(rows) + 1)
        for part in (rows[:half], rows[half:]):
            micro = mini.select_idxs(part)
            now = leaf[micro.batch["number"]]
            outputs = {"log_probs": now, "entropy": now.square(), "values": 2.0 * now}
            total = total + policy_loss(config, scale, POLICY_LOSSES["vanilla"])(outputs, micro)[0]
            value = critic_loss(CriticConfig(loss_agg_mode=critic), scale, 3.0)(outputs, micro)[0]
            total = total + value
        return Metrics()

    batch |= identify(batch)
    for mini, scale in mini_batches(batch, MiniBatchPlan(2, 1, True, seed, 1), Metrics(), name="actor"):
        one(mini, scale)
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), gradient


COLUMNS_BEFORE = [
    *("response_mask", "loss_mask", "call", "trajectory_id", "token_level_scores", "values"),
    *("old_log_probs", "ref_log_prob", "log_probs"),
]
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", MODES)
@settings(FEW, max_examples=4)
@given(SEED)
def test_losses_of_a_step(mode: str, seed: int) -> None:
    plain = whole(seed)
    split = Split(plain, seed)
    for name in ("grpo", "rloo", "reinforce_plus_plus", "gae"):
        batches = [batch.select(COLUMNS_BEFORE) | advantages(batch, name) for batch in (plain, split.batch)]
        expected, theirs = update(batches[0], seed, loss_agg_mode=mode)
        found, ours = update(batches[1], seed, loss_agg_mode=mode)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
        split.same(ours, theirs)


def test_a_mean_over_rows_weighs_a_row_by_the_rows_of_its_trajectory() -> None:
    """Trajectories of 2, 1 and 3 rows, of which one has nothing to learn from; by hand."""
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0], [0, 1], [1, 1]]).bool()
    learn = mask.clone()
    learn[4] = False
    x = torch.arange(12, dtype=torch.float64).view(6, 2)
    names = torch.tensor([3, 3, 1, 8, 8, 8])
    batch = DataProto.from_dict(
        {"response_mask": mask, "loss_mask": learn, "trajectory_id": names, "x": x}, {"uid": [*"aaabbb"]}
    )
    found: list[float] = []

    def one(mini: DataProto, scale: LossScale) -> Metrics:
        assert mini.batch["trajectory_rows"].tolist() == [2, 2, 1, 2, 2]
        assert scale == LossScale(8.0, 3.0)
        rows = mini.batch
        scale = replace(scale, trajectory_rows=rows["trajectory_rows"])
        found.append(float(scale.weighted(rows["x"][:, 0]).sum()))
        return Metrics()

    for mini, scale in mini_batches(batch, MiniBatchPlan(2, 1, False, 0, 1), Metrics(), name="actor"):
        one(mini, scale)
    assert found == [0 / 2 + 2 / 2 + 4 + 6 / 2 + 10 / 2]
