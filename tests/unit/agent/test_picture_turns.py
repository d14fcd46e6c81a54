"""Conversations with pictures: those that tools and environments answer with are read, placed, and trained on."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from spoken_engine import client_of, episode, says
from transformers import AutoTokenizer

from hybridflow.agent.build import INTERACTIONS
from hybridflow.agent.chat import ChatAgent, ChatParts
from hybridflow.agent.collate import collate
from hybridflow.agent.conversation import Conversation, Seen
from hybridflow.agent.episode import Episode, PolicyLimits
from hybridflow.agent.hosted_environment import EnvironmentSpec
from hybridflow.agent.journal import ANSWER, GroupFile, Journal
from hybridflow.agent.runner import Limit, Runner
from hybridflow.config.agent import AgentConfig, MultiTurnConfig, RetriesConfig
from hybridflow.config.data import DataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.media import MediaReader
from hybridflow.errors import DataError
from hybridflow.models.policy import PolicyModel
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import HostsLike, LocalHosts
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import pack, prompt_groups, share_prompts
from hybridflow.protocol.prompt import MEDIA, Medium, Prompt
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.client import LLMClient
from hybridflow.rollout.engine_replica import EngineReplica
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.tools.base import ToolAnswer, answer_of
from hybridflow.tools.schemas import ToolResponse
from hybridflow.tools.toolset import Toolset
from picture_models import FAMILIES, picture_model, picture_policy, squares

RED, BLUE, GREEN = (220, 30, 30), (30, 60, 220), (30, 160, 60)
WORLD = '''
import base64, io
from PIL import Image
from hybridflow.environments import Environment, Step
from hybridflow.tools import tool

COLOURS = [(220, 30, 30), (30, 60, 220), (30, 160, 60)]

def drawn(number, side=16):
    return Image.new("RGB", (side, side), COLOURS[number % 3])

def png(number):
    file = io.BytesIO()
    drawn(number).save(file, "PNG")
    return file.getvalue()

class Show(Environment):
    """A picture in each observation, in another form each, and as many turns as the sample's number."""

    def __init__(self, first=0):
        self.first = first

    def reset(self, row):
        self.turn = 0
        return [{"role": "user", "content": [{"type": "image", "image": drawn(self.first)}, {"type": "text", "text": "1 ?"}]}]

    def step(self, text):
        self.turn += 1
        n = self.first + self.turn
        url = "data:image/png;base64," + base64.b64encode(png(n)).decode()
        forms = [
            {"type": "image", "image": drawn(n, side=16 if n % 2 else 24)},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "bytes": png(n)},
        ]
        parts = [{"type": "text", "text": "2 "}, forms[self.turn % 3], {"type": "text", "text": " ?"}]
        return Step(parts, reward=1.0, done=self.turn > self.step_seed % 3 + 1)

class Bad(Show):
    def step(self, text):
        return Step([{"type": "image", "image": b"no picture"}])

class Far(Show):
    def step(self, text):
        return Step([{"type": "image_url", "image_url": {"url": "http://localhost:1/a.png"}}])

class Ids(Environment):
    def reset(self, row):
        return row["extra_info"]["ids"]

class Row(Environment):
    """The row's own pictures, where its prompt has places for them."""

    def step(self, text):
        return Step(done=True)

class Late(Environment):
    """One of the row's pictures, in the second turn."""

    def reset(self, row):
        self.pictures = row["images"]
        return "wait"

    def step(self, text):
        if not self.pictures:
            return Step(done=True)
        return Step([{"type": "image", "image": self.pictures.pop()}])
'''
TOOLS = '''
from PIL import Image
from hybridflow.tools import tool
from hybridflow.tools.schemas import ToolResponse

@tool
def zoom(number: int) -> str:
    """Zoom in."""
    if number == 4:
        return ToolResponse(text="8", image=["/nowhere.png"])
    if number == 5:
        return "no picture"
    return ToolResponse(text="8", image=[Image.new("RGB", (16, 16), (20 * number, 30, 30))]), 0.5
'''
ROOM = PolicyLimits(max_model_len=600, max_prompt_length=300, request_deadline=60.0, lost_replicas=2)
ZOOM = '<tool_call>{"name": "zoom", "arguments": {"number": NUMBER}}</tool_call>'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("world") / "world.py"
    file.write_text(WORLD)
    return file


@pytest.fixture(scope="module")
def zoom(tmp_path_factory: pytest.TempPathFactory) -> Toolset:
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(TOOLS)
    return Toolset.load(MultiTurnConfig(function_tool_path=str(file)))


def parts_of(family: str, hosts: HostsLike, tools: Toolset | None = None, **changes: Any) -> ChatParts:
    tokenizer = AutoTokenizer.from_pretrained(picture_model(family))
    multi_turn = changes.pop("multi_turn", MultiTurnConfig())
    agent = AgentConfig(retries=RetriesConfig(0, 0, 0), strip_thinking=changes.pop("strip_thinking", False))
    template = ChatTemplate(tokenizer, {}, changes.pop("template", None))
    reader = MediaReader.of_model(tokenizer, DataConfig())
    assert reader is not None
    parts = ChatParts(
        tokenizer, template, "hermes", tools or Toolset(), hosts, multi_turn, agent, reader=reader
    )
    return replace(parts, **changes)


def run(
    parts: ChatParts,
    client: LLMClient,
    episodes: Sequence[Episode],
    environment: EnvironmentSpec | None = None,
    *,
    journal: Journal | None = None,
    limits: PolicyLimits = ROOM,
) -> list[Trajectory]:
    agent = ChatAgent(parts, environment)
    runner = Runner(
        lambda _: agent, parts.tokenizer, limits, parts.agent, hosts=parts.hosts, limit=Limit(), journal=journal
    )
    told: dict[int, Trajectory] = {}
    asyncio.run(runner.run(client, episodes, told.__setitem__))
    return [told[place] for place in range(len(episodes))]


@contextmanager
def native(policy: PolicyModel, **settings: int) -> Iterator[LLMClient]:
    engine = NativeEngine(policy, eos_token_ids=[3], **settings)
    replica = EngineReplica(engine, name="native")
    try:
        yield LLMClient([replica])
    finally:
        replica.close()


def shown(world: Path, name: str = "Show", **options: Any) -> EnvironmentSpec:
    return EnvironmentSpec.of(f"{world}:{name}", options)


@torch.no_grad()
def assert_trained_as_sampled(policy: PolicyModel, rows: DataProto, atol: float = 1e-5) -> None:
    """Training's log-probs of the rows are those of generation, however the rows are packed."""
    sampled = rows.batch["rollout_log_probs"]
    mask = rows.batch["response_mask"]
    for packed in (pack(rows), share_prompts(pack(rows))):
        trained = packed.unpack(policy(packed).log_probs)
        torch.testing.assert_close(trained[mask], sampled[mask], atol=atol, rtol=0)
    alone = [pack(rows[place : place + 1]) for place in range(len(rows))]
    apart = torch.cat([policy(packed).log_probs for packed in alone])
    torch.testing.assert_close(apart, sampled[mask], atol=atol, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_has_the_log_probs_of_generation_over_turns(family: str, world: Path) -> None:
    policy = picture_policy(family)
    stop = SamplingParams(max_tokens=3, stop_token_ids=tuple(range(4, 90)), ignore_eos=True)
    episodes = [replace(episode(number), sampling=stop, seed=7 + number) for number in range(6)]
    with native(policy, max_num_batched_tokens=31) as client:  # chunks that cut pictures
        found = run(parts_of(family, LocalHosts()), client, episodes, shown(world))
    assert not any(each.failed for each in found), [each.outcome for each in found]
    rows = collate(found, 0)
    assert len(rows) == 6, "each conversation is one row"
    media = rows.non_tensor_batch[MEDIA]
    assert sorted({len(each) for each in media}) == [2, 3, 4], "as many pictures as the conversation has turns"
    placeholders = torch.tensor(sorted(parts_of(family, LocalHosts()).reader.processor.placeholders))
    is_picture = torch.isin(rows.batch["input_ids"], placeholders) & rows.batch["attention_mask"].bool()
    assert is_picture.sum(1).tolist() == [sum(medium.length for medium in each) for each in media]
    width = rows.batch["response_mask"].shape[1]
    assert not bool((rows.batch["response_mask"] & is_picture[:, -width:]).any()), "pictures are given"
    assert_trained_as_sampled(policy, rows)
    assert set(prompt_groups(rows)) == {0}, "all begin with the same picture"
    # the picture of the second turn is what later turns read
    second = media[0][1]
    other = {**second.values, "pixel_values": second.values["pixel_values"] * 0.5}
    changed = DataProto.from_dict(
        {name: rows.batch[name][:1] for name in ("input_ids", "attention_mask", "response_mask", "responses")},
        {MEDIA: [(media[0][0], replace(second, values=other, digest="other"), *media[0][2:])]},
    )
    with torch.no_grad():
        before, after = (policy(pack(each)).log_probs for each in (rows[:1], changed))
    calls = rows.batch["call"][0][rows.batch["response_mask"][0]]
    assert torch.equal(before[calls == 0], after[calls == 0]), "the first turn is before the second picture"
    assert bool(((before - after).abs()[calls > 0] > 1e-4).any()), "later turns read it"

