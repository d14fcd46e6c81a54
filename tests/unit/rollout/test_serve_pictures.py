"""Pictures in requests to the server: the engine's own answers, apart in its cache, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from PIL import Image
from serving import TOKEN, Served, serve_client, tiny_model
from transformers import AutoTokenizer

from hybridflow.config.data import BaseDataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.media import MediaReader, MediaSource
from hybridflow.data.pictures import MediaError, sent_file
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.client import EngineReplica, LLMClient
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.server import prompts
from hybridflow.rollout.server.build import ServeSettings, build_service
from hybridflow.rollout.server.errors import ApiError
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.prompts import JobReaders
from hybridflow.rollout.server.schema import ChatBody
from hybridflow.rollout.server.service import ServerLimits
from picture_models import picture_host, picture_model, picture_policy, squares

RED = squares((220, 30, 30), (30, 60, 220))
BLUE = squares((30, 60, 220), (30, 160, 60))
CHAT = "/v1/chat/completions"
LIMITS = ServerLimits(max_body_bytes=200_000)
PARTS_ALONE = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"


def file_of(picture: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def url(file: bytes | Image.Image, kind: str = "image/png") -> str:
    held = file_of(file) if isinstance(file, Image.Image) else file
    return f"data:{kind};base64,{base64.b64encode(held).decode()}"


def shown(address: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, **more}}


def asked(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    """One message of these parts; a text is a part too."""
    made = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": role, "content": made}]


def model_of(family: str, **keys: bool) -> ServedModel:
    tokenizer = AutoTokenizer.from_pretrained(picture_model(family))
    reader = MediaReader.of_model(tokenizer, BaseDataConfig(**keys))
    return tiny_model(tokenizer=tokenizer, vocabulary=len(tokenizer), reader=reader)


@contextmanager
def serving(
    family: str, policy: PolicyModel, *, limits: ServerLimits = LIMITS, **keys: bool
) -> Iterator[Served]:
    replica = EngineReplica(NativeEngine(policy, eos_token_ids=[3]), name="native-0")
    with serve_client(LLMClient([replica]), model_of(family, **keys), limits) as server:
        yield server


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("qwen3_vl", picture_policy()) as server:
        yield server
        server.wait_idle()


def own(model: ServedModel, policy: PolicyModel, text: str, shown: Sequence[Image.Image]) -> Any:
    """The prompt as rows of data have it, and the engine's answer, which nothing was cached for."""
    assert model.reader is not None
    row = {"images": list(shown)}
    messages, sources = model.reader.in_parts(
        [{"role": "user", "content": "<image>" * len(shown) + text}], row
    )
    expanded = model.reader.expand(ChatTemplate(model.tokenizer).begin(messages), sources, whole=True)
    prompt = Prompt(tuple(expanded.token_ids), expanded.media)
    engine = NativeEngine(policy, eos_token_ids=[3], enable_prefix_caching=False)
    (output,) = engine.generate([GenerationRequest(0, prompt, SamplingParams(6, temperature=0), 0)])
    assert isinstance(output, GenerationOutput)
    return prompt, output


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_answers_are_the_engines_and_pictures_under_equal_texts_are_told_apart(family: str) -> None:
    policy = picture_policy(family)
    found = []
    with serving(family, policy) as server:
        for shows in ([RED], [BLUE], [RED], [BLUE, RED]):
            parts = [shown(url(picture), detail="low") for picture in shows]
            answer = server.openai.chat.completions.create(
                model="tiny",
                messages=asked(*parts, "red ?"),
                max_tokens=6,
                temperature=0,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            prompt, output = own(server.service.model, policy, "red ?", shows)
            (choice,) = answer.choices
            assert answer.usage.prompt_tokens == len(prompt)
            assert choice.model_extra["token_ids"] == output.token_ids
            log_probs = [each.logprob for each in choice.logprobs.content]
            assert log_probs == pytest.approx(output.log_probs, abs=1e-5)
            found.append((choice.model_extra["token_ids"], log_probs))
    assert found[0] == (found[2][0], pytest.approx(found[2][1], abs=1e-5)), (
        "the other picture's cache is its own"
    )
    assert max(abs(one - other) for one, other in zip(found[0][1], found[1][1], strict=False)) > 1e-3


def test_all_interfaces_and_formats_read_the_same(served: Served) -> None:
    jpeg = file_of(RED, "JPEG")
    texts = set()
    for kind, file in (("PNG", file_of(Image.open(io.BytesIO(jpeg)))), ("JPEG", jpeg)):
        sent = url(file, f"image/{kind.lower()}")
        chat = served.http.post(CHAT, json={"messages": asked(shown(sent), "red ?"), "temperature": 0})
        source = {"type": "base64", "media_type": f"image/{kind.lower()}"}
        source["data"] = base64.b64encode(file).decode()
        blocks = asked({"type": "image", "source": source}, "red ?")
        ask = {"model": "tiny", "temperature": 0, "max_tokens": 400}
        headers = {"x-api-key": TOKEN}
        messages = httpx.post(
            f"{served.url}/v1/messages", json={**ask, "messages": blocks}, headers=headers, timeout=600
        )
        items = asked({"type": "input_image", "image_url": sent, "detail": "auto"})
        items[0]["content"].append({"type": "input_text", "text": "red ?"})
        response = served.openai.responses.create(model="tiny", input=items, temperature=0)
        texts.add(chat.json()["choices"][0]["message"]["content"].strip())
        texts.add("".join(block["text"] for block in messages.json()["content"]).strip())
        texts.add(response.output_text.strip())
        assert messages.json()["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]
        assert response.usage.input_tokens == chat.json()["usage"]["prompt_tokens"] > 16
    for kind in ("WEBP", "GIF"):
        answer = served.http.post(CHAT, json={"messages": asked(shown(url(file_of(RED, kind))))})
        assert answer.status_code == 200, answer.text
    assert len(texts) == 1


def bomb(side: int) -> bytes:
    """A PNG of some bytes whose head names `side` × `side` pixels."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"")))
    made = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in (*chunks, (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + made


ATTACKS: dict[str, tuple[list[Any], str]] = {
    "broken base64": ([shown("data:image/png;base64,@@@")], "is no base64"),
    "letters of no ASCII": ([shown("data:image/png;base64,éé")], "is no base64"),
    "half of a file": ([shown(url(file_of(RED)[:-30]))], "a picture cannot be read"),
    "no picture": ([shown(url(b"nothing"))], "its 7 bytes are no picture that can be read"),
    "another format": ([shown(url(file_of(RED, "BMP")))], "send a file of PNG, JPEG, WEBP, GIF"),
    "a bomb": ([shown(url(bomb(60_000)))], "at most 33554432 are read: send it smaller"),
    "many pixels": ([shown(url(Image.new("1", (6000, 6000))))], "it has 36000000 pixels, and at most"),
    "a thread": ([shown(url(Image.new("RGB", (1, 900))))], "a picture cannot be read"),
    "more than the context": ([shown(url(Image.new("1", (400, 400))))] * 3, "conversation with its pictures"),
    "a path": ([shown("/etc/hostname")], "wanted data:image/png;base64,…"),
    "a file": ([shown("file:///etc/hostname")], "wanted data:image/png;base64,…"),
    "no image": ([shown(url(b"a", "text/plain"))], "wanted data:image/png;base64,…"),
    "an address": ([shown("http://127.0.0.1:1/a.png")], "nothing is fetched here"),
    "no URL": ([shown(3)], "messages[0].content[0]: has no URL in 'image_url'"),
    "a bare URL": ([{"type": "image_url", "image_url": url(RED)}], "has no URL in 'image_url'"),
    "a video": ([{"type": "video_url", "video_url": {"url": "a"}}], "only text and image_url are"),
    "a mark in the text": (["<|image_pad|>", shown(url(RED))], "has 1 pictures, and what the model reads"),
    "a mark alone": (["<|image_pad|>"], "has 0 pictures, and what the model reads"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_bad_picture_is_a_bad_request_and_ends_nothing(served: Served, name: str) -> None:
    parts, told = ATTACKS[name]
    answer = served.http.post(CHAT, json={"messages": asked(*parts)})
    assert answer.status_code == 400 and told in answer.json()["error"]["message"], answer.text
    good = {"messages": asked(shown(url(RED)), "red ?"), "max_tokens": 1}
    assert served.http.post(CHAT, json=good).status_code == 200


def of_two_formats() -> bytes:
    """A WEBP of 16 × 16 pixels that is also an IM, a format with a head of text, of 300 × 200."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (220, 30, 30)).save(file, "WEBP", lossless=True)
    image = file.getvalue()[8:]
    size = 0x13A  # its first byte is the colon that ends the first name of an IM: "RIFF:"
    text = b"\nImage size (x*y): 300*200\n\x1a".ljust(size - len(image) - 8, b"\0")
    return b"RIFF" + struct.pack("<I", size) + image + b"text" + struct.pack("<I", len(text)) + text


def test_what_is_counted_is_what_is_decoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Image.open(io.BytesIO(of_two_formats())).size == (300, 200), "left alone, Pillow takes the IM"
    file, pixels = sent_file(url(of_two_formats()), fetch=False, seconds=0)
    reader = served.service.model.reader
    assert pixels == 16 * 16 and reader is not None
    counted, decoded = (reader.read(reader.of_files([file]), whole=whole) for whole in (False, True))
    small = reader.read([MediaSource("image", Image.new("RGB", (16, 16), (220, 30, 30)))])
    assert counted[0].token_ids == decoded[0].token_ids == small[0].token_ids
    assert served.http.post(CHAT, json={"messages": asked(shown(url(file)))}).status_code == 200
    monkeypatch.setattr(Image.Image, "convert", lambda self, mode: Image.new(mode, (40, 40)))
    with pytest.raises(MediaError, match=r"has \(40, 40\) pixels, and its head says \(16, 16\)"):
        reader.read(reader.of_files([file_of(RED)]))


def test_places_and_limits_of_a_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(body: dict[str, Any], status: int = 400, path: str = CHAT) -> str:
        answer = served.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return str(answer.json()["error"]["message"])

    history = [*asked("hi"), *asked(shown(url(RED)), role="assistant"), *asked("more")]
    assert "whose role the chat template writes them for" in told({"messages": history})
    mark = served.service.model.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert "has 0 pictures" in told({"prompt": [5, mark, 6]}, path="/v1/completions")
    noise = Image.effect_noise((500, 500), 99)
    assert "200000 bytes" in told({"messages": asked(shown(url(noise)))}, status=413)
    two = {"messages": asked(shown(url(RED)), shown(url(BLUE)))}
    monkeypatch.setattr(prompts, "MAX_PICTURES", 1)
    assert "messages[0].content[1]: a request has at most 1 pictures" in told(two)
    monkeypatch.setattr(prompts, "MAX_PICTURES", 2)
    monkeypatch.setattr(prompts, "MOST_PIXELS", 300)
    assert "up to this one have 512 pixels, and those of a request at most 300" in told(two)


def test_texts_about_pictures_do_not_wait_behind_pictures(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = served.service.readers
    found = []

    async def run(make: Any, num_bytes: int, *, pictures: bool) -> Any:
        found.append(pictures)
        return await JobReaders.run(readers, make, num_bytes, pictures=pictures)

    monkeypatch.setattr(readers, "run", run)

    def queued(path: str, body: dict[str, Any], encode: Callable[[str], bytes] = str.encode) -> bool:
        content = encode(json.dumps({"model": "tiny", **body}))
        headers = {"x-api-key": TOKEN, "content-type": "application/json"}
        answer = httpx.post(f"{served.url}{path}", content=content, headers=headers, timeout=600)
        assert answer.status_code == 200, answer.text
        return found.pop()

    most = {"max_tokens": 1}
    for text in ("which image formats are there?", 'the "image_url" of an "image"', "caf\u00e9"):
        assert not queued(CHAT, {**most, "messages": asked(text)}), text
    chat = {**most, "messages": asked(shown(url(RED)))}
    assert queued(CHAT, chat)
    assert queued(CHAT, chat, lambda text: text.replace("image_url", "im\\u0061ge_url").encode())
    assert queued(CHAT, chat, lambda text: text.encode("utf-16"))
    assert queued("/v1/responses", {"input": asked({"type": "input_image", "image_url": url(RED)})})
    source = {"type": "base64", "media_type": "image/png", "data": url(RED).partition(",")[2]}
    assert queued("/v1/messages", {**most, "messages": asked({"type": "image", "source": source})})


def test_open_requests_hold_pictures_up_to_a_limit(served: Served) -> None:
    service = served.service
    job = service.chat_job(ChatBody(messages=asked(shown(url(RED)))), lambda: None)
    text = service.chat_job(ChatBody(messages=asked("hi")), lambda: None)
    assert job.media_bytes > 0 == text.media_bytes
    service.limits = ServerLimits(max_media_bytes=job.media_bytes)
    try:
        with service.admit(job), service.admit(text):
            with pytest.raises(ApiError, match="pictures of open requests") as caught, service.admit(job):
                pass
            assert caught.value.status == 429
        with service.admit(job):
            pass
    finally:
        service.limits = LIMITS
    assert service.open_media_bytes == 0 == service.open_choices


def test_addresses_are_fetched_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        picture_host([b"HTTP/1.1 200 OK\r\n\r\n", file_of(RED)]) as (address, asked_for),
        serving("qwen3_vl", picture_policy(), fetch_media=True) as server,
    ):
        body = {"messages": asked(shown(address)), "temperature": 0, "max_tokens": 4}
        fetched = server.http.post(CHAT, json=body).json()
        sent = server.http.post(CHAT, json={**body, "messages": asked(shown(url(RED)))}).json()
        assert fetched["choices"][0]["message"] == sent["choices"][0]["message"]
        assert asked_for == ["GET /a.png HTTP/1.1"]
        monkeypatch.setattr(prompts, "FETCH_SECONDS", 0.0)
        slow = server.http.post(CHAT, json=body)
        assert slow.status_code == 400 and "was not whole after" in slow.text


def test_a_request_whose_pictures_take_too_long_has_its_own_deadline() -> None:
    answered = threading.Event()

    def answer() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nX-Slow: "
        answered.wait(600)

    limits = replace(LIMITS, deadline_s=0.5)
    with (
        picture_host(answer()) as (address, _),
        serving("qwen3_vl", picture_policy(), limits=limits, fetch_media=True) as server,
    ):
        late = server.http.post(CHAT, json={"messages": asked(shown(address))})
        answered.set()
        assert late.status_code == 504 and "was not read within 0.5 s" in late.text
        assert server.service.readers.num_open == 0


def test_a_slow_host_does_not_hold_up_the_pictures_of_others() -> None:
    begun = threading.Event()
    answered = threading.Event()

    def answer() -> Iterator[bytes]:
        begun.set()
        yield b"HTTP/1.1 200 OK\r\nX-Slow: "
        answered.wait(600)

    with (
        picture_host(answer()) as (address, _),
        serving("qwen3_vl", picture_policy(), fetch_media=True) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        slow = thread.submit(server.http.post, CHAT, json={"messages": asked(shown(address))})
        try:
            assert begun.wait(600)
            body = {"messages": asked(shown(url(RED))), "max_tokens": 1}
            assert server.http.post(CHAT, json=body).status_code == 200 and not slow.done()
        finally:
            answered.set()
        assert slow.result().status_code == 400


def test_the_command_reads_pictures_where_its_model_does() -> None:
    settings = ServeSettings(str(picture_model()), "tiny", max_model_len=64, fetch_media=True)
    service = build_service(settings)
    try:
        reader = service.model.reader
        assert reader is not None and reader.config.fetch_media and service.model.takes_texts
    finally:
        for replica in service.client.replicas:
            replica.close()


def test_a_template_that_takes_parts_alone_is_given_parts() -> None:
    model = replace(model_of("qwen3_vl"), chat_template=PARTS_ALONE)
    assert not model.takes_texts
    found = prompts.SentPictures(model, lambda: None).content("hi", "messages[0].content")
    assert found == [{"type": "text", "text": "hi"}]
