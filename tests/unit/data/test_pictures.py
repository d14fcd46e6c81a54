"""Pictures of rows: every form that data sets use, and what is said of one that cannot be used."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import random
from pathlib import Path

import pytest
from PIL import Image

from hybridflow.data import pictures
from hybridflow.data.pictures import MediaError, picture_size, read_picture, read_video, thumbnail
from picture_models import picture_host, squares

RED = (255, 0, 0)
BLUE = (0, 0, 255)


def png(*colours: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    squares(*colours).save(file, "PNG")
    return file.getvalue()


def test_every_form_gives_the_same_picture(tmp_path: Path) -> None:
    content = png(RED, BLUE)
    file = tmp_path / "a.png"
    file.write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    forms = [
        content,
        str(file),
        file,
        f"file://{file}",
        url,
        squares(RED, BLUE),
        {"bytes": content, "path": "gone.png"},
        {"bytes": None, "path": str(file)},
        {"image": str(file)},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    wanted = squares(RED, BLUE).tobytes()
    for form in forms:
        picture = read_picture(form)
        assert picture.mode == "RGB" and picture.tobytes() == wanted, form
        assert picture_size(form) == picture.size, form


def test_a_palette_and_transparency_become_rgb() -> None:
    file = io.BytesIO()
    squares(RED).convert("P").save(file, "GIF")
    assert read_picture(file.getvalue()).mode == "RGB"
    assert read_picture(squares(RED).convert("RGBA")).mode == "RGB"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("gone.png", "gone.png cannot be read: No such file"),
        (b"no picture", "given as bytes is no picture in a format that is known"),
        ("https://a.example/b.png", "is an address, and nothing is fetched.*data.fetch_media=true"),
        ("data:image/png;base64,*", "is no base64"),
        ({"width": 3}, "entries width is no picture: wanted one of image"),
        (7, "got int, wanted a path"),
        (png(RED)[:48], "is damaged"),
    ],
    ids=["gone", "no picture", "address", "url", "entries", "number", "damaged"],
)
def test_what_cannot_be_read_is_named(value: object, said: str) -> None:
    for read in (read_picture, picture_size):
        with pytest.raises(MediaError, match=said):
            read(value)


def noise(width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(0).randbytes(width * height * 3))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_the_size_is_known_where_the_picture_can_be_read(form: str) -> None:
    file = io.BytesIO()
    noise(50, 37).save(file, form)
    content = file.getvalue()
    assert picture_size(content) == read_picture(content).size == (50, 37)
    for read in (read_picture, picture_size):
        with pytest.raises(MediaError, match=r"is damaged|is no picture"):
            read(content[: len(content) // 2])


def test_a_checksum_alone_damages_no_picture() -> None:
    content = bytearray(png(RED))
    content[content.index(b"IEND") - 5] ^= 1  # the last byte of the pixels' checksum
    assert picture_size(bytes(content)) == read_picture(bytes(content)).size == (16, 16)


def test_a_picture_in_memory_stays_as_it_is() -> None:
    file = io.BytesIO()
    noise(50, 37).save(file, "JPEG")
    held = Image.open(file)
    wanted = read_picture(file.getvalue()).tobytes()
    assert picture_size({"image": held}) == (50, 37) and read_picture(held).tobytes() == wanted


HEAD = b"HTTP/1.1 200 OK\r\n"


def test_an_address_is_fetched_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: /b.png\r\n\r\n"
    gone = b"HTTP/1.1 404 Not Found\r\n\r\n"
    with picture_host([moved], [HEAD, b"\r\n", png(RED)], [gone], [HEAD, b"\r\n", png(RED)]) as (url, asked):
        assert read_picture(url, fetch=True).tobytes() == squares(RED).tobytes()
        assert asked == ["GET /a.png HTTP/1.1", "GET /b.png HTTP/1.1"]
        with pytest.raises(MediaError, match=r"a\.png cannot be fetched: .*404"):
            read_picture(url, fetch=True)
        monkeypatch.setattr(pictures, "MOST_BYTES", 10)
        with pytest.raises(MediaError, match="more than 10 bytes"):
            read_picture(url, fetch=True)
    with pytest.raises(MediaError, match="cannot be fetched"):
        read_picture(url, fetch=True)


@pytest.mark.parametrize("begun", [b"", HEAD + b"X-Slow: ", HEAD + b"\r\n"], ids=["status", "header", "body"])
def test_a_host_that_sends_a_byte_now_and_then_is_left(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "FETCH_SECONDS", 0.5)
    drip = itertools.chain([begun], itertools.repeat(b"a"))
    with (
        picture_host(drip, pause=0.01) as (url, _),
        pytest.raises(MediaError, match=r"was not whole after 0\.5 s"),
    ):
        read_picture(url, fetch=True)


def test_an_event_loop_may_run_where_a_picture_is_fetched() -> None:
    async def fetched() -> tuple[int, int]:
        return picture_size(url, fetch=True)

    with picture_host([HEAD + b"\r\n" + png(RED)]) as (url, _):
        assert asyncio.run(fetched()) == (16, 16)


def test_a_video_is_frames_or_a_file_with_several(tmp_path: Path) -> None:
    file = tmp_path / "a.gif"
    squares(RED).save(file, save_all=True, append_images=[squares(BLUE), squares(RED)])
    frames, fps = read_video(str(file))
    assert [frame.getpixel((0, 0)) for frame in frames] == [RED, BLUE, RED] and fps == 2.0
    frames, fps = read_video({"video": [squares(RED), png(BLUE)], "fps": 4})
    assert [frame.getpixel((0, 0)) for frame in frames] == [RED, BLUE] and fps == 4.0
    with pytest.raises(MediaError, match="no frames"):
        read_video([])
    for odd in (-1, 0, "fast", float("nan"), [2]):
        with pytest.raises(MediaError, match="wanted its frames in a second, a number above 0"):
            read_video({"video": [squares(RED)], "fps": odd})


def test_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(MediaError, match="too many pixels"):
        read_picture(png(RED))


def test_a_small_picture_is_shown_as_it_is() -> None:
    shown = thumbnail(squares(RED, BLUE))
    assert shown.startswith(b"\x89PNG") and read_picture(shown).tobytes() == squares(RED, BLUE).tobytes()


def test_a_large_picture_is_shown_small() -> None:
    large = noise(640, 320)
    shown = thumbnail(large)
    assert shown.startswith(b"\xff\xd8") and len(shown) < 16_384 < len(png(RED)) + 640 * 320
    assert read_picture(shown).size == (160, 80) and large.size == (640, 320)
