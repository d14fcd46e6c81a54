"""A reward model in a run: its scores are those of transformers for the conversation in its own template, and
they join those of functions by weights and conditions.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_trainer import ppo_config, tiny_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from hybridflow.cli.main import main
from hybridflow.config import PPOConfig
from hybridflow.config.reward import RewardConfig, RewardModelRoleConfig
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, ModelError, RewardError
from hybridflow.protocol import DataProto
from hybridflow.rewards.result import ScoreRequest, ScoringOutcome
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.ppo.model_rewards import ModelReader, ModelScorer
from hybridflow.workers.reward_model import SCORES

TEMPLATE = "{% for m in messages %}{{ m.content }} {{ m.role }}{{ eos_token }} {% endfor %}"
ANSWER = {"role": "assistant", "content": "4"}
ALONE = ("reward.custom_reward_function.path=null",)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with random weights, and a chat template that is not the policy's."""
    folder = tiny_model(tmp_path_factory.mktemp("reward_model"), hidden=48, seed=7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        torch.nn.init.normal_(hf.score.weight)
    hf.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def config(policy: Path, reward_model: Path, run: Path, *settings: str) -> PPOConfig:
    enabled = (
        "reward.reward_model.enable=true",
        "reward.reward_model.read_to=end",
        f"reward.reward_model.model.path='{reward_model}'",
    )
    return ppo_config(policy, run, *enabled, *settings)


def first_batch(config: PPOConfig) -> tuple[DataProto, dict[str, float]]:
    with build(config) as trainer:
        made = trainer.source.next(1)
        return made.rows, made.metrics.to_floats()


def expected(folder: Path, rows: DataProto, policy: Path) -> Tensor:
    """Score by transformers what was asked and answered, a row at a time."""
    hf = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = load_tokenizer(policy)
    scores = []
    for prompt, response in zip(rows.batch["prompts"], rows.non_tensor_batch["solution_str"], strict=True):
        text = theirs.decode(
            [t for t in prompt.tolist() if t != theirs.pad_token_id], skip_special_tokens=True
        )
        question = text.removeprefix("user\n").removesuffix("assistant\n").strip("\n")
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(hf(input_ids=ids).logits[0, 0])
    return torch.stack(scores)


def test_a_reward_model_alone_is_the_reward(policy: Path, reward_model: Path, tmp_path: Path) -> None:
    settings = (*ALONE, "reward.reward_model.fsdp_config.param_offload=true")
    with build(config(policy, reward_model, tmp_path / "run", *settings)) as trainer:
        rows = trainer.source.next(1).rows
        _, metrics = trainer.step(rows, 1)
        validated = trainer.validator(1) if trainer.validator else {}
    got = rows.batch["token_level_scores"].sum(-1)
    torch.testing.assert_close(got, expected(reward_model, rows, policy), atol=1e-4, rtol=1e-4)
    assert got.std() > 0 and metrics.to_floats()["actor/num_updates"] == 2.0
    assert any("reward_model_score" in name for name in validated)


def test_terms_are_weighed_and_may_have_a_condition(policy: Path, reward_model: Path, tmp_path: Path) -> None:
    (tmp_path / "even.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(solution_str) % 2 == 0)\n"
    )
    terms = (
        f"reward.terms=[{{name: '{tmp_path}/even.py'}},"
        f"{{name: '{tmp_path}/even.py', key: again, weight: 10, when: even}},"
        "{name: reward_model, weight: 0.5, when: even}]"
    )
    rows, _ = first_batch(config(policy, reward_model, tmp_path / "run", *ALONE, terms))
    even = torch.tensor([len(text) % 2 == 0 for text in rows.non_tensor_batch["solution_str"]])
    assert 0 < int(even.sum()) < len(rows)
    wanted = torch.where(even, 11.0 + 0.5 * expected(reward_model, rows, policy), 0.0)
    torch.testing.assert_close(rows.batch["token_level_scores"].sum(-1), wanted, atol=1e-4, rtol=1e-4)
    for column in ("again", "reward_model_score"):
        values = torch.tensor([float(value) for value in rows.non_tensor_batch[column]])
        assert torch.equal(values.isnan(), ~even), column


def test_a_row_that_the_model_cannot_read_is_an_error_of_the_reward(
    policy: Path, reward_model: Path, tmp_path: Path
) -> None:
    short = (*ALONE, "reward.reward_model.max_length=2")
    with pytest.raises(RewardError, match=r"reward_model\.max_length=2"):
        first_batch(config(policy, reward_model, tmp_path / "run", *short))
    rows, metrics = first_batch(
        config(policy, reward_model, tmp_path / "drop", *short, "reward.on_error=drop")
    )
    assert len(rows) == 0 and metrics["reward/num_errors"] == 8.0


def test_a_score_that_is_no_number_is_an_error_of_its_row(
    policy: Path, reward_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(reward_model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["score.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    keys = config(policy, broken, tmp_path / "run", *ALONE, "reward.on_error=drop")
    rows, metrics = first_batch(keys)
    assert len(rows) == 0 and metrics["reward/num_errors/RewardError"] == 8.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("reward.reward_model.enable=false", "reward.terms=[{name: reward_model}]", *ALONE), "which is off"),
        ((), r"which writes no verdict: set reward\.reward_model\.kind=score"),
        (("reward.terms=[{name: reward_model}, {name: reward_model, key: b}]", *ALONE), "one reward model"),
        (("reward.reward_model.model.path=null", *ALONE), r"reward_model\.model\.path is not set"),
        (("data.task.name=null", "data.environment=guess", *ALONE), "would never be asked"),
    ],
)
def test_mistakes_are_refused(
    settings: tuple[str, ...], problem: str, policy: Path, reward_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(policy, reward_model, tmp_path / "run", *settings)


def test_a_language_model_is_no_reward_model(policy: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match="has no head"),
        build(config(policy, policy, tmp_path / "run", *ALONE)),
    ):
        pass


def test_an_evaluation_scores_as_the_run_validates(policy: Path, reward_model: Path, tmp_path: Path) -> None:
    with build(config(policy, reward_model, tmp_path / "run", *ALONE)) as trainer:
        assert trainer.validator is not None
        validated = trainer.validator(0)
    recipe = str(tmp_path / "run/config.yaml")
    assert main(["eval", str(policy), "--recipe", recipe, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out/results.json").read_text())["arithmetic_chain"]
    of_run = validated["val-core/arithmetic_chain/reward/mean@1"]
    assert found["failed"] == {} and found["metrics"]["mean@1"]["value"] == pytest.approx(of_run, abs=1e-5)


@pytest.mark.parametrize("words", [["reward-test"], ["eval", "--responses", "answers"]])
def test_commands_without_a_model_refuse_one_of_the_reward(
    words: list[str], reward_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answers": ["2"]}\n')
    keys = ["reward.reward_model.enable=true", f"reward.reward_model.model.path='{reward_model}'"]
    keys += [f"data.{split}_files='{tmp_path}/rows.jsonl'" for split in ("train", "val")]
    assert main([*words, *keys, f"trainer.default_local_dir='{tmp_path}/out'"]) == 1
    assert "its part of the score would be missing" in " ".join(capsys.readouterr().err.split())


def test_keys_of_verl_choose_the_model(policy: Path, reward_model: Path, tmp_path: Path) -> None:
    made: Any = ppo_config(
        policy,
        tmp_path / "run",
        *ALONE,
        "reward_model.enable=true",
        f"reward_model.model.path='{reward_model}'",
        "reward_model.model.input_tokenizer=null",
        "reward_model.micro_batch_size_per_gpu=3",
        "reward_model.model.fsdp_config.param_offload=true",
        "reward_model.strategy=fsdp",
    )
    learned = made.reward.reward_model
    assert learned.enable and learned.micro_batch_size_per_gpu == 3 and learned.fsdp_config.param_offload
    assert made.reward.terms == [{"name": "reward_model"}]


def test_a_conversation_may_end_with_the_answer(reward_model: Path) -> None:
    tokenizer = load_tokenizer(reward_model)
    request = ScoreRequest("", "4", "", messages=[{"role": "user", "content": "2 2"}, ANSWER])
    whole, answer = (
        ModelReader(tokenizer, RewardModelRoleConfig(read_to=end, max_length=64)).read(request)
        for end in ("end", "answer")
    )
    assert answer.scored == [tokenizer.eos_token_id] and whole.scored != answer.scored
    assert whole.before[: len(answer.before) + 1] == answer.before + answer.scored


@pytest.mark.parametrize("activation", ["none", "sigmoid"])
def test_a_response_that_ends_at_once_is_one_empty_step(
    activation: str, policy: Path, reward_model: Path
) -> None:
    ours = load_tokenizer(policy)
    keys = RewardModelRoleConfig(kind="token_score", step_separator="1", activation=activation, max_length=64)
    read: list[DataProto] = []

    class Group:
        def score(self, rows: DataProto) -> DataProto:
            read.append(rows)
            return DataProto.from_dict({SCORES: torch.full(rows.batch["responses"].shape, 2.0)})

    scorer: Any = ModelScorer(
        cast(Any, None),
        cast(Any, Group()),
        ModelReader(load_tokenizer(reward_model), keys),
        RewardConfig(terms=[{"name": "reward_model"}], reward_model=keys),
        ours,
    )
    eos_first = ScoreRequest("", "", "", {}, (ours.eos_token_id,), [{"role": "user", "content": "2 2"}])
    (outcome,) = scorer.complete([eos_first], [ScoringOutcome()])
    wanted = {"none": 2.0, "sigmoid": float(torch.tensor(2.0).sigmoid())}[activation]
    assert not outcome.error and outcome.score == pytest.approx(wanted)
    separator = load_tokenizer(reward_model).encode("1", add_special_tokens=False)
    assert read[0].batch["responses"].tolist() == [separator]


@pytest.mark.parametrize("reduce", ["mean", "sum", "min"])
def test_scores_of_steps_are_on_the_tokens_that_end_them(
    reduce: str, policy: Path, reward_model: Path, tmp_path: Path
) -> None:
    """Each step is what a digit ends, so that random responses have several."""
    hf = AutoModelForTokenClassification.from_pretrained(reward_model, num_labels=1)
    torch.nn.init.normal_(hf.score.weight, generator=torch.Generator().manual_seed(2))
    hf.save_pretrained(tmp_path / "prm")
    AutoTokenizer.from_pretrained(reward_model).save_pretrained(tmp_path / "prm")
    settings = (
        "reward.reward_model.kind=token_score",
        f"reward.reward_model.step_reduce={reduce}",
        "reward.reward_model.activation=sigmoid",
        "reward.reward_model.step_separator='1'",
        "actor_rollout_ref.rollout.n=8",
    )
    rows, _ = first_batch(config(policy, tmp_path / "prm", tmp_path / "run", *ALONE, *settings))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "prm")
    ours = load_tokenizer(policy)
    several = 0
    for row, text in enumerate(rows.non_tensor_batch["solution_str"]):
        prompt = ours.decode(rows.batch["prompts"][row], skip_special_tokens=True)
        question = prompt.removeprefix("user\n").removesuffix("assistant\n").strip("\n")
        ids = theirs.apply_chat_template([{"role": "user", "content": question}], return_dict=True)[
            "input_ids"
        ]
        values = []
        wanted = torch.zeros(rows.batch["responses"].shape[1])
        written = ""
        steps = [step for step in re.split("(?<=1)", text) if step]
        for step in steps:
            ids = ids + theirs(step, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                values.append(float(hf.eval()(input_ids=torch.tensor([ids])).logits[0, -1, 0].sigmoid()))
            written += step
            counts = range(1, rows.batch["responses"].shape[1] + 1)
            sampled = rows.batch["responses"][row]
            place = next(
                n for n in counts if len(ours.decode(sampled[:n], skip_special_tokens=True)) >= len(written)
            )
            wanted[place - 1] += values[-1] / (len(steps) if reduce == "mean" else 1)
        several += len(steps) > 1
        got = rows.batch["token_level_scores"][row]
        if reduce == "min":
            assert float(got.sum()) == pytest.approx(min(values), abs=1e-4) and int((got != 0).sum()) == 1
        elif len(steps) > 1:
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        else:
            assert float(got.sum()) == pytest.approx(float(wanted.sum()), abs=1e-4)
    assert several > 1
