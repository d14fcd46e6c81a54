"""A batch with stale tokens: the loss is that of decoupled PPO (2110.00641), and what is measured of it.

The reference is written out token by token in float64. The proximal policy is the actor at the start of the
step, in every mini-batch and every epoch; the behaviour policy is the one that sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, ppo_config
from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.algorithm import RolloutCorrectionConfig
from hybridflow.errors import ConfigError
from hybridflow.protocol import DataProto
from hybridflow.workers.correction import correct_rollout
from hybridflow.workers.losses import find_policy_loss, policy_loss

RECORDING = """
from pathlib import Path

import torch

from hybridflow.algorithms.policy_losses import LossInputs
from hybridflow.algorithms.policy_losses.vanilla import vanilla


def recording(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None):
    inputs = LossInputs(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights)
    out = vanilla(inputs, clip_c=None)
    folder = Path(__file__).parent / "seen"
    folder.mkdir(exist_ok=True)
    given = (log_prob.detach(), old_log_prob, advantages, response_mask, rollout_is_weights)
    number = len(list(folder.iterdir()))
    torch.save((*given, scale.num_tokens, out.loss.detach()), folder / f"{number:03}.pt")
    return out
"""
"""A loss that keeps what each of its calls was given."""
STALE = "training/off_policy"


def decoupled(
    now: Tensor, proximal: Tensor, behaviour: Tensor, a: Tensor, mask: Tensor, cap: float, count: float
) -> Tensor:
    """−Σ_t min(π_prox/π_behav, cap)·min(r·A, clip(r, 0.8, 1.2)·A) / count, with r = π/π_prox."""
    terms = []
    for row, token in mask.nonzero().tolist():
        weight = min(float((proximal[row, token] - behaviour[row, token]).exp()), cap)
        ratio = (now[row, token] - float(proximal[row, token])).exp()
        gain = float(a[row, token])
        clipped = ratio.clamp(0.8, 1.2)
        terms.append(-weight * torch.minimum(ratio * gain, clipped * gain))
    return sum(terms, torch.zeros((), dtype=torch.float64)) / count


def test_the_weighted_loss_is_the_decoupled_objective_with_its_gradient() -> None:
    rng = torch.Generator().manual_seed(3)
    size = (5, 6)
    proximal = -3 * torch.rand(size, generator=rng, dtype=torch.float64)
    behaviour = proximal + 0.6 * torch.randn(size, generator=rng, dtype=torch.float64)
    start = proximal + 0.3 * torch.randn(size, generator=rng, dtype=torch.float64)
    a = torch.randn(size, generator=rng, dtype=torch.float64)
    mask = torch.rand(size, generator=rng) < 0.8
    tensors = {
        **dict.fromkeys(("response_mask", "loss_mask"), mask),
        **dict.fromkeys(("old_log_probs",), proximal),
        "rollout_log_probs": behaviour,
        "advantages": a,
    }
    batch = DataProto.from_dict(tensors, {"uid": [*"aabbc"]})
    found = correct_rollout(batch, RolloutCorrectionConfig(rollout_is="token"), proximal)
    assert found.weights is not None and bool((found.weights[mask] == 2.0).any()), "some are truncated"
    batch |= DataProto.from_dict({"rollout_is_weights": found.weights})
    batch.pop(["rollout_log_probs"])
    config = ActorConfig(clip_ratio_c=1e9)
    scale = LossScale.count(mask)
    ours = start.clone().requires_grad_()
    loss, _ = policy_loss(config, scale, find_policy_loss(config))({"log_probs": ours}, batch)
    theirs = start.clone().requires_grad_()
    wanted = decoupled(theirs, proximal, behaviour, a, mask, 2.0, float(mask.sum()))
    loss.backward()
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def make_stale(batch: DataProto) -> None:
    """Rows 0 and 1 as from older weights; row 1 and the tail of row 2 one version older still."""
    mask = batch.batch["response_mask"]
    batch.batch["policy_version"][0, mask[0]] = 4
    batch.batch["policy_version"][1, mask[1]] = 3
    tail = mask[2].clone()
    tail[: int(mask[2].sum()) // 2] = False
    batch.batch["policy_version"][2, tail] = 4
    shift = torch.linspace(-0.4, 0.9, mask.shape[1])
    for row, tokens in ((0, mask[0]), (1, mask[1]), (2, tail)):
        batch.batch["rollout_log_probs"][row, tokens] += shift[tokens]


@pytest.fixture
def stale_run(model: Path, tmp_path: Path) -> tuple[DataProto, Tensor, dict[str, float], list[Any]]:
    """A step with two epochs of two mini-batches on a stale batch: rows, log-probs before it, metrics, and
    what each call of the loss was given.
    """
    (tmp_path / "recording.py").write_text(RECORDING)
    keys = (
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        f"actor_rollout_ref.actor.policy_loss.loss_mode='{tmp_path}/recording.py:recording'",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.rollout.exact=false",
    )
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        trainer.source.publish(5)
        batch = trainer.source.next(1).rows
        make_stale(batch)
        start = trainer.step.roles.actor.log_probs(batch, with_entropy=False).batch["old_log_probs"]
        trained, metrics = trainer.step(batch, 1)
    seen = [torch.load(path) for path in sorted((tmp_path / "seen").iterdir())]
    return trained, start, metrics.to_floats(), seen


def test_the_proximal_policy_is_that_of_the_steps_start_in_every_mini_batch_and_epoch(
    stale_run: tuple[DataProto, Tensor, dict[str, float], list[Any]],
) -> None:
    trained, start, _, seen = stale_run
    mask = trained.batch["response_mask"]
    torch.testing.assert_close(trained.batch["old_log_probs"][mask], start[mask])
    rollout = trained.batch["rollout_log_probs"]
    behaviour_of = {round(float(old), 5): float(r) for old, r in zip(start[mask], rollout[mask])}
    apart = []
    num_tokens = 0
    for now, old, a, tokens, weights, count, loss in seen:
        behaviour = torch.zeros_like(old, dtype=torch.float64)
        for row, token in tokens.nonzero().tolist():
            behaviour[row, token] = behaviour_of[round(float(old[row, token]), 5)]
        proximal = old.double()
        expected = (proximal - behaviour).exp().clamp(max=2.0)
        torch.testing.assert_close(weights[tokens].double(), expected[tokens], rtol=1e-4, atol=1e-5)
        wanted = decoupled(now.double(), proximal, behaviour, a, tokens, 2.0, float(count))
        assert float(loss) == pytest.approx(float(wanted), rel=1e-4, abs=1e-5)
        apart.append(float((now - old)[tokens].abs().max()))
        num_tokens += int(tokens.sum())
    assert num_tokens == 2 * int(trained.batch["loss_mask"].sum()), "every token in both epochs"
    assert apart[0] < 1e-4 and min(apart[1:]) > 1e-3, "the actor moves on, and the proximal policy stays"


def test_what_is_measured_of_a_stale_batch(
    stale_run: tuple[DataProto, Tensor, dict[str, float], list[Any]],
) -> None:
    trained, start, found, _ = stale_run
    assert found[f"{STALE}/trajectory_staleness/max"] == 2.0
    assert found[f"{STALE}/trajectory_staleness/mean"] == pytest.approx(3 / 8)
    assert found[f"{STALE}/trajectory_staleness_worst/mean"] == pytest.approx(4 / 8)
    assert found[f"{STALE}/trajectory_spans/mean"] == pytest.approx(1 / 8)
    assert found[f"{STALE}/ratio/0_steps"] == pytest.approx(1.0, abs=1e-4)
    rows = trained.batch
    old_tokens = rows["response_mask"] & (rows["policy_version"] == 3)
    ratio = (start - rows["rollout_log_probs"])[old_tokens].double().exp().mean()
    assert found[f"{STALE}/ratio/2_steps"] == pytest.approx(float(ratio), rel=1e-4)
    assert found[f"{STALE}/k3_kl/2_steps"] > 1e-3 > found[f"{STALE}/k3_kl/0_steps"]
    assert sum(found[f"{STALE}/tokens/{age}_steps"] for age in range(3)) == pytest.approx(1.0)


def test_a_fresh_batch_has_no_staleness_to_tell(model: Path, tmp_path: Path) -> None:
    keys = ("algorithm.adv_estimator=grpo",)
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        _, metrics = trainer.step(trainer.source.next(1).rows, 1)
    assert not [name for name in metrics.to_floats() if name.startswith(STALE)]


def test_in_exact_mode_a_row_of_two_versions_gets_the_actors_log_probs(model: Path, tmp_path: Path) -> None:
    keys = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.exact=true")
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        trainer.source.publish(5)
        batch = trainer.source.next(1).rows
        mask = batch.batch["response_mask"]
        batch.batch["policy_version"][2, 0] = 4  # its first token alone
        batch.batch["rollout_log_probs"][2, mask[2]] -= 1.0
        before = batch.batch["rollout_log_probs"].clone()
        trained, metrics = trainer.step(batch, 1)
    apart = (trained.batch["old_log_probs"] - before).abs() * mask
    assert bool((apart[2][mask[2]] > 0.5).all()), "no token of the row is taken from the rollout"
    apart[2] = 0
    assert float(apart.max()) == 0.0, "the other rows are the rollout's, to the bit"
    found = metrics.to_floats()
    assert found["training/rollout_log_probs_diff_max"] == 0.0
    assert found[f"{STALE}/trajectory_spans/max"] == 1.0


SAMPLERS = """
class Fixed:
    def __init__(self, dataset, seed):
        self.size = len(dataset)

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self):
        return self.size


class Learning(Fixed):
    def update(self, batch):
        pass
"""


def test_an_exact_schedule_refuses_a_sampler_that_learns(model: Path, tmp_path: Path) -> None:
    (tmp_path / "samplers.py").write_text(SAMPLERS)
    keys = (
        "trainer.schedule=exact_async",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
    )

    def start(sampler: str, *further: str) -> None:
        named = f"data.sampler.class_path='{tmp_path}/samplers.py:{sampler}'"
        with build(ppo_config(model, tmp_path / "run", *keys, named, *further)):
            pass

    start("Fixed")
    start("Learning", "trainer.async.run_ahead=0")
    with pytest.raises(ConfigError, match=r"data\.sampler \(Learning\) learns from batches"):
        start("Learning")
