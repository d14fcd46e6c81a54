"""The continuous schedules in one process: nothing ahead is the synchronous run, and the bound holds."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import actor_module, build, ppo_config

from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.errors import CheckpointError, DataError, RewardError, RolloutError, TrainingError
from hybridflow.protocol import DataProto
from hybridflow.rewards.manager import RewardSession, ScoredBatch
from hybridflow.trainer.schedules.ledger import LEDGER_FILE, Ledger
from hybridflow.trainer.schedules.ledger_state import GroupPhase

STEPS = 6
GROUPS = 4  # of a step
COLOCATED = ("trainer.schedule=colocated_async", "algorithm.rollout_correction.rollout_is=token")
PPO = ("algorithm.adv_estimator=gae",)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true")


class Run:
    """A run of a few steps on a tiny model, and what it has trained on."""

    def __init__(self, model: Path, folder: Path, *keys: str, steps: int = STEPS) -> None:
        self.model = model
        self.folder = folder / "run"
        folder.mkdir(exist_ok=True)
        self.keys = ("trainer.save_freq=1", f"trainer.total_training_steps={steps}", *keys)
        self.batches: dict[int, DataProto] = {}

    def train(self, last: int | None = None) -> dict[str, torch.Tensor]:
        """Train up to step `last`, from the newest checkpoint; return the weights."""
        with build(ppo_config(self.model, self.folder, *self.keys)) as trainer:

            def keep(batch: DataProto, values: Any, step: int) -> dict[str, float]:
                self.batches[step] = batch
                return {}

            trainer.log_samples = keep
            trainer.fit(lambda step, logged: step == last)
            return {name: value.detach().clone() for name, value in actor_module(trainer).named_parameters()}

    def staleness(self) -> Counter[int]:
        """Tokens by the training steps between the weights that sampled them and those that they trained."""
        found: Counter[int] = Counter()
        for step, batch in self.batches.items():
            sampled = batch.batch["response_mask"]
            found.update((step - 1 - batch.batch["policy_version"][sampled]).tolist())
        return found

    def ledger(self) -> Ledger:
        return Ledger(self.folder / LEDGER_FILE)


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [pytest.param(GRPO, 6, id="grpo"), pytest.param(PPO, 20, id="ppo", marks=pytest.mark.slow)],
)
def test_nothing_ahead_is_the_synchronous_run(
    model: Path, tmp_path: Path, algorithm: tuple[str, ...], steps: int
) -> None:
    ahead = ("trainer.schedule=colocated_async", "trainer.async.run_ahead=0")
    one = Run(model, tmp_path / "sync", *algorithm, steps=steps)
    other = Run(model, tmp_path / "async", *algorithm, *ahead, steps=steps)
    wanted = one.train()
    found = other.train()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    digests = [read_manifest(run.folder / f"global_step_{steps}").files for run in (one, other)]
    tensors = [name for name in digests[0] if name.endswith(".safetensors") and not name.startswith("data/")]
    assert len(tensors) >= 2
    assert {name: digests[0][name] for name in tensors} == {name: digests[1][name] for name in tensors}


@pytest.mark.parametrize(
    ("partial", "ahead", "bound"),
    [("true", "0.5", 1), ("false", "1", 1), ("true", "1", 3), ("false", "2", 4)],
)
def test_the_bound_holds_for_each_token_and_each_group_is_trained_once(
    model: Path, tmp_path: Path, partial: str, ahead: str, bound: int
) -> None:
    keys = (f"trainer.async.run_ahead={ahead}", f"trainer.async.max_staleness={bound}")
    run = Run(model, tmp_path / "a", *GRPO, *COLOCATED, *keys, f"trainer.async.partial_rollout={partial}")
    run.train()
    staleness = run.staleness()
    assert min(staleness) >= 0 and 0 < max(staleness) <= bound
    with run.ledger() as ledger:
        state = ledger.state
    assert state.trained_per_step == [GROUPS] * STEPS and state.num_admitted == STEPS * GROUPS
    assert max(state.staleness) <= bound
    uids = [uid for batch in run.batches.values() for uid in dict.fromkeys(batch.non_tensor_batch["uid"])]
    assert len(uids) == len(set(uids)) == STEPS * GROUPS


@pytest.mark.parametrize("schedule", ["colocated_async", "one_step_off"])
def test_each_step_logs_who_has_waited_for_whom(model: Path, tmp_path: Path, schedule: str) -> None:
    shares = []
    keys = ("trainer.total_training_steps=3", *GRPO, *COLOCATED, f"trainer.schedule={schedule}")
    config = ppo_config(model, tmp_path / "run", *keys)
    with build(config) as trainer:

        def keep(batch: DataProto, values: Any, step: int) -> dict[str, float]:
            shares.append([values[f"fully_async/{who}/idle_ratio"] for who in ("trainer", "rollouter")])
            return {}

        trainer.log_samples = keep
        trainer.fit()
    assert len(shares) == 3
    assert all(-1e-3 < share < 1.001 for of_a_step in shares for share in of_a_step)
    waited, unused = shares[0]  # the first batch is there only after a wait, in which the engine works
    assert waited > 0 and unused < 1


@pytest.mark.parametrize("partial", ["true", "false"])
def test_responses_go_on_under_new_weights_only_where_they_may(
    model: Path, tmp_path: Path, partial: str
) -> None:
    ahead = ("trainer.async.run_ahead=1", f"trainer.async.partial_rollout={partial}")
    lengths_vary = (
        "data.max_response_length=40",
        f"actor_rollout_ref.rollout.stop_token_ids={list(range(20, 32))}",
    )
    run = Run(model, tmp_path / "a", *GRPO, *COLOCATED, *ahead, *lengths_vary)
    run.train()
    versions_of_a_row = {
        len(set(versions[mask].tolist()))
        for batch in run.batches.values()
        for versions, mask in zip(batch.batch["policy_version"], batch.batch["response_mask"])
    }
    assert (max(versions_of_a_row) > 1) == (partial == "true")


def test_a_resumed_run_trains_each_admitted_group_once(model: Path, tmp_path: Path) -> None:
    keys = ("trainer.async.run_ahead=1.5", "trainer.async.max_staleness=3")
    run = Run(model, tmp_path / "a", *GRPO, *COLOCATED, *keys)
    run.train(last=2)
    run.train(last=4)
    run.train()
    with run.ledger() as ledger:
        state = ledger.state
    assert state.trained_per_step == [GROUPS] * STEPS
    phases = Counter(state.phase(index) for index in range(state.num_admitted))
    assert phases == {GroupPhase.TRAINED: STEPS * GROUPS}
    uids = [uid for batch in run.batches.values() for uid in dict.fromkeys(batch.non_tensor_batch["uid"])]
    assert len(uids) == len(set(uids)) == STEPS * GROUPS
    assert max(run.staleness()) <= 3


def test_groups_that_dynamic_sampling_leaves_out_are_replaced(model: Path, tmp_path: Path) -> None:
    run = Run(
        model,
        tmp_path / "a",
        *GRPO,
        *COLOCATED,
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=share",
        "data.gen_batch_size=3",
    )
    run.train()
    with run.ledger() as ledger:
        state = ledger.state
    assert state.trained_per_step == [GROUPS] * STEPS
    assert state.groups["filtered"] > 0
    assert state.num_admitted == STEPS * GROUPS + state.groups["filtered"]


def test_an_error_of_a_reward_reaches_the_trainer_and_says_what_is_open(model: Path, tmp_path: Path) -> None:
    run = Run(model, tmp_path / "a", *GRPO, *COLOCATED)
    config = ppo_config(run.model, run.folder, *run.keys)
    (tmp_path / "a" / "reward.py").write_text(
        "def compute_score(*args, **kwargs):\n    raise ValueError('no')\n"
    )
    with pytest.raises(RewardError) as caught, build(config) as trainer:
        trainer.fit()
    assert any("open: version 0" in note and "being generated" in note for note in caught.value.__notes__)


def test_prompts_that_can_teach_nothing_end_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.trainer.schedules.continuous.MAX_BARREN_BATCHES", 2)
    keys = ("enable=true", "metric=score", "min_mean=9")
    none_is_that_good = [f"algorithm.filter_groups.{key}" for key in keys]
    run = Run(model, tmp_path / "a", *GRPO, *COLOCATED, *none_is_that_good)
    with pytest.raises(DataError, match="the last 8 groups were left out"):
        run.train()


def test_a_bound_that_waiting_groups_would_pass_is_refused_on_resume(model: Path, tmp_path: Path) -> None:
    far = ("trainer.async.run_ahead=3", "trainer.async.max_staleness=3")
    Run(model, tmp_path / "a", *GRPO, *COLOCATED, *far).train(last=1)
    near = ("trainer.async.run_ahead=1", "trainer.async.max_staleness=1")
    with pytest.raises(CheckpointError, match=r"too many for trainer\.async\.max_staleness=1"):
        Run(model, tmp_path / "a", *GRPO, *COLOCATED, *near).train()


def test_an_engine_that_fails_is_named_and_not_the_requests_that_it_leaves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("out of tokens")

    monkeypatch.setattr("hybridflow.rollout.native.session.Session.step", broken)
    with pytest.raises(RolloutError, match=r"the engine failed with .* left: RuntimeError: out of tokens"):
        Run(model, tmp_path / "a", *GRPO, *COLOCATED).train()


def test_an_error_of_the_training_step_says_what_is_open(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **named: Any) -> None:
        raise TrainingError("no gradient")

    monkeypatch.setattr("hybridflow.trainer.ppo.step.PPOStep.__call__", broken)
    with pytest.raises(TrainingError, match="no gradient") as caught:
        Run(model, tmp_path / "a", *GRPO, *COLOCATED).train()
    assert [note for note in caught.value.__notes__ if "in the batch of step 0: 0-3" in note]


def test_all_admitted_groups_can_be_scored_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one step ahead, two steps' groups are admitted; asyncio's own threads would be five here."""
    admitted = 2 * GROUPS
    at_once = threading.Barrier(admitted)
    calls = itertools.count()
    scored = RewardSession.result

    def together(self: RewardSession) -> ScoredBatch:
        if next(calls) < admitted:
            at_once.wait(120)  # an error where fewer come
        return scored(self)

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(RewardSession, "result", together)
    Run(model, tmp_path / "a", *GRPO, *COLOCATED, "trainer.async.run_ahead=1", steps=2).train()
    assert next(calls) >= admitted
