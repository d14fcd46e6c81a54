"""`hybridflow.train`: the command's bits, rewards and data of a program, callbacks, where it is called."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_calls import KEYS, ROWS, digits, metrics_of

import hybridflow
from hybridflow import Callback, Environment, HybridFlowError, Run, Step, StopTraining
from hybridflow.api.entries import named_objects
from hybridflow.api.launch import RowsInMemory, files_or_rows
from hybridflow.cli.main import main
from hybridflow.config.tree import flatten
from hybridflow.errors import CheckpointError, ConfigError, DataError, RewardError, Stopped

FILE = """
def share(data_source, solution_str, ground_truth, extra_info):
    return sum(each.isdigit() for each in solution_str) / max(1, len(solution_str))
"""


def train(model: Path, folder: Path, **changes: Any) -> Run:
    """Train with a reward that no other process could import: starting processes takes longer than a run."""

    def share(response: str) -> float:
        return digits(response)

    arguments = {"reward": share, "dataset": ROWS, "overrides": KEYS, "progress": False, **changes}
    return hybridflow.train("grpo", model=model, output_dir=folder, **arguments)


def test_the_bits_are_those_of_the_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(FILE)
    calls = []

    def share(solution_str: str) -> float:
        calls.append(solution_str)
        return digits(solution_str)

    run = train(model, tmp_path / "api", reward=share, val_dataset=ROWS[:2])
    assert "step 1" not in capsys.readouterr().out
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    val = tmp_path / "val.jsonl"
    val.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    words = [
        "--recipe=grpo",
        f"data.train_files={data}",
        f"data.val_files={val}",
        f"reward.function={reward}:share",
        "reward.num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={tmp_path / 'command'}",
        "trainer.save_freq=2",
        *(f"{key}={json.dumps(value)}" for key, value in flatten(KEYS)),
    ]
    assert main(["train", *words]) == 0
    assert metrics_of(run.folder) == metrics_of(tmp_path / "command")
    assert len(calls) == 2 * 8 + 2 * 2, "called in this process: two steps of eight, two validations of two"

    other = Run.open(tmp_path / "command")
    assert other.metrics[-1]["critic/score/mean"] == run.metrics[-1]["critic/score/mean"]
    assert other.validation == run.validation and "val-core/data/reward/mean@1" in str(run.validation)
    assert run.curve("critic/score/mean")[0] == [1, 2]
    assert run.config["trainer"]["total_training_steps"] == 2
    assert {"prompt", "response", "score"} <= set(run.samples[0]) and run.validation_samples
    with pytest.raises(DataError, match="critic/score/mean"):
        run.curve("critic/scores/mean")
    assert run.checkpoint == run.folder / "global_step_2" and run.message == ""
    assert "<iframe" in run.report()._repr_html_() and "2 steps" in run._repr_html_()
    trained, tokenizer = run.model()
    assert trained.config.hidden_size == 32 and tokenizer.decode(tokenizer.encode("12")).strip() == "12"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"reward": lambda text, truth: 0.0},
            ConfigError,
            r"reward: _lambda_: got <lambda>\(text, tr",
        ),
        ({"reward": 3}, ConfigError, "reward: got int, wanted a function"),
        ({"reward": []}, ConfigError, "reward is an empty list"),
        ({"reward": [(digits, "much")]}, ConfigError, "wanted a pair of a reward and its weight"),
        ({"reward": Environment}, ConfigError, "pass it as environment="),
        ({"reward": "gsm9k"}, ConfigError, "got 'gsm9k', wanted auto"),
        ({"environment": Environment()}, ConfigError, "wanted the class"),
        ({"dataset": [{"question": "1 + 1"}] * 12}, DataError, "no column prompt; its columns: question"),
        ({"dataset": []}, DataError, "dataset is empty"),
        ({"dataset": {"prompt": ["a"]}}, DataError, "dataset: got dict, wanted a list of dicts"),
        ({"dataset": [{"prompt": "a"}, 7]}, DataError, "dataset, row 1: got int"),
        ({"dataset": [{"prompt": "a", "answer": object()}]}, DataError, "row 0: a object is no JSON"),
        ({"dataset": [{"prompt": "\ud800"}]}, DataError, "dataset, row 0: .*surrogates not allowed"),
        ({"dataset": "missing.parquet"}, ConfigError, "there is no file missing.parquet"),
        ({"overrides": {"trainer": {"total_step": 2}}}, ConfigError, "unknown key trainer.total_step"),
        ({"overrides": "a=1"}, ConfigError, "overrides: got 'a=1', wanted a dict"),
        ({"overrides": None}, ConfigError, "overrides: got None, wanted a dict"),
        ({"overrides": ["trainer.seed=x"]}, ConfigError, "trainer.seed: got 'x'"),
        ({"callbacks": [Callback]}, ConfigError, r"wanted an object: Callback\(\)"),
        ({"callbacks": [3]}, ConfigError, "callbacks: got int"),
        ({"callbacks": 3}, ConfigError, "callbacks: got int, wanted .*, or a list of these"),
        ({"callbacks": [lambda step: None]}, ConfigError, r"wanted on_step_end\(step, metrics\)"),
        ({"resume": "nowhere"}, ConfigError, "there is no folder nowhere"),
        ({"model": 5}, ConfigError, "got int, wanted a folder or a hub name"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_loaded(
    changes: Mapping[str, Any], error: type[Exception], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        train(**{"model": model, "folder": tmp_path / "run", **changes})
    assert isinstance(caught.value, HybridFlowError)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_processes_cannot_call_what_they_cannot_import(model: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "reward": {"num_workers": 2}}
    with pytest.raises(ConfigError, match="inner is defined in a notebook"):
        train(model, tmp_path / "run", reward=lambda_of(3), overrides=keys)


def test_a_module_that_only_this_process_has_is_called_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "by_hand.py"
    file.write_text("def score(response):\n    return 1.0\n")
    found = importlib.util.spec_from_file_location("by_hand", file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "by_hand", module)
    found.loader.exec_module(module)
    with named_objects() as objects:
        assert objects.spec(module.score) == "hybridflow_objects:score"
        monkeypatch.syspath_prepend(str(tmp_path))
        assert objects.spec(module.score) == "by_hand:score"


def lambda_of(number: int) -> Any:
    def inner(response: str) -> float:
        return float(len(response) > number)

    return inner


@pytest.mark.slow
def test_rewards_of_all_kinds_are_summed_with_their_weights(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    limit = 4

    async def long(response: str, extra_info: dict[str, Any]) -> float:
        await asyncio.sleep(0)
        return float(len(response) > limit + 0 * extra_info["index"])

    rewards: list[Any] = [
        digits,
        (long, 0.5),
        f"{file}:share",
        {"name": "length", "weight": -0.01, "max_chars": 2},
    ]
    run = train(model, tmp_path / "run", reward=rewards)
    for row in run.samples:
        assert row["score"] == pytest.approx(
            row["digits"] + 0.5 * row["long"] + row["share"] - 0.01 * row["length"], abs=1e-6
        )


def test_a_function_of_completions_gets_lists_and_the_columns_of_the_data(
    model: Path, tmp_path: Path
) -> None:
    seen = []

    def right(prompts: Any, completions: Any, target: Any, **columns: Any) -> list[float]:
        seen.append((prompts, completions, target, sorted(columns)))
        return [float(len(completion[0]["content"])) for completion in completions]

    rows = [{**row, "target": number, "hard": number > 3} for number, row in enumerate(ROWS)]
    run = train(model, tmp_path / "run", reward=[(right, 0.5), digits], dataset=rows)
    assert {row["right"] == len(row["response"]) for row in run.samples} == {True}
    for prompts, completions, target, columns in seen:
        assert prompts == [rows[target[0]]["prompt"]]
        assert [message["role"] for message in completions[0]] == ["assistant"]
        assert {"answer", "hard", "index", "ground_truth", "data_source"} <= set(columns)


def test_a_function_that_raises_is_named_as_its_cell_has_it(model: Path, tmp_path: Path) -> None:
    def broken(response: str) -> float:
        raise ValueError("out of luck")

    with pytest.raises(RewardError, match="the reward function broken failed on row") as caught:
        train(model, tmp_path / "run", reward=broken)
    message = str(caught.value)
    assert "call it with this row's response, '" in message and "out of luck" in message
    assert "reward-test" not in message and "hybridflow_objects:" not in message


@pytest.mark.slow
def test_an_entry_of_the_terms_gives_its_function_options(model: Path, tmp_path: Path) -> None:
    def scaled(response: str, scale: float) -> float:
        return scale * digits(response)

    run = train(model, tmp_path / "run", reward={"name": scaled, "scale": 3.0, "key": "mine"})
    assert all(row["mine"] == pytest.approx(3 * digits(row["response"])) for row in run.samples)


@pytest.mark.slow
def test_a_function_of_a_module_is_called_by_worker_processes(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "run", reward=digits, overrides={**KEYS, "reward": {"num_workers": 1}})
    assert run.config["reward"]["function"] == "tiny_calls:digits"
    assert len(run.metrics) == 2


class Events(Callback):
    """Keeps what it is told; ends the run where the test wants it."""

    def __init__(self, **answers: Any) -> None:
        self.seen: list[Any] = []
        self.answers = answers

    def on_run_start(self, folder: Path, total_steps: int) -> None:
        self.seen.append(("start", total_steps))

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        assert metrics["training/global_step"] == step
        self.seen.append(("step", step))
        return self._answer("step")

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        self.seen.append(("validation", step))
        return None

    def on_samples(self, step: int, rows: Any) -> bool | None:
        self.seen.append(("samples", step, len(rows)))
        return self._answer("samples")

    def on_checkpoint(self, step: int, folder: Path) -> bool | None:
        assert folder.is_dir() or self.answers.get("beside")
        self.seen.append(("checkpoint", step))
        return self._answer("checkpoint")

    def on_run_end(self, folder: Path) -> None:
        self.seen.append("end")

    def _answer(self, method: str) -> bool | None:
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.slow
def test_callbacks_hear_everything_and_end_the_run_in_order(model: Path, tmp_path: Path) -> None:
    events = Events()
    keys = {**KEYS, "trainer": {**KEYS["trainer"], "log_val_generations": 1}}
    whole = train(model, tmp_path / "whole", callbacks=[events], val_dataset=ROWS[:2], overrides=keys)
    assert events.seen == [
        ("start", 2),
        ("samples", 0, 1),
        ("validation", 0),
        ("step", 1),
        ("samples", 2, 1),
        ("step", 2),
        ("validation", 2),
        ("checkpoint", 2),
        "end",
    ]
    for answer in (True, StopTraining("enough")):
        events = Events(step=answer)
        folder = tmp_path / type(answer).__name__
        run = train(model, folder, callbacks=[events], val_dataset=ROWS[:2], overrides=keys)
        assert events.seen[-3:] == [("step", 1), ("checkpoint", 1), "end"]
        assert run.message.startswith("ended by a callback after step 1/2; newest checkpoint global_step_1")
        assert run.checkpoint == folder / "global_step_1"
        again = train(model, folder, val_dataset=ROWS[:2], overrides=keys)
        assert metrics_of(again.folder)[2] == metrics_of(whole.folder)[2], "it went on to the same bits"


@pytest.mark.slow
def test_an_error_of_a_callback_is_named_and_the_step_is_saved(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Events\.on_step_end raised[\s\S]*out of luck"):
        train(model, tmp_path / "run", callbacks=[Events(step=ValueError("out of luck"))])
    assert Run.open(tmp_path / "run").checkpoint == tmp_path / "run" / "global_step_1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "answers",
    [
        {"samples": True},
        {"samples": ValueError("out of luck"), "checkpoint": ValueError("and again")},
        {"step": True, "checkpoint": True},
    ],
)
def test_a_save_beside_the_run_becomes_whole_when_callbacks_end_it(
    answers: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    keys = {
        **KEYS,
        "actor_rollout_ref.actor.checkpoint.async_save": True,
        "trainer": {**KEYS["trainer"], "log_val_generations": 1, "val_before_train": False, "test_freq": 1},
    }
    arguments: dict[str, Any] = {
        "callbacks": [Events(beside=True, **answers)],
        "val_dataset": ROWS[:2],
        "overrides": keys,
    }
    if "step" in answers or answers["samples"] is True:
        run = train(model, tmp_path / "run", **arguments)
        assert run.message.startswith("ended by a callback after step 1/2; newest checkpoint global_step_1")
    else:
        with pytest.raises(ConfigError, match="out of luck"):
            train(model, tmp_path / "run", **arguments)
    assert Run.open(tmp_path / "run").checkpoint == tmp_path / "run" / "global_step_1"


def test_a_second_run_of_a_process_says_where_it_was_ended(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class AtOnce(Callback):
        def on_run_start(self, folder: Path, total_steps: int) -> bool:
            return True

    train(model, tmp_path / "first", val_dataset=None)
    run = train(model, tmp_path / "second", callbacks=AtOnce(), progress=True)
    assert run.message.startswith("ended by a callback before the first step; there is no checkpoint yet")
    assert caplog.messages.count(run.message) == 1


def test_a_function_alone_ends_a_run_that_prints_nothing(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script without logging
    run = train(
        model,
        tmp_path / "run",
        callbacks=lambda step, metrics: metrics["critic/score/mean"] > -1,
        progress=False,
    )
    assert run.message.startswith("ended by a callback after step 1/2")
    shown = capfd.readouterr()
    assert "ended by a callback" not in shown.out + shown.err


@pytest.mark.slow
def test_runs_follow_one_another_in_threads_and_under_an_event_loop(model: Path, tmp_path: Path) -> None:
    def asks(response: str) -> float:
        async def answer() -> float:
            await asyncio.sleep(0)
            return digits(response)

        return asyncio.run(answer())  # refused where this thread has a running loop

    def nested(step: int, metrics: Mapping[str, float]) -> None:
        with pytest.raises(ConfigError, match="another run is going on in this process"):
            train(model, tmp_path / "nested")

    runs = [train(model, tmp_path / "first", callbacks=[nested]), train(model, tmp_path / "second")]
    thread = threading.Thread(target=lambda: runs.append(train(model, tmp_path / "thread", reward=asks)))
    thread.start()
    thread.join()

    async def cell() -> None:
        runs.append(train(model, tmp_path / "loop", reward=asks))
        await asyncio.sleep(0)
        assert asyncio.current_task() is not None

    asyncio.run(cell())
    assert len(runs) == 4
    scores = [run.curve("critic/score/mean") for run in runs]
    assert scores[0] == scores[1] == scores[2] == scores[3]


@pytest.mark.slow
def test_ctrl_c_ends_a_script_and_gives_a_notebook_its_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(step: int, metrics: Mapping[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped):
        train(model, tmp_path / "script", callbacks=[interrupt])
    assert Run.open(tmp_path / "script").checkpoint is not None
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    run = train(model, tmp_path / "notebook", callbacks=[interrupt])
    assert "the same call goes on" in run.message and run.checkpoint is not None
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_an_environment_of_a_cell_is_played(model: Path, tmp_path: Path) -> None:
    played = []

    class Count(Environment):
        def __init__(self, wanted: int = 1) -> None:
            self.wanted = wanted

        def reset(self, row: Mapping[str, Any]) -> str:
            return "Say something."

        def step(self, text: str) -> Step:
            return Step(reward=digits(text), done=True)

        def score(self) -> float:
            played.append(self.wanted)
            return 0.5

    run = train(
        model,
        tmp_path / "run",
        reward=None,
        environment=Count,
        environment_options={"wanted": 3},
        dataset=None,
        overrides={**KEYS, "data": {**KEYS["data"], "task": {"size": 12, "val_size": 0}}},
    )
    assert set(played) == {3} and len(run.metrics) == 2


@pytest.mark.slow
def test_a_loaded_model_is_saved_first(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ConfigError, match="give its tokenizer too"):
        train(loaded, tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(model)
    run = train(loaded, tmp_path / "run", tokenizer=tokenizer)
    plain = train(model, tmp_path / "plain", overrides={**KEYS, "trainer.save_freq": -1})
    assert run.curve("critic/score/mean") == plain.curve("critic/score/mean")
    with pytest.raises(CheckpointError, match=r"set trainer\.save_freq"):
        plain.model()


@pytest.mark.parametrize("library", ["datasets", "pandas"])
def test_rows_of_libraries_are_written_as_they_are(library: str, tmp_path: Path) -> None:
    module = pytest.importorskip(library)
    rows: Any = module.Dataset.from_list(ROWS) if library == "datasets" else module.DataFrame(ROWS)
    found = files_or_rows(rows, "dataset")
    assert isinstance(found, RowsInMemory)
    found.write(tmp_path / "rows.jsonl")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == ROWS


def test_paths_and_texts_are_told_apart(tmp_path: Path) -> None:
    assert files_or_rows("a.parquet", "dataset") == ["a.parquet"]
    assert files_or_rows([Path("a.jsonl"), "b.json"], "dataset") == ["a.jsonl", "b.json"]
    found = files_or_rows(["One. ", "Two. "], "dataset")
    assert isinstance(found, RowsInMemory)
    found.write(tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == '{"prompt": "One. "}\n{"prompt": "Two. "}\n'
