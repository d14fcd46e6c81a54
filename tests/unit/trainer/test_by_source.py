"""Several data sources in a batch, each with its own estimator, options, weight and coefficient of the KL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, ppo_config
from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.algorithms.catalog import AGGREGATIONS
from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.by_source import sources_of
from hybridflow.config.load import load_config
from hybridflow.config.needs import teacher_reader
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.by_source import SourceAdvantages
from hybridflow.trainer.ppo.columns import estimate_advantages, find_estimator, find_estimators
from hybridflow.trainer.replay.reverify import reverify
from hybridflow.workers.losses import policy_loss
from hybridflow.workers.mini_batches import MiniBatchPlan, mini_batches

ACTOR = "actor_rollout_ref.actor"
MIXED = ["grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo"]
MIXED += ["gpg", "optimal_token_baseline", "tir_optimal_token_baseline", "max_rl", "on_policy_distillation"]


def rows_of(source: str, longest: int, *, seed: int, several: bool = False) -> dict[str, list[Any]]:
    """Three groups of four trajectories as plain lists, whose responses have up to `longest` tokens; with
    `several` every second one has two rows.
    """
    rng = generator(seed, "rows", *source.encode())
    rows: dict[str, list[Any]] = {name: [] for name in ("ids", "mask", "scores", "facts", "numbers")}
    for sample in range(12):
        for row in range(1 + several * (sample % 2)):
            length = int(torch.randint(2, longest + 1, (1,), generator=rng))
            rows["ids"].append(torch.randint(3, 90, (length,), generator=rng).tolist())
            sampled = torch.rand(length, generator=rng) < 0.8
            sampled[-1] = True
            rows["mask"].append(sampled.tolist())
            rows["scores"].append(float(torch.rand(1, generator=rng)) if row == 0 else 0.0)
            rows["facts"].append((source, f"{source}-{sample // 4}", sample + 1000 * len(source)))
            rows["numbers"].append(torch.rand(3, length, generator=rng))
    return rows


def batch_of(*parts: dict[str, list[Any]], order: list[int] | None = None) -> DataProto:
    """The rows of all parts, as `make_rows` pads them, in this order."""
    rows = {name: [each for part in parts for each in part[name]] for name in parts[0]}
    if order is not None:
        rows = {name: [values[place] for place in order] for name, values in rows.items()}
    tensors = make_rows([[1, 2]] * len(rows["ids"]), rows["ids"], 0, response_masks=rows["mask"])
    mask = tensors["response_mask"]
    scores, numbers = torch.zeros(mask.shape), torch.zeros(3, *mask.shape)
    for row, sampled in enumerate(rows["mask"]):
        scores[row, len(sampled) - 1] = rows["scores"][row]
        numbers[:, row, : len(sampled)] = rows["numbers"][row]
    sources, uids, ids = zip(*rows["facts"], strict=True)
    tensors |= {
        "loss_mask": mask & (torch.arange(mask.shape[1]) != 1),
        "token_level_scores": scores,
        "token_level_rewards": scores + 0.01 * numbers[1],
        "old_log_probs": -numbers[0],
        "teacher_log_probs": -numbers[1],
        "sum_pi_squared": numbers[2],
        "trajectory_id": torch.tensor(ids),
    }
    share = [float(value) for value in rows["scores"]]
    return DataProto.from_dict(tensors, {"data_source": list(sources), "uid": list(uids), "share": share})


def algorithm(**by_source: dict[str, Any]) -> PPOConfig:
    chosen = AlgorithmConfig(adv_estimator="grpo", gdpo_reward_keys=["score", "share"], by_source=by_source)
    return PPOConfig(algorithm=chosen)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_the_advantages_of_a_source_are_those_of_a_batch_of_its_own(name: str, several: bool) -> None:
    mine, others = (
        rows_of("mine", 60, seed=1, several=several),
        rows_of("others", 210, seed=2, several=several),
    )
    count = len(mine["ids"]) + len(others["ids"])
    order = torch.randperm(count, generator=generator(3, "order")).tolist()
    mixed = batch_of(mine, others, order=order)
    config = algorithm(mine={"adv_estimator": name, "norm_adv_by_std_in_grpo": False, "gamma": 0.9})
    found = SourceAdvantages(config)(mixed)

    own = [place for place in order if place < len(mine["ids"])]
    alone = AlgorithmConfig(
        adv_estimator=name, norm_adv_by_std_in_grpo=False, gamma=0.9, gdpo_reward_keys=["score", "share"]
    )
    for source, chosen, config_alone in (
        ("mine", batch_of(mine, order=own), replace(config, algorithm=alone)),
        (
            "others",
            batch_of(others, order=[place - len(mine["ids"]) for place in order if place not in own]),
            replace(config, algorithm=replace(config.algorithm, by_source={})),
        ),
    ):
        wanted = estimate_advantages(chosen, config_alone, find_estimator(config_alone.algorithm))
        places = torch.tensor([each == source for each in mixed.non_tensor_batch["data_source"]])
        for column in ("advantages", "returns"):
            got, expected = found.batch[column][places], wanted.batch[column]
            assert torch.equal(got[:, : expected.shape[1]], expected), column
            assert not got[:, expected.shape[1] :].any()
    assert bool(found.batch["advantages"].any())


def reference_loss(
    losses: Tensor, mask: Tensor, ids: list[int], weights: list[float], mode: str, factor: float
) -> float:
    """The weighted mean of `docs/configuration.md`, written out token by token in float64."""
    total, tokens, sequences = 0.0, 0.0, {}
    for row, (trajectory, weight) in enumerate(zip(ids, weights, strict=True)):
        mine = [float(losses[row, t]) for t in range(mask.shape[1]) if mask[row, t]]
        if not mine:
            continue
        sequences[trajectory] = weight
        tokens += weight * len(mine)
        share = sum(mine)
        if mode == "seq-mean-token-mean":
            learned = [r for r, each in enumerate(ids) if each == trajectory and mask[r].any()]
            share = share / len(mine) / len(learned)
        total += weight * share
    counts = {
        "token-mean": tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum-norm": sum(sequences.values()) * factor,
    }
    return total / counts.get(mode, sum(sequences.values()))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_loss_is_the_weighted_mean_however_it_is_cut(mode: str) -> None:
    batch = batch_of(rows_of("a", 5, seed=4, several=True), rows_of("bb", 9, seed=5, several=True))
    batch.batch["loss_mask"][3] = False
    config = algorithm(a={"weight": 2.5, "kl_loss_coef": 0.3}, bb={"weight": 0.25})
    actor = ActorConfig(
        loss_agg_mode=mode, loss_scale_factor=7.0, use_kl_loss=True, kl_loss_type="k1", kl_loss_coef=0.02
    )
    roles = replace(config.actor_rollout_ref, actor=actor)
    batch |= SourceAdvantages(replace(config, actor_rollout_ref=roles))(batch)
    batch |= DataProto.from_dict({"ref_log_prob": batch.batch["teacher_log_probs"]})
    ((mini, scale),) = mini_batches(batch, MiniBatchPlan(99, 1, False, 0, 1), Metrics(), name="actor")
    function = policy_loss(actor, scale, POLICY_LOSSES["vanilla"])
    total = sum(
        float(function({"log_probs": rows.batch["old_log_probs"]}, rows)[0]) for rows in mini.split(5)
    )
    columns = batch.batch
    source = batch.non_tensor_batch["data_source"]
    weights = [2.5 if each == "a" else 0.25 for each in source]
    coefs = torch.tensor([0.3 if each == "a" else 0.02 for each in source], dtype=torch.float64)
    kl = (columns["old_log_probs"] - columns["ref_log_prob"]).double()
    losses = -columns["advantages"].double() + coefs[:, None] * kl
    ids = columns["trajectory_id"].tolist()
    wanted = reference_loss(losses, columns["loss_mask"], ids, weights, mode, 7.0)
    assert total == pytest.approx(wanted, rel=1e-5)
    even = reference_loss(losses, columns["loss_mask"], ids, [1.0] * len(ids), mode, 7.0)
    assert abs(wanted - even) > 1e-3, "the weights decide"


def test_the_loss_of_right_answers_is_a_weighted_mean_too() -> None:
    batch = batch_of(rows_of("a", 5, seed=4), rows_of("bb", 9, seed=5))
    config = algorithm(a={"weight": 4.0})
    batch |= SourceAdvantages(config)(batch)
    right = torch.arange(len(batch)) % 2 == 0
    batch |= DataProto.from_dict({"positive": right})
    losses = []
    for coef in (0.0, 0.5):
        actor = ActorConfig(positive_lm_loss_coef=coef)
        ((mini, scale),) = mini_batches(batch, MiniBatchPlan(99, 1, False, 0, 1), Metrics(), name="actor")
        function = policy_loss(actor, scale, POLICY_LOSSES["vanilla"])
        parts = [function({"log_probs": rows.batch["old_log_probs"]}, rows)[0] for rows in mini.split(5)]
        losses.append(float(sum(parts)))
    weights = torch.tensor([4.0 if each == "a" else 1.0 for each in batch.non_tensor_batch["data_source"]])
    chosen = batch.batch["loss_mask"] & right[:, None]
    each = (weights[:, None] * chosen).double()
    wanted = float((each * -batch.batch["old_log_probs"].double()).sum() / each.sum())
    assert losses[1] - losses[0] == pytest.approx(0.5 * wanted, rel=1e-4)


def test_counts_without_weights_are_those_of_weights_of_one() -> None:
    batch = batch_of(rows_of("a", 6, seed=6, several=True)).batch
    arguments = (batch["loss_mask"], None, batch["trajectory_id"])
    ones = torch.ones(len(batch["trajectory_id"]))
    assert LossScale.count(*arguments) == LossScale.count(*arguments, ones)
    learned = batch["trajectory_id"][batch["loss_mask"].any(-1)]
    assert LossScale.count(*arguments).num_sequences == len(learned.unique()) < len(learned)


def two_sources(folder: Path) -> str:
    lines = [
        {
            "data_source": "sums" if place % 2 else "lab/words",
            "prompt": f"{place} + {place} =" if place % 2 else f"say a word that begins like {place}",
            "reward_model": {"style": "rule", "ground_truth": str(2 * place)},
        }
        for place in range(16)
    ]
    path = folder / "mixed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"data.train_files=['{path}']"


RUN = ("data.task.name=null", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")
OWN = """
def level(response_mask, *, height):
    return height * response_mask.float(), response_mask.float()
"""


def sources(folder: Path) -> tuple[str, ...]:
    """One mini-batch of two sources, one with an estimator that is not zero in the mean."""
    (folder / "own.py").write_text(OWN)
    own = f"{{adv_estimator:'{folder / 'own.py'}:level',options:{{height:2.0}},weight:3}}"
    return (
        f"algorithm.by_source.sums={own}",
        "algorithm.by_source={lab/words:{adv_estimator:reinforce_plus_plus}}",
        f"{ACTOR}.ppo_mini_batch_size=4",
    )


def test_a_run_of_two_sources_learns_by_their_weights(model: Path, tmp_path: Path) -> None:
    config = ppo_config(model, tmp_path / "run", *RUN, two_sources(tmp_path), *sources(tmp_path))
    with build(config) as trainer:
        batch, metrics = trainer.step(trainer.source.next(1).rows, 1)
    found, rows = metrics.to_floats(), batch.batch
    weights = torch.tensor([3.0 if each == "sums" else 1.0 for each in batch.non_tensor_batch["data_source"]])
    assert torch.equal(rows["source_weight"], weights) and "source_kl_coef" not in batch
    tokens = (rows["loss_mask"].double() * weights[:, None]).sum()
    wanted = -(rows["advantages"].double() * rows["loss_mask"] * weights[:, None]).sum() / tokens
    assert found["actor/pg_loss"] == pytest.approx(float(wanted), abs=1e-6)
    assert float(wanted) == pytest.approx(-2.0 * found["by_source/sums/token_share"], abs=1e-6)
    mine = batch.non_tensor_batch["data_source"] == "sums"
    share = float(3 * rows["loss_mask"][mine].sum() / tokens)
    assert found["by_source/sums/token_share"] == pytest.approx(share)
    scores = (rows["token_level_scores"] * rows["response_mask"]).sum(-1)[mine]
    assert found["by_source/sums/score/mean"] == pytest.approx(float(scores.double().mean()))
    assert found["by_source/sums/num_trajectories"] + found["by_source/lab/words/num_trajectories"] == 16


def test_coefficients_of_the_kl_that_differ_are_told_by_source(model: Path, tmp_path: Path) -> None:
    keys = (
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_coef=0.5",
        "algorithm.by_source={sums:{kl_loss_coef:0.25}}",
    )
    with build(ppo_config(model, tmp_path / "run", *RUN, two_sources(tmp_path), *keys)) as trainer:
        found = trainer.step(trainer.source.next(1).rows, 1)[1].to_floats()
    assert "actor/kl_coef" not in found
    assert (found["by_source/sums/kl_coef"], found["by_source/lab/words/kl_coef"]) == (0.25, 0.5)


def test_kept_rows_are_judged_by_the_algorithm_of_their_source(model: Path, tmp_path: Path) -> None:
    keys = ("trainer.keep_rows=true", "trainer.total_training_steps=1", "trainer.test_freq=-1")
    config = ppo_config(
        model, tmp_path / "run", *RUN, two_sources(tmp_path), *sources(tmp_path), *keys, "trainer.save_freq=1"
    )
    with build(config) as trainer:
        trainer.fit()
    (own,) = reverify(tmp_path / "run", None, None, None)
    assert own.changed_scores == 0 and own.advantages[0] == own.advantages[1] > 1.0
    assert own.losses is not None and own.losses[0] == own.losses[1]
    (other,) = reverify(tmp_path / "run", None, "rloo", None)
    assert other.advantages[1] < 1.0, "another estimator is that of all rows"


def test_sources_with_the_algorithm_of_the_run_change_no_bit(model: Path, tmp_path: Path) -> None:
    files = two_sources(tmp_path)
    same = "algorithm.by_source={sums:{weight:1},lab/words:{adv_estimator:grpo}}"
    steps = []
    for name, more in (("plain", ()), ("named", (same,))):
        with build(ppo_config(model, tmp_path / name, *RUN, files, *more)) as trainer:
            batch, metrics = trainer.step(trainer.source.next(1).rows, 1)
        assert "source_weight" not in batch
        steps.append((batch.batch["advantages"], metrics.to_floats()["actor/grad_norm"]))
    assert torch.equal(steps[0][0], steps[1][0]) and steps[0][1] == steps[1][1]


def test_a_data_source_may_have_a_dot_in_its_name() -> None:
    keys = ["algorithm.by_source={a.b: {weight: 2}, c: {adv_estimator: rloo}}"]
    entries = sources_of(load_config(PPOConfig, keys).config.algorithm)
    assert entries["a.b"].weight == 2.0 and entries["c"].adv_estimator == "rloo"


def test_a_problem_of_an_entry_names_its_source(tmp_path: Path) -> None:
    own = algorithm(sums={"adv_estimator": f"{tmp_path}/none.py:foo"}).algorithm
    with pytest.raises(ConfigError, match=r"^algorithm\.by_source, sums: .*none\.py"):
        find_estimators(own)
    taught = algorithm(sums={"adv_estimator": "on_policy_distillation"})
    assert teacher_reader(taught) == "algorithm.by_source, sums: adv_estimator=on_policy_distillation"


def test_a_source_that_no_row_has_is_refused(model: Path, tmp_path: Path) -> None:
    other = "algorithm.by_source={maths:{weight:2}}"
    config = ppo_config(model, tmp_path / "run", *RUN, two_sources(tmp_path), other)
    with (
        pytest.raises(ConfigError, match=r"algorithm\.by_source: no row has the data source maths"),
        build(config),
    ):
        pass


def test_an_estimator_of_ones_own_that_reads_a_critic_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(token_level_rewards, reward_baselines): ...\n")
    own = f"algorithm.by_source={{sums:{{adv_estimator:'{tmp_path / 'mine.py'}:mine'}}}}"
    config = ppo_config(model, tmp_path / "run", *RUN, two_sources(tmp_path), own)
    with (
        pytest.raises(ConfigError, match="sums: estimator mine needs reward_baselines, which"),
        build(config),
    ):
        pass
