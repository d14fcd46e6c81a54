"""The example of an estimator and a loss of one's own: a run takes both by path, and their numbers are the
ones used.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_trainer import ppo_config

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.load import load_config
from hybridflow.errors import ConfigError
from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.build import build
from hybridflow.workers.losses import find_policy_loss, policy_loss

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_algorithm" / "my_algorithm.py"


def settings(*more: str) -> list[str]:
    return [
        f"algorithm.adv_estimator='{EXAMPLE}:median_baseline'",
        f"actor_rollout_ref.actor.policy_loss.loss_mode='{EXAMPLE}:quadratic_ratio'",
        *more,
    ]


def test_a_run_with_an_estimator_and_a_loss_of_ones_own(model: Path, tmp_path: Path) -> None:
    options = ["algorithm.options={floor: 0.0}", "actor_rollout_ref.actor.policy_loss.options={width: 0.5}"]
    config = ppo_config(model, tmp_path / "run", *settings(*options))
    with build(config) as trainer:
        batch = trainer.source.next(1).rows
        batch, metrics = trainer.step(batch, 1)
    scores = batch.batch["token_level_scores"].sum(-1)
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        group = torch.tensor([other == uid for other in batch.non_tensor_batch["uid"]])
        expected = scores[row] - scores[group].median()
        assert batch.batch["advantages"][row, 0] == pytest.approx(float(expected), abs=1e-6)
    found = metrics.to_floats()
    assert found["actor/num_updates"] == 2 and "actor/ratio_far" in found and "actor/pg_clipfrac" not in found


def test_an_option_that_is_not_taken_is_refused(model: Path, tmp_path: Path) -> None:
    wrong = settings("actor_rollout_ref.actor.policy_loss.options={widht: 0.5}")
    with pytest.raises(ConfigError, match=r"widht.*does not take.*width"):
        ppo_config(model, tmp_path / "run", *wrong)
    with pytest.raises(ConfigError, match=r"algorithm.options has flor.*does not take.*floor"):
        ppo_config(model, tmp_path / "run", *settings("algorithm.options={flor: 0.1}"))


OWN = """
import functools
import torch
from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses import LossInputs
from hybridflow.algorithms.policy_losses.vanilla import vanilla

CALLS = []

def few(log_prob, advantages, group_ids, clip_low, half=0.5):
    assert group_ids.shape == log_prob.shape[:1] and clip_low == 0.2 and half == 0.25
    return LossOutput(-(log_prob * advantages).sum() * half, {})

def as_verl(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None):
    return vanilla(
        LossInputs(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights)
    )

def whole(inputs, *, clip_low, loss_agg_mode="seq-mean-token-mean"):
    CALLS.append((clip_low, loss_agg_mode))
    return vanilla(inputs, clip_low=clip_low)

def wrapped(function):
    def call(*args, **kwargs):
        CALLS.append((len(args), sorted(kwargs)))
        return function(*args, **kwargs)
    return call

def named(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        CALLS.append((len(args), sorted(kwargs)))
        return function(*args, **kwargs)
    return call

plain = wrapped(as_verl)
same = named(vanilla)

def rest(log_prob, **rest):
    CALLS.append(sorted(rest))
    return LossOutput(log_prob.sum() * 0 + log_prob.mean(), {})

def pair(log_prob):
    return log_prob.sum(), {}

@named
def no_such(log_prob, uid):
    return log_prob.sum()
"""


def loss_of(folder: Path, name: str, *overrides: str) -> tuple[PolicyLoss, ActorConfig]:
    (folder / "mine.py").write_text(OWN)
    path = f"actor_rollout_ref.actor.policy_loss.loss_mode={folder}/mine.py:{name}"
    actor = load_config(PPOConfig, [path, *overrides]).config.actor_rollout_ref.actor
    return find_policy_loss(actor), actor


def share(base: PolicyLoss, actor: ActorConfig) -> float:
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(3, 4, generator=generator) for name in ("old_log_probs", "advantages")}
    rows["loss_mask"] = torch.tensor([[True] * 4, [True] * 2 + [False] * 2, [False] * 4])
    micro = DataProto.from_dict(rows | {"group_ids": torch.tensor([0, 0, 1])})
    log_probs = torch.randn(3, 4, generator=generator)
    loss = policy_loss(actor, LossScale.count(rows["loss_mask"]), base)
    return float(loss({"log_probs": log_probs}, micro)[0])


def test_a_loss_gets_what_its_arguments_name(tmp_path: Path) -> None:
    base, actor = loss_of(tmp_path, "few", "actor_rollout_ref.actor.policy_loss.options={half: 0.25}")
    assert base.keywords == ("group_ids", "clip_low", "half") and share(base, actor) != 0
    built_in = share(POLICY_LOSSES["vanilla"], actor)
    for name, wanted in (("plain", (6, [])), ("same", (0, 4))):
        base, actor = loss_of(tmp_path, name)
        assert share(base, actor) == built_in
        seen = base.function.__wrapped__.__globals__["CALLS"][-1]
        assert (seen[0], seen[1] if name == "plain" else len(seen[1])) == wanted
    base, actor = loss_of(tmp_path, "whole")
    assert base.keywords == ("clip_low", "loss_agg_mode") and share(base, actor) == built_in
    assert base.function.__wrapped__.__globals__["CALLS"][-1] == (0.2, "seq-mean-token-mean"), "its own mode"
    base, actor = loss_of(tmp_path, "rest")
    share(base, actor)
    given = base.function.__wrapped__.__globals__["CALLS"][-1]
    assert {"advantages", "scale", "group_ids", "clip_high", "loss_agg_mode"} < set(given)
    assert "inputs" not in given


def test_what_a_loss_cannot_get_or_give_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy loss pair returned a tuple, wanted LossOutput"):
        share(*loss_of(tmp_path, "pair"))
    with pytest.raises(ConfigError, match=r"policy loss no_such needs uid; there are advantages, "):
        share(*loss_of(tmp_path, "no_such"))
    own = f"actor_rollout_ref.actor.policy_loss.loss_mode={tmp_path}/mine.py:no_such"
    config = ppo_config(model, tmp_path / "run", own)
    with pytest.raises(ConfigError, match=r"there is no uid \(did you mean group_ids\?\)"), build(config):
        pass
