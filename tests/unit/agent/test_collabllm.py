"""CollabLLM's forward sampling, where its user fails and where there is nothing to go on from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from spoken_engine import LIMITS, client_of, episode, says

from hybridflow.agent.collabllm import CollabLLM
from hybridflow.agent.runner import Limit, Runner
from hybridflow.config.agent import AgentConfig, RetriesConfig
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.processes.local import LocalHosts
from hybridflow.protocol.trajectory import Trajectory

TOKENIZER = create_tiny_tokenizer()
USERS = """
import asyncio
from hybridflow.interactions.base import BaseInteraction

class Moody(BaseInteraction):
    "The second of its conversations fails, while the others wait."
    begun = 0
    ended = 0

    async def start_interaction(self, instance_id=None, **kwargs):
        self.begun += 1
        return str(self.begun)

    async def generate_response(self, instance_id, messages, **kwargs):
        if self.config.get("fails"):
            if instance_id == "2":
                raise ValueError("no more")
            await asyncio.sleep(3600)
        return False, f"more {instance_id}", 0.0, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        Moody.ended += 1
"""


def play(tmp_path: Path, answer: str, *, fails: bool, name: str = "moody") -> Trajectory:
    (tmp_path / "users.py").write_text(USERS)
    user = {"name": "moody", "class_name": f"{tmp_path / 'users.py'}:Moody", "config": {"fails": fails}}
    (tmp_path / "user.yaml").write_text(yaml.safe_dump({"interaction": [user]}))
    agent = CollabLLM(TOKENIZER, str(tmp_path / "user.yaml"))
    config = AgentConfig(retries=RetriesConfig(environment=0))
    runner = Runner(lambda _: agent, TOKENIZER, LIMITS, config, hosts=LocalHosts(), limit=Limit())
    told: list[Trajectory] = []
    row: dict[str, Any] = {
        "raw_prompt": [{"role": "user", "content": "help"}],
        "extra_info": {"interaction_kwargs": {"name": name}},
    }

    async def run() -> None:
        with client_of(says(TOKENIZER, lambda prompt: answer, TOKENIZER.eos_token_id)) as client:
            await runner.run(client, [episode(**row)], lambda place, trajectory: told.append(trajectory))
        assert len(asyncio.all_tasks()) == 1, "nothing runs on"

    asyncio.run(run())
    return told[0]


def test_only_the_answer_is_a_row_and_every_continuation_is_told(tmp_path: Path) -> None:
    trajectory = play(tmp_path, "<think>so</think> fine", fails=False)
    (row,) = trajectory.lineages
    text = TOKENIZER.decode(list(row.response_ids))
    assert text == "<think>so</think> fine<|im_end|>" and trajectory.turns == 1
    talks = trajectory.extra["extra_info"]["conversations"]
    assert [[each["content"] for each in talk] for talk in talks] == [
        ["help", "fine", f"more {number}", "fine", f"more {number}", "fine"] for number in (1, 2, 3)
    ]


def test_a_user_that_fails_ends_its_trajectory_and_leaves_nothing_behind(tmp_path: Path) -> None:
    trajectory = play(tmp_path, "fine", fails=True)
    assert trajectory.outcome.cause == "environment" and "ValueError: no more" in trajectory.outcome.detail


@pytest.mark.parametrize("answer", ["", "<think>so</think>"])
def test_an_empty_answer_has_no_continuation(tmp_path: Path, answer: str) -> None:
    trajectory = play(tmp_path, answer, fails=False)
    assert not trajectory.failed and trajectory.extra["extra_info"]["conversations"] == []


def test_a_row_with_another_user_is_a_failure_of_the_data(tmp_path: Path) -> None:
    trajectory = play(tmp_path, "fine", fails=False, name="other")
    assert trajectory.outcome.cause == "data" and "wanted moody" in trajectory.outcome.detail
