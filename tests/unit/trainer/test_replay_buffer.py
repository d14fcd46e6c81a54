"""PF-PPO's replay buffer: which rows a step draws, and what it trains them by."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import actor_module, build, metrics_of, ppo_config
from torch import Tensor

from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.controller.backend import Part
from hybridflow.controller.local import in_memory
from hybridflow.errors import ConfigError, Stopped
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.randomness import generator
from hybridflow.protocol.remote import RemoteColumn
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.ppo.replay_buffer import ReplayBuffer, not_noted
from hybridflow.trainer.replay.kept_rows import KeptRows
from hybridflow.trainer.replay.reverify import reverify
from hybridflow.trainer.schedules.ledger import LEDGER_FILE, surviving_transitions
from hybridflow.trainer.schedules.ledger_state import Replayed
from hybridflow.workers.actor import POLICY_COLUMNS

DRAWN = ("algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true")
BYPASS = ("algorithm.rollout_correction.bypass_mode=true",)
DECOUPLED = ("algorithm.rollout_correction.rollout_is=token",)
MAX_AGE = 2
STEPS = 5
BUFFER = (
    *DRAWN,
    f"algorithm.pf_ppo.max_age={MAX_AGE}",
    f"trainer.total_training_steps={STEPS}",
    "actor_rollout_ref.rollout.exact=false",
)


def sampled(batch: DataProto) -> dict[str, dict[str, list[Any]]]:
    """By trajectory, "uid tokens": what was sampled in it; a draw's tokens say which trajectory it is."""
    found = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        mask = batch.batch["response_mask"][row]
        values = {
            name: batch.batch[name][row][mask].tolist()
            for name in ("responses", "rollout_log_probs", "policy_version", "token_level_scores")
        }
        found[f"{uid} {values['responses']}"] = values
    return found


class Recorded:
    """A run, with what each step was given, could draw, and has drawn."""

    def __init__(self, model: Path, folder: Path, *keys: str) -> None:
        self.folder = folder / "run"
        self.keys = keys
        self.model = model
        folder.mkdir(exist_ok=True)
        self.given: dict[int, DataProto] = {}
        self.union: dict[int, DataProto] = {}
        self.drawn: dict[int, DataProto] = {}
        self.current: dict[int, Tensor] = {}  # log-probs of the drawn rows by the weights before the update
        self.kept: list[int] = []  # rows whose tokens have left the driver, step by step
        self.learned: dict[str, Tensor] = {}  # the weights after it

    def train(self) -> dict[str, Tensor]:
        with build(ppo_config(self.model, self.folder, *self.keys)) as trainer:
            self._watch(trainer)
            trainer.fit()
            return {name: value.detach().clone() for name, value in actor_module(trainer).named_parameters()}

    def _watch(self, trainer: PPOTrainer) -> None:
        buffer = trainer.step.buffer
        assert buffer is not None
        join = buffer.join
        note_drawn = buffer.note_drawn
        store = trainer.step.roles.actor.backend.store

        def storing(columns: DataProto) -> Part:
            if "input_ids" in columns:
                self.kept.append(len(columns))
            return store(columns)

        def joining(batch: DataProto, step: int, keep: Callable[[DataProto], DataProto]) -> DataProto:
            self.given[step] = batch.select()
            self.union[step] = join(batch, step, keep)
            return self.union[step]

        def noting(drawn: DataProto, new: DataProto, step: int) -> Any:
            self.drawn[step] = drawn.select()
            tokens = drawn.select(list(POLICY_COLUMNS), [], [])
            self.current[step] = trainer.step.roles.actor.log_probs(tokens).batch["old_log_probs"]
            return note_drawn(drawn, new, step)

        trainer.step.roles.actor.backend.store = storing  # type: ignore[method-assign]
        buffer.join = joining  # type: ignore[method-assign]
        buffer.note_drawn = noting  # type: ignore[method-assign]

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        return metrics_of(self.folder)


KEPT = ("trainer.save_freq=1", "trainer.keep_rows=true")


@pytest.fixture(scope="module")
def decoupled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    run = Recorded(model, tmp_path_factory.mktemp("decoupled"), *BUFFER, *DECOUPLED, *KEPT)
    run.learned = run.train()
    return run


@pytest.fixture(scope="module")
def bypass(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    run = Recorded(model, tmp_path_factory.mktemp("bypass"), *BUFFER, *BYPASS)
    run.train()
    return run


def steps_of_rows(run: Recorded) -> dict[str, int]:
    """The step that was given each trajectory."""
    return {name: step for step, batch in run.given.items() for name in sampled(batch)}


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_rows_of_the_last_steps_are_drawn_and_older_ones_are_not(
    mode: str, request: pytest.FixtureRequest
) -> None:
    run: Recorded = request.getfixturevalue(mode)
    made_in = steps_of_rows(run)
    ages: Counter[int] = Counter()
    for step, drawn in run.drawn.items():
        assert len(drawn) == len(run.given[step]) == 8
        assert {made_in[name] for name in sampled(run.union[step])} == {*range(max(1, step - 2), step + 1)}
        ages.update(step - made_in[name] for name in sampled(drawn))
    assert set(ages) == {0, 1, 2}, "each age was drawn, and none beyond the bound"


def test_the_odds_are_over_the_scores_of_all_steps(decoupled: Recorded) -> None:
    """The draw of each step, done again with weights that are written out in float64."""
    seed = ppo_config(decoupled.model, decoupled.folder, *decoupled.keys).trainer.seed
    for step, batch in decoupled.union.items():
        scores = []
        for row, mask in zip(batch.batch["token_level_scores"].double(), batch.batch["response_mask"]):
            scores.append(sum(float(value) for value, own in zip(row, mask) if own))
        weights = torch.tensor([abs(score) ** 2.0 for score in scores], dtype=torch.float64)
        rng = generator(seed, "pf_ppo", step)
        places = torch.multinomial(weights / weights.max(), 8, replacement=True, generator=rng)
        wanted = [decoupled.union[step].batch["responses"][place].tolist() for place in places]
        assert decoupled.drawn[step].batch["responses"].tolist() == wanted
    assert len(decoupled.union[5]) == 24


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_a_drawn_row_keeps_its_tokens_behaviour_log_probs_versions_and_scores(
    mode: str, request: pytest.FixtureRequest
) -> None:
    run: Recorded = request.getfixturevalue(mode)
    given = {name: values for batch in run.given.values() for name, values in sampled(batch).items()}
    made_in = steps_of_rows(run)
    for drawn in run.drawn.values():
        for name, values in sampled(drawn).items():
            assert values == given[name]
            assert set(values["policy_version"]) == {made_in[name] - 1}


def test_with_decoupled_correction_the_proximal_policy_is_that_of_the_step(decoupled: Recorded) -> None:
    """π_old is the policy at the start of the step, weighted by min(π_old/π_behaviour, 2)."""
    changed = 0
    for step, drawn in decoupled.drawn.items():
        mask = drawn.batch["response_mask"]
        old = drawn.batch["old_log_probs"][mask]
        behaviour = drawn.batch["rollout_log_probs"][mask]
        torch.testing.assert_close(old, decoupled.current[step][mask], rtol=0, atol=2e-5)
        wanted = (old - behaviour).double().exp().clamp(max=2.0)
        torch.testing.assert_close(drawn.batch["rollout_is_weights"][mask].double(), wanted)
        changed += int(((old - behaviour).abs() > 0.05).sum())
    assert changed > 20, "replayed tokens have another probability by now"


def test_in_bypass_mode_the_denominator_is_the_policy_that_sampled(bypass: Recorded) -> None:
    apart = 0
    for step, drawn in bypass.drawn.items():
        mask = drawn.batch["response_mask"]
        old = drawn.batch["old_log_probs"][mask]
        assert torch.equal(old, drawn.batch["rollout_log_probs"][mask])
        apart += int(((old - bypass.current[step][mask]).abs() > 0.05).sum())
    assert apart > 20, "the current policy is another one"


def test_values_and_advantages_are_computed_anew_in_each_step(decoupled: Recorded) -> None:
    values: dict[str, set[float]] = {}
    for drawn in decoupled.drawn.values():
        assert bool((drawn.batch["advantages"] != 0).any())
        for row, uid in enumerate(drawn.non_tensor_batch["uid"]):
            name = f"{uid} {drawn.batch['responses'][row].tolist()}"
            values.setdefault(name, set()).add(float(drawn.batch["values"][row, 0]))
    assert any(len(found) > 1 for found in values.values())


def test_a_row_of_a_group_is_compared_with_its_own_group(model: Path, tmp_path: Path) -> None:
    keys = (*BUFFER, *DECOUPLED, "algorithm.adv_estimator=rloo")
    run = Recorded(model, tmp_path / "a", *keys)
    run.train()
    again = 0
    for step, drawn in run.drawn.items():
        scores: dict[str, list[float]] = {}
        for batch in run.given.values():
            for row, uid in enumerate(batch.non_tensor_batch["uid"]):
                scores.setdefault(uid, []).append(float(batch.batch["token_level_scores"][row].sum()))
        for row, uid in enumerate(drawn.non_tensor_batch["uid"]):
            own = float(drawn.batch["token_level_scores"][row].sum())
            (other,) = [score for score in scores[uid] if score != own] or [own]
            mask = drawn.batch["response_mask"][row]
            assert float(drawn.batch["advantages"][row][mask][0]) == pytest.approx(own - other, abs=1e-5)
            again += uid not in run.given[step].non_tensor_batch["uid"]
    assert again > 5


def test_metrics_are_those_of_the_steps_own_rows(decoupled: Recorded) -> None:
    for step, line in decoupled.metrics.items():
        if "critic/score/mean" not in line:
            continue
        given = decoupled.given[step]
        scores = (given.batch["token_level_scores"] * given.batch["response_mask"]).sum(-1)
        assert line["critic/score/mean"] == pytest.approx(float(scores.mean()), abs=1e-6)
        assert line["perf/total_num_tokens"] == float(given.batch["attention_mask"].sum())
        own = set(given.non_tensor_batch["uid"])
        again = [uid not in own for uid in decoupled.drawn[step].non_tensor_batch["uid"]]
        assert line["training/replay/drawn_again"] == pytest.approx(sum(again) / 8)
        held = [decoupled.given[number] for number in range(max(1, step - 1), step + 1)]
        size = sum(tensor.nbytes for batch in held for tensor in dict(batch.batch.items()).values())
        assert line["training/replay/bytes"] == size


def test_tokens_of_rows_that_may_be_drawn_leave_the_driver_once(decoupled: Recorded) -> None:
    assert decoupled.kept == [8] * STEPS
    for batch in decoupled.union.values():
        read = batch.by_reference().materialized()
        assert all(torch.equal(read.batch[name], batch.batch[name]) for name in POLICY_COLUMNS)


def test_without_a_buffer_the_first_step_is_the_same_and_later_ones_are_not(
    decoupled: Recorded, model: Path, tmp_path: Path
) -> None:
    keys = (*BUFFER, *DECOUPLED, *KEPT, "algorithm.pf_ppo.max_age=0", "trainer.total_training_steps=2")
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        assert trainer.step.buffer is None and "replay_buffer" not in trainer.state.parts
        trainer.fit()
    plain = metrics_of(tmp_path / "run")
    first = {name: value for name, value in decoupled.metrics[1].items() if "/replay/" not in name}
    assert first == {name: plain[1][name] for name in first} and len(first) > 60
    assert plain[2]["actor/pg_loss"] != decoupled.metrics[2]["actor/pg_loss"]


SCHEDULES = {
    "one_step_off": ("trainer.schedule=one_step_off",),
    "two_ahead": ("trainer.schedule=exact_async", "trainer.async.run_ahead=2"),
    "colocated_async": ("trainer.schedule=colocated_async",),
}


@pytest.mark.parametrize("schedule", ["two_ahead", "colocated_async"])
def test_the_ledger_says_how_often_each_group_was_drawn_again(
    schedule: str, model: Path, tmp_path: Path
) -> None:
    run = Recorded(model, tmp_path / "a", *BUFFER, *DECOUPLED, *SCHEDULES[schedule])
    run.train()
    drawn: Counter[tuple[int, int]] = Counter()
    for step, batch in run.drawn.items():
        own = set(run.given[step].non_tensor_batch["uid"])
        for uid in ByTrajectory(batch).samples.non_tensor_batch["uid"]:
            batch_number, place = map(int, uid.split("-"))
            if uid not in own:
                drawn[(batch_number - 1) * 4 + place, step - 1] += 1
    assert drawn
    noted = {}
    taken_in = {}
    for _, line in surviving_transitions(run.folder / LEDGER_FILE):
        if isinstance(line, Replayed):
            noted |= {(index, line.step): line.draws for index in line.indices}
        elif type(line).__name__ == "Taken":
            taken_in |= dict.fromkeys(line.indices, line.step)  # type: ignore[attr-defined]
    assert noted == drawn
    assert {step - taken_in[index] for index, step in noted} == {1, 2}


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param((), id="sync"),
        *(
            pytest.param(keys, id=name, marks=[pytest.mark.slow] * (name == "two_ahead"))
            for name, keys in SCHEDULES.items()
        ),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    schedule: tuple[str, ...], decoupled: Recorded, model: Path, tmp_path: Path
) -> None:
    keys = (*BUFFER, *DECOUPLED, *KEPT, *schedule)
    if "trainer.schedule=colocated_async" in schedule:
        keys += ("trainer.async.run_ahead=0",)  # the timing then decides nothing
    (tmp_path / "b").mkdir()
    whole = decoupled
    if schedule:
        whole = Recorded(model, tmp_path / "a", *keys)
        whole.learned = whole.train()
    with build(ppo_config(model, tmp_path / "b" / "run", *keys)) as trainer:
        learn = trainer.step

        def stop(batch: DataProto, step: int) -> Any:
            if step == 4:  # in the step, once the buffer has its rows
                assert learn.buffer is not None
                learn.buffer.join(batch, step, lambda rows: DataProto())
                raise Stopped(signal.SIGTERM, "in step 4")
            return learn(batch, step)

        trainer.step = stop  # type: ignore[assignment]
        with pytest.raises(Stopped):
            trainer.fit()
    other = Recorded(model, tmp_path / "b", *keys)
    found = other.train()
    assert sorted(other.drawn) == [4, 5]
    assert all(torch.equal(found[name], value) for name, value in whole.learned.items())
    assert {4: other.metrics[4], 5: other.metrics[5]} == {4: whole.metrics[4], 5: whole.metrics[5]}


def test_a_run_may_begin_or_shorten_its_buffer_when_it_is_resumed(model: Path, tmp_path: Path) -> None:
    first = (*BUFFER, *DECOUPLED, "trainer.save_freq=1", "trainer.total_training_steps=2")
    run = Recorded(model, tmp_path / "a", *first)
    run.train()
    state = CheckpointStore(run.folder).load_latest()
    assert state is not None and len(state.state["trainer"]["replay_buffer"]) == 2
    shorter = Recorded(
        model, tmp_path / "a", *first, "trainer.total_training_steps=3", "algorithm.pf_ppo.max_age=1"
    )
    shorter.train()
    assert len(shorter.union[3]) == 16
    plain = ("algorithm.pf_ppo.max_age=0", "trainer.total_training_steps=1")
    (tmp_path / "b").mkdir()
    with build(ppo_config(model, tmp_path / "b" / "run", *first, *plain)) as trainer:
        trainer.fit()
    begun = Recorded(model, tmp_path / "b", *first)
    begun.train()
    assert len(begun.union[2]) == 8


def test_kept_rows_have_all_columns_and_reverify_says_why_it_cannot(decoupled: Recorded) -> None:
    kept = KeptRows(decoupled.folder).read(3)
    assert len(kept.rows) == 8
    assert {"old_log_probs", "values", "advantages", "returns"} <= set(kept.rows.names())
    assert kept.rows.batch["advantages"].shape == kept.rows.batch["response_mask"].shape
    with pytest.raises(ConfigError, match=r"has a replay buffer \(algorithm\.pf_ppo\.max_age=2\)"):
        reverify(decoupled.folder, None, None, 3)


def test_the_tiny_model_learns_from_rows_of_several_steps(model: Path, tmp_path: Path) -> None:
    keys = (*BUFFER, *BYPASS, "trainer.total_training_steps=20", "data.train_batch_size=8")
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        trainer.fit()
    scores = [line["critic/score/mean"] for line in metrics_of(tmp_path / "run").values()]
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.15, scores


def rows(step: int, widths: tuple[int, int], count: int = 2) -> DataProto:
    """Rows whose tokens say their step, as wide as the longest of them."""
    prompt, response = widths
    ids = torch.full((count, prompt + response), step)
    mask = torch.ones(count, response, dtype=torch.bool)
    return DataProto.from_dict(
        {
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids, dtype=torch.bool),
            "response_mask": mask,
            "rollout_log_probs": -1.0 * mask,
            "policy_version": (step - 1) * mask.int(),
            "row_id": torch.arange(count) + 100 * step,
        },
        {"uid": [f"{step}-{row}" for row in range(count)]},
    )


def test_rows_of_other_widths_are_padded_where_they_are_read() -> None:
    buffer = ReplayBuffer(2, 0, not_noted)
    kept = []

    def keep(batch: DataProto) -> DataProto:
        """As a group does."""
        if batch.has("input_ids") and batch.remote:
            return DataProto()
        kept.append(len(batch))
        part = in_memory(batch.select([*POLICY_COLUMNS], [], []))
        whole = range(len(batch))
        return DataProto(remote={name: RemoteColumn.in_shard(part, name, whole) for name in POLICY_COLUMNS})

    for step, widths in enumerate([(3, 4), (3, 4), (5, 2), (3, 4)], start=1):
        own = rows(step, widths)
        own |= keep(own)
        batch = buffer.join(own, step, keep)
        read = batch.by_reference().materialized()
        assert all(torch.equal(read.batch[name], batch.batch[name]) for name in POLICY_COLUMNS)
    assert kept == [2, 2, 2, 2]
    assert batch.batch["input_ids"].shape == (6, 9)
    assert batch.batch["input_ids"][2].tolist() == [3] * 7 + [0, 0]
    assert batch.batch["policy_version"][2].tolist() == [2, 2, -1, -1]
    assert list(batch.non_tensor_batch["uid"]) == ["4-0", "4-1", "3-0", "3-1", "2-0", "2-1"]
    resumed = ReplayBuffer(2, 0, not_noted)
    resumed.load_state_dict(buffer.state_dict())
    kept.clear()
    for step in (5, 6):
        own = rows(step, (3, 4))
        own |= keep(own)
        assert resumed.join(own, step, keep).by_reference().has("input_ids")
    assert kept == [2, 2, 2, 2], "rows of a checkpoint leave the driver once, too"
