"""Every row's numbers stay that row's: through reordering, resampling, mini-batches, dealing to ranks and
micro-batches.
"""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS
from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config import PPOConfig
from hybridflow.config.algorithm import AlgorithmConfig, PFPPOConfig
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.balancing import karmarkar_karp, split_micro_batches
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.columns import estimate_advantages, find_estimator, identify, resample
from hybridflow.workers.mini_batches import MiniBatchPlan, mini_batches

GROUPS, WIDTH = [*"aaaabbbbccccddddeeee"], 7
ESTIMATORS = sorted(set(ADVANTAGE_ESTIMATORS) - {"grpo_passk"})  # its ties go by row id: see its own tests


def batch_of(seed: int) -> DataProto:
    """Rows of different lengths; the first token of each says which row it is."""
    rng, rows = torch.Generator().manual_seed(seed), len(GROUPS)
    lengths = torch.randint(1, WIDTH + 1, (rows,), generator=rng)
    mask = torch.arange(WIDTH)[None] < lengths[:, None]

    def tokens() -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=rng) * mask

    scores = torch.randint(0, 5, (rows,), generator=rng).float()
    placed = torch.zeros(rows, WIDTH)
    placed[torch.arange(rows), lengths - 1] = scores
    columns = {
        name: tokens()
        for name in ("values", "old_log_probs", "teacher_log_probs", "process_rewards", "ref_log_prob")
    }
    return DataProto.from_dict(
        {
            "responses": torch.arange(rows)[:, None].expand(rows, WIDTH).clone(),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "row_id": torch.arange(rows) + 100,
            "token_level_scores": placed,
            "token_level_rewards": placed.clone(),
            "sum_pi_squared": tokens().abs().clamp(0.01, 0.99),
            "reward_baselines": torch.rand(rows, generator=rng),
            "is_demonstration": torch.arange(rows) % 4 == 0,
            **columns,
        },
        {
            "uid": GROUPS,
            "acc": [float(s > 2) for s in scores],
            "format": torch.rand(rows, generator=rng).tolist(),
        },
    )


def advantages(batch: DataProto, name: str) -> DataProto:
    algorithm = AlgorithmConfig(adv_estimator=name, gamma=0.97, lam=0.9, gdpo_reward_keys=["acc", "format"])
    return estimate_advantages(batch, PPOConfig(algorithm=algorithm), find_estimator(algorithm))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_follow_their_rows(name: str) -> None:
    batch = batch_of(1)
    batch |= advantages(batch, name)
    assert bool(batch.batch["advantages"].any())
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(5))
    names = list(batch.batch.keys())
    moved = batch.select(["responses", *(key for key in names if key not in ("advantages", "returns"))])
    moved = moved.select_idxs(order)
    found = advantages(moved, name).batch["advantages"]
    torch.testing.assert_close(found, batch.batch["advantages"][order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_from_the_estimator_to_the_micro_batch(method: str) -> None:
    batch = batch_of(2)
    batch |= identify(batch)
    batch |= advantages(batch, "gae")
    truth = {
        int(row[0]): (a.clone(), r.clone())
        for row, a, r in zip(*(batch.batch[k] for k in ("responses", "advantages", "returns")))
    }
    known = dict(zip(batch.batch["row_id"].tolist(), batch.batch["responses"][:, 0].tolist(), strict=True))
    batch = resample(batch, PFPPOConfig(reweight_method=method), generator(3, "pf_ppo", 1))  # type: ignore[arg-type]
    for row_id, number in zip(batch.batch["row_id"].tolist(), batch.batch["responses"][:, 0].tolist()):
        assert known.get(row_id, number) == number, "an id of a row that was not drawn stays its own"
    assert len(batch) == len(GROUPS) and len(set(batch.batch["row_id"].tolist())) == len(GROUPS), (
        "duplicates get ids of their own"
    )
    assert any(
        count > 1 for count in torch.unique(batch.batch["responses"][:, 0], return_counts=True)[1].tolist()
    )
    seen: list[int] = []

    def update(mini: DataProto, scale: LossScale) -> Metrics:
        lengths = mini.batch["loss_mask"].sum(-1).tolist()
        for rank in karmarkar_karp(lengths, 2):
            sharded = mini.select_idxs(rank)
            sizes = sharded.batch["loss_mask"].sum(-1).tolist()
            for rows in split_micro_batches(sizes, max_tokens=12):
                for row in rows:
                    number = int(sharded.batch["responses"][row, 0])
                    assert torch.equal(sharded.batch["advantages"][row], truth[number][0])
                    assert torch.equal(sharded.batch["returns"][row], truth[number][1])
                    assert sharded.non_tensor_batch["uid"][row] == GROUPS[number]
                    seen.append(number)
        return Metrics()

    plan = MiniBatchPlan(groups=2, epochs=1, shuffle=True, seed=1, step=1)
    for mini, scale in mini_batches(batch, plan, Metrics(), name="actor"):
        update(mini, scale)
    assert sorted(seen) == sorted(batch.batch["responses"][:, 0].tolist())
