"""Faults that need not end a run: it goes on where the key says so, and counts or reports what happened."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_run import Inputs, gsm8k_rows, metrics_of, small_run
from wrong_inputs import (
    HANGING,
    LONG,
    TWO_ROWS,
    Case,
    Make,
    data_with,
    edit_json,
    estimator_of_nan,
    jsonl,
    keys,
    model_with,
    reward_with,
    rows_with,
)

from hybridflow.checkpoint.shard_index import read_tensors
from hybridflow.protocol import DataProto
from hybridflow.trainer.main_ppo import main as main_ppo

ODD_ROWS_FAIL = "if extra_info['index'] % 2: {}\n    return 0.5"


@pytest.mark.parametrize(
    ("on_error", "code", "kind"),
    [
        ("zero", "raise KeyError('grade')", "KeyError"),
        ("drop", "return float('nan')", "RewardError"),
    ],
)
def test_failing_reward_is_counted(
    on_error: str, code: str, kind: str, inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make = reward_with(
        ODD_ROWS_FAIL.format(code),
        f"reward.on_error={on_error}",
        "data.train_max_samples=4",
        "data.shuffle=false",
    )
    assert main_ppo(small_run(inputs, tmp_path / "run", *make(inputs, tmp_path))) == 0
    warning = capfd.readouterr().err
    assert f"reward.on_error={on_error}" in warning and "failed on 4 of 8 rows" in warning
    # two of the four prompts have an odd index, each with two responses
    for line in metrics_of(tmp_path / "run").values():
        assert line["reward/num_errors"] == line[f"reward/num_errors/{kind}"] == 4
        # dropped rows leave the batch
        assert line["critic/score/mean"] == pytest.approx(0.25 if on_error == "zero" else 0.5)


def test_hanging_reward_is_counted(inputs: Inputs, tmp_path: Path) -> None:
    make = reward_with(
        "if extra_info['index'] == 0: time.sleep(3600)\n    return 1.0", *HANGING, "reward.on_error=zero"
    )
    assert main_ppo(small_run(inputs, tmp_path / "run", *TWO_ROWS, *make(inputs, tmp_path), steps=1)) == 0
    line = metrics_of(tmp_path / "run")[1]
    assert line["reward/num_timeouts"] == 1 and line["critic/score/mean"] == 0.5


SURVIVED: list[Case] = [
    (
        "no pad token",
        model_with(edit_json("tokenizer_config.json", pad_token=None)),
        ("no pad token", "<|im_end|>"),
    ),
    (
        "odd key of verl",
        keys("trainer.use_legacy_worker_impl=auto"),
        ("trainer.use_legacy_worker_impl", "no effect"),
    ),
    (
        "long prompts are filtered",
        data_with(
            "a.jsonl",
            jsonl([*gsm8k_rows(6, split="train"), *rows_with(prompt=LONG)[:2]]),
            "data.filter_overlong_prompts=true",
        ),
        ("2 of 8 prompts", "data.max_prompt_length=40"),
    ),
    (
        "long prompts are cut",
        data_with(
            "a.jsonl",
            jsonl([*gsm8k_rows(6, split="train"), *rows_with(prompt=LONG)[:2]]),
            "data.truncation=left",
        ),
        ("2 of 8 prompts", "data.truncation=left"),
    ),
]


@pytest.mark.parametrize(
    ("make", "wanted"), [pytest.param(make, wanted, id=name) for name, make, wanted in SURVIVED]
)
def test_survived_and_said(
    make: Make, wanted: Iterable[str], inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo(small_run(inputs, tmp_path / "run", *make(inputs, tmp_path), steps=1)) == 0
    written = capfd.readouterr().err
    assert [text for text in wanted if text not in written] == [], written
    assert list(metrics_of(tmp_path / "run")) == [1]


def test_steps_that_are_not_finite_are_skipped_and_kept(inputs: Inputs, tmp_path: Path) -> None:
    """As long as they are few: weights stay as they were, the rows are written down, the run ends well."""
    make = estimator_of_nan(inputs, tmp_path)
    assert (
        main_ppo(
            small_run(
                inputs,
                tmp_path / "run",
                *make,
                "trainer.max_nonfinite_steps=9",
                "trainer.save_freq=2",
                steps=2,
            )
        )
        == 0
    )
    assert [line["actor/num_skipped_steps"] for line in metrics_of(tmp_path / "run").values()] == [2, 2]
    dumped = DataProto.load_from_disk(tmp_path / "run" / "nonfinite" / "actor_after_update_0_1")
    assert len(dumped) == 4 and dumped.batch["advantages"].isnan().any()
    policy = read_tensors(tmp_path / "run" / "global_step_2" / "actor", "model")
    start = load_file(inputs.model / "model.safetensors")
    assert all(policy[f"hf.{name}"].equal(tensor) for name, tensor in start.items())


def test_resume_with_a_larger_batch_than_the_epoch_has_left(inputs: Inputs, tmp_path: Path) -> None:
    assert main_ppo(small_run(inputs, tmp_path, "trainer.save_freq=2", steps=2)) == 0  # 8 of 14 rows are done
    assert main_ppo(small_run(inputs, tmp_path, "data.train_batch_size=8", steps=3)) == 0
    assert metrics_of(tmp_path)[3]["training/epoch"] == 1


def test_interrupted_by_the_user(inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make = reward_with("import os, signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)")
    # a shell's background jobs start with it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main_ppo(small_run(inputs, tmp_path / "run", *make(inputs, tmp_path))) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    written = capfd.readouterr().err
    last = "interrupted in step 1/2; there is no checkpoint yet; the same command starts anew\n"
    assert written.endswith(last) and "Traceback" not in written
