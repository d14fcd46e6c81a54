"""Runs on rows with pictures: a critic that reads them, and what is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_trainer import build, ppo_config

from hybridflow.errors import ConfigError
from hybridflow.observability.trackers.jsonl import read_metrics
from picture_models import picture_model

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
        (["data.environment=guess"], "agents, tools and environments read the text of a row alone"),
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
