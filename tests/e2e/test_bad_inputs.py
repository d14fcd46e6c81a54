"""Mistakes of users, at the level of the command: one clear message, and a status that is not 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Inputs, small_run, write_jsonl
from wrong_inputs import (
    ACTOR,
    HANGING,
    LONG,
    ONE_MESSAGE,
    ROLLOUT,
    TWO_ROWS,
    Case,
    Make,
    bad_estimator,
    data_with,
    edit_json,
    empty_parquet,
    estimator_of_nan,
    jsonl,
    keys,
    loss_that_raises,
    model_with,
    not_finite,
    other_seed,
    other_size,
    other_vocabulary,
    parquet,
    plugin,
    reward_with,
    rows_with,
    rows_without,
    text,
)

from hybridflow.cli.main import main as hybridflow
from hybridflow.trainer.main_ppo import main as main_ppo
from hybridflow.trainer.main_sft import main as main_sft

TEACHER = "on_policy_distillation"
SAMPLING = ("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true")

REFUSED: list[Case] = [
    (
        "unknown key",
        keys("data.train_batchsize=4"),
        ("data.train_batchsize", "did you mean data.train_batch_size"),
    ),
    (
        "gdpo of what the reward does not return",
        keys("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score,politeness]"),
        ("algorithm.gdpo_reward_keys", "politeness", "score"),
    ),
    (
        "teacher with other tokens",
        other_vocabulary(f"algorithm.adv_estimator={TEACHER}", "distillation.teacher_model.path={other}"),
        ("distillation.teacher_model", "vocabulary"),
    ),
    (
        "process reward model with other tokens",
        other_vocabulary("algorithm.adv_estimator=prime", "reward.process_reward_model.model.path={other}"),
        ("reward.process_reward_model", "vocabulary"),
    ),
    (
        "spin without answers",
        keys("algorithm.adv_estimator=spin", f"{ACTOR}.policy_loss.loss_mode=dpo"),
        ("data.demonstration_key", "messages"),
    ),
    (
        "maximum likelihood of scores below 0",
        reward_with("return -1.0", "algorithm.adv_estimator=max_rl"),
        ("algorithm.adv_estimator=max_rl", "-1"),
    ),
    (
        "groups that never vary",
        reward_with(
            "return 1.0",
            *SAMPLING,
            "algorithm.filter_groups.metric=score",
            "algorithm.filter_groups.max_num_gen_batches=2",
        ),
        ("kept 0 of the 8", "max_num_gen_batches=2", "data.train_batch_size=4"),
    ),
    (
        "groups by a number that is not there",
        keys(*SAMPLING, "algorithm.filter_groups.metric=politeness"),
        ("algorithm.filter_groups.metric=politeness", "score"),
    ),
    ("engine that is not here", keys(f"{ROLLOUT}.name=vllm"), (f"{ROLLOUT}.name=vllm", "native")),
    ("estimator raises", bad_estimator, ("mine.py", "no such luck")),
    (
        "resume from no checkpoint",
        keys("trainer.resume_mode=resume_path", "trainer.resume_from_path={tmp}"),
        ("no whole checkpoint",),
    ),
    ("data is a folder", keys("data.train_files={tmp}"), ("data.train_files",)),
    ("empty parquet", data_with("a.parquet", empty_parquet), ("a.parquet", "no rows")),
    ("no parquet at all", data_with("a.parquet", text("hello")), ("a.parquet",)),
    ("malformed jsonl", data_with("a.jsonl", text('{"prompt": \n')), ("a.jsonl", "line 1")),
    ("missing column", data_with("a.parquet", parquet(rows_without("prompt"))), ("a.parquet", "prompt")),
    (
        "no ground truth",
        data_with(
            "a.parquet", parquet(rows_without("reward_model")), "reward.custom_reward_function.path=null"
        ),
        ("ground_truth",),
    ),
    (
        "source without a built-in reward",
        data_with(
            "a.parquet", parquet(rows_with(data_source="mine")), "reward.custom_reward_function.path=null"
        ),
        ("mine", "reward"),
    ),
    ("prompt is a number", data_with("a.jsonl", jsonl(rows_with(prompt=3))), ("a.jsonl", "prompt")),
    ("message without role", data_with("a.jsonl", jsonl(rows_with(prompt=[{"content": "x"}]))), ("role",)),
    (
        "prompt too long",
        data_with("a.jsonl", jsonl(rows_with(prompt=LONG))),
        ("data.max_prompt_length=40", "truncation"),
    ),
    (
        "all prompts filtered",
        data_with("a.jsonl", jsonl(rows_with(prompt=LONG)), "data.filter_overlong_prompts=true"),
        ("data.max_prompt_length",),
    ),
    ("fewer rows than the batch", keys("data.train_max_samples=3"), ("3", "data.train_batch_size=4")),
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
    (
        "torn weights",
        model_with(lambda f: (f / "model.safetensors").write_bytes(b"abc") and None),
        ("model",),
    ),
    (
        "unknown architecture",
        model_with(edit_json("config.json", model_type="gtp2", architectures=["Gtp2"])),
        ("gtp2",),
    ),
    (
        "rows over the model's positions",
        model_with(edit_json("config.json", max_position_embeddings=20)),
        ("25", "max_position_embeddings", "20"),
    ),
    (
        "no causal model",
        model_with(edit_json("config.json", model_type="vit", architectures=["ViTModel"])),
        ("model",),
    ),
    ("weights that are not finite", model_with(not_finite), ("not finite", "weights")),
    ("checkpoint of another model", other_size, ("made with another model", "actor_rollout_ref.model.path")),
    (
        "sampler gives rows that are not there",
        plugin("data.sampler.class_path", "Sampler"),
        ("Sampler gave row 999", "0 to 13"),
    ),
    (
        "dataset raises",
        plugin("data.custom_cls.path", "Data"),
        ("data.custom_cls", "mine.py:Data", "no such luck"),
    ),
    (
        "dataset's items raise",
        plugin("data.custom_cls.path", "Items"),
        ("data.custom_cls", "item 0", "mine.py:Items", "luck"),
    ),
    (
        "estimator gives one tensor",
        plugin("algorithm.adv_estimator", "one"),
        ("one must return Advantages", "(8, 12)"),
    ),
    (
        "external_lib missing",
        keys("actor_rollout_ref.model.external_lib=no.such.lib"),
        ("model.external_lib", "no module named 'no'"),
    ),
    ("checkpoint of another seed", other_seed, ("trainer.seed=1", "trainer.resume_mode=disable")),
    ("policy loss raises", loss_that_raises, (f"{ACTOR}.policy_loss.loss_mode", "mine.py", "nothing")),
    (
        "loss is never finite",
        estimator_of_nan,
        ("3 in a row", "nonfinite/actor_after_update_0_3", "trainer.max_nonfinite_steps"),
    ),
    (
        "learning rate without sense",
        keys(f"{ACTOR}.optim.lr=1e30"),
        ("gradient norm nan", "learning rate", "trainer.max_nonfinite_steps"),
    ),
    ("reward name missing", keys("reward.custom_reward_function.name=nobody"), ("nobody", "compute_score")),
    ("reward does not parse", reward_with("return ("), ("my_reward.py:5", "SyntaxError")),
    (
        "reward with other arguments",
        keys("reward.custom_reward_function.reward_kwargs={bonus: 1}"),
        ("bonus",),
    ),
    (
        "reward raises",
        reward_with("raise KeyError('grade')"),
        ("KeyError: 'grade'", "my_reward.py", "reward.on_error"),
    ),
    ("reward returns NaN", reward_with("return float('nan')"), ("nan", "reward.on_error")),
    (
        "reward hangs",
        reward_with("time.sleep(3600)", *HANGING, *TWO_ROWS),
        ("reward.timeout=2.5", "reward.on_error"),
    ),
]


@pytest.mark.parametrize(
    ("make", "wanted"), [pytest.param(make, wanted, id=name) for name, make, wanted in REFUSED]
)
def test_refused(
    make: Make, wanted: Iterable[str], inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = (f"{ROLLOUT}.exact=false", *make(inputs, tmp_path))  # no time for whether it can hold
    status = main_ppo(small_run(inputs, tmp_path / "run", *overrides, steps=3))
    written = capfd.readouterr().err
    print(written)
    assert status == 1
    assert len(ONE_MESSAGE.findall(written)) == 1, written
    message = written[ONE_MESSAGE.search(written).start() :]  # type: ignore[union-attr]
    # of the user's own function it is shown
    assert "Traceback" not in written or re.search(r"my_reward\.py|mine\.py", message)
    assert [text for text in wanted if text not in message] == []


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
    (
        "key of the other trainer",
        [{"prompt": "1", "response": "2"}],
        ("actor_rollout_ref.rollout.n=2",),
        ("actor_rollout_ref.rollout.n",),
    ),
]


@pytest.mark.parametrize(
    ("rows", "more", "wanted"), [pytest.param(*case, id=name) for name, *case in SFT_REFUSED]
)
def test_supervised_refused(
    rows: list[Any],
    more: tuple[str, ...],
    wanted: tuple[str, ...],
    inputs: Inputs,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
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
    (["train", "--recipe", "tiny/grop"], ("tiny/grop", "did you mean tiny/grpo")),
    (["reward-test", "data.train_files={tmp}/none.parquet"], ("none.parquet",)),
]


@pytest.mark.parametrize(
    ("words", "wanted"), COMMANDS, ids=lambda value: value[0] if isinstance(value, list) else ""
)
def test_commands_refused(
    words: list[str], wanted: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert hybridflow([word.replace("{tmp}", str(tmp_path)) for word in words]) == 1
    written = capfd.readouterr().err
    assert len(ONE_MESSAGE.findall(written)) == 1 and "Traceback" not in written
    assert [text for text in wanted if text not in written] == [], written
