"""Divergences from a teacher in the actor's loss, through the trainer, and over two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, ppo_config, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.build import build_engine
from hybridflow.episodes.planning import shows_data, training_requests
from hybridflow.errors import ConfigError
from hybridflow.models.heads.divergence import DivergenceSpec
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import TOP_OUTCOMES, make_rows
from hybridflow.workers.reference import ReferenceHead
from ranks import Ranks

ACTOR = "actor_rollout_ref.actor"
LOSS = "distillation.distillation_loss"
TAUGHT = ("algorithm.adv_estimator=on_policy_distillation", f"{LOSS}.use_task_rewards=false")
NAME = "actor/distillation_loss"
VOCABULARY = 112


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("teacher") / "model", hidden=48, layers=1, seed=3)


def first_steps(
    model: Path, teacher: Path, run: Path, *settings: str
) -> tuple[list[dict[str, float]], DataProto]:
    """The metrics of two steps, and the first batch with all of its columns."""
    path = f"distillation.teacher_model.path='{teacher}'"
    with build(ppo_config(model, run, *TAUGHT, path, *settings)) as trainer:
        batch, first = trainer.step(trainer.source.next(1).rows, 1)
        batch |= trainer.step.roles.actor.fetch(batch, [TOP_OUTCOMES])
        _, second = trainer.step(trainer.source.next(2).rows, 2)
    return [first.to_floats(), second.to_floats()], batch


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_the_whole_vocabulary_is_that_of_all_its_tokens_told(
    kind: str, model: Path, teacher: Path, tmp_path: Path
) -> None:
    whole, _ = first_steps(model, teacher, tmp_path / "whole", f"{LOSS}.loss_mode={kind}")
    all_told = (f"{LOSS}.loss_mode={kind}_topk", f"{LOSS}.topk={VOCABULARY}")
    told, batch = first_steps(model, teacher, tmp_path / "told", *all_told)
    assert batch.batch[TOP_OUTCOMES].shape[-1] == 2 * VOCABULARY + 1
    for one, other in zip(whole, told, strict=True):
        assert one[NAME] > 0 and other[NAME] == pytest.approx(one[NAME], rel=1e-3)
        assert "actor/pg_loss" not in one and other["actor/distillation_rest"] < 1e-6


@pytest.mark.parametrize("told", [False, True])
def test_a_student_that_is_its_own_teacher_stays(model: Path, tmp_path: Path, told: bool) -> None:
    mode = f"{LOSS}.loss_mode=jsd{'_topk' * told}"
    settings = (
        *TAUGHT,
        f"distillation.teacher_model.path='{model}'",
        mode,
        f"{LOSS}.topk=5",
        f"{ACTOR}.ppo_mini_batch_size=4",
    )
    with build(ppo_config(model, tmp_path / "run", *settings)) as trainer:
        _, metrics = trainer.step(trainer.source.next(1).rows, 1)
    found = metrics.to_floats()
    assert abs(found[NAME]) < 1e-6 and found["actor/grad_norm"] < 1e-5


def test_it_is_the_mean_over_the_tokens_that_are_learned_from_and_falls(
    model: Path, teacher: Path, tmp_path: Path
) -> None:
    settings = (f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=6", "data.train_batch_size=2")
    path = f"distillation.teacher_model.path='{teacher}'"
    with build(ppo_config(model, tmp_path / "run", *TAUGHT, path, *settings)) as trainer:
        prompts = trainer.source.next(1).rows
        batch, metrics = trainer.step(prompts.select_idxs(range(len(prompts))), 1)
        batch |= trainer.step.roles.actor.fetch(batch, [TOP_OUTCOMES])
        before = metrics.to_floats()[NAME]
        after = trainer.step(prompts, 2)[1].to_floats()[NAME]
    assert after < before
    fresh = engine_of(str(model), 1, None)
    mask, told = batch.batch["loss_mask"], batch.batch[TOP_OUTCOMES]
    with torch.no_grad():
        slow = []
        for row in range(len(batch)):
            attended = batch.batch["attention_mask"][row].bool()
            ids = batch.batch["input_ids"][row][attended]
            layer = fresh.policy.hf
            layer.set_attn_implementation("eager")
            log_p = layer(input_ids=ids[None]).logits[0].log_softmax(-1)
            tokens = mask[row].nonzero()[:, 0].tolist()
            start = len(ids) - int(batch.batch["attention_mask"][row, -mask.shape[1] :].sum())
            for token in tokens:
                top = told[row, token].double()
                p = log_p[start + token - 1].exp()[top[:6].long()]
                q = top[6:12].exp()
                rest = top[12].exp()
                slow.append(float((q * (q / p).log()).sum() + rest * (rest / (1 - p.sum())).log()))
    assert before == pytest.approx(sum(slow) / len(slow), rel=1e-4)


def test_task_rewards_are_kept_beside_it(model: Path, teacher: Path, tmp_path: Path) -> None:
    settings = ("algorithm.adv_estimator=grpo", f"distillation.teacher_model.path='{teacher}'")
    more = (f"{LOSS}.loss_mode=jsd",)
    with build(ppo_config(model, tmp_path / "run", *settings, *more)) as trainer:
        found = trainer.step(trainer.source.next(1).rows, 1)[1].to_floats()
    assert "actor/pg_loss" in found and found[NAME] > 0


def test_a_teacher_of_the_rows_data_source(model: Path, teacher: Path, tmp_path: Path) -> None:
    told = (f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=5")
    named = f"distillation.teachers={{arithmetic_chain: '{teacher}'}}"
    found, _ = first_steps(model, model, tmp_path / "named", *told, named)
    alone, _ = first_steps(model, teacher, tmp_path / "alone", *told)
    assert [one[NAME] for one in found] == [one[NAME] for one in alone]
    named = f"distillation.teachers={{maths: '{teacher}'}}"
    with pytest.raises(ConfigError, match="no row has the data source maths; the data has arithmetic_chain"):
        first_steps(model, model, tmp_path / "no", *told, named)


def engine_of(folder: str, world_size: int, lr: float | None, sequence: int = 1) -> Any:
    layout = ParallelLayout()
    if world_size > 1:
        layout = ParallelLayout.from_keys(world_size, sequence=sequence)
    return build_engine(
        "policy",
        {"path": folder, "device": "cpu", "dtype": "float64", "probe": False, "gradient_checkpointing": True},
        name="actor",
        optim=None if lr is None else OptimConfig(lr=lr),
        fsdp=FSDPConfig(),
        layout=layout,
    )


def taught(
    rank: int, folder: str, other: str, told: bool, limit: int, world_size: int, sequence: int = 1
) -> tuple[float, list[Tensor]]:
    """The summed divergence of the last of three steps, and the weights after it."""
    actor, teacher = (
        engine_of(each, world_size, lr, sequence) for each, lr in ((folder, 1e-3), (other, None))
    )
    rows = DataProto.from_dict(
        make_rows([[5, 6], [7], [8, 9, 4], [6]], [[4, 5], [9] * 5, [7], [5, 8]], pad_id=0)
    )
    mine = rows if sequence > 1 else rows.select_idxs([0, 1, 2, 3][rank::world_size])
    limits = BatchLimits(limit)
    if told:
        spec = OutputSpec(log_probs=True, top_outcomes=5, top_below=100)
        outcomes = teacher.forward(mine, spec, limits)["top_outcomes"]
        assert outcomes.shape == (len(mine), 5, 11)
        mine |= DataProto.from_dict({TOP_OUTCOMES: outcomes})
    else:
        actor.policy.teacher = ReferenceHead(teacher)
    total = []

    def loss(answers: dict[str, Tensor], micro: DataProto) -> Any:
        value = (answers["divergence"] * micro.batch["response_mask"]).sum()
        total.append(float(value.detach()))
        return value - 0.1 * answers["log_probs"].sum(), Metrics()

    for _ in range(3):
        total.clear()
        actor.train_mini_batch(
            mine, OutputSpec(log_probs=True, divergence=DivergenceSpec("jsd")), loss, limits
        )
    weights = [x.full_tensor() if isinstance(x, DTensor) else x for x in actor.module.parameters()]
    return sum(total), [x.detach().clone() for x in weights]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("sequence", [1, 2])
def test_two_ranks_and_other_cuts_learn_the_same(
    two_ranks: Ranks, model: Path, teacher: Path, told: bool, sequence: int
) -> None:
    one, weights = taught(0, str(model), str(teacher), told, 64, 1)
    cut, of_cut = taught(0, str(model), str(teacher), told, 7, 1)
    both = two_ranks.run(taught, str(model), str(teacher), told, 12, 2, sequence)
    shared = sum(value for value, _ in both) / sequence
    assert one > 1e-5 and cut == pytest.approx(one, abs=1e-9) and shared == pytest.approx(one, abs=1e-9)
    for theirs in (of_cut, *(each for _, each in both)):
        assert all(torch.allclose(a, b, atol=1e-9, rtol=0) for a, b in zip(weights, theirs, strict=True))


AHEAD = ("trainer.schedule=one_step_off", "algorithm.rollout_correction.bypass_mode=true")


def mixed(lmbda: float, *more: str) -> tuple[str, ...]:
    """GKD with one response to a prompt and room for the data's answers."""
    sizes = ("actor_rollout_ref.rollout.n=1", "data.max_response_length=40", "data.train_batch_size=12")
    mini = f"{ACTOR}.ppo_mini_batch_size=12"
    return (f"{LOSS}.loss_mode=jsd", f"distillation.lmbda={lmbda}", *sizes, mini, *more)


def test_a_share_of_the_prompts_has_the_answers_of_the_data(
    model: Path, teacher: Path, tmp_path: Path
) -> None:
    path = f"distillation.teacher_model.path='{teacher}'"
    for name in ("own", "half", "none", "ahead"):
        (tmp_path / name).mkdir()
    rows: dict[str, DataProto] = {}
    for name, settings in {
        "own": mixed(1.0),
        "half": mixed(0.5),
        "none": mixed(0.0),
        "ahead": mixed(0.5, *AHEAD),
    }.items():
        with build(ppo_config(model, tmp_path / name / "run", *TAUGHT, path, *settings)) as trainer:
            trainer.source.publish(0)
            rows[name] = trainer.source.next(1).rows
            _, metrics = trainer.step(rows[name], 1)
        found = metrics.to_floats()
        assert found[NAME] > 0 and found["actor/grad_norm"] > 0, name
    told = rows["half"].batch["is_demonstration"]
    assert "is_demonstration" not in rows["own"] and rows["none"].batch["is_demonstration"].all()
    assert 0 < int(told.sum()) < 12, "drawn by the seed"
    for row in range(12):
        wanted = rows["none" if told[row] else "own"]
        assert texts(rows["half"])[row] == texts(wanted)[row], "the others are what they were"
    for row, text in enumerate(texts(rows["none"])):
        assert text.endswith(str(rows["none"].non_tensor_batch["ground_truth"][row])), "the data's own"
    assert rows["ahead"].batch["is_demonstration"].equal(told) and texts(rows["ahead"]) == texts(rows["half"])


def texts(rows: DataProto) -> list[str]:
    return [str(text) for text in rows.non_tensor_batch["solution_str"]]


def test_which_prompts_these_are_is_drawn_by_the_number_of_the_group(
    model: Path, teacher: Path, tmp_path: Path
) -> None:
    """2,000 draws: 5 standard deviations of the share are 0.054."""
    path = f"distillation.teacher_model.path='{teacher}'"
    whole, part = (ppo_config(model, tmp_path / "run", *TAUGHT, path, *mixed(lmbda)) for lmbda in (1.0, 0.3))
    prompts = [PromptRow([3, 4], {}, index) for index in range(2000)]
    every, none = training_requests(whole, (), 7, prompts)
    sampled, given = training_requests(part, (), 7, prompts)
    assert len(none) == 0 and sorted(sampled.groups + given.groups) == every.groups
    assert len(sampled) / 2000 == pytest.approx(0.3, abs=0.054)
    seeds = {group: request.seed for group, request in zip(every.groups, every.requests, strict=True)}
    assert [request.seed for request in sampled.requests] == [seeds[group] for group in sampled.groups]
    assert [request.request_id for request in (sampled + given).requests] == list(range(2000))
    one_by_one = [training_requests(part, (), 7 + number, [prompts[number]])[1] for number in range(50)]
    assert [each.groups for each in one_by_one if len(each)] == [[group] for group in given.groups][
        : sum(map(len, one_by_one))
    ]
    with pytest.raises(ConfigError, match="reads reward_baselines: set lmbda=1"):
        shows_data(part, ("reward_baselines",))
