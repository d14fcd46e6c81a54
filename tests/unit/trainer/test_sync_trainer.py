"""The whole of a run in this process, on a tiny model: the same twice, one copy of the weights, the same
numbers on both sides.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import actor_module, build, metrics_of, ppo_config

from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.engines.base import BatchLimits
from hybridflow.engines.micro_batches import together
from hybridflow.errors import ConfigError
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import PackedBatch, share_prompts
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.ppo.columns import STAYS, TEXTS, TOKENS
from hybridflow.trainer.ppo.validation import Validator

FAST = "actor_rollout_ref.rollout.exact=false"
PPO = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=50")
GRPO = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
)


BYPASS_AND_REJECT = ("bypass_mode=true", "rollout_rs=seq_mean_k2", "rollout_rs_threshold=1.0")


def train(model: Path, run: Path, overrides: Sequence[str]) -> dict[int, dict[str, float]]:
    run.parent.mkdir(parents=True, exist_ok=True)
    with build(ppo_config(model, run, *overrides)) as trainer:
        trainer.fit()
    return metrics_of(run)


def test_micro_batches_and_validation_batches_change_no_metric_beyond_rounding(
    model: Path, tmp_path: Path
) -> None:
    validate = (
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    )
    common = [*PPO, *validate, "actor_rollout_ref.rollout.val_kwargs.n=2", "trainer.total_training_steps=1"]
    cut = [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
        "critic.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.max_num_seqs=3",
        "data.val_batch_size=2",
    ]
    whole = train(model, tmp_path / "a" / "run", common)[1]
    split = train(model, tmp_path / "b" / "run", [*common, *cut])[1]
    assert any(name.startswith("val-core/") for name in whole)
    # how many rows meet in a decode step is what was cut
    scheduling = [name for name in whole if name.startswith("rollout/")]
    assert whole["rollout/max_rows"] == 8.0 and split["rollout/max_rows"] == 3.0
    assert (
        whole["rollout/generated_tokens"]
        == split["rollout/generated_tokens"]
        == whole["response_length/mean"] * 8
    )
    for line in (whole, split):
        for name in scheduling:
            del line[name]
    assert split == pytest.approx(whole, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "key", [(), ("actor_rollout_ref.actor.use_prefix_grouper=true",)], ids=["auto", "true"]
)
def test_prompts_that_are_computed_once_change_no_metric_beyond_rounding(
    key: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    dealt: list[bool] = []

    def grouped(batch: DataProto, lengths: Sequence[int], limits: BatchLimits) -> list[int]:
        dealt.append("group_ids" in batch)
        return together(batch, lengths, limits)

    def counted(packed: PackedBatch) -> PackedBatch:
        shared = share_prompts(packed)
        saved.append(packed.num_tokens - shared.num_tokens)
        return shared

    monkeypatch.setattr("hybridflow.engines.micro_batches.share_prompts", counted)
    monkeypatch.setattr("hybridflow.engines.micro_batches.together", grouped)
    common = [*GRPO, FAST, "trainer.total_training_steps=1"]
    false = "actor_rollout_ref.actor.use_prefix_grouper=false"
    apart = train(model, tmp_path / "a" / "run", [*common, false])[1]
    assert saved == []
    once = train(model, tmp_path / "b" / "run", [*common, *key])[1]
    assert once == pytest.approx(apart, rel=1e-3, abs=1e-4)
    old, reference, *updates = saved  # of four prompts with two rows each
    assert dealt == [bool(key)] * 4, "several ranks would get whole groups where that is asked for"
    assert len(updates) == 2 and old == reference == sum(updates) == 4 * once["prompt_length/mean"]


def test_exact_mode_keeps_the_prompts_of_rows_apart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(packed: PackedBatch) -> PackedBatch:
        raise AssertionError("a prompt is computed once")

    monkeypatch.setattr("hybridflow.engines.micro_batches.share_prompts", shared)
    line = train(model, tmp_path / "run", [*GRPO, "trainer.total_training_steps=1"])[1]
    assert line["training/old_log_probs_from_rollout"] == 1.0, "exact mode holds"


def test_the_rollout_shares_the_trainers_weights(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "run", *GRPO)) as trainer:
        engine = trainer.source.roles.rollout.backend.worker("rollout").engine  # type: ignore[attr-defined]
        ours, theirs = actor_module(trainer), engine.policy
        pointers = {name: parameter.data_ptr() for name, parameter in ours.named_parameters()}
        assert pointers == {name: parameter.data_ptr() for name, parameter in theirs.named_parameters()}
        before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
        trainer.fit()
        assert pointers == {name: parameter.data_ptr() for name, parameter in theirs.named_parameters()}, (
            "no copy was made"
        )
        assert any(not torch.equal(parameter, before[name]) for name, parameter in theirs.named_parameters())
        assert engine.policy_version == 2  # validation after step 2
        reference = trainer.step.roles.reference.backend.worker("reference").engine.module  # type: ignore[union-attr, attr-defined]
        assert all(torch.equal(parameter, before[name]) for name, parameter in reference.named_parameters())


def test_columns_that_only_workers_read_stay_with_them(model: Path, tmp_path: Path) -> None:
    """Where no samples are shown; the update is the same to the bit, and no step leaves rows behind."""
    weights, metrics = [], []
    for shows in (True, False):
        (tmp_path / str(shows)).mkdir()
        with build(ppo_config(model, tmp_path / str(shows) / "run", *GRPO, FAST)) as trainer:
            trainer.step.shows = lambda step, shows=shows: shows
            for step in (1, 2):
                batch, found = trainer.step(trainer.source.next(step).rows, step)
                for name in ("ref_log_prob", "old_log_probs", "entropys"):
                    assert batch.has(name) and (name in batch) == shows
                shards = [weakref.ref(shard) for each in batch.remote.values() for shard in each.shards]
                del batch
                gc.collect()
                assert shards and not any(shard() for shard in shards), "they live as long as their rows"
            weights.append([weight.clone() for weight in actor_module(trainer).parameters()])
            metrics.append(found.to_floats())
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    assert metrics[0] == metrics[1] and "actor/entropy" in metrics[0] and metrics[0]["actor/kl_loss"] > 0


BYPASS = ("algorithm.rollout_correction.bypass_mode=true",)
REJECTION = (
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=1.5",
)
REUSED = ("actor_rollout_ref.rollout.reuse_log_probs_within=1.0",)


STORED: dict[str, tuple[str, ...]] = {
    "fast": (FAST,),
    "exact": ("actor_rollout_ref.rollout.exact=true",),
    "reused log-probs": (FAST, *REUSED),
    "bypass": (FAST, *BYPASS),
    "rejection": (FAST, *REJECTION),
    "bypass and rejection": (FAST, *BYPASS, *REJECTION),
    "clip_cov": (FAST, "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"),
    "baseline of tokens": (FAST, "algorithm.adv_estimator=optimal_token_baseline"),
    "drawn again": (FAST, "algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true"),
    "dumps": (FAST, "trainer.rollout_data_dir=DUMPS"),
    "kl in the reward": (FAST, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"),
}
SHOWN_QUICKLY = ("fast", "bypass and rejection", "drawn again")
"""Settings whose steps are shown in tests that are not slow; the others read the same columns or fewer."""


@pytest.mark.parametrize(
    ("keys", "shows"),
    [
        pytest.param(keys, shows, id=f"{name}, {'shown' if shows else 'not shown'}", marks=marks)
        for name, keys in STORED.items()
        for shows, marks in ((False, ()), (True, [pytest.mark.slow] * (name not in SHOWN_QUICKLY)))
    ],
)
def test_columns_that_were_stored_before_the_step_need_not_be_in_the_batch(
    model: Path, tmp_path: Path, keys: tuple[str, ...], shows: bool
) -> None:
    """The update and the metrics are the same; the driver gets them where it reads or shows them."""
    made_elsewhere = [name for name in STAYS if name not in TEXTS]
    weights, metrics = [], []
    for stored in (False, True):
        (tmp_path / str(stored)).mkdir()
        keys = ("algorithm.adv_estimator=grpo", "reward.watch=false", *keys)
        keys = tuple(key.replace("DUMPS", str(tmp_path)) for key in keys)
        with build(ppo_config(model, tmp_path / str(stored) / "run", *keys)) as trainer:
            trainer.step.shows = lambda step: shows
            written = trainer.step.config.trainer.rollout_data_dir is not None
            rows = trainer.source.next(1).rows
            if stored:
                kept = trainer.step.roles.actor.keep(rows, STAYS)
                rows.pop(made_elsewhere, TEXTS)
                rows |= kept
            batch, found = trainer.step(rows, 1)
            if shows:
                assert {*STAYS, "old_log_probs", "advantages"} <= {*batch.names()}
            elif written:
                assert {*TOKENS, *TEXTS} <= {*batch.names()}
            weights.append([weight.clone() for weight in actor_module(trainer).parameters()])
            metrics.append(found.to_floats())
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    timings = {name for name in metrics[0] if name.startswith("timing")}
    first, second = ({k: v for k, v in line.items() if k not in timings} for line in metrics)
    assert first == second


def run_one_step(trainer: PPOTrainer, **columns: Any) -> tuple[DataProto, dict[str, float]]:
    made = trainer.source.next(1)
    batch, metrics = trainer.step(made.rows, 1)
    made.metrics.update(metrics)
    return batch, made.metrics.to_floats()


def test_columns_of_a_step(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "run", *PPO, FAST)) as trainer:
        batch, metrics = run_one_step(trainer)
    added = {
        "old_log_probs",
        "entropys",
        "ref_log_prob",
        "values",
        "token_level_scores",
        "token_level_rewards",
        "advantages",
        "returns",
    }
    assert added <= set(batch.batch.keys())
    mask = batch.batch["response_mask"]
    for name in added:
        assert batch.batch[name].dtype == torch.float32 and not batch.batch[name][~mask].any(), name
    assert torch.equal(batch.batch["policy_version"][mask], torch.zeros(int(mask.sum()), dtype=torch.int32))
    assert torch.equal(batch.batch["ref_log_prob"], batch.batch["old_log_probs"]), "nothing has moved yet"
    assert (
        abs(metrics["actor/reward_kl_penalty"]) < 1e-6 and metrics["actor/reward_kl_penalty_coeff"] == 0.001
    )


def test_rows_that_are_drawn_again_leave_the_number_of_updates_and_the_schedule(
    model: Path, tmp_path: Path
) -> None:
    common = [
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "critic.optim.lr_scheduler_type=cosine",
    ]
    plain = train(model, tmp_path / "a" / "run", common)
    drawn = ["algorithm.use_pf_ppo=true", "algorithm.pf_ppo.weight_pow=20"]  # few rows, many times
    lines = train(model, tmp_path / "b" / "run", [*common, *drawn])
    for step, line in lines.items():
        for name in ("actor/num_updates", "critic/num_updates", "actor/lr", "critic/lr"):
            assert line[name] == plain[step][name], (step, name)
        assert line["actor/num_updates"] == 4.0
    assert lines[2]["actor/lr"] < lines[1]["actor/lr"] * 0.2


def test_in_critic_warm_up_only_the_critic_moves(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "run", "trainer.critic_warmup=1")) as trainer:
        before = {
            name: parameter.detach().clone() for name, parameter in actor_module(trainer).named_parameters()
        }
        _, metrics = run_one_step(trainer)
        assert all(
            torch.equal(parameter, before[name])
            for name, parameter in actor_module(trainer).named_parameters()
        )
    assert metrics["critic/num_updates"] == 2.0 and "actor/num_updates" not in metrics


def test_validation_does_not_count_as_generation_of_the_step(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "run", "trainer.test_freq=2")) as trainer:
        trainer.fit()
    first, second = (read_metrics(tmp_path / "run" / "metrics.jsonl")[step] for step in (1, 2))
    assert not {"timing_s/val_gen", "timing_s/val_reward"} & first.keys()
    assert second["timing_s/val_gen"] + second["timing_s/val_reward"] <= second["timing_s/testing"]
    own = [second[f"timing_s/{name}"] for name in ("gen", "reward", "testing")]
    assert sum(own) <= second["timing_s/step"]


def test_a_run_can_be_ended_after_a_step_and_goes_on_later(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    def stop_at_two(step: int, metrics: dict[str, float]) -> bool:
        seen.append((step, metrics["rollout/generated_tokens"]))
        return step == 2

    with build(ppo_config(model, tmp_path / "run", *GRPO, "trainer.total_training_steps=3")) as trainer:
        trainer.fit(stop_at_two)
        assert trainer.state.step == 2
        assert seen == [
            (step, line["rollout/generated_tokens"]) for step, line in metrics_of(tmp_path / "run").items()
        ]
        trainer.fit()
        assert trainer.state.step == 3 and [step for step, _ in seen] == [1, 2]


def test_validation_only(model: Path, tmp_path: Path) -> None:
    config = ppo_config(model, tmp_path / "run", "trainer.val_only=true", "algorithm.adv_estimator=grpo")
    with build(config) as trainer:
        before = {
            name: parameter.detach().clone() for name, parameter in actor_module(trainer).named_parameters()
        }
        found = trainer.fit()
        assert all(
            torch.equal(parameter, before[name])
            for name, parameter in actor_module(trainer).named_parameters()
        )
    assert {name for name in found if name.startswith("val-core/")} == {
        "val-core/arithmetic_chain/reward/mean@1"
    }
    assert {"val-aux/arithmetic_chain/share/mean@1", "val-aux/response_length/mean"} <= found.keys()
    assert list(metrics_of(tmp_path / "run")) == [0]


def test_a_run_in_which_the_actor_would_never_train_is_refused(model: Path, tmp_path: Path) -> None:
    overrides = (
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
        "data.task.size=8",
        "trainer.critic_warmup=2",
    )
    with (
        pytest.raises(ConfigError, match=r"critic_warmup=2 leaves none of the run's 2 steps"),
        build(ppo_config(model, tmp_path / "run", *overrides)),
    ):
        pass


def test_a_step_of_several_generation_batches_takes_as_many_from_an_epoch(
    model: Path, tmp_path: Path
) -> None:
    sampling = (
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
    )
    sizes = (
        "data.task.size=64",
        "data.gen_batch_size=3",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=2",
    )
    with build(ppo_config(model, tmp_path / "run", *sampling, *sizes)) as trainer:
        assert trainer.total_steps == 2 * (64 // 6), "4 groups take two generation batches of 3 prompts"


def test_answers_of_the_data_are_the_actors_in_bypass_mode_and_not_measured_as_its_own(
    model: Path, tmp_path: Path
) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    spin = (
        "algorithm.adv_estimator=spin",
        "actor_rollout_ref.actor.policy_loss.loss_mode=dpo",
        "data.max_response_length=40",
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with build(ppo_config(model, tmp_path / "a" / "run", *spin, FAST)) as trainer:
        plain, metrics = run_one_step(trainer)
    with build(ppo_config(model, tmp_path / "b" / "run", *spin, bypass)) as trainer:
        bypassed, _ = run_one_step(trainer)
    told, rows = plain.batch["is_demonstration"], plain.batch
    assert torch.equal(told, bypassed.batch["is_demonstration"]) and told.any()
    torch.testing.assert_close(bypassed.batch["old_log_probs"], rows["old_log_probs"], atol=1e-4, rtol=0)
    assert torch.equal(bypassed.batch["old_log_probs"][~told], bypassed.batch["rollout_log_probs"][~told])
    sampled = rows["response_mask"] & ~told[:, None]
    assert metrics["response_length/mean"] == pytest.approx(float(sampled.sum() / (~told).sum()))
    assert metrics["response_length/max"] == int(sampled.sum(-1).max())
    assert metrics["actor/entropy"] == pytest.approx(float(rows["entropys"][sampled].mean()), rel=1e-5)


DPO = ("algorithm.adv_estimator=online_dpo", "actor_rollout_ref.actor.policy_loss.loss_mode=dpo")


def test_a_row_whose_partner_is_left_out_of_the_loss_is_left_out_with_it(model: Path, tmp_path: Path) -> None:
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    with build(ppo_config(model, tmp_path / "run", *DPO, FAST, mini)) as trainer:
        batch = trainer.source.next(1).rows
        keep = torch.ones_like(batch.batch["loss_mask"])
        keep[0] = False  # as a response that was cut at the length limit, or a rejected one
        batch, metrics = trainer.step(batch.narrow_loss_mask(keep), 1)
    paired = batch.batch["advantages"].any(-1).tolist()
    learned = batch.batch["loss_mask"].any(-1).tolist()
    assert paired[:2] == [True, True] and learned == [False, False, *paired[2:]] and any(learned)
    # at the first update the policy is the reference, so each pair's loss is log 2, and so is their mean
    assert metrics.to_floats()["actor/pg_loss"] == pytest.approx(math.log(2), rel=1e-5)


def test_in_bypass_mode_a_row_whose_partner_is_rejected_is_left_out_with_it(
    model: Path, tmp_path: Path
) -> None:
    correction = [f"algorithm.rollout_correction.{key}" for key in BYPASS_AND_REJECT]
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    with build(ppo_config(model, tmp_path / "run", *DPO, *correction, mini)) as trainer:
        batch = trainer.source.next(1).rows
        batch.batch["rollout_log_probs"][0] -= 5.0  # far from the policy of the moment: rejected
        _, metrics = trainer.step(batch, 1)
    found = metrics.to_floats()
    assert 0 < found["rollout_corr/rollout_rs_seq_masked_fraction"] < 0.5
    assert found["actor/pg_loss"] == pytest.approx(math.log(2), rel=1e-5)


COMPARES = """
from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses import register_policy_loss

@register_policy_loss("compares_rows", agg_mode="token-sum", keeps_groups=True)
def compares(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None):
    assert len(log_prob) in (2, 4), "whole groups of two rows"
    return LossOutput(-(log_prob * advantages * response_mask).sum() / scale.num_tokens, {})
"""


def test_a_users_loss_that_compares_rows_gets_whole_groups(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(COMPARES)
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode='{tmp_path}/mine.py:compares'"
    limit = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"
    try:
        with build(
            ppo_config(model, tmp_path / "run", "algorithm.adv_estimator=rloo", loss, limit)
        ) as trainer:
            _, metrics = run_one_step(trainer)
    finally:
        POLICY_LOSSES.pop("compares_rows", None)
    assert metrics["actor/num_updates"] == 2.0


@pytest.mark.parametrize(
    ("before", "every", "steps"),
    [("false", -1, []), ("true", -1, [0, 2]), ("false", 1, [1, 2]), ("false", 5, [2])],
)
def test_when_a_run_validates(
    before: str, every: int, steps: list[int], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_freq=-1` validates at the end, unless `val_before_train=false` says that nothing is to be
    compared.
    """
    seen: list[int] = []
    monkeypatch.setattr(Validator, "__call__", lambda self, step: seen.append(step) or {})  # type: ignore[func-returns-value]
    settings = [
        f"trainer.val_before_train={before}",
        f"trainer.test_freq={every}",
        "algorithm.adv_estimator=grpo",
    ]
    with build(ppo_config(model, tmp_path / "run", *settings)) as trainer:
        trainer.fit()
    assert seen == steps


def test_a_curriculum_sampler_is_given_all_columns_of_each_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in steps that the report does not show, where the driver fetches no more than it reads."""
    (tmp_path / "own.py").write_text(
        "class Reverse:\n"
        "    def __init__(self, dataset, seed): self.size = len(dataset)\n"
        "    def set_epoch(self, epoch): pass\n"
        "    def __iter__(self): return iter(range(self.size - 1, -1, -1))\n"
        "    def __len__(self): return self.size\n"
        "    def update(self, batch):\n"
        f"        with open({str(tmp_path / 'columns')!r}, 'a') as file:\n"
        "            print(*sorted(batch.names()), file=file)\n"
    )
    monkeypatch.setattr("hybridflow.trainer.ppo.sample_log.SampleLog.shows", lambda self, step: False)
    sampler = (f"data.sampler.class_path={tmp_path / 'own.py'}", "data.sampler.class_name=Reverse")
    train(model, tmp_path / "run", (*GRPO, *sampler, "trainer.total_training_steps=2", FAST))
    first, second = (set(line.split()) for line in (tmp_path / "columns").read_text().splitlines())
    assert first == second >= {"old_log_probs", "ref_log_prob", "entropys", "advantages"}
