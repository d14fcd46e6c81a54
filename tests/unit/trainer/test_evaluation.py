"""`hybridflow eval` and `generate` on a tiny model: a run's own checkpoint, an early end, failures."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_trainer import build, ppo_config, tiny_model

from hybridflow.cli.main import main
from hybridflow.config.evaluation import prepare_evaluation
from hybridflow.errors import ConfigError
from hybridflow.observability.report import collect
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.rollout.server.build import ServeSettings, build_service
from hybridflow.rollout.server.run import DrainingServer, listen
from hybridflow.trainer import main_eval, main_generation
from hybridflow.trainer.evaluation.results import Answer, AnswerFile

SAMPLED = (
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that has validated and saved at its end."""
    folder = tmp_path_factory.mktemp("evaluated")
    keys = ["trainer.save_freq=2", "trainer.logger=[jsonl]", *SAMPLED]
    with build(ppo_config(tiny_model(folder / "model"), folder / "run", *keys)) as trainer:
        trainer.fit()
    return folder / "run"


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def test_a_checkpoint_has_the_accuracy_of_its_runs_validation(run: Path, tmp_path: Path) -> None:
    assert main(["eval", str(run), "--out", str(tmp_path / "whole")]) == 0
    found = results(tmp_path / "whole")["arithmetic_chain"]
    of_run = read_metrics(run / "metrics.jsonl")[2]
    assert found["prompts"] == 5 and found["answers"] == 10 and found["failed"] == {}
    assert found["metrics"]["mean@2"]["value"] == pytest.approx(
        of_run["val-core/arithmetic_chain/reward/mean@2"], abs=1e-6
    )
    assert found["metrics"]["share/mean@2"]["value"] == pytest.approx(
        of_run["val-aux/arithmetic_chain/share/mean@2"], abs=1e-6
    )
    rows = next(iter(collect(tmp_path / "whole")["details"].values()))
    assert len(rows) == 10 and {"prompt", "response", "score"} <= rows[0].keys()

    # ended in the middle of a line: what was whole stays, and the table is the same
    lines = (tmp_path / "whole/answers.jsonl").read_bytes().splitlines(keepends=True)
    assert all("reward" not in json.loads(line) for line in lines), "they are scored elsewhere"
    (tmp_path / "whole/answers.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:30])
    before = (tmp_path / "whole/results.json").read_bytes()
    assert main(["eval", str(run / "global_step_2"), "--out", str(tmp_path / "whole")]) == 0
    assert (tmp_path / "whole/results.json").read_bytes() == before
    after = (tmp_path / "whole/answers.jsonl").read_bytes().splitlines(keepends=True)
    assert after[:4] == lines[:4] and sorted(after) == sorted(lines)


def test_other_sampling_or_another_folder_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    AnswerFile(out, {"model": "b", "n": 1}).close()  # a start that failed before any answer
    file = AnswerFile(out, {"model": "a", "n": 1})
    file.add(Answer(0, 0, "1 + 1", "2", "stop", 1))
    file.close()
    AnswerFile(out, {"model": "a", "n": 1}).close()
    with pytest.raises(ConfigError, match="n was 1 and is 2"):
        AnswerFile(out, {"model": "a", "n": 2})
    with pytest.raises(ConfigError, match="and no evaluation: give the name of a new folder"):
        AnswerFile(run, {"model": "a"})
    config, _ = prepare_evaluation(
        [f"actor_rollout_ref.model.path={run.parent}/model"], recipe="tiny/grpo", n=4
    )
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    assert (sampling.n, sampling.do_sample, sampling.temperature) == (4, True, 1.0)
    assert main(["eval", str(run), "-n", "2", "data.task.name=null"]) == 1
    assert "there is nothing to answer: set data.val_files" in capsys.readouterr().err
    greedy = "actor_rollout_ref.rollout.val_kwargs.do_sample=false"
    assert main(["eval", str(run), greedy]) == 1
    assert "greedy answers to a prompt would all be the same" in capsys.readouterr().err


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, messages=()):
    assert [message["content"] for message in messages] == ["1+1", solution_str]
    if solution_str == "bad":
        raise ValueError("cannot be scored")
    return {"score": float(solution_str == ground_truth), "pred": solution_str}
"""


def test_responses_of_a_file_are_scored_and_failures_are_in_no_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [
        {"prompt": "1+1", "data_source": "sums", "reward_model": {"ground_truth": "2"}, "answers": answers}
        for answers in (["2", "2", "3", "4"], ["2", "bad", "5", "5"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "answers.parquet")
    status = main_eval.main(
        [
            f"data.path={tmp_path}/answers.parquet",
            "data.response_key=answers",
            f"custom_reward_function.path={tmp_path}/reward.py",
            "reward.num_workers=0",
            f"data.output_path={tmp_path}/out",
        ]
    )
    assert status == 0 and "test_score/sums" in capsys.readouterr().out
    found = results(tmp_path / "out")["sums"]
    assert found["failed"] == {"reward: ValueError": 1} and found["answers"] == 7
    metrics = found["metrics"]
    assert metrics["mean@4"]["value"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert metrics["pass@2"]["value"] == pytest.approx(((1 - 1 / 6) + (1 - 1 / 3)) / 2)
    assert metrics["pass@4"] == {**metrics["pass@4"], "value": 1.0, "prompts": 1}  # of three answers none
    assert metrics["maj@4"]["value"] == 1.0 and metrics["maj@4"]["over"] == "every set of k"


def test_other_facts_of_a_prompt_are_other_prompts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    words = ["generate", str(run), "--out", str(tmp_path / "out"), "data.task.name=null"]
    words.append(f"data.val_files='{data}'")
    data.write_text('{"prompt": "1 + 1", "extra_info": {"seed": 1}}\n')
    assert main(words) == 0 and main(words) == 0
    assert main([*words, "actor_rollout_ref.rollout.quantization=int8"]) == 1
    assert "actor_rollout_ref.rollout.quantization was None and is int8" in capsys.readouterr().err
    data.write_text('{"prompt": "1 + 1", "extra_info": {"seed": 2}}\n')
    assert main(words) == 1 and "prompts was 1 of digest" in capsys.readouterr().err


@pytest.mark.parametrize("column", ["reward_model", "extra_info"])
def test_a_column_of_texts_where_objects_are_wanted_is_an_error_of_the_data(
    column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "1 + 1", "data_source": "openai/gsm8k", "responses": ["2"], column: "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys = [f"data.path={tmp_path}/rows.jsonl", f"data.output_path={tmp_path}/out", "reward.num_workers=0"]
    assert main_eval.main(keys) == 1
    assert f"DataError: {tmp_path}/rows.jsonl, row 0: reward_model is" in capsys.readouterr().err


TOKENS = """
def compute_score(data_source, solution_str, ground_truth, response_ids, messages, extra_info=None):
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[-1]["content"] == solution_str
    return {"score": [1.0] * len(response_ids)}
"""


def test_a_reward_function_is_given_the_conversation_and_the_sampled_ids(run: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens.py").write_text(TOKENS)
    words = ["eval", str(run), "--out", str(tmp_path / "out")]
    words.append(f"reward.custom_reward_function.path='{tmp_path}/tokens.py'")
    for _ in range(2):  # of answers that are there already, too
        assert main(words) == 0
        found = results(tmp_path / "out")["arithmetic_chain"]
        assert found["metrics"]["mean@2"]["value"] == pytest.approx(found["mean_tokens"])


WORLD = """
from pathlib import Path

from hybridflow.environments import Environment, Step

class Twice(Environment):
    def reset(self, row):
        self.turns = 0
        if row["extra_info"]["index"] == 1 and not Path(__file__).with_name("mended").exists():
            raise RuntimeError("out of order")
        return "1 + 1"

    def step(self, text):
        self.turns += 1
        return Step("2 + 2", reward=0.25 * self.turns, done=self.turns == 2)
"""


def test_turns_with_an_environment_and_one_that_fails_is_counted_and_tried_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    words = ["eval", str(run.parent / "model"), "--environment", f"{tmp_path}/world.py:Twice"]
    words += [
        "--out",
        str(tmp_path / "out"),
        "data.task.val_size=3",
        "data.max_prompt_length=64",
        "data.max_response_length=100",
        "actor_rollout_ref.rollout.max_model_len=200",
        f"actor_rollout_ref.rollout.stop_token_ids=[{','.join(map(str, range(112)))}]",  # any token
        "actor_rollout_ref.rollout.agent.num_workers=0",
        "actor_rollout_ref.rollout.agent.retries.environment=0",
        "trainer.num_threads=1",
    ]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "1 failed, 1 environment" in shown.out and "1 of the answers failed" in shown.err
    found = results(tmp_path / "out")["Twice"]
    assert (found["answers"], found["failed"]) == (2, {"environment": 1})
    assert "out of order" in found["first_failure"]
    assert found["metrics"]["mean@1"] == {**found["metrics"]["mean@1"], "value": 0.75, "prompts": 2}
    lines = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    assert "out of order" in next(line["detail"] for line in lines if line["failed"])
    assert all(line["turns"] == 2 and line["extra_info"]["messages"] for line in lines if not line["failed"])

    (tmp_path / "mended").touch()
    assert main(words) == 0
    found = results(tmp_path / "out")["Twice"]
    assert (found["answers"], found["failed"]) == (3, {})
    assert len((tmp_path / "out/answers.jsonl").read_text().splitlines()) == 4


def test_verls_keys_generate_a_parquet_of_responses(run: Path, tmp_path: Path) -> None:
    rows = [{"question": [{"role": "user", "content": "1 + 2 = ?"}], "data_source": "sums", "id": 7}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    keys = [
        f"model.path={run.parent}/model",
        f"data.path={tmp_path}/prompts.parquet",
        "data.prompt_key=question",
        "data.n_samples=3",
        f"data.output_path={tmp_path}/made/responses.parquet",
        "rollout.response_length=4",
        "rollout.prompt_length=40",
        "rollout.name=native",
        "trainer.n_gpus_per_node=1",
    ]
    assert main_generation.main(keys) == 0
    written = pq.read_table(tmp_path / "made/responses.parquet").to_pylist()
    assert len(written) == 1 and written[0]["id"] == 7 and len(written[0]["responses"]) == 3


def test_verls_keys_may_be_greedy_and_failed_answers_are_the_exit_status(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def evaluated(config: Any, subject: Any, responses: Path) -> Any:
        asked.append(config.actor_rollout_ref.rollout.val_kwargs)
        return {"sums": {"failed": {"deadline": 2}}}

    monkeypatch.setattr(main_generation, "evaluate", evaluated)
    keys = [f"model.path={run.parent}/model", "data.task.name=arithmetic_chain", "data.n_samples=1"]
    keys += ["rollout.temperature=0", f"data.output_path={tmp_path}/out"]
    assert main_generation.main(keys) == 1 and not asked
    assert "data.output_path=" in capsys.readouterr().err
    assert main_generation.main([*keys[:-1], f"data.output_path={tmp_path}/out.jsonl"]) == 1
    assert (asked[0].do_sample, asked[0].temperature, asked[0].n) == (False, 0.0, 1)
    assert "sums: 2 answers failed (deadline)" in capsys.readouterr().err


def test_an_endpoint_that_is_not_there_is_told_before_anything_is_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "http://127.0.0.1:9/v1", "--deadline", "1", "--out", str(tmp_path / "out")]
    words += ["data.task.name=arithmetic_chain", "data.task.val_size=3", "data.max_response_length=8"]
    assert main([*words, f"actor_rollout_ref.model.path={run.parent}/model"]) == 1
    assert "nothing answers at http://127.0.0.1:9/v1 (ConnectError" in capsys.readouterr().err
    assert not (tmp_path / "out/answers.jsonl").read_text()


def test_an_endpoint_gives_the_answers_of_its_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(run.parent / "model")
    service = build_service(ServeSettings(model, "tiny", dtype="float32"))
    bound = listen("127.0.0.1", 0)
    server = DrainingServer(service, token="a-token-for-tests")
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    monkeypatch.setenv("OPENAI_API_KEY", "a-token-for-tests")
    keys = ["--recipe", "tiny/grpo", "data.task.val_size=3", "data.max_response_length=8"]
    url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    there = ["eval", url, "--served-model", "tiny", "--out", str(tmp_path / "there"), *keys]
    try:
        assert main([*there, f"actor_rollout_ref.model.path={model}"]) == 0
    finally:
        server.should_exit = True
        thread.join(600)
        bound.close()
        for replica in service.client.replicas:
            replica.close()
    assert main(["generate", model, "--out", str(tmp_path / "here"), *keys]) == 0
    rows = [json.loads(line) for line in (tmp_path / "here/responses.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(len(row["responses"]) == 1 for row in rows)
    answers = [
        set((tmp_path / name / "answers.jsonl").read_text().splitlines()) for name in ("there", "here")
    ]
    assert len(answers[0]) == 3 and answers[0] == answers[1]
