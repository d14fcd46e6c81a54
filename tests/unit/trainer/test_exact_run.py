"""Runs in exact mode: no old-log-prob pass, no difference, and an alarm when there is one. And fast mode that
saves the pass.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import actor_module, build, ppo_config
from torch import Tensor

from hybridflow.errors import ConfigError, TrainingError
from hybridflow.models.policy import PolicyModel
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.protocol import DataProto
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.workers import ActorGroup
from hybridflow.workers.log_prob_check import LogProbCheck, look_first

GRPO = ("algorithm.adv_estimator=grpo", "trainer.total_training_steps=3", "trainer.test_freq=-1")
ROLLOUT = "actor_rollout_ref.rollout"
TAKEN, APART, CHECKED = (
    "training/old_log_probs_from_rollout",
    "training/rollout_log_probs_diff_max",
    "training/rollout_rows_checked",
)


def train(model: Path, run: Path, *overrides: str) -> dict[int, dict[str, float]]:
    run.parent.mkdir(parents=True, exist_ok=True)
    with build(ppo_config(model, run, *GRPO, *overrides)) as trainer:
        trainer.fit()
    return read_metrics(run / "metrics.jsonl")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each of the actor's passes for log-probs."""
    seen: list[int] = []
    real = ActorGroup.log_probs

    def counted(self: ActorGroup, batch: DataProto, **asked: bool) -> DataProto:
        seen.append(len(batch))
        return real(self, batch, **asked)

    monkeypatch.setattr(ActorGroup, "log_probs", counted)
    whole = ActorGroup.keep_log_probs

    def counted_whole(self: ActorGroup, batch: DataProto, **asked: Any) -> DataProto:
        seen.append(len(batch))
        return whole(self, batch, **asked)

    monkeypatch.setattr(ActorGroup, "keep_log_probs", counted_whole)
    return seen


def test_three_steps_without_a_pass_and_without_a_difference(
    model: Path, tmp_path: Path, passes: list[int]
) -> None:
    lines = train(model, tmp_path / "run", f"{ROLLOUT}.exact=auto", f"{ROLLOUT}.exact_check_rows=3")
    assert sorted(lines) == [1, 2, 3]
    for line in lines.values():
        assert line[APART] == 0.0 and line[TAKEN] == 1.0
        assert line[CHECKED] == 4 + 3  # the first mini-batch, and three of the other
        assert line["training/first_ratio_min"] == line["training/first_ratio_max"] == 1.0
        assert line["actor/entropy"] > 0 and line["actor/num_updates"] == 2
    assert passes == [3, 3, 3]


def test_with_one_mini_batch_the_ratio_is_exactly_one(model: Path, tmp_path: Path, passes: list[int]) -> None:
    for line in train(
        model, tmp_path / "run", f"{ROLLOUT}.exact=true", "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    ).values():
        assert line["actor/ppo_kl"] == 0.0 and line["actor/pg_clipfrac"] == 0.0 and line[CHECKED] == 8
    assert passes == []


@pytest.mark.parametrize(
    "overrides", [(), ("trainer.critic_warmup=2",)], ids=["in_the_update", "without_an_update"]
)
def test_one_flipped_bit_in_the_weights_that_generate_stops_the_run(
    model: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    with build(ppo_config(model, run, *GRPO, f"{ROLLOUT}.exact=true", *overrides)) as trainer:
        before = {name: value.clone() for name, value in actor_module(trainer).state_dict().items()}
        worker: Any = trainer.step.roles.actor.backend.worker("rollout")  # type: ignore[attr-defined]
        policy: PolicyModel = deepcopy(worker.engine.policy)
        flipped = policy.hf.get_submodule("model.layers.0.mlp.down_proj").get_parameter("weight")
        flipped.detach().view(torch.int32)[3, 5] ^= 1 << 20  # the lowest ones are rounded away here
        worker.engine = NativeEngine(policy, eos_token_ids=worker.engine.eos_token_ids)
        with pytest.raises(
            TrainingError,
            match=r"exact mode, step 1: row \d+ of prompt \S+, response token \d+ has log-prob -\d",
        ):
            trainer.fit()
        after = actor_module(trainer).state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items()), (
            "nothing was learned from it"
        )


def test_a_run_that_cannot_be_exact_says_why_once_or_is_refused(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = ("data.max_response_length=300", "trainer.total_training_steps=1")
    with (
        caplog.at_level(logging.INFO),
        build(ppo_config(model, tmp_path / "run", *GRPO, f"{ROLLOUT}.exact=auto", *long)) as trainer,
    ):
        assert actor_module(trainer).exact is None
    assert [record.message for record in caplog.records if "fast mode" in record.message] == [
        "fast mode: a row may have data.max_prompt_length=32 + data.max_response_length=300 = 332 "
        "tokens, and actor_rollout_ref.rollout.exact=auto takes up to 256, "
        "beyond which it costs more than it saves"
    ]
    half = ("actor_rollout_ref.model.dtype=bfloat16", f"{ROLLOUT}.exact=true")
    with (
        pytest.raises(ConfigError, match="exact=true cannot hold: the model computes in bfloat16"),
        build(ppo_config(model, tmp_path / "other", *GRPO, *half)),
    ):
        pass


def off_by_a_rounding(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """As on a machine where a pass over so many rows differs."""
    real = ActorGroup.log_probs

    def rounded(self: ActorGroup, batch: DataProto, **asked: bool) -> DataProto:
        columns = real(self, batch, **asked)
        if len(batch) == num_rows:
            columns.batch["old_log_probs"] = columns.batch["old_log_probs"] * (1 + 1e-6)
        return columns

    monkeypatch.setattr(ActorGroup, "log_probs", rounded)


@pytest.mark.parametrize("where", ["in_the_rows_checked", "in_the_update"])
def test_auto_brings_the_pass_back_and_keeps_kernels_and_run_where_a_difference_shows(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    passes: list[int],
    where: str,
) -> None:
    if where == "in_the_rows_checked":
        off_by_a_rounding(monkeypatch, num_rows=3)
    else:
        monkeypatch.setattr("hybridflow.workers.losses.look_first", look_at_others)
    lines = train(model, tmp_path / "run", f"{ROLLOUT}.exact=auto", f"{ROLLOUT}.exact_check_rows=3")
    told = [
        record.message
        for record in caplog.records
        if "old log-probs are computed from now on" in record.message
    ]
    assert len(told) == 1 and "in step 1 log-probs of rollout and training differ by up to" in told[0]
    assert passes == ([3, 8, 8, 8] if where == "in_the_rows_checked" else [3, 8, 8])
    assert lines[3][APART] == 0.0 and TAKEN not in lines[3], "the kernels are still batch-invariant"


def test_a_run_whose_pass_is_back_keeps_it_and_its_kernels_after_a_resume(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = (f"{ROLLOUT}.exact_check_rows=3", "trainer.save_freq=1")
    with monkeypatch.context() as odd:
        off_by_a_rounding(odd, num_rows=3)
        train(model, tmp_path / "run", *keys, "trainer.total_training_steps=1")
    with caplog.at_level(logging.INFO), build(ppo_config(model, tmp_path / "run", *GRPO, *keys)) as trainer:
        assert trainer.state.step == 1 and actor_module(trainer).exact is not None
        assert not trainer.step.old_log_probs.exact.reuses
    assert "exact mode: before the checkpoint that this run goes on from" in caplog.text
    again = (*keys, f"{ROLLOUT}.exact=true")
    with build(ppo_config(model, tmp_path / "run", *GRPO, *again)) as trainer:
        assert trainer.state.step == 1 and trainer.step.old_log_probs.exact.reuses, (
            "asked for, it is tried anew"
        )


def test_a_row_of_another_version_is_neither_compared_nor_taken(
    model: Path, tmp_path: Path, passes: list[int]
) -> None:
    with build(ppo_config(model, tmp_path / "run", *GRPO, f"{ROLLOUT}.exact=true")) as trainer:
        batch = trainer.source.next(1).rows
        stale = batch.batch["response_mask"][0]
        batch.batch["policy_version"][0, stale] = -1
        batch.batch["rollout_log_probs"][0, stale] -= 1.0  # as under other weights
        trained, metrics = trainer.step(batch, 1)
        found = metrics.to_floats()
        assert passes[-1] == 1 and found[APART] == 0.0 and found[TAKEN] == 1.0
        apart = (trained.batch["old_log_probs"] - batch.batch["rollout_log_probs"])[0, stale]
        assert bool((apart > 0.5).all()), "its old log-probs are the actor's"
        assert trainer.step.old_log_probs.exact.reuses and actor_module(trainer).exact is not None


def look_at_others(outputs: dict[str, Tensor], micro: DataProto, watch: LogProbCheck) -> Metrics:
    """As on a machine where the forward of an update differs."""
    return look_first({**outputs, "log_probs": outputs["log_probs"] * (1 + 1e-6)}, micro, watch)


@pytest.mark.parametrize("left_out", [[], [0, 1, 2, 3], list(range(8))], ids=["none", "half", "all"])
def test_rows_that_the_update_leaves_out_are_checked_beside_it(
    model: Path, tmp_path: Path, left_out: list[int]
) -> None:
    with build(ppo_config(model, tmp_path / "run", *GRPO, f"{ROLLOUT}.exact=true")) as trainer:
        batch = trainer.source.next(1).rows
        keep = torch.ones_like(batch.batch["loss_mask"])
        keep[left_out] = False  # as responses that were cut at the length limit
        _, metrics = trainer.step(batch.narrow_loss_mask(keep), 1)
        assert metrics.to_floats()[CHECKED] >= 8, "every row, here or in the first update"
        keep[:] = True
        keep[0] = False
        trainer.source.publish(1)
        batch = trainer.source.next(2).rows
        batch.batch["rollout_log_probs"][0, 0] *= 1 + 1e-3
        with pytest.raises(
            TrainingError, match=r"exact mode, step 2: row \d+ of prompt 2-0, response token 0 "
        ):
            trainer.step(batch.narrow_loss_mask(keep), 2)


def test_rows_are_compared_with_the_version_that_the_source_has_published(
    model: Path, tmp_path: Path
) -> None:
    """Whatever number that is: a step does not say which weights are the actor's."""
    with build(ppo_config(model, tmp_path / "run", *GRPO, f"{ROLLOUT}.exact=true")) as trainer:
        trainer.source.publish(7)
        _, metrics = trainer.step(trainer.source.next(1).rows, 1)
    assert metrics.to_floats()[CHECKED] == 8.0


def test_exact_mode_checks_the_rows_that_have_no_partner(model: Path, tmp_path: Path) -> None:
    pairs = (
        "algorithm.adv_estimator=online_dpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode=dpo",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.exact=true",
    )
    with build(ppo_config(model, tmp_path / "run", *pairs)) as trainer:
        batch = trainer.source.next(1).rows
        scores = batch.batch["token_level_scores"].sum(-1)[:4]
        odd = int(((scores != scores.max()) & (scores != scores.min())).nonzero()[0, 0])
        batch.batch["rollout_log_probs"][odd, 0] *= 1 + 1e-3
        with pytest.raises(
            TrainingError, match=r"exact mode, step 1: row \d+ of prompt 1-0, response token 0 "
        ):
            trainer.step(batch, 1)


def test_an_estimator_that_needs_the_pass_keeps_it(model: Path, tmp_path: Path, passes: list[int]) -> None:
    line = train(
        model,
        tmp_path / "run",
        "algorithm.adv_estimator=optimal_token_baseline",
        "trainer.total_training_steps=1",
        f"{ROLLOUT}.exact=true",
    )[1]
    assert passes == [8] and line[APART] == 0.0 and TAKEN not in line


def test_auto_is_fast_where_no_pass_would_be_saved(model: Path, tmp_path: Path) -> None:
    keys = ("algorithm.adv_estimator=optimal_token_baseline", f"{ROLLOUT}.exact=auto")
    with build(ppo_config(model, tmp_path / "run", *GRPO, *keys)) as trainer:
        assert actor_module(trainer).exact is None


def test_fast_mode_saves_the_pass_where_the_rows_it_checks_are_close(
    model: Path, tmp_path: Path, passes: list[int]
) -> None:
    rows = (f"{ROLLOUT}.exact_check_rows=2", f"{ROLLOUT}.exact=false")
    close = train(model, tmp_path / "a" / "run", f"{ROLLOUT}.reuse_log_probs_within=1e-3", *rows)
    assert passes == [2, 2, 2] and all(
        line[TAKEN] == 1.0 and 0 < line[APART] < 1e-3 for line in close.values()
    )
    passes.clear()
    strict = train(
        model,
        tmp_path / "b" / "run",
        f"{ROLLOUT}.reuse_log_probs_within=0",
        *rows,
        "trainer.total_training_steps=1",
    )
    assert passes == [2, 8] and strict[1][TAKEN] == 0.0 and strict[1][APART] > 0


def test_a_step_that_takes_the_rollouts_log_probs_still_measures_how_far_they_are(
    model: Path, tmp_path: Path, passes: list[int]
) -> None:
    keys = (f"{ROLLOUT}.exact=false", f"{ROLLOUT}.reuse_log_probs_within=1e-3")
    for line in train(model, tmp_path / "run", *keys).values():
        assert line[TAKEN] == 1.0 and 0 < abs(line["rollout_corr/kl"]) < 1e-3
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
        assert line["rollout_corr/training_ppl"] > 1.0 and "rollout_corr/rollout_is_std" not in line
    assert passes == [8, 8, 8], "exact_check_rows=16 looks at all rows"


@pytest.mark.parametrize(
    "correction",
    [("rollout_is=token",), ("rollout_rs=token_k2", "rollout_rs_threshold=1.0")],
    ids=["weights", "rejection"],
)
def test_rollout_correction_keeps_the_pass_that_it_compares_with(
    model: Path, tmp_path: Path, passes: list[int], correction: tuple[str, ...]
) -> None:
    corrected = [f"algorithm.rollout_correction.{key}" for key in correction]
    keys = (f"{ROLLOUT}.exact=false", f"{ROLLOUT}.exact_check_rows=2", *corrected)
    without = train(model, tmp_path / "a" / "run", *keys)
    lines = train(model, tmp_path / "b" / "run", f"{ROLLOUT}.reuse_log_probs_within=1e-3", *keys)
    assert passes == [8] * 6
    for step, line in lines.items():
        assert TAKEN not in line and line["rollout_corr/rollout_is_std"] > 0
        same = [name for name in line if name.startswith(("rollout_corr/", "actor/"))]
        assert all(line[name] == without[step][name] for name in same)
