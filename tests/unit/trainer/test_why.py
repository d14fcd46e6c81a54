"""Why a run is slow: each cause is found in the counts that show it, first where it is the largest, and its
forecast is what the planner's model or the counts say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.main import main
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.config.show import to_yaml
from hybridflow.config.tree import with_values
from hybridflow.errors import ConfigError, DataError
from hybridflow.planner.costs import StepRows
from hybridflow.planner.model_shape import shape_of
from hybridflow.trainer.ppo import run_plan
from hybridflow.trainer.ppo.run_plan import Forecaster, PhaseSeconds
from hybridflow.trainer.why import findings, run_times
from hybridflow.trainer.why.findings import found_in, held, waits_written
from hybridflow.trainer.why.rules import RULES, Wait, waits_of
from hybridflow.trainer.why.run_times import RunTimes

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
QUIET: Mapping[str, Any] = {
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    f"{ACTOR}.use_kl_loss": False,
    f"{ROLLOUT}.n": 8,
}
STEP: Mapping[str, float] = {
    "timing_s/gen": 4.0,
    "timing_s/update_actor": 4.0,
    "timing_s/step": 8.0,
    "training/num_trajectories": 64.0,
    "response_length/mean": 20.0,
    "response_length/max": 20.0,
    "prompt_length/mean": 10.0,
    "rollout/max_rows": 64.0,
    "rollout/requests": 64.0,
    "rollout/decode_steps": 20.0,
    "rollout/generated_tokens": 1280.0,
    "perf/rollout_tokens_per_second": 400.0,
}


PASS = 1 / 32
"""Seconds of a pass besides its tokens."""


def run_with(
    keys: Mapping[str, Any] | None = None,
    trajectories: list[Mapping[str, float]] | None = None,
    **metrics: float,
) -> RunTimes:
    """A run of one kind of step; the metrics' names have __ for the slash."""
    step = {**STEP, **{name.replace("__", "/"): value for name, value in metrics.items()}}
    config = with_values(PPOConfig(), {**QUIET, **(keys or {})})
    return RunTimes(config, [step, step], [], trajectories or [])


@pytest.fixture(autouse=True)
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that knows five figures: so much time do these keys take. That of tokens is wrong."""

    def predict(config: PPOConfig, rows: StepRows) -> dict[str, PhaseSeconds]:
        actor = config.actor_rollout_ref.actor
        rollout = config.actor_rollout_ref.rollout
        waves = max(1.0, rows.count / rollout.max_num_seqs)
        lasts = rows.lengths.quantile(1) if config.trainer.schedule == "sync" else rows.lengths.mean
        again = 1.25 if config.actor_rollout_ref.model.enable_gradient_checkpointing else 1.0
        passes = rows.count / (actor.ppo_micro_batch_size_per_gpu or rows.count)
        scoring = rows.count / (rollout.log_prob_micro_batch_size_per_gpu or rows.count)
        return {
            "gen": PhaseSeconds(waves * lasts),
            "update_actor": PhaseSeconds(7.0 * again, PASS * passes * again),
            "old_log_prob": PhaseSeconds(7.0, PASS * scoring),
        }

    def forecaster(config: PPOConfig, card: str = "") -> Forecaster:
        return predict

    monkeypatch.setattr(run_times, "forecaster", forecaster)


def test_a_run_whose_parts_are_as_they_must_be_has_nothing_to_change() -> None:
    assert waits_of(run_with()) == []


TOOL = [{"generate": 1.0, "environment": 3.0}]
CASES = [
    (
        "validations",
        {"trainer.test_freq": 1},
        {"timing_s__testing": 3.0, "timing_s__step": 11.0},
        [],
        3 * 7 / 8,
    ),
    (
        "checkpoints",
        {"trainer.save_freq": 1},
        {"timing_s__save_checkpoint": 1.0, "timing_s__step": 9.0},
        [],
        2 / 3,
    ),
    (
        "rewards",
        {"reward.num_workers": 1},
        {"timing_s__reward": 4.0, "timing_s__step": 12.0, "reward__seconds_per_row_max": 0.1},
        [],
        3.0,
    ),
    (
        "tools",
        {f"{ROLLOUT}.agent.num_workers": 1},
        {"timing_s__gen": 9.0, "timing_s__step": 13.0, "rollout__decode_steps": 64.0},
        TOOL,
        8.0 * 3 / 4,
    ),
    ("few_rows", {f"{ROLLOUT}.max_num_seqs": 16}, {"rollout__max_rows": 16.0}, [], 3.0),
    ("preemptions", {}, {"rollout__preemptions": 32.0}, [], 1.0),
    ("tail", {}, {"response_length__max": 80.0}, [], 3.0),
    ("micro_batches", {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}, {}, [], 63 * PASS),
    (
        "log_prob_batches",
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1, "algorithm.rollout_correction.bypass_mode": True},
        {"timing_s__old_log_prob": 3.0, "timing_s__step": 11.0},
        [],
        63 * PASS,
    ),
    ("recomputation", {"actor_rollout_ref.model.enable_gradient_checkpointing": True}, {}, [], 0.8),
    ("log_probs_again", {}, {"timing_s__old_log_prob": 1.0, "timing_s__step": 9.0}, [], 1.0),
    (
        "idle_reference",
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0},
        {"timing_s__ref": 2.0, "timing_s__step": 10.0},
        [],
        2.0,
    ),
    ("dropped_groups", {}, {"training__num_gen_batches": 4.0}, [], 3.0),
    ("idle_trainer", {}, {"timing_s__wait_for_rollouts": 2.0, "timing_s__step": 10.0}, [], None),
    ("pushes", {}, {"timing_s__update_weights": 2.0, "timing_s__step": 10.0}, [], None),
    ("driver", {}, {"timing_s__step": 12.0}, [], None),
]


@pytest.mark.parametrize(
    ("cause", "keys", "metrics", "trajectories", "saved"), CASES, ids=[c[0] for c in CASES]
)
def test_each_cause_is_first_where_it_is_the_one(
    cause: str,
    keys: Mapping[str, Any],
    metrics: Mapping[str, float],
    trajectories: list[Mapping[str, float]],
    saved: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    first = waits_of(run_with(keys, trajectories, **metrics))[0]
    assert first.cause == cause
    assert first.saved == (None if saved is None else pytest.approx(saved))


def test_every_rule_has_a_case() -> None:
    rules = {rule.__name__ for rule in RULES}
    assert {case[0] for case in CASES} == rules | {"log_prob_batches"}


@pytest.mark.parametrize(("phase", "key"), [("testing", "test_freq"), ("save_checkpoint", "save_freq")])
def test_what_the_last_step_does_anyway_is_no_reason_to_do_it_less_often(phase: str, key: str) -> None:
    config = with_values(PPOConfig(), {**QUIET, f"trainer.{key}": 20})
    last = {**STEP, f"timing_s/{phase}": 4.0, "timing_s/step": 12.0}
    assert waits_of(RunTimes(config, [STEP, last], [], [])) == []


def test_one_slow_score_is_not_mended_by_more_processes() -> None:
    run = run_with(timing_s__reward=4.0, timing_s__step=12.0, reward__seconds_per_row_max=3.9)
    first = next(wait for wait in waits_of(run) if wait.cause == "rewards")
    assert first.key == "reward.timeout" and first.saved is None


def test_without_the_planners_figures_the_counted_waits_are_told_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_times, "forecaster", lambda config, card: None)
    keys = {f"{ROLLOUT}.max_num_seqs": 16}
    found = waits_of(run_with(keys, rollout__max_rows=16.0, timing_s__old_log_prob=1.0, timing_s__step=9.0))
    assert [(wait.cause, wait.saved) for wait in found] == [
        ("log_probs_again", 1.0),
        ("few_rows", None),
        ("tail", None),
    ]


def test_a_forecast_that_was_tried_stands_beside_what_it_became() -> None:
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    before = run_with({key: 1})
    after = run_with({key: None, "trainer.seed": 5}, timing_s__update_actor=1.5, timing_s__step=5.5)
    found, others = held(before, after)
    assert [(each.wait.cause, each.wait.saved, each.became) for each in found] == [
        ("micro_batches", pytest.approx(63 * PASS), 2.5)
    ]
    assert others == ["trainer.seed"]


def test_overrides_are_written_as_a_command_takes_them() -> None:
    assert Wait("a", 1.0, "", "x.y", None).overrides == ("x.y=null",)
    assert Wait("a", 1.0, "", "x.y", True, also=("z=1",)).overrides == ("x.y=true", "z=1")
    assert Wait("a", 1.0, "", "x.y", 512).overrides == ("x.y=512",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder of three steps, of which the first is slow in another way."""
    words = [
        "trainer.device=cpu",
        f"{ROLLOUT}.max_num_seqs=16",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
    prepared = prepare_config(PPOConfig, words, recipe="tiny/grpo", runs=False, needs_model=False)
    (tmp_path / "config.yaml").write_text(to_yaml(prepared.config))
    steps = [{"step": number, **STEP, "rollout/max_rows": 16.0} for number in (1, 2, 3)]
    steps[0]["timing_s/step"] = 100.0
    lines = "".join(json.dumps(step) + "\n" for step in [*steps, {"step": 4, "perf/throughput": 1.0}])
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 5, "torn')
    (tmp_path / "rollouts.jsonl").write_text(
        json.dumps({"step": 2, "num_tokens": [20] * 60 + [80] * 4}) + "\n"
    )
    spans = [
        ["trajectory 7", "generate", 0.0, 1.0],
        ["trajectory 7", "tool", 1.0, 3.0],
        ["driver", "adv", 0, 9],
    ]
    (tmp_path / "timeline.jsonl").write_text(json.dumps({"step": 3, "spans": spans}) + "\n")
    return tmp_path


def test_a_folder_is_read(folder: Path) -> None:
    run = RunTimes.read(folder)
    assert run.seconds == 8.0, "the first step builds caches, and does not count"
    assert run.rows.lengths.quantile(1) == 80 and run.rows.count == 64
    assert run.trajectories == [{"generate": 1.0, "tool": 2.0}]


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] == 8.0 and {wait["cause"] for wait in found["waits"]} >= {"few_rows", "tail"}
    assert main(["why", str(folder)]) == 0
    told = capsys.readouterr().out
    assert f"{ROLLOUT}.max_num_seqs=64, forecast to save" in told
    assert main(["why", str(folder), "--tried", str(folder)]) == 0
    assert "no key of these two runs was changed" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["trainer.device", "actor_rollout_ref.model.path"])
def test_a_run_whose_device_or_model_is_elsewhere_is_read_without_forecasts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(run_times, "forecaster", run_plan.forecaster)
    monkeypatch.setattr("hybridflow.distributed.device._available", lambda name: False)
    value = {"trainer.device": "cuda", "actor_rollout_ref.model.path": "/no/model"}[key]
    config = with_values(RunTimes.read(folder).config, {key: value})
    (folder / "config.yaml").write_text(to_yaml(config))
    found = {wait.cause: wait.saved for wait in waits_of(RunTimes.read(folder))}
    assert found["few_rows"] is None and found["tools"] is not None


def test_a_run_that_generates_nothing_is_told_in_one_line(folder: Path) -> None:
    (folder / "config.yaml").write_text(to_yaml(SFTConfig()))
    with pytest.raises(ConfigError, match=r"^[^\n]* is no run of `hybridflow train`[^\n]*$"):
        RunTimes.read(folder)


def test_a_folder_that_is_none_or_too_young_is_told(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        RunTimes.read(tmp_path / "none")
    (folder / "metrics.jsonl").write_text('{"step": 1, "timing_s/step": 1.0}\n')
    with pytest.raises(DataError, match="1 finished steps"):
        RunTimes.read(folder)


def test_lines_of_another_form_are_passed_over(folder: Path) -> None:
    odd: list[Any] = [{"num_tokens": ["a"]}, {"num_tokens": 3}, {"spans": [["a"]]}, {"spans": [[1, 2, 3, 4]]}]
    for name in ("rollouts.jsonl", "timeline.jsonl"):
        (folder / name).write_text("".join(json.dumps({"step": 2, **line}) + "\n" for line in odd))
    (folder / "metrics.jsonl").write_text(
        (folder / "metrics.jsonl").read_text() + '\n{"step": 9, "timing_s/step": "a"}\n'
    )
    run = RunTimes.read(folder)
    assert run.seconds == 8.0 and not run.lengths and not run.trajectories


def test_what_is_advised_for_the_tail_is_no_refused_configuration() -> None:
    (wait,) = [each for each in waits_of(run_with(response_length__max=80.0)) if each.cause == "tail"]
    words = [*wait.overrides, "data.train_batch_size=64"]
    prepare_config(PPOConfig, words, recipe="tiny/grpo", runs=False, needs_model=False)
    corrected = run_with({"algorithm.rollout_correction.bypass_mode": True}, response_length__max=80.0)
    (wait,) = [each for each in waits_of(corrected) if each.cause == "tail"]
    assert wait.overrides == ("trainer.schedule=colocated_async",)


def test_a_phase_that_is_nothing_but_passes_saves_no_more_than_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    run = run_with({key: 1}, timing_s__update_actor=1.0, timing_s__step=5.0)
    assert run.saving("update_actor", {key: None}) == pytest.approx(1.0 - 1.0 / 64)


def test_the_forecasts_of_a_run_with_cards_need_none_of_them_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_times, "forecaster", run_plan.forecaster)
    monkeypatch.setattr(run_plan, "shapes_if_known", lambda config: {"actor": shape_of("Qwen2.5-7B")})
    monkeypatch.setattr("hybridflow.distributed.device._available", lambda name: False)
    config = with_values(RunTimes.read(folder).config, {"trainer.device": "cuda"})
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "machine.json").write_text('{"card": "NVIDIA H100 80GB HBM3", "cards": 1}')
    saved = {wait.cause: wait.saved for wait in waits_of(RunTimes.read(folder))}
    assert saved["few_rows"] is not None and saved["few_rows"] > 1.0


def test_a_run_writes_its_waits_for_its_page(folder: Path) -> None:
    run = RunTimes.read(folder)
    with pytest.raises(KeyError), waits_written(run.config, folder):
        raise KeyError("the error that ends the run")
    assert json.loads((folder / "waits.json").read_text()) == json.loads(json.dumps(found_in(run)))
    (folder / "metrics.jsonl").write_text("")
    with waits_written(run.config, folder):
        pass
    assert not (folder / "waits.json").exists(), "those of an earlier run are not its own"


def test_no_error_of_the_waits_ends_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: RunTimes) -> dict[str, Any]:
        raise TypeError("a rule that is wrong")

    config = RunTimes.read(folder).config
    monkeypatch.setattr(findings, "found_in", broken)
    with waits_written(config, folder):
        pass
    assert not (folder / "waits.json").exists()
