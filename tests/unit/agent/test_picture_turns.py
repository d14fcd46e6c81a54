"""Conversations with pictures of tools and environments: read, in their places, and trained on."""

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

from hybridflow.agent.agent_loop import AgentLoopAgent
from hybridflow.agent.build import INTERACTIONS
from hybridflow.agent.chat import ChatAgent, ChatParts
from hybridflow.agent.collate import GROUPS_PER_STEP, collate
from hybridflow.agent.conversation import Conversation
from hybridflow.agent.episode import Episode, PolicyLimits
from hybridflow.agent.hosted_environment import EnvironmentSpec
from hybridflow.agent.journal import ANSWER, GroupFile, Journal
from hybridflow.agent.runner import Limit, Runner
from hybridflow.config import PPOConfig
from hybridflow.config.agent import AgentConfig, MultiTurnConfig, RetriesConfig
from hybridflow.config.data import DataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.media import MediaReader, MediaSource
from hybridflow.data.prompts import PromptRow
from hybridflow.errors import DataError
from hybridflow.models.policy import PolicyModel
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import HostsLike, LocalHosts
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import pack, prompt_groups, share_prompts
from hybridflow.protocol.prompt import MEDIA, Medium, Prompt
from hybridflow.protocol.trajectory import PolicyCall, Trajectory, rows_of
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

    after_loss = "repeat"

    def __init__(self, first=0):
        self.first = first

    def reset(self, row):
        self.turn = 0
        picture = {"type": "image", "image": drawn(self.first)}
        return [{"role": "user", "content": [picture, {"type": "text", "text": "1 ?"}]}]

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
        self.pictures = list(row["images"])
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
        lambda _: agent,
        parts.tokenizer,
        limits,
        parts.agent,
        hosts=parts.hosts,
        limit=Limit(),
        journal=journal,
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
    assert sorted({len(each) for each in media}) == [2, 3, 4], "as many pictures as turns"
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
        {
            name: rows.batch[name][:1]
            for name in ("input_ids", "attention_mask", "response_mask", "responses")
        },
        {MEDIA: [(media[0][0], replace(second, values=other, digest="other"), *media[0][2:])]},
    )
    with torch.no_grad():
        before, after = (policy(pack(each)).log_probs for each in (rows[:1], changed))
    calls = rows.batch["call"][0][rows.batch["response_mask"][0]]
    assert torch.equal(before[calls == 0], after[calls == 0]), "the first turn is before the second picture"
    assert bool(((before - after).abs()[calls > 0] > 1e-4).any()), "later turns read it"


def spoken(
    answer: Callable[[str], str], parts: ChatParts, environment: EnvironmentSpec | None = None, **row: Any
) -> Trajectory:
    """Have a model that says `answer(prompt)` play one conversation."""
    limits = row.pop("limits", ROOM)
    journal = row.pop("journal", None)
    with client_of(says(parts.tokenizer, answer, parts.tokenizer.eos_token_id)) as client:
        episodes = [episode(max_tokens=200, **row)]
        return run(parts, client, episodes, environment, journal=journal, limits=limits)[0]


def zooms(*numbers: int) -> Callable[[str], str]:
    """Call the tool with one number after the other, and then answer."""

    def answer(prompt: str) -> str:
        turn = prompt.count("<|im_start|>assistant\n") - 1
        return ZOOM.replace("NUMBER", str(numbers[turn])) if turn < len(numbers) else "7"

    return answer


QUESTION = {"raw_prompt": [{"role": "user", "content": "<image>1 ?"}], "images": [squares(RED, BLUE)]}


@pytest.mark.parametrize("in_process", [True, False])
def test_a_tool_answers_with_pictures(zoom: Toolset, in_process: bool) -> None:
    hosts: HostsLike = LocalHosts() if in_process else Hosts(1)
    try:
        parts = parts_of("qwen3_vl", hosts, zoom)
        found = spoken(zooms(1, 2, 4, 5), parts, **QUESTION)
    finally:
        hosts.close()
    assert found.outcome.kind == "finished", found.outcome
    (row,) = found.lineages
    assert len(row.prompt.media) == 1 and len(row.given_media) == 2
    text = parts.tokenizer.decode([*row.prompt.token_ids, *row.response_ids])
    short = re.sub(r"(<\|image_pad\|>)+", "PICTURE", text)
    assert (
        short.count("PICTURE") == 3
        and short.count("tool\n<|vision_start|>PICTURE<|vision_end|>8<|im_end|>") == 2
    )
    assert "zoom failed" in short and "cannot be read" in short, "an unreadable picture is told to the model"
    assert found.metrics["tools/raised"] == 1
    assert found.extra["extra_info"]["tool_rewards"] == [0.5, 0.5, 0.0, 0.0]
    messages = found.extra["extra_info"]["messages"]
    assert messages[2]["content"] == [{"type": "image"}, {"type": "text", "text": "8"}]
    assert messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "1 ?"}]
    policy = picture_policy("qwen3_vl")
    calls = [piece for piece in row.segments if piece.sampled]
    rows = collate([replace(found, reward=0.0)], 0)
    with torch.no_grad():
        whole = policy(pack(rows)).log_probs.split([len(piece.token_ids) for piece in calls])
    before: list[int] = [*row.prompt.token_ids]
    for piece in row.segments:
        if piece.sampled:  # each call alone, as generation reads it
            media = tuple(medium for medium in row.media if medium.start < len(before))
            alone = collate([one_call(Prompt(tuple(before), media), piece.token_ids)], 0)
            with torch.no_grad():
                own = policy(pack(alone)).log_probs
            torch.testing.assert_close(own, whole[calls.index(piece)], atol=1e-5, rtol=0)
        before += piece.token_ids


def one_call(prompt: Prompt, sampled: Sequence[int]) -> Trajectory:
    output = SimpleNamespace(
        token_ids=sampled, log_probs=[0.0] * len(sampled), policy_versions=[0] * len(sampled)
    )
    return Trajectory(1, 0, rows_of([PolicyCall(prompt, output)]), reward=0.0)


def test_equal_tokens_under_other_pictures_are_another_row() -> None:
    red, blue = Medium(1, 2, "red"), Medium(5, 2, "blue")
    output = SimpleNamespace(token_ids=[4], log_probs=[-1.0], policy_versions=[0])
    begun = PolicyCall(Prompt((1, 9, 9, 2), (red,)), output)
    goes_on = PolicyCall(Prompt((1, 9, 9, 2, 4, 9, 9), (red, blue)), output)
    (row,) = rows_of([begun, goes_on])
    assert row.media == (red, blue) and row.given_media == (blue,) and row.response_ids == [4, 9, 9, 4]
    again = PolicyCall(Prompt((1, 9, 9, 2, 4, 9, 9, 4, 8), (red, blue)), output)
    assert [each.response_ids for each in rows_of([begun, goes_on, again])] == [[4, 9, 9, 4, 8, 4]]
    other = PolicyCall(Prompt((1, 9, 9, 2, 4, 9, 9, 4, 8), (red, replace(blue, digest="green"))), output)
    assert [each.response_ids for each in rows_of([begun, goes_on, other])] == [[4, 9, 9, 4], [4]]
    moved = PolicyCall(Prompt((1, 9, 9, 2, 4, 9, 9), (Medium(1, 2, "blue"), replace(red, start=5))), output)
    assert len(rows_of([begun, moved])) == 2


@pytest.mark.parametrize(
    ("name", "cause", "said"),
    [
        ("Bad", "environment", "step() of the environment gave a picture that cannot be read"),
        ("Far", "data", "data.fetch_media"),
    ],
)
def test_a_bad_picture_fails_its_trajectory(world: Path, name: str, cause: str, said: str) -> None:
    parts = parts_of("qwen3_vl", LocalHosts())
    found = spoken(lambda _: "7", parts, shown(world, name))
    assert found.outcome.cause == cause and said in found.outcome.detail


def test_what_reads_no_pictures_says_so(world: Path, zoom: Toolset, caplog: pytest.LogCaptureFixture) -> None:
    text = parts_of("qwen3_vl", LocalHosts(), zoom, reader=None)
    found = spoken(zooms(1), text, raw_prompt=[{"role": "user", "content": "1 ?"}])
    (row,) = found.lineages
    told = text.tokenizer.decode(row.response_ids)
    assert (
        found.outcome.kind == "finished"
        and "8\n(pictures left out, as you read text only: 1)" in told
        and not row.media
    )
    assert "tools answer with pictures" in caplog.text
    found = spoken(lambda _: "7", text, shown(world))
    assert found.outcome.cause == "data" and "the model reads text only" in found.outcome.detail
    refused = parts_of("qwen3_vl", LocalHosts(), pictures_refused="rollout.name=hf: set it to native")
    found = spoken(lambda _: "7", refused, shown(world))
    assert found.outcome.cause == "data" and "gives pictures, and rollout.name=hf" in found.outcome.detail


def test_a_template_that_drops_the_pictures_of_tools_is_named(zoom: Toolset) -> None:
    plain = parts_of("qwen3_vl", LocalHosts(), zoom)
    own = plain.tokenizer.chat_template
    is_image = "{%- if part['type'] == 'image'"
    assert is_image in own
    dropped = own.replace(is_image, f"{is_image} and message['role'] == 'tool' -%}}{{%- elif {is_image[7:]}")
    parts = replace(plain, template=ChatTemplate(plain.tokenizer, {}, dropped))
    found = spoken(zooms(1), parts, **QUESTION)
    assert found.outcome.cause == "data" and "does not write each of them once" in found.outcome.detail


def test_the_tokens_of_pictures_count(world: Path) -> None:
    parts = parts_of("qwen3_vl", LocalHosts())
    first = len(spoken(lambda _: "7", parts, shown(world)).lineages[0].prompt)
    found = spoken(lambda _: "7", parts, shown(world), limits=replace(ROOM, max_prompt_length=first - 1))
    assert found.outcome.cause == "data" and "data.max_prompt_length" in found.outcome.detail
    found = spoken(lambda _: "7", parts, shown(world), limits=replace(ROOM, max_model_len=first + 20))
    assert found.outcome.kind == "truncated" and len(found.lineages[0].media) == 1


def test_pictures_of_the_row_stand_in_their_places(world: Path, tmp_path: Path) -> None:
    parts = parts_of("qwen3_vl", LocalHosts())
    found = spoken(lambda _: "7", parts, shown(world, "Row"), **QUESTION)
    assert len(found.lineages[0].prompt.media) == 1
    late = spoken(lambda _: "7", parts, shown(world, "Late"), **QUESTION)
    assert [len(late.lineages[0].prompt.media), len(late.lineages[0].given_media)] == [0, 1]
    assert late.lineages[0].media[0].digest == found.lineages[0].media[0].digest
    config = tmp_path / "interactions.yaml"
    config.write_text(
        "interaction: [{class_name: hybridflow.interactions.gsm8k_interaction.Gsm8kInteraction}]"
    )
    talk = EnvironmentSpec.of(INTERACTIONS, {"config_path": str(config)})
    kwargs = {"extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "7"}}}
    found = spoken(lambda _: "#### 7", parts, talk, **QUESTION, **kwargs)
    assert len(found.lineages[0].prompt.media) == 1, found.outcome
    places = [{"role": "user", "content": [{"type": "image"}]}]
    none = spoken(lambda _: "7", parts, shown(world, "Row"), raw_prompt=places)
    assert none.outcome.cause == "data" and "more places for an image" in none.outcome.detail


def test_token_ids_bring_their_pictures(world: Path) -> None:
    parts = parts_of("qwen3_vl", LocalHosts())
    place = next(iter(parts.reader.processor.placeholders))
    found = spoken(lambda _: "7", parts, shown(world, "Ids"), extra_info={"ids": [5, place, 6]})
    assert found.outcome.cause == "data" and "1 placeholders of pictures" in found.outcome.detail
    medium = Medium(1, 1, "red", {"pixel_values": torch.zeros(1)})
    own = {"ids": Prompt((5, place, 6), (medium,))}
    found = spoken(lambda _: "7", parts, shown(world, "Ids"), extra_info=own)
    assert found.lineages[0].media == (medium,)
    conversation = Conversation(parts.template, processor=parts.reader.processor)
    conversation.begin(Prompt((5, place, 6), (medium,)))
    conversation.add(Prompt((7, place), (medium,)))
    assert [each.start for each in conversation.prompt.media] == [1, 4]


def test_a_conversation_is_what_its_template_renders(world: Path) -> None:
    strict = MultiTurnConfig(tokenization_sanity_check_mode="strict")
    checked = spoken(lambda _: "7", parts_of("smolvlm", LocalHosts(), multi_turn=strict), shown(world))
    assert checked.metrics["template_differences"] == 0 and len(checked.lineages[0].media) == 3
    kept, again = (
        spoken(lambda _: "7", parts_of("qwen3_vl", LocalHosts(), strip_thinking=strip), shown(world))
        for strip in (False, True)
    )
    assert kept.lineages == again.lineages and len(again.lineages[0].media) == 3
    rendered = Conversation(parts_of("qwen3_vl", LocalHosts()).template, strip_thinking=True)
    rendered.begin_rendered(Prompt((5, 6), (Medium(1, 1, "red"),)), [{"role": "user", "content": "1"}])
    with pytest.raises(DataError, match=r"agent.strip_thinking renders .* again"):
        rendered.add("2")


@pytest.mark.parametrize("with_tools", [False, True])
def test_an_episode_with_pictures_goes_on_by_its_journal(
    world: Path, zoom: Toolset, tmp_path: Path, with_tools: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of("qwen3_vl", LocalHosts(), zoom if with_tools else None)
    spec = None if with_tools else shown(world)
    row = QUESTION if with_tools else {}
    answer = zooms(1, 2) if with_tools else lambda _: "7"
    whole = spoken(answer, parts, spec, group=GROUPS_PER_STEP, **row)
    assert len(whole.lineages[0].media) == 3
    real = GroupFile.append
    left = [6]

    def append(self: GroupFile, line: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("killed")
        real(self, line)

    with monkeypatch.context() as dying, pytest.raises(ExceptionGroup):
        dying.setattr(GroupFile, "append", append)
        spoken(answer, parts, spec, group=GROUPS_PER_STEP, journal=Journal(tmp_path, 4), **row)
    asked: list[str] = []

    def noted(prompt: str) -> str:
        asked.append(prompt)
        return answer(prompt)

    continued = spoken(noted, parts, spec, group=GROUPS_PER_STEP, journal=Journal(tmp_path, 4), **row)
    assert continued.lineages == whole.lineages and continued.reward == whole.reward
    assert len(asked) < 3, "the turns of the journal were not taken again"


def test_conversations_share_what_they_read_of_a_picture() -> None:
    reader = parts_of("qwen3_vl", LocalHosts()).reader
    (first,) = reader.read([MediaSource("image", squares(RED, BLUE))])
    same, other = reader.read([MediaSource("image", squares(RED, side)) for side in (BLUE, GREEN)])
    assert same is first and other is not first
    assert same.media[0].digest != other.media[0].digest


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_tools_give_pictures_in_many_forms(tmp_path: Path) -> None:
    picture = squares(RED, GREEN)
    (tmp_path / "a.png").write_bytes(png(picture))
    url = "data:image/png;base64," + base64.b64encode(png(picture)).decode()
    forms = [
        picture,
        ToolResponse(image=[picture]),
        ToolAnswer(images=(str(tmp_path / "a.png"),)),
        (ToolResponse(image=[png(picture)]), 0.0, {}),
        [{"type": "image_url", "image_url": {"url": url}}],
        [{"type": "image", "image": picture}, {"type": "text", "text": ""}],
    ]
    reader = parts_of("qwen3_vl", LocalHosts()).reader
    digests = set()
    for form in forms:
        answer = answer_of(form)
        assert json.loads(json.dumps(ANSWER.write(answer))) and ANSWER.read(ANSWER.write(answer)) == answer
        _, sources = reader.in_parts(
            [{"role": "tool", "content": [{"type": "image", "url": answer.images[0]}]}], {}, of_agent=True
        )
        (read,) = reader.read(sources)
        digests.add(read.media[0].digest)
    assert len(digests) == 1 and answer_of([{"type": "image"}]).text == '[{"type": "image"}]'
    far = answer_of(ToolResponse(text="a", image=["https://a.example/b.png"]))
    assert far == ToolAnswer("a", images=("https://a.example/b.png",)), (
        "whether it is fetched is the run's to say"
    )
    for bad in (
        ToolResponse(image=[b"no"]),
        ToolAnswer(images=("/nowhere.png",)),
        ToolResponse(video=[picture]),
    ):
        with pytest.raises((ValueError, TypeError)):
            answer_of(bad)


def loops_of_the_page() -> tuple[Any, Any]:
    """The loop that the page shows, and one that does not give `generate` its newest picture."""
    page = (Path(__file__).parents[3] / "docs" / "agents" / "agent_loops.md").read_text(encoding="utf-8")
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Crop" in block
    ]
    assert code.count("image_data=images") == 1
    loops = []
    for own in (code, code.replace("image_data=images", "image_data=images[:2]")):
        names: dict[str, Any] = {}
        exec(own, names)
        loops.append(names["Crop"])
    return loops[0], loops[1]


def test_agent_loops_read_pictures_as_in_verl() -> None:
    policy = picture_policy("qwen2_5_vl")
    parts = parts_of("qwen2_5_vl", LocalHosts())
    raw = [{"role": "user", "content": "<image>1 <image>?"}]
    images = [squares(RED, BLUE), squares(GREEN, side=24)]
    read, sources = parts.reader.in_parts(raw, {"images": images})
    expanded = parts.reader.expand(parts.template.begin(read), sources, whole=True)
    facts = {"data_source": "test", "reward_model": {}, "extra_info": {}, "raw_prompt": raw, "images": images}
    row = PromptRow(expanded.token_ids, facts, index=0, media=expanded.media)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    found = {}
    whole, forgetful = loops_of_the_page()
    with native(policy) as client:
        for loop in (whole, forgetful):
            agent = AgentLoopAgent(loop, {}, PPOConfig(), parts.tokenizer, parts.reader)
            runner = Runner(
                lambda _, agent=agent: agent,
                parts.tokenizer,
                ROOM,
                parts.agent,
                hosts=parts.hosts,
                limit=Limit(),
            )
            one = Episode(row, group=1, sample=0, group_seed=1, seed=2, sampling=sampling)
            asyncio.run(runner.run(client, [one], lambda _, each, loop=loop: found.__setitem__(loop, each)))
    trajectory = found[whole]
    assert trajectory.outcome.kind in ("finished", "truncated"), trajectory.outcome
    (lineage,) = trajectory.lineages
    assert lineage.prompt == row.prompt and len(lineage.given_media) == 1
    assert_trained_as_sampled(policy, collate([trajectory], 0))
    failed = found[forgetful].outcome
    assert failed.cause == "environment" and "have not the placeholders of its image_data" in failed.detail
