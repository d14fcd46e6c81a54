"""What is wrong with the data files and the reward is said before torch is loaded."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.algorithm import AlgorithmConfig, FilterGroupsConfig
from hybridflow.config.data import DataConfig, SFTDataConfig, TaskConfig
from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.config.tree import with_values
from hybridflow.data.early_checks import check_data
from hybridflow.errors import ConfigError, DataError, RewardError
from hybridflow.rewards.compose import resolve
from hybridflow.rewards.early_checks import check_reward
from hybridflow.rewards.load import REWARD_FUNCTIONS
from hybridflow.rewards.result import normalize_result

ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"ground_truth": "2"},
}
SFT_ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
CHECK_SECONDS = 6.0
"""CPU seconds that refusing a run may take; it takes about 1 on a quiet machine, and 13 with torch."""


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ppo(files: Any, reward: RewardConfig | None = None, **keys: Any) -> PPOConfig:
    algorithm = keys.pop("algorithm", AlgorithmConfig())
    data = DataConfig(train_files=files, **{"train_batch_size": 2, **keys})
    return PPOConfig(data=data, reward=reward or RewardConfig(), algorithm=algorithm)


def check(config: PPOConfig) -> None:
    check_reward(config, check_data(config))


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_good_files_pass_and_their_sources_are_known(tmp_path: Path, suffix: str) -> None:
    rows = [*[ROW] * 70, {**ROW, "data_source": "math"}]
    config = ppo(write(tmp_path / f"a{suffix}", rows))
    (facts,) = check_data(config)
    assert facts.sources == ["gsm8k", "math"] and facts.columns == list(ROW)
    check(config)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
@pytest.mark.parametrize(
    ("change", "keys", "error", "said"),
    [
        ({"data_source": "mine"}, {}, RewardError, r"a\.\w+: reward.function=auto knows no reward.*'mine'"),
        ({}, {"prompt_key": "question"}, DataError, "no column question; its columns: data_source, prompt"),
        ({}, {"reward_fn_key": "src"}, DataError, "no column src;.*set data.reward_fn_key"),
        ({"prompt": 3}, {}, DataError, "none of the first 3 rows can be used; row 0: got int, wanted a list"),
        ({"extra_info": "x"}, {}, DataError, "row 0: extra_info is str"),
        ({"images": ["a.png"]}, {"image_key": "x"}, DataError, "column images, filled in row 0, and no key"),
        ({"videos": ["a.mp4"]}, {"video_key": None}, DataError, "column videos, filled in row 0, and no key"),
        ({"prompt": [{"role": "user", "content": [{"type": "sound"}]}]}, {}, DataError, "'sound'.*is text"),
        ({}, {"train_batch_size": 4}, DataError, "3 rows, fewer than data.train_batch_size=4"),
        ({"reward_model": None}, {"drop": True}, RewardError, "no.*ground truth|ground_truth"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path,
    suffix: str,
    change: dict[str, Any],
    keys: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    keys = dict(keys)
    row = {**ROW, **change}
    if keys.pop("drop", False):
        row = {name: value for name, value in row.items() if value is not None}
    config = ppo(write(tmp_path / f"a{suffix}", [row] * 3), **keys)
    with pytest.raises(error, match=said):
        check(config)


def test_rows_without_a_source_have_a_name_in_metrics(tmp_path: Path) -> None:
    row = {name: value for name, value in ROW.items() if name != "data_source"}
    file = write(tmp_path / "a.parquet", [row] * 3)
    with pytest.raises(RewardError, match="name no source, so theirs is 'data', and reward"):
        check(ppo(file))
    check(ppo(file, RewardConfig(function="gsm8k")))


def test_a_run_whose_environment_or_agent_scores_needs_no_known_source(tmp_path: Path) -> None:
    config = ppo(write(tmp_path / "a.parquet", [{**ROW, "data_source": "mine"}] * 3))
    with pytest.raises(RewardError, match="'mine'"):
        check(config)
    check(with_values(config, {"data.environment": "guess"}))
    agent = "actor_rollout_ref.rollout.agent"
    check(with_values(config, {f"{agent}.command": ["python"]}))
    check(with_values(config, {f"{agent}.default_agent_loop": "mine.py:run"}))
    with pytest.raises(RewardError, match="'mine'"):
        check(with_values(config, {f"{agent}.default_agent_loop": "tool_agent"}))


def test_sources_of_validation_files_and_late_rows(tmp_path: Path) -> None:
    train = write(tmp_path / "a.parquet", [ROW] * 3)
    late = write(tmp_path / "b.parquet", [*[ROW] * 5000, {**ROW, "data_source": "mine"}])
    with pytest.raises(RewardError, match=r"b\.parquet: .*'mine'"):
        check(ppo(train, val_files=late))
    check(ppo(train, RewardConfig(on_error="zero"), val_files=late))  # 5000 of 5001 rows score
    check(ppo(train, RewardConfig(custom_reward_function=CustomRewardConfig(__file__)), val_files=late))


NO_TRUTH = {"data_source": "gsm8k", "prompt": ROW["prompt"]}
NULL_TRUTH = {**ROW, "reward_model": {"style": "rule", "ground_truth": None}}


@pytest.mark.parametrize("row", [NO_TRUTH, NULL_TRUTH], ids=["no column", "null"])
def test_one_file_of_several_without_ground_truth(tmp_path: Path, row: dict[str, Any]) -> None:
    good = write(tmp_path / "good.jsonl", [ROW] * 3)
    bad = write(tmp_path / "bad.jsonl", [row] * 3)
    said = r"bad\.jsonl: none of its first rows has a ground truth .* the reward gsm8k"
    for reward in (RewardConfig(), RewardConfig(function="gsm8k")):
        with pytest.raises(RewardError, match=said):
            check(ppo([good, bad], reward))
    with pytest.raises(RewardError, match=r"bad\.jsonl"):
        check(ppo(good, val_files=[good, bad]))
    check(ppo([good, bad], RewardConfig(on_error="zero")))
    check(ppo([good, bad], RewardConfig(function="random")))
    check(ppo([good, bad], RewardConfig(custom_reward_function=CustomRewardConfig(__file__))))


def test_a_single_row_without_ground_truth_passes(tmp_path: Path) -> None:
    check(ppo(write(tmp_path / "a.jsonl", [NULL_TRUTH, ROW])))


@pytest.mark.parametrize("column", ["images", "photos"])
def test_pictures_for_a_model_of_text_are_refused_at_once(tmp_path: Path, column: str) -> None:
    config = ppo(write(tmp_path / "a.jsonl", [{**ROW, column: ["a.png"]}] * 2))
    keys = {"actor_rollout_ref.model.path": str(tmp_path), "data.image_key": column}
    config = with_values(config, keys)
    check(config)  # nothing is known of the model
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    check(config)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        DataError, match=rf"column {column}, filled in row 0, and the model .* reads text only"
    ):
        check(config)


def test_empty_image_columns_and_some_bad_rows_pass(tmp_path: Path) -> None:
    rows = [{**ROW, "images": []}, {**ROW, "images": None}, {**ROW, "images": []}]
    for suffix in ("parquet", "jsonl"):
        check(ppo(write(tmp_path / f"a.{suffix}", rows)))
    check(ppo(write(tmp_path / "b.jsonl", [{**ROW, "prompt": 3}, ROW, ROW])))


def test_data_that_is_not_read_here(tmp_path: Path) -> None:
    assert check_data(ppo("s3://bucket/a.parquet")) == []
    task = DataConfig(task=TaskConfig(name="arithmetic_chain"))
    assert check_data(PPOConfig(data=task))[0].sources == ["arithmetic_chain"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "no column prompt, response;.*data.messages_key=messages"),
        ({"messages": [{"role": "user"}]}, "message 0 .user. has content of type NoneType"),
        ({"prompt": "a", "response": 3}, "response is int, wanted a string"),
        ({**SFT_ROW, "image": "a"}, "column image, filled in row 0, and no key names it"),
        ({"conversations": [{"from": "someone", "value": "x"}]}, "from 'someone', wanted one of human"),
    ],
)
def test_supervised_data(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    def config(file: str) -> SFTConfig:
        return SFTConfig(data=SFTDataConfig(train_files=file, train_batch_size=2))

    with pytest.raises(DataError, match=said):
        check_data(config(write(tmp_path / "a.parquet", [row] * 3)))
    good = {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}
    check_data(config(write(tmp_path / "b.parquet", [good] * 3)))
    check_data(config(write(tmp_path / "c.jsonl", [SFT_ROW] * 3)))
    plain = config(write(tmp_path / "d.jsonl", [{"text": "x"}, {"text": ""}, {"text": 3}]))
    check_data(replace(plain, data=replace(plain.data, text_key="text")))
    empty = config(write(tmp_path / "e.jsonl", [{"text": ""}] * 3))
    with pytest.raises(DataError, match="row 0: the text is empty"):
        check_data(replace(empty, data=replace(empty.data, text_key="text")))


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
STEPS = {"prompt": "a", "completions": ["b"], "labels": [True]}


@pytest.mark.parametrize(
    ("loss", "row", "said"),
    [
        ("dpo", {"prompt": "a", "completion": "b", "label": True}, "no column chosen, rejected"),
        ("dpo", {"chosen": "b", "rejected": "c"}, "neither `Human:` nor `Assistant:`"),
        ("kto", {"prompt": "a", "completion": "b"}, "no column label.*or answers with a data.label_key"),
        ("bradley_terry", STEPS, "no column chosen, rejected"),
        ("process", PAIR, "no column completions, labels.*data.steps_key"),
        ("process", {**STEPS, "labels": []}, "a label for each of 1 steps"),
        ("dpo", PAIR, ""),
        ("kto", {"prompt": "a", "completion": "b", "label": True}, ""),
        ("bradley_terry", PAIR, ""),
        ("process", STEPS, ""),
    ],
)
def test_comparisons(tmp_path: Path, loss: str, row: dict[str, Any], said: str) -> None:
    root: SFTConfig = RewardModelConfig() if loss in ("process", "bradley_terry") else DPOConfig()
    file = write(tmp_path / "a.jsonl", [row] * 3)
    values = {"data.train_files": file, "data.train_batch_size": 2, "algorithm.loss": loss}
    config = with_values(root, values)
    if said:
        with pytest.raises(DataError, match=said):
            check_data(config)
    else:
        check_data(config)


@pytest.mark.parametrize(("columns", "answers"), [(("chosen", "rejected"), 6), (("completion", "label"), 3)])
def test_kto_counts_answers(tmp_path: Path, columns: tuple[str, str], answers: int) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "a"} | dict.fromkeys(columns, "b")] * 3)
    given = {"data.train_files": file, "algorithm.loss": "kto"}
    check_data(with_values(DPOConfig(), {**given, "data.train_batch_size": answers}))
    with pytest.raises(DataError, match=f"{answers} answers, fewer than data.train_batch_size={answers + 1}"):
        check_data(with_values(DPOConfig(), {**given, "data.train_batch_size": answers + 1}))


@pytest.mark.parametrize(
    ("reward", "algorithm", "said"),
    [
        (RewardConfig(), {"gdpo_reward_keys": ["acc", "form"]}, "gdpo_reward_keys names form.*score, acc"),
        (
            RewardConfig(terms=[{"name": "length", "max_chars": 3}]),
            {"filter_groups": FilterGroupsConfig(enable=True, metric="acc")},
            "filter_groups.metric=acc.*returns score, length",
        ),
        (RewardConfig(function="random"), {"gdpo_reward_keys": ["acc"]}, "names acc.*random"),
        (
            RewardConfig(terms=[{"name": "gsm8k"}, {"name": "random", "when": "acc"}]),
            {"gdpo_reward_keys": ["acc", "random"]},
            "names random, .* not for every row",
        ),
    ],
)
def test_keys_that_no_built_in_reward_returns(
    tmp_path: Path, reward: RewardConfig, algorithm: dict[str, Any], said: str
) -> None:
    file = write(tmp_path / "a.jsonl", [ROW] * 3)
    with pytest.raises(ConfigError, match=said):
        check(ppo(file, reward, algorithm=AlgorithmConfig(**algorithm)))


@pytest.mark.parametrize(
    ("reward", "keys", "metric"),
    [
        (RewardConfig(), ["acc", "score"], "acc"),
        (RewardConfig(function="arithmetic_chain"), ["acc", "format"], "seq_reward"),
        (
            RewardConfig(terms=[{"name": "gsm8k", "key": "right"}, {"name": "random"}]),
            ["right", "random"],
            "acc",
        ),
        (RewardConfig(terms=[{"name": "gsm8k"}, {"name": "random", "when": "acc"}]), ["gsm8k"], "random"),
        (RewardConfig(custom_reward_function=CustomRewardConfig(__file__)), ["anything"], "anything"),
        (RewardConfig(terms=[{"name": "gsm8k"}, {"name": f"{__file__}:polite"}]), ["polite"], "polite"),
    ],
)
def test_keys_that_a_reward_returns_pass(
    tmp_path: Path, reward: RewardConfig, keys: list[str], metric: str
) -> None:
    filters = FilterGroupsConfig(enable=True, metric=metric)
    algorithm = AlgorithmConfig(gdpo_reward_keys=keys, filter_groups=filters)
    check(ppo(write(tmp_path / "a.jsonl", [ROW] * 3), reward, algorithm=algorithm))


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (RewardConfig(function="gsm9k"), "reward.function: got 'gsm9k', wanted auto, "),
        (RewardConfig(function="absent.py:score"), r"reward.function: no file absent.py \(looked in "),
        (RewardConfig(function="rewards/mine:score"), "reward.function: rewards/mine is not a Python file"),
        (
            RewardConfig(custom_reward_function=CustomRewardConfig(path="absent.py")),
            "reward.custom_reward_function: no file absent.py",
        ),
        (
            RewardConfig(
                function="exact_match", custom_reward_function=CustomRewardConfig(reward_kwargs={"a": 1})
            ),
            "reward.function: exact_match has no option a",
        ),
        (RewardConfig(terms=[{"name": "gsm8k"}, {"name": "gsm9k"}]), r"reward.terms\[1\]: got 'gsm9k'"),
        (RewardConfig(terms=[{"name": "absent.py"}]), r"reward.terms\[0\]: no file absent.py"),
    ],
)
def test_a_reward_that_does_not_exist(tmp_path: Path, reward: RewardConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(ppo(write(tmp_path / "a.jsonl", [ROW] * 4), reward))


def test_a_reward_in_a_file_is_not_run_by_the_early_check(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit(3)\n")
    data = write(tmp_path / "a.jsonl", [ROW] * 4)
    for path in (str(file), f"{file}:score"):
        check(ppo(data, RewardConfig(function=path)))
        check(ppo(data, RewardConfig(custom_reward_function=CustomRewardConfig(path=path))))
        check(ppo(data, RewardConfig(terms=[{"name": path}])))


def test_the_name_of_a_function_may_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(**row):\n    return 0.5\n")
    assert resolve(RewardConfig(function=str(file)), 0)() == 0.5


@pytest.mark.parametrize(
    "name", [name for name in REWARD_FUNCTIONS if name not in ("reasoning_gym", "code", "judge")]
)
def test_the_table_of_returned_keys_is_true(name: str) -> None:
    options = {"format": {"pattern": "x"}, "length": {"max_chars": 3}}.get(name, {})
    config = RewardConfig(terms=[{"name": name, "key": "own", **options}])
    for response in ("#### 1", "\\boxed{1}", ""):
        row = {"data_source": "x", "solution_str": response, "ground_truth": "1", "extra_info": {}}
        _, extras = normalize_result(resolve(config, seed=0)(**row))
        assert set(extras) == {"own", *REWARD_FUNCTIONS[name].returns}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "RewardError: "),
        (["data.prompt_key=question"], "no column question"),
        (["reward.function=gsm8k", "algorithm.gdpo_reward_keys=[form]"], "names form"),
    ],
)
def test_a_run_says_so_before_torch(tmp_path: Path, words: list[str], said: str) -> None:
    from hybridflow.models.tiny import create_tiny_model

    create_tiny_model(tmp_path / "model", seed=0)
    file = write(tmp_path / "a.jsonl", [{**ROW, "data_source": "mine"}] * 4)
    code = (
        "import sys; from hybridflow.trainer.main_ppo import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was loaded'; sys.exit(status)"
    )
    overrides = [
        f"data.train_files={file}",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        *words,
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-c", code, *overrides], capture_output=True, text=True, timeout=110
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 1 and said in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert after.ru_utime - before.ru_utime < CHECK_SECONDS
