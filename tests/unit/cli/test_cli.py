"""The `hybridflow` command in process: what each word prints, what it leaves behind, and its exit status."""

from __future__ import annotations

import json
import logging
import re
import runpy
from pathlib import Path

import pytest
import transformers
import yaml

from hybridflow import __version__
from hybridflow.cli import doctor, doctor_facts
from hybridflow.cli.main import main
from hybridflow.data.files import count_rows
from hybridflow.models.tiny import create_tiny_model

WORDS = (
    "demo",
    "train",
    "sft",
    "config",
    "explain",
    "doctor",
    "merge",
    "serve",
    "eval",
    "generate",
    "reward-test",
    "try",
    "try-algorithm",
    "view",
    "diff",
    "replay",
    "reverify",
)
PROBED = doctor_facts.Probe({"torch": "2.13.0", "threads": 1, "vectors": "AVX2", "cards": [], "failed": {}})
NUM_PARAMETERS = 56 * 32 + 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32) + 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1
    )


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what a command sets up must not outlive its captured stderr
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def run(*words: object) -> list[str]:
    return [str(word) for word in words]


def task(model: object, *more: str) -> list[str]:
    return run(
        "data.task.name=arithmetic_chain",
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=grpo",
        *more,
    )


def status_of_exit(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of_exit(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in WORDS)
    assert status_of_exit(["--version"]) == 0 and __version__ in capsys.readouterr().out


def test_the_package_runs_as_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["hybridflow", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("hybridflow", run_name="__main__")
    assert end.value.code == 0 and __version__ in capsys.readouterr().out


@pytest.mark.parametrize("word", WORDS)
def test_each_command_has_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of_exit([word, "--help"]) == 0
    assert f"usage: hybridflow {word}" in capsys.readouterr().out


def test_misspelt_commands_end_in_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of_exit([]) == 2
    assert status_of_exit(["tarin"]) == 2 and "'tarin'" in capsys.readouterr().err
    assert status_of_exit(["demo", "--algo", "dpo"]) == 2


def test_config_prints_the_run_as_yaml_and_makes_no_folder(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run("config", *task(tiny, "actor_rollout_ref.rollout.n=4"))) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["actor_rollout_ref"]["rollout"]["n"] == 4 and tree["data"]["tokenizer"] == str(tiny)
    assert main(run("config", "--changed", *task(tiny, "actor_rollout_ref.rollout.n=4"))) == 0
    assert "train_batch_size" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_config_refuses_a_run_folder_that_cannot_be_written(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert (
        main(
            run("config", *task(tiny, "trainer.default_local_dir=file/run", "actor_rollout_ref.rollout.n=4"))
        )
        == 1
    )
    assert "trainer.default_local_dir=file/run cannot be written" in capsys.readouterr().err


def test_config_shows_notes_and_takes_recipes(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = run("config", "--recipe", "grpo", "data.task.name=arithmetic_chain", f"model.path={tiny}")
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "note: model.path is now actor_rollout_ref.model.path" in shown.err
    assert yaml.safe_load(shown.out)["algorithm"]["adv_estimator"] == "grpo", "notes do not stand in the YAML"


@pytest.mark.parametrize("wrong", ["data.train_batch_size=-1", "data.no_such_key=1"])
def test_config_names_what_is_wrong_and_what_this_machine_lacks(
    wrong: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who brings a script of verl learns all of it at once, without a run."""
    lacking = ["actor_rollout_ref.rollout.name=sglang", "trainer.logger=[console,swanlab]"]
    lacking.append("actor_rollout_ref.rollout.n=2")
    assert main(run("config", *task(tiny), *lacking, wrong)) == 1
    said = capsys.readouterr().err
    assert wrong.partition("=")[0] in said
    assert "note: actor_rollout_ref.rollout.name=sglang needs sglang" in said and "swanlab is not" in said
    assert "add trainer.on_missing=fallback" in said
    for command in ("config", "reward-test", "explain"):
        assert main(run(command, *task(tiny), *lacking, "trainer.on_missing=fallback")) == 0


@pytest.mark.parametrize(("words", "key"), [([], "actor_rollout_ref"), (["--sft"], "checkpoint")])
def test_config_alone_lists_every_key(words: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *words]) == 0
    assert key in yaml.safe_load(capsys.readouterr().out)


def test_overrides_may_stand_before_and_after_an_option(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run(
        "config", f"actor_rollout_ref.model.path={tiny}", "data.train_batch_size=8", "--recipe", "grpo"
    )
    assert main([*words, "data.task.name=arithmetic_chain", "data.train_batch_size=16"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["data"]["task"]["name"] == "arithmetic_chain" and tree["data"]["train_batch_size"] == 16
    assert status_of_exit(["config", "--recipee", "grpo"]) == 2
    assert status_of_exit(["doctor", "now"]) == 2


def test_a_sweep_into_one_run_folder_is_refused_before_it_starts(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run(
        "train",
        "--multirun",
        *task(tiny, "actor_rollout_ref.rollout.n=4"),
        "actor_rollout_ref.actor.optim.lr=1e-3,1e-4",
    )
    assert main(words) == 1
    assert "2 runs would write into 1 run folders" in capsys.readouterr().err
    named = [*words, "trainer.experiment_name=lr-${actor_rollout_ref.actor.optim.lr}", "reward.function=none"]
    assert main(named) == 1 and "got 'none'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "refused", ["trainer.n_gpus_per_node=1000", "trainer.critic_warmup=1000", "data.train_batch_size=4096"]
)
def test_a_refused_run_leaves_no_folder(
    refused: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = task(
        tiny,
        "actor_rollout_ref.rollout.n=4",
        "data.task.size=64",
        "data.train_batch_size=8",
        "trainer.device=cpu",
        refused,
    )
    assert main(run("train", *words)) == 1
    assert "Error: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("grpo", "A recipe is given as --recipe grpo"),
        ("mine.yaml", "A recipe is given as --recipe mine.yaml"),
        ("drgrpo", "If you mean the recipe dr_grpo, write --recipe dr_grpo"),
        ("something-else", "Recipes are given as --recipe NAME: cispo, "),
    ],
)
def test_a_word_that_stands_alone_may_be_a_recipe(
    word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", word]) == 1
    assert f"{word}: not an override, which is key=value. {says}" in capsys.readouterr().err


def test_explain_counts_steps_parameters_and_memory(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"data_source": "x", "prompt": "1 + 1 = ?", "reward_model": {"ground_truth": "2"}}] * 50
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    words = run(
        "data.train_files=rows.jsonl", f"actor_rollout_ref.model.path={tiny}", "algorithm.adv_estimator=grpo"
    )
    words += run(
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
    )
    words += run("trainer.total_epochs=2")
    assert main(run("config", "--explain", *words)) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (  # whole lines: in a pipe no name of a key is broken
        "sequences per step: 32 (data.train_batch_size=8 × rollout.n=4)",
        "optimizer steps per step: 2 (2 mini-batches × actor.ppo_epochs=1)",
        "training steps: 12 (trainer.total_epochs=2 × (training rows // 8))",
        "optimizer steps in all: 24 (12 steps × 2)",
    ):
        assert line in lines
    assert any(line.startswith("memory while updating: ") for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_explain_counts_parameters_without_weights(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((tiny / "config.json").read_bytes())
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    assert (
        main(run("config", "--explain", "--sft", "data.task.name=arithmetic_chain", "model.path=bare")) == 0
    )
    assert f"{NUM_PARAMETERS + 32 * (vocabulary - 56):,} parameters" in capsys.readouterr().out


def test_explain_says_that_too_few_rows_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "few.jsonl"
    rows.write_text('{"data_source": "gsm8k", "prompt": "1 + 1 ="}\n' * 3)
    words = [
        f"data.train_files='{rows}'",
        "data.train_batch_size=4",
        "actor_rollout_ref.model.path=owner/model",
    ]
    assert main(run("config", "--explain", *words)) == 0
    out = capsys.readouterr().out
    assert "cannot run" in out and "3 training rows" in out and "data.train_batch_size=4" in out


def test_explain_without_the_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(run("config", "--explain", *task("owner/model", "actor_rollout_ref.rollout.n=4"))) == 0
    shown = capsys.readouterr().out
    assert "not estimated" in shown and "owner/model is no folder on this machine" in shown


def test_rows_are_counted_without_reading_parquet_and_not_for_remote_files(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": list(range(7))}), "rows.parquet")
    (tmp_path / "rows.json").write_text('[{"a": 1}, {"a": 2}]')
    assert count_rows(["rows.parquet", "rows.json"]) == 9
    assert count_rows(["rows.parquet", "s3://bucket/rows.parquet"]) is None


def test_explain_prints_the_formulas_without_model_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = run(
        "explain",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.rollout.n=8",
    )
    assert main(words) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "4. the advantage: algorithm.adv_estimator=grpo" in lines
    assert "5. the policy loss: actor_rollout_ref.actor.policy_loss.loss_mode=vanilla" in lines, (
        "no line is folded on a pipe"
    )
    assert any(line.startswith("max(−A·ρ, −A·clip(ρ, 1 − 0.2, 1 + 0.28))") for line in lines)
    assert any("vanilla.py:" in line and "https://arxiv.org/abs/1707.06347" in line for line in lines)
    assert main(run("explain", "--recipe", "grpo", "actor_rollout_ref.rollout.n=1")) == 1
    assert "set actor_rollout_ref.rollout.n to 2 or more" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_explain_folds_its_lines_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert main(run("explain")) == 0
    shown = capsys.readouterr().out
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown.splitlines()]
    assert "\x1b[1m" in shown and max(map(len, plain)) <= 60


@pytest.mark.parametrize("word", ["config", "train", "sft", "reward-test", "explain"])
def test_a_wrong_configuration_is_one_message_and_status_1(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "data.train_batch_sise=8"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("ConfigError: ") and "data.train_batch_size" in shown and "Traceback" not in shown


def test_doctor_says_what_is_here_and_what_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor_facts.Facts, "probe", PROBED)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "CPU cores" in shown and "reasoning-gym tasks" in shown and "megatron-core" in shown
    assert "pip install 'hybridflow[" in shown and "trainer.n_gpus_per_node up to " in shown


def test_doctor_names_each_engine_and_the_way_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(doctor_facts.Facts, "probe", PROBED)
    monkeypatch.setattr(doctor, "_version", lambda module: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv-sglang" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-sglang" / "bin" / "python").touch()
    assert main(["doctor"]) == 0
    lines = {
        line.split("│")[1].strip(): line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    }
    assert "yes" in lines["native"] and transformers.__version__ in lines["hf"]
    assert " no " in lines["vllm"] and "scripts/setup_vllm.sh on a CPU" in lines["vllm"]
    assert "set actor_rollout_ref.rollout.server.python=.venv-sglang/bin/python" in lines["sglang"]
    assert "pip install 'hybridflow[openai]'" in lines["openai"]
    assert "pip install 'hybridflow[liger]'" in lines["Liger's kernels, on CUDA (use_liger)"]
    assert "torch has" in lines["attention over rows of any length"]
    monkeypatch.setattr(doctor, "_version", lambda module: "9.9")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "9.9" in next(line for line in shown.splitlines() if line.startswith("│ vllm"))


def test_view_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    assert main(["view", "run", "-o", "page.html"]) == 0
    assert "wrote page.html" in capsys.readouterr().out
    assert "critic/score/mean" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["view", "nowhere"], "DataError: nowhere is no folder"),
        (["view", "."], "DataError: . holds no metrics.jsonl"),
        (["view", "run", "-o", "."], "ConfigError: the report cannot be written"),
        (["merge", "nowhere", "out"], "CheckpointError: no actor to merge at nowhere"),
    ],
)
def test_a_wrong_folder_is_one_message_and_status_1(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run", "summary.json").write_text("{}")
    assert main(words) == 1
    assert capsys.readouterr().err.startswith(message)
