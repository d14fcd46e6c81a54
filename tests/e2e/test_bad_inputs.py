"""What users get wrong, at the level of the command: one clear message and a status that is not 0, or counted and survived.

Each case makes what it needs in `tmp_path`, and says by which overrides it goes wrong and what the message must hold.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file
from tiny_run import Inputs, gsm8k_rows, metrics_of, small_run, write_jsonl, write_parquet

from hybridflow.checkpoint.state import load_tree
from hybridflow.cli.main import main as hybridflow
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol import DataProto
from hybridflow.trainer.main_ppo import main as main_ppo
from hybridflow.trainer.main_sft import main as main_sft

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
Case = tuple[str, Callable[[Inputs, Path], list[str]], tuple[str, ...]]
ONE_MESSAGE = re.compile(r"^(?:Config|Data|Model|Reward|Rollout|Training|Checkpoint|Worker)Error: ", re.MULTILINE)


def keys(*overrides: str) -> Callable[[Inputs, Path], list[str]]:
    """A case that needs no files; {tmp} is the test's folder."""
    return lambda inputs, tmp: [override.replace("{tmp}", str(tmp)) for override in overrides]


def model_with(change: Callable[[Path], None]) -> Callable[[Inputs, Path], list[str]]:
    """A copy of the model folder with something wrong in it."""

    def make(inputs: Inputs, tmp: Path) -> list[str]:
        folder = tmp / "model"
        shutil.copytree(inputs.model, folder)
        change(folder)
        return [f"actor_rollout_ref.model.path={folder}"]

    return make


def data_with(name: str, write: Callable[[Path], Any], *more: str) -> Callable[[Inputs, Path], list[str]]:
    """A data file with something wrong in it."""

    def make(inputs: Inputs, tmp: Path) -> list[str]:
        write(tmp / name)
        return [f"data.train_files={tmp / name}", *more]

    return make


def reward_with(code: str, *more: str) -> Callable[[Inputs, Path], list[str]]:
    """A reward function of the user's; `code` is its body."""

    def make(inputs: Inputs, tmp: Path) -> list[str]:
        path = tmp / "my_reward.py"
        path.write_text(f"import time\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    {code}\n")
        return [f"reward.custom_reward_function.path={path}", *more]

    return make


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    """Change entries of a JSON file in a model folder; None removes one."""

    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def several(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    """One change after another."""

    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def rows_without(*columns: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in columns} for row in gsm8k_rows(6, split="train")]


def rows_with(**columns: Any) -> list[dict[str, Any]]:
    return [row | columns for row in gsm8k_rows(6, split="train")]


def empty_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(gsm8k_rows(1, split="train")).slice(0, 0), path)


def bad_estimator(inputs: Inputs, tmp: Path) -> list[str]:
    (tmp / "mine.py").write_text("def mine(token_level_rewards, response_mask, group_ids):\n    raise ValueError('no such luck')\n")
    return [f"algorithm.adv_estimator={tmp / 'mine.py'}:mine"]


def file_as_folder(inputs: Inputs, tmp: Path) -> list[str]:
    (tmp / "file").write_text("")
    return [f"trainer.default_local_dir={tmp / 'file' / 'run'}"]


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def estimator_of_nan(inputs: Inputs, tmp: Path) -> list[str]:
    (tmp / "mine.py").write_text("def mine(token_level_rewards, response_mask):\n    return (token_level_rewards * float('nan'),) * 2\n")
    return [f"algorithm.adv_estimator={tmp / 'mine.py'}:mine"]


def loss_that_raises(inputs: Inputs, tmp: Path) -> list[str]:
    (tmp / "mine.py").write_text("def mine(*args, **kwargs):\n    return args[0].nothing\n")
    return [f"{ACTOR}.policy_loss.loss_mode={tmp / 'mine.py'}:mine"]


def other_size(inputs: Inputs, tmp: Path) -> list[str]:
    """Resume, with another model, a run that has a checkpoint."""
    assert main_ppo(small_run(inputs, tmp / "run", "trainer.save_freq=1", steps=1)) == 0
    return [f"actor_rollout_ref.model.path={create_tiny_model(tmp / 'other', hidden=16, layers=2, heads=2, kv_heads=1, intermediate=64)}"]


TWO_ROWS = ("data.train_max_samples=2", "data.shuffle=false", "data.train_batch_size=2", f"{ROLLOUT}.n=1")
HANGING = ("reward.num_workers=1", "reward.timeout=0.5")
LONG = [{"role": "user", "content": "1 + 1 = ? " * 20}]
REFUSED: list[Case] = [
    ("unknown key", keys("data.train_batchsize=4"), ("data.train_batchsize", "did you mean data.train_batch_size")),
    ("not an override", keys("train_batch_size"), ("train_batch_size",)),
    ("wrong type", keys("data.train_batch_size=many"), ("data.train_batch_size", "many", "int")),
    ("null where a value is needed", keys("data.train_batch_size=null"), ("data.train_batch_size",)),
    ("out of bounds", keys(f"{ROLLOUT}.top_p=1.5"), (f"{ROLLOUT}.top_p", "1.5")),
    ("n=1 with grpo", keys("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=1"), ("grpo", f"{ROLLOUT}.n=1")),
    ("batch not divisible", keys(f"{ACTOR}.ppo_mini_batch_size=3"), ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=3")),
    ("mini-batch over batch", keys(f"{ACTOR}.ppo_mini_batch_size=8"), (f"{ACTOR}.ppo_mini_batch_size=8", "data.train_batch_size=4")),
    ("token cap too small", keys(f"{ACTOR}.ppo_max_token_len_per_gpu=51"), (f"{ACTOR}.ppo_max_token_len_per_gpu=51", "52")),
    ("token cap of the critic", keys("critic.forward_max_token_len_per_gpu=9"), ("critic.forward_max_token_len_per_gpu=9", "52")),
    ("engine that is not here", keys(f"{ROLLOUT}.name=vllm"), (f"{ROLLOUT}.name=vllm", "native")),
    ("two devices", keys("trainer.n_gpus_per_node=2"), ("trainer.n_gpus_per_node=2", "one process")),
    ("unknown tracker", keys("trainer.logger=[consol]"), ("trainer.logger", "consol")),
    ("unknown estimator", keys("algorithm.adv_estimator=gpro"), ("algorithm.adv_estimator=gpro", "grpo")),
    ("estimator file missing", keys("algorithm.adv_estimator={tmp}/none.py:mine"), ("algorithm.adv_estimator", "none.py")),
    ("estimator raises", bad_estimator, ("mine.py", "no such luck")),
    ("val_only without data", keys("trainer.val_only=true"), ("trainer.val_only=true", "data.val_files")),
    (
        "resume_path missing",
        keys("trainer.resume_mode=resume_path", "trainer.resume_from_path={tmp}/gone"),
        ("trainer.resume_from_path", "gone"),
    ),
    ("resume_path without path", keys("trainer.resume_mode=resume_path"), ("trainer.resume_mode=resume_path", "trainer.resume_from_path")),
    ("resume from no checkpoint", keys("trainer.resume_mode=resume_path", "trainer.resume_from_path={tmp}"), ("no whole checkpoint",)),
    ("unwritable run folder", file_as_folder, ("trainer.default_local_dir", "file/run")),
    ("data file missing", keys("data.train_files={tmp}/none.parquet"), ("data.train_files", "none.parquet")),
    ("no data at all", keys("data.train_files=[]"), ("data.train_files",)),
    ("data is a folder", keys("data.train_files={tmp}"), ("data.train_files",)),
    ("empty parquet", data_with("a.parquet", empty_parquet), ("a.parquet", "no rows")),
    ("no parquet at all", data_with("a.parquet", lambda path: path.write_text("hello")), ("a.parquet",)),
    ("malformed jsonl", data_with("a.jsonl", lambda path: path.write_text('{"prompt": \n')), ("a.jsonl", "line 1")),
    ("missing column", data_with("a.parquet", lambda p: write_parquet(p, rows_without("prompt"))), ("a.parquet", "prompt")),
    (
        "no ground truth",
        data_with("a.parquet", lambda p: write_parquet(p, rows_without("reward_model")), "reward.custom_reward_function.path=null"),
        ("ground_truth",),
    ),
    (
        "source without a built-in reward",
        data_with("a.parquet", lambda p: write_parquet(p, rows_with(data_source="mine")), "reward.custom_reward_function.path=null"),
        ("mine", "reward"),
    ),
    ("prompt is a number", data_with("a.jsonl", lambda p: write_jsonl(p, rows_with(prompt=3))), ("a.jsonl", "prompt")),
    ("message without role", data_with("a.jsonl", lambda p: write_jsonl(p, rows_with(prompt=[{"content": "x"}]))), ("role",)),
    (
        "prompt too long",
        data_with("a.jsonl", lambda p: write_jsonl(p, rows_with(prompt=LONG))),
        ("data.max_prompt_length=40", "truncation"),
    ),
    (
        "all prompts filtered",
        data_with("a.jsonl", lambda p: write_jsonl(p, rows_with(prompt=LONG)), "data.filter_overlong_prompts=true"),
        ("data.max_prompt_length",),
    ),
    ("fewer rows than the batch", keys("data.train_max_samples=3"), ("3", "data.train_batch_size=4")),
    ("no chat template", model_with(no_template), ("chat template", "data.tokenizer")),
    (
        "template that does not parse",
        model_with(lambda f: (f / "chat_template.jinja").write_text("{% for %}") and None),
        ("TemplateSyntaxError",),
    ),
    (
        "neither pad nor end token",
        model_with(edit_json("tokenizer_config.json", pad_token=None, eos_token=None)),
        ("neither a pad token nor an end token",),
    ),
    ("tokenizer missing", keys("data.tokenizer={tmp}/none"), ("none",)),
    ("model folder missing", keys("actor_rollout_ref.model.path={tmp}/none"), ("actor_rollout_ref.model.path", "none")),
    ("no weights", model_with(lambda f: (f / "model.safetensors").unlink()), ("model", "weights")),
    ("torn weights", model_with(lambda f: (f / "model.safetensors").write_bytes(b"abc") and None), ("model",)),
    ("unknown architecture", model_with(edit_json("config.json", model_type="gtp2", architectures=["Gtp2"])), ("gtp2",)),
    (
        "rows over the model's positions",
        model_with(edit_json("config.json", max_position_embeddings=20)),
        ("25", "max_position_embeddings", "20"),
    ),
    ("no causal model", model_with(edit_json("config.json", model_type="vit", architectures=["ViTModel"])), ("model",)),
    ("weights that are not finite", model_with(not_finite), ("not finite", "weights")),
    ("checkpoint of another model", other_size, ("in the checkpoint",)),
    ("policy loss raises", loss_that_raises, (f"{ACTOR}.policy_loss.loss_mode", "mine.py", "nothing")),
    ("loss is never finite", estimator_of_nan, ("3 in a row", "nonfinite/actor_after_update_0_3", "trainer.max_nonfinite_steps")),
    ("learning rate without sense", keys(f"{ACTOR}.optim.lr=1e30"), ("gradient norm nan", "learning rate", "trainer.max_nonfinite_steps")),
    ("reward file missing", keys("reward.custom_reward_function.path={tmp}/none.py"), ("reward.custom_reward_function.path", "none.py")),
    ("reward name missing", keys("reward.custom_reward_function.name=nobody"), ("nobody", "compute_score")),
    ("reward does not parse", reward_with("return ("), ("my_reward.py:5", "SyntaxError")),
    ("reward with other arguments", keys("reward.custom_reward_function.reward_kwargs={bonus: 1}"), ("bonus",)),
    ("unknown reward", keys("reward.function=gsm9k", "reward.custom_reward_function.path=null"), ("gsm9k", "gsm8k")),
    ("reward raises", reward_with("raise KeyError('grade')"), ("KeyError: 'grade'", "my_reward.py", "reward.on_error")),
    ("reward returns NaN", reward_with("return float('nan')"), ("nan", "reward.on_error")),
    ("reward over float32", reward_with("return 1e300"), ("1e+300", "reward.on_error")),
    ("reward hangs", reward_with("time.sleep(60)", *HANGING, *TWO_ROWS), ("reward.timeout=0.5", "reward.on_error")),
    ("reward returns text", reward_with("return 'good'"), ("good", "reward.on_error")),
]


@pytest.mark.parametrize(("make", "wanted"), [pytest.param(make, wanted, id=name) for name, make, wanted in REFUSED])
def test_refused(
    make: Callable[[Inputs, Path], list[str]], wanted: Iterable[str], inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main_ppo(small_run(inputs, tmp_path / "run", *make(inputs, tmp_path), steps=3))
    written = capfd.readouterr().err
    print(written)
    assert status == 1
    assert len(ONE_MESSAGE.findall(written)) == 1, written
    message = written[ONE_MESSAGE.search(written).start() :]  # type: ignore[union-attr]
    assert "Traceback" not in written or re.search(r"my_reward\.py|mine\.py", message)  # of the user's own function it is shown
    assert [text for text in wanted if text not in message] == []


ODD_ROWS_FAIL = "if extra_info['index'] % 2: {}\n    return 0.5"
FAILURES = {
    "raises": ("raise KeyError('grade')", "KeyError"),
    "returns NaN": ("return float('nan')", "RewardError"),
    "returns text": ("return 'good'", "RewardError"),
}


@pytest.mark.parametrize("on_error", ["zero", "drop"])
@pytest.mark.parametrize(("code", "kind"), [pytest.param(*failure, id=name) for name, failure in FAILURES.items()])
def test_failing_reward_is_counted(
    code: str, kind: str, on_error: str, inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make = reward_with(ODD_ROWS_FAIL.format(code), f"reward.on_error={on_error}", "data.train_max_samples=4", "data.shuffle=false")
    assert main_ppo(small_run(inputs, tmp_path / "run", *make(inputs, tmp_path))) == 0
    warning = capfd.readouterr().err
    assert f"reward.on_error={on_error}" in warning and "failed on 4 of 8 rows" in warning
    for line in metrics_of(tmp_path / "run").values():  # two of the four prompts have an odd index, each with two responses
        assert line["reward/num_errors"] == line[f"reward/num_errors/{kind}"] == 4
        assert line["critic/score/mean"] == pytest.approx(0.25)
        assert (line["training/loss_tokens_ratio"] < 0.9) == (on_error == "drop")


def test_hanging_reward_is_counted(inputs: Inputs, tmp_path: Path) -> None:
    make = reward_with("if extra_info['index'] == 0: time.sleep(60)\n    return 1.0", *HANGING, "reward.on_error=zero")
    assert main_ppo(small_run(inputs, tmp_path / "run", *TWO_ROWS, *make(inputs, tmp_path), steps=1)) == 0
    line = metrics_of(tmp_path / "run")[1]
    assert line["reward/num_timeouts"] == 1 and line["critic/score/mean"] == 0.5


SURVIVED: list[Case] = [
    ("no pad token", model_with(edit_json("tokenizer_config.json", pad_token=None)), ("no pad token", "<|im_end|>")),
    ("odd key of verl", keys("trainer.balance_batch=true"), ("trainer.balance_batch", "no effect")),
    (
        "long prompts are filtered",
        data_with(
            "a.jsonl",
            lambda p: write_jsonl(p, [*gsm8k_rows(6, split="train"), *rows_with(prompt=LONG)[:2]]),
            "data.filter_overlong_prompts=true",
        ),
        ("2 of 8 prompts", "data.max_prompt_length=40"),
    ),
    (
        "long prompts are cut",
        data_with(
            "a.jsonl", lambda p: write_jsonl(p, [*gsm8k_rows(6, split="train"), *rows_with(prompt=LONG)[:2]]), "data.truncation=left"
        ),
        ("2 of 8 prompts", "data.truncation=left"),
    ),
]


@pytest.mark.parametrize(("make", "wanted"), [pytest.param(make, wanted, id=name) for name, make, wanted in SURVIVED])
def test_survived_and_said(
    make: Callable[[Inputs, Path], list[str]], wanted: Iterable[str], inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo(small_run(inputs, tmp_path / "run", *make(inputs, tmp_path), steps=1)) == 0
    written = capfd.readouterr().err
    assert [text for text in wanted if text not in written] == [], written
    assert list(metrics_of(tmp_path / "run")) == [1]


def test_steps_that_are_not_finite_are_skipped_and_kept(inputs: Inputs, tmp_path: Path) -> None:
    """As long as they are few: weights stay as they were, the rows are written down, the run ends well."""
    make = estimator_of_nan(inputs, tmp_path)
    assert main_ppo(small_run(inputs, tmp_path / "run", *make, "trainer.max_nonfinite_steps=9", "trainer.save_freq=2", steps=2)) == 0
    assert [line["actor/num_skipped_steps"] for line in metrics_of(tmp_path / "run").values()] == [2, 2]
    dumped = DataProto.load_from_disk(tmp_path / "run" / "nonfinite" / "actor_after_update_0_1")
    assert len(dumped) == 4 and dumped.batch["advantages"].isnan().any()
    policy, start = load_tree(tmp_path / "run" / "global_step_2" / "actor")["model"], load_file(inputs.model / "model.safetensors")
    assert all(policy[f"hf.{name}"].equal(tensor) for name, tensor in start.items())


SFT_REFUSED: list[tuple[str, list[Any], tuple[str, ...], tuple[str, ...]]] = [
    ("no assistant", [{"messages": [{"role": "user", "content": "hi"}]}], (), ("assistant",)),
    ("no messages", [{"question": "hi", "answer": "ho"}], (), ("data.messages_key", "data.prompt_key")),
    (
        "too long",
        [{"prompt": "1" * 99, "response": "2"}],
        ("data.max_length=16", "data.max_token_len_per_gpu=16"),
        ("data.max_length=16", "data.truncation"),
    ),
    (
        "token cap",
        [{"prompt": "1", "response": "2"}],
        ("data.max_token_len_per_gpu=100",),
        ("data.max_token_len_per_gpu=100", "data.max_length"),
    ),
    ("key of the other trainer", [{"prompt": "1", "response": "2"}], ("actor_rollout_ref.rollout.n=2",), ("actor_rollout_ref.rollout.n",)),
]


@pytest.mark.parametrize(("rows", "more", "wanted"), [pytest.param(*case, id=name) for name, *case in SFT_REFUSED])
def test_supervised_refused(
    rows: list[Any], more: tuple[str, ...], wanted: tuple[str, ...], inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    keys = [
        f"data.train_files={data}",
        "data.train_batch_size=1",
        f"model.path={inputs.model}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    assert main_sft([*keys, *more]) == 1
    written = capfd.readouterr().err
    assert len(ONE_MESSAGE.findall(written)) == 1 and "Traceback" not in written
    assert [text for text in wanted if text not in written] == [], written


COMMANDS: list[tuple[list[str], tuple[str, ...]]] = [
    (["train", "--recipe", "grop"], ("grop", "grpo")),
    (["train", "--recipe", "{tmp}/none.yaml"], ("none.yaml",)),
    (["merge", "{tmp}/none", "{tmp}/out"], ("none",)),
    (["view", "{tmp}/none"], ("none",)),
    (["config", "data.train_batchsize=4"], ("data.train_batch_size",)),
    (["reward-test", "data.train_files={tmp}/none.parquet"], ("none.parquet",)),
]


@pytest.mark.parametrize(("words", "wanted"), COMMANDS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_commands_refused(words: list[str], wanted: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert hybridflow([word.replace("{tmp}", str(tmp_path)) for word in words]) == 1
    written = capfd.readouterr().err
    assert len(ONE_MESSAGE.findall(written)) == 1 and "Traceback" not in written
    assert [text for text in wanted if text not in written] == [], written
