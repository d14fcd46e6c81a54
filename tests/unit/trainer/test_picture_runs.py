"""Runs on rows with pictures: a critic that reads them, and what is refused before a model is loaded."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_trainer import build, ppo_config

from hybridflow.data.tasks.red_squares import RedSquares
from hybridflow.errors import ConfigError
from hybridflow.observability.trackers.jsonl import read_metrics
from picture_models import create_tiny_vlm, picture_model

PICTURES = (
    "data.task.name=red_squares",
    "data.task.size=16",
    "data.max_prompt_length=48",
    "data.max_response_length=2",
)


def test_a_critic_reads_the_pictures_too(tmp_path: Path) -> None:
    keys = ("algorithm.adv_estimator=gae", "trainer.test_freq=-1", "trainer.logger=[jsonl]")
    config = ppo_config(picture_model(), tmp_path / "run", *PICTURES, *keys)
    with build(config) as trainer:
        values = trainer.step.roles.critic.backend.worker("critic").engine.module  # type: ignore[attr-defined]
        tower = [weight.detach().clone() for weight in values.vision.tower.parameters()]
        trainer.fit()
        moved = [
            not before.equal(now) for before, now in zip(tower, values.vision.tower.parameters(), strict=True)
        ]
    assert sum(moved) > len(moved) // 2, "the critic has a tower of its own, which learns"
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[2]
    assert last["critic/grad_norm"] > 0 and last["critic/num_skipped_steps"] == 0
    rows = (tmp_path / "run" / "samples" / "1.jsonl").read_text()
    assert "data:image/png;base64," in rows and rows.count("<|image_pad|>") == 2 * rows.count("\n")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["actor_rollout_ref.rollout.name=hf"], "rollout.name=hf is given token ids alone: set it to native"),
    ],
)
def test_what_reads_text_alone_is_refused(keys: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"makes pictures, and .*{said}"):
        ppo_config(picture_model(), tmp_path / "run", *PICTURES, *keys)
    # nothing is known of the rows of a user's own task before they are made
    own = "data.task.name=hybridflow.data.tasks.red_squares:RedSquares"
    config = ppo_config(picture_model(), tmp_path / "run", *PICTURES, *keys, own)
    with pytest.raises(ConfigError, match=f"the data has pictures, and .*{said}"), build(config):
        pass


def test_a_student_learns_the_answers_of_the_data_to_pictures_in_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GKD without answers of the student's: pictures are parts of messages, and one answer has one itself."""
    rows = []
    for row in RedSquares().rows("train", 5):
        url = "data:image/png;base64," + base64.b64encode(row["images"][0]["bytes"]).decode()
        picture = {"type": "image_url", "image_url": {"url": url}}
        prompt = [{"role": "user", "content": [picture, {"type": "text", "text": "red ?"}]}]
        answer = [{"type": "text", "text": row["reward_model"]["ground_truth"]}]
        drawn = [picture] if len(rows) == 4 else []
        told = [*prompt, {"role": "assistant", "content": [*answer, *drawn]}]
        rows.append({"prompt": prompt, "messages": told, "reward_model": row["reward_model"]})
    teacher = create_tiny_vlm(tmp_path / "teacher", hidden=32, vision_layers=1, seed=5)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    keys = (
        *("data.task.name=null", f"data.train_files='{tmp_path / 'rows.json'}'", "data.train_batch_size=4"),
        *("data.max_prompt_length=48", "data.max_response_length=4"),
        *("algorithm.adv_estimator=on_policy_distillation", "distillation.lmbda=0"),
        *(f"distillation.distillation_loss.{key}" for key in ("use_task_rewards=false", "loss_mode=jsd")),
        f"distillation.teacher_model.path='{teacher}'",
        *("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        *("trainer.test_freq=-1", "trainer.total_training_steps=1"),
    )
    with build(ppo_config(picture_model(), tmp_path / "run", *keys)) as trainer:
        batch = trainer.source.next(1).rows
        _, metrics = trainer.step(batch, 1)
    found = metrics.to_floats()
    assert len(batch) == 4 and batch.batch["is_demonstration"].all()
    assert "1 of 5 rows" in caplog.text and "the answer has a picture" in caplog.text
    assert found["actor/distillation_loss"] > 0 and found["actor/grad_norm"] > 0


def test_ranks_that_share_rows_read_no_pictures(tmp_path: Path) -> None:
    keys = ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2")
    with pytest.raises(
        ConfigError, match="makes pictures, and ranks that share rows read none: set actor_ro"
    ):
        ppo_config(picture_model(), tmp_path / "run", *PICTURES, *keys)


def test_an_agent_that_reads_text_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "class Own:\n    reads_text_alone = True\n    def __init__(self, tokenizer): ...\n"
        "    async def run(self, episode, policy): ...\n"
    )
    key = f"actor_rollout_ref.rollout.agent.default_agent_loop='{tmp_path / 'agent.py'}:Own'"
    config = ppo_config(picture_model(), tmp_path / "run", *PICTURES, key)
    with (
        pytest.raises(ConfigError, match=r"pictures, and the agent .*:Own reads the text of a row"),
        build(config),
    ):
        pass


WORLD = """
import io
from PIL import Image
from hybridflow.environments import Environment, Step

class Zoom(Environment):
    def reset(self, row):
        self.picture = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        self.turns = 0
        return row["raw_prompt"]

    def step(self, text):
        self.turns += 1
        half = self.picture.crop((0, 0, 8, 8 * self.turns)).resize((16, 16))
        parts = [{"type": "image", "image": half}, {"type": "text", "text": "red ?"}]
        return Step(parts, reward=len(text) / 8, done=self.turns == 1 + self.step_seed % 3)
"""
TURNS = (
    *("data.task.size=16", "data.max_prompt_length=48", "data.max_response_length=2"),
    "actor_rollout_ref.rollout.max_model_len=240",
    f"actor_rollout_ref.rollout.stop_token_ids=[{','.join(map(str, range(100)))}]",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_prefix_grouper=true",
    "algorithm.adv_estimator=grpo",
    "trainer.test_freq=-1",
    "trainer.logger=[jsonl]",
)


def zoomed(tmp_path: Path, *keys: str) -> tuple[dict[int, dict[str, float]], list[dict[str, Any]]]:
    """Train with an environment that answers with pictures; return metrics by step, and the first samples."""
    (tmp_path / "world.py").write_text(WORLD)
    environment = f"data.environment='{tmp_path / 'world.py'}:Zoom'"
    keys = ("data.task.name=red_squares", environment, *TURNS, *keys)
    with build(ppo_config(picture_model(), tmp_path / "run", *keys)) as trainer:
        trainer.fit()
    lines = (tmp_path / "run" / "samples" / "1.jsonl").read_text().splitlines()
    return read_metrics(tmp_path / "run" / "metrics.jsonl"), [json.loads(line) for line in lines]


def test_a_run_reads_the_pictures_of_an_environment(tmp_path: Path) -> None:
    steps, rows = zoomed(tmp_path, "actor_rollout_ref.rollout.agent.num_workers=1")
    for step in (1, 2):
        assert steps[step]["training/rollout_log_probs_diff_max"] < 1e-5
        assert steps[step]["actor/grad_norm"] > 0 and steps[step]["agent/num_rows/mean"] == 1.0
    assert steps[1]["agent/num_turns/max"] >= 2
    several = [row for row in rows if len(row["media"]) > 1]
    assert several, "conversations of several turns have several pictures"
    for row in rows:
        later = [medium for medium in row["media"] if medium.get("in_response")]
        assert len(later) == len(row["media"]) - 1 == row["response"].count("<|image_pad|>")
        assert row["prompt"].count("<|image_pad|>") == 1
        if "messages" in row:
            assert row["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "red ?"}]
    assert any("picture" in medium for row in several for medium in row["media"] if medium.get("in_response"))


def test_generation_and_training_agree_to_the_bit_with_pictures(tmp_path: Path) -> None:
    keys = (
        "actor_rollout_ref.rollout.exact=true",
        "actor_rollout_ref.actor.use_prefix_grouper=false",
        "actor_rollout_ref.rollout.agent.num_workers=0",
    )
    steps, _ = zoomed(tmp_path, *keys)
    assert [steps[step]["training/rollout_log_probs_diff_max"] for step in (1, 2)] == [0.0, 0.0]


AGENT = """
import base64, io
import httpx
from PIL import Image

async def run(base_url, row):
    messages = list(row["raw_prompt"])
    score = 0.0
    picture = Image.open(io.BytesIO(base64.b64decode(row["images"][0].partition(",")[2])))
    async with httpx.AsyncClient(timeout=600) as client:
        for turn in range(2):
            body = {"messages": messages, "return_token_ids": True}
            answer = await client.post(base_url + "/chat/completions", json=body)
            (choice,) = answer.raise_for_status().json()["choices"]
            score += choice["token_ids"][0] % 7 / 7
            messages.append(choice["message"])
            file = io.BytesIO()
            picture.crop((0, 0, 8, 8 * turn + 8)).resize((16, 16)).save(file, "PNG")
            shown = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            parts = [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": "red ?"}]
            messages.append({"role": "user", "content": parts})
    return score
"""


@pytest.mark.parametrize(("keys", "most"), [((), 1e-5), (("actor_rollout_ref.rollout.exact=true",), 0.0)])
def test_an_agent_of_a_base_url_sends_pictures_that_are_trained_on(
    tmp_path: Path, keys: tuple[str, ...], most: float
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = f"actor_rollout_ref.rollout.agent.default_agent_loop='{tmp_path / 'agent.py'}:run'"
    grouper = f"actor_rollout_ref.actor.use_prefix_grouper={'false' if keys else 'true'}"
    keys = ("data.task.name=red_squares", agent, *TURNS, grouper, *keys)
    with build(ppo_config(picture_model(), tmp_path / "run", *keys)) as trainer:
        trainer.fit()
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for step in (1, 2):
        assert steps[step]["training/rollout_log_probs_diff_max"] <= most
        assert steps[step]["actor/grad_norm"] > 0 and steps[step]["agent/num_rows/mean"] == 1.0
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples" / "1.jsonl").read_text().splitlines()]
    for row in rows:
        assert [bool(medium.get("in_response")) for medium in row["media"]] == [False, True]
        assert row["response"].count("<|image_pad|>") == 1 == row["prompt"].count("<|image_pad|>")
