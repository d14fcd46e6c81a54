"""Agents that know a base URL and send pictures: what they have sent is what is trained."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from spoken_engine import episode
from test_picture_turns import ROOM, assert_trained_as_sampled, native
from transformers import AutoTokenizer

from hybridflow.agent.black_box import CommandAgent, FunctionAgent
from hybridflow.agent.collate import collate
from hybridflow.agent.endpoint import Endpoint, Recording
from hybridflow.agent.episode import Policy
from hybridflow.config.data import DataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.media import MediaReader
from hybridflow.data.pictures import MediaError, read_picture, sent_file
from hybridflow.models.policy import PolicyModel
from hybridflow.processes.local import LocalHosts
from hybridflow.protocol.prompt import MEDIA
from hybridflow.protocol.trajectory import Lineage, Trajectory, rows_of
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.server.model import ServedModel
from picture_models import picture_model, picture_policy, squares

RED, BLUE, GREEN = (220, 30, 30), (30, 60, 220), (30, 160, 60)
PICTURES = [squares(RED, BLUE), squares(GREEN, RED, side=24), squares(BLUE, GREEN)]
STOP = SamplingParams(max_tokens=3, stop_token_ids=tuple(range(4, 90)), ignore_eos=True)


def endpoint_of(family: str, **keys: Any) -> Endpoint:
    tokenizer = AutoTokenizer.from_pretrained(picture_model(family))
    reader = MediaReader.of_model(tokenizer, DataConfig(**keys))
    model = ServedModel("policy", tokenizer, len(tokenizer), ROOM.max_model_len, "hermes", reader=reader)
    return Endpoint(model, ChatTemplate(tokenizer))


def url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def user(picture: Image.Image | str, text: str = "1 ?") -> dict[str, Any]:
    address = picture if isinstance(picture, str) else url(picture)
    shown = {"type": "image_url", "image_url": {"url": address, "detail": "high"}}
    return {"role": "user", "content": [shown, {"type": "text", "text": text}]}


def recorded(
    policy: PolicyModel, endpoint: Endpoint, play: Callable[[Recording], Awaitable[Any]]
) -> tuple[tuple[Lineage, ...], Recording]:
    """Return the rows of one trajectory whose agent does what `play` does."""

    async def work() -> tuple[tuple[Lineage, ...], Recording]:
        with native(policy, max_num_batched_tokens=31) as client:
            numbers = iter(range(100))
            own = Policy(client, replace(episode(), sampling=STOP), ROOM, lambda: next(numbers))
            async with endpoint.record(own) as recording:
                await play(recording)
            return rows_of(own.calls), recording

    return asyncio.run(work())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_a_conversation_with_pictures_is_one_row_and_trained_as_sampled(family: str) -> None:
    policy = picture_policy(family)

    async def play(recording: Recording) -> None:
        history: list[Any] = []
        async with openai.AsyncOpenAI(
            base_url=f"{recording.url}/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            for picture in PICTURES:
                history.append(user(picture))
                answer = await client.chat.completions.create(model="gpt", messages=history)
                said = answer.choices[0].message.content
                history.append({"role": "assistant", "content": said})

    rows, recording = recorded(policy, endpoint_of(family), play)
    (row,) = rows
    assert [piece.sampled for piece in row.segments] == [True, False, True, False, True]
    assert len(row.prompt.media) >= 1 and len(row.media) >= 3
    assert recording.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "1 ?"}]
    batch = collate([Trajectory(1, 0, rows, reward=0.0)], 0)
    assert len(batch.non_tensor_batch[MEDIA][0]) == len(row.media)
    assert_trained_as_sampled(policy, batch)


def test_a_history_with_another_picture_is_another_row_and_a_bad_one_fails_nothing() -> None:
    policy = picture_policy()
    bad = {
        "data:image/png;base64,@@": "is no base64",
        "/etc/hostname": "wanted data:image/png;base64,…",
        "http://127.0.0.1:1/a.png": "data.fetch_media=true",
    }

    async def play(recording: Recording) -> None:
        async with httpx.AsyncClient(timeout=600) as client:

            async def ask(*messages: Any) -> httpx.Response:
                body = {"messages": list(messages)}
                return await client.post(f"{recording.url}/v1/chat/completions", json=body)

            for address, told in bad.items():
                answer = await ask(user(address))
                assert answer.status_code == 400 and told in answer.json()["error"]["message"]
            mark = [5, recording.model.tokenizer.convert_tokens_to_ids("<|image_pad|>")]
            alone = await client.post(f"{recording.url}/v1/completions", json={"prompt": mark})
            assert alone.status_code == 400 and "has 0 pictures" in alone.text
            assert recording.failure is None
            said = (await ask(user(PICTURES[0]))).json()["choices"][0]["message"]
            for first in (PICTURES[0], PICTURES[2]):
                await ask(user(first), said, {"role": "user", "content": "<|image_pad|> 2 ?"})
            many = await ask(user(Image.new("1", (400, 400))), said, *[user(PICTURES[0])] * 30)
            assert many.json()["error"]["code"] == "context_length_exceeded"

    rows, _ = recorded(policy, endpoint_of("qwen3_vl"), play)
    assert [sum(piece.sampled for piece in row.segments) for row in rows] == [2, 1]
    assert [len(row.media) for row in rows] == [1, 1] and rows[0].media != rows[1].media
    assert_trained_as_sampled(policy, collate([Trajectory(1, 0, rows, reward=0.0)], 0))


def test_pictures_are_refused_with_the_reason_where_nothing_reads_them() -> None:
    reads = endpoint_of("qwen3_vl")
    model = replace(reads.model, reader=None, pictures_refused="rollout.name=hf is given token ids alone")

    async def play(recording: Recording) -> None:
        async with httpx.AsyncClient(timeout=600) as client:
            ask = {"messages": [user(PICTURES[0])]}
            answer = await client.post(f"{recording.url}/v1/chat/completions", json=ask)
            assert answer.status_code == 400 and "rollout.name=hf is given token ids" in answer.text

    assert recorded(picture_policy(), Endpoint(model, reads.template), play)[0] == ()


AGENT = """
import json, os, sys
import httpx

def run(base_url, row):
    assert all(each.startswith("data:image/png;base64,") for each in row["images"])
    body = {"messages": row["raw_prompt"]}
    httpx.post(base_url + "/chat/completions", json=body, timeout=600).raise_for_status()
    return {"score": 1.0, "images": len(row["images"])}

if __name__ == "__main__":
    row = json.load(open(os.environ["HYBRIDFLOW_ROW"]))
    print(json.dumps(run(os.environ["OPENAI_BASE_URL"], row)))
"""


@pytest.mark.parametrize("in_process", [True, False])
def test_a_row_with_pictures_is_given_as_it_can_be_sent(tmp_path: Path, in_process: bool) -> None:
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    PICTURES[0].save(tmp_path / "a.png")
    row = {
        "raw_prompt": [{"role": "user", "content": "<image>1 <image>?"}],
        "images": [str(tmp_path / "a.png"), {"bytes": base64.b64decode(url(PICTURES[1]).partition(",")[2])}],
    }
    endpoint = endpoint_of("qwen3_vl")
    agent: Any = CommandAgent([sys.executable, str(script)], endpoint)
    if in_process:
        agent = FunctionAgent(f"{script}:run", endpoint, LocalHosts(), deadline_s=600.0)

    async def work() -> Policy:
        with native(picture_policy()) as client:
            numbers = iter(range(100))
            own = replace(episode(**row), sampling=STOP)
            policy = Policy(client, own, ROOM, lambda: next(numbers))
            result = await agent.run(own, policy)
            assert result.reward == 1.0 and result.metrics == {"images": 2.0}
            return policy

    (call,) = asyncio.run(work()).calls
    reader = endpoint.model.reader
    assert reader is not None
    messages, sources = reader.in_parts(row["raw_prompt"], row)
    wanted = reader.expand(endpoint.template.begin(messages), sources, whole=True)
    assert list(call.prompt.token_ids) == wanted.token_ids and call.prompt.media == wanted.media


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO", "JPEG2000", "MPO", "JPEG", "data", "memory"])
def test_pictures_of_rows_are_sent_in_formats_that_are_taken(kind: str) -> None:
    reader = endpoint_of("qwen3_vl").model.reader
    assert reader is not None
    file = io.BytesIO()
    PICTURES[0].save(file, "PNG" if kind in ("data", "memory") else kind)
    held: Any = file.getvalue()
    if kind == "data":
        held = "data:;base64," + base64.b64encode(held).decode()
    elif kind == "memory":
        held = Image.open(file)
    sent = reader.as_sent({"raw_prompt": [{"role": "user", "content": "<image>?"}], "images": [held]})
    assert sent["raw_prompt"][0]["content"][0]["image_url"] == {"url": sent["images"][0]}
    taken, _ = sent_file(sent["images"][0], fetch=False, seconds=0)
    assert read_picture(taken).tobytes() == read_picture(held).tobytes()
    assert (taken == held) == (kind in ("MPO", "JPEG"))


def test_rows_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    reader = endpoint_of("qwen3_vl").model.reader
    assert reader is not None
    with pytest.raises(MediaError, match=r"nowhere\.png cannot be read"):
        reader.as_sent({"images": ["/nowhere.png"], "raw_prompt": "a"})
    Image.new("1", (6000, 6000)).save(tmp_path / "large.png")
    with pytest.raises(MediaError, match=r"image 1 of the row: .*large\.png has 36000000 pixels, and at"):
        reader.as_sent({"images": [PICTURES[0], str(tmp_path / "large.png")], "raw_prompt": "a"})
    with pytest.raises(MediaError, match="videos are not sent over HTTP"):
        reader.as_sent({"videos": [[PICTURES[0]]], "raw_prompt": "a"})
    text = {"raw_prompt": [{"role": "user", "content": "hi"}], "images": None}
    assert reader.as_sent(text) == text
    away = reader.as_sent({"raw_prompt": [{"role": "user", "content": "<image>"}], "images": ["http://a/b"]})
    assert away["raw_prompt"][0]["content"][0]["image_url"] == {"url": "http://a/b"}
