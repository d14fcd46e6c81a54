"""Pictures and videos as rows of data hold them: files, bytes, data URLs, or dictionaries of these.

path │ bytes │ data:image/png;base64,… │ PIL │ {bytes, path} │ {image: …}  ──read_picture──► RGB picture
                                                                            ──picture_size──► width, height
list of pictures │ a file with several, such as GIF │ {video: …, fps}      ──read_video────► frames, fps
data URL or address of a client, in a request over HTTP                    ──sent_file─────► bytes of a file

What tools and environments answer with is packed first: pictures become data URLs, which any process and any
file of JSON can hold.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, ImageSequence, UnidentifiedImageError

from hybridflow.data.messages import MEDIA_PARTS
from hybridflow.errors import DataError

Picture = Image.Image

FPS = 2.0
"""Frames in a second of a video that does not say how many it has."""
FETCH_KEY = "data.fetch_media"
MOST_BYTES = 64 * 2**20
"""Most bytes of a picture that is fetched from an address."""
FETCH_SECONDS = 30.0
"""Deadline of one fetch, from the name of the host to the last byte; in requests, of all their fetches."""
SENT_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that a client may send: those of OpenAI's and Anthropic's interfaces. Others have decoders that few
need and that a hostile file could aim at.
"""
MOST_SENT_PIXELS = 2**25
"""Most pixels of a picture that a client sends, such as 7680 × 4320: some 100 MB once it is decoded."""
SHOWN_SIDE = 160
"""Pixels of the longer side of a picture that is kept for readers of samples."""
SHOWN_BYTES = 8192
NAMES = ("image", "image_url", "video", "video_url", "url", "bytes", "path")
"""Entries of a dictionary that hold the picture itself, in the order in which they count."""


class MediaError(DataError, ValueError):
    """A picture or a video that cannot be used, with its file or address."""


def read_picture(value: Any, *, fetch: bool = False, formats: tuple[str, ...] | None = None) -> Picture:
    """Return a picture in RGB; MediaError says why that cannot be done.

    Addresses (http, https) are read only with `fetch`, and with `formats` only files that are one of these,
    whose pixels are as many as their head says. A picture with several frames gives its first.
    """
    picture, name = _open(value, fetch, formats)
    counted = picture.size
    with _damage_named(name):
        read = picture.convert("RGB")
    if formats is not None and read.size != counted:
        raise MediaError(f"{name} has {read.size} pixels, and its head says {counted}")
    return read


def picture_size(
    value: Any, *, fetch: bool = False, formats: tuple[str, ...] | None = None
) -> tuple[int, int]:
    """Return width and height of a picture in pixels, where it can be read; MediaError as `read_picture`.

    Nothing is decoded of a PNG, whose checksums say that it is whole, a JPEG at an eighth of its size, and
    any other file, such as WEBP and GIF, in full.
    """
    held = _unwrapped(value)
    if isinstance(held, Image.Image):
        return read_picture(held).size
    picture, name = _open(held, fetch, formats)
    size = picture.size
    if picture.format == "PNG":
        with suppress(OSError, ValueError, SyntaxError):
            picture.verify()
            return size
    elif picture.format in ("JPEG", "MPO"):
        with _damage_named(name):
            picture.draft("RGB", (1, 1))
            picture.load()
            return size
    # the pixels can be right where checksums are not
    return read_picture(held, fetch=fetch, formats=formats).size


def sent_file(url: str, *, fetch: bool, seconds: float) -> tuple[bytes, int]:
    """Return the file of a picture that a client has sent, and its number of pixels; MediaError says why not.

    `url` is a data URL or, with `fetch`, an http address, whose file is to be whole in `seconds`. Nothing is
    decoded. No path is taken: a client may not have this machine's files read.
    """
    name = f"a URL that begins {url[:40]!r}"
    is_data = url.startswith("data:image/") and url.partition(",")[0].endswith(";base64")
    if not is_data and not url.startswith(("http://", "https://")):
        raise MediaError(f"got {name}, wanted data:image/png;base64,… with the picture's own bytes")
    if not is_data and not fetch:
        raise MediaError(
            f"got {name}, an address, and nothing is fetched here: send data:image/png;base64,… with the "
            f"picture's own bytes, or let addresses be fetched (--fetch-media of a server, {FETCH_KEY}=true "
            "of a run)"
        )
    content = _content(url, url, fetch) if is_data else _fetched(url, seconds)
    try:
        with Image.open(io.BytesIO(content), formats=SENT_FORMATS) as picture:
            pixels = picture.width * picture.height
    except Image.DecompressionBombError as error:
        raise MediaError(_too_many_pixels(str(error))) from error
    except Exception as error:  # a hostile file: decoders raise all sorts of errors
        raise MediaError(
            f"its {len(content)} bytes are no picture that can be read ({type(error).__name__}): send a file "
            f"of {', '.join(SENT_FORMATS)}"
        ) from error
    if pixels > MOST_SENT_PIXELS:
        raise MediaError(_too_many_pixels(f"it has {pixels} pixels"))
    return content, pixels


def _too_many_pixels(got: str) -> str:
    return f"{got}, and at most {MOST_SENT_PIXELS} are read: send it smaller"


def url_of(value: Any) -> str:
    """Return a picture as a URL that `sent_file` takes: an address as it is, else a data URL, which is a PNG
    where its file has none of SENT_FORMATS. MediaError as `pack_media`, and for too many pixels.
    """
    held = _unwrapped(value)
    if isinstance(held, str) and held.startswith(("http://", "https://")):
        return held
    picture, name = _open(held, False)
    if (pixels := picture.width * picture.height) > MOST_SENT_PIXELS:
        raise MediaError(_too_many_pixels(f"{name} has {pixels} pixels"))
    if picture.format not in (*SENT_FORMATS, "MPO"):  # MPO: a JPEG with further pictures behind it
        held = read_picture(picture)
    elif isinstance(held, str) and held.startswith("data:"):
        held = _content(held, held, False)  # its own head may name another type than a picture's
    return str(pack_media(held))


def pack_media(value: Any) -> Any:
    """Return a picture, or a video, with data URLs in the place of files and of pictures in memory.

    A file keeps its bytes, and a picture in memory becomes a PNG. Addresses (http, https) stay what they are:
    whether they are fetched is the reader's to say. MediaError where a picture cannot be read.
    """
    if isinstance(value, Mapping):
        rate = {"fps": value["fps"]} if "fps" in value else {}
        packed = pack_media(_inside(value))
        return {**(packed if isinstance(packed, dict) else {"url": packed}), **rate}
    if isinstance(value, list | tuple):
        return [pack_media(each) for each in value]
    if isinstance(value, str) and value.startswith(("data:", "http://", "https://")):
        return value
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        read_picture(value).save(file, "PNG", compress_level=1)
        value = file.getvalue()
    elif isinstance(value, str | Path):
        value = _content(str(value), str(value)[:200], False)
    picture, _ = _open(value, False)
    return f"data:image/{str(picture.format).lower()};base64,{base64.b64encode(value).decode()}"


def pack_parts(content: Sequence[Any]) -> list[Any]:
    """Return the parts of a content with packed media; MediaError as `pack_media`."""
    packed = []
    for part in content:
        kind = MEDIA_PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        if kind is not None and (held := media_in(part)):
            part = {"type": kind, **pack_media(held)}
        packed.append(part)
    return packed


def media_in(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a part of type image or video holds of its picture; nothing where it is a place alone."""
    held = {name: value for name, value in part.items() if name not in ("type", "text") and value}
    return {} if held.keys().isdisjoint(NAMES) else held


def blank(size: tuple[int, int]) -> Picture:
    """Return a black picture in RGB of (width, height) pixels."""
    return Image.new("RGB", size)


def read_video(value: Any, *, fetch: bool = False) -> tuple[list[Picture], float]:
    """Return the frames of a video in RGB and their number in a second; MediaError as `read_picture`."""
    fps = FPS
    if isinstance(value, Mapping):
        fps = _fps(value.get("fps"))
        value = _inside(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if not value:
            raise MediaError("a video has no frames")
        return [read_picture(frame, fetch=fetch) for frame in value], fps
    picture, name = _open(value, fetch)
    with _damage_named(name):
        return [frame.convert("RGB") for frame in ImageSequence.Iterator(picture)], fps


def thumbnail(picture: Picture) -> bytes:
    """Return a picture in RGB as a PNG, made smaller where a side has more than SHOWN_SIDE pixels.

    It is a JPEG where its PNG would have more than SHOWN_BYTES.
    """
    small = picture.copy()
    small.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    file = io.BytesIO()
    small.save(file, "PNG")
    if file.tell() > SHOWN_BYTES:
        file = io.BytesIO()
        small.save(file, "JPEG")
    return file.getvalue()


def _fps(given: Any) -> float:
    """Return the frames in a second that a video names; MediaError for what is no number above 0."""
    if given is None:
        return FPS
    with suppress(TypeError, ValueError):
        fps = float(given)
        if 0 < fps < math.inf:
            return fps
    raise MediaError(f"a video has fps={given!r}: wanted its frames in a second, a number above 0")


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Turn errors of the reader of a file into a MediaError with the picture's name."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaError(f"{name} is damaged: {error}") from error


def _unwrapped(value: Any) -> Any:
    """Return a picture without the dictionaries around it."""
    while isinstance(value, Mapping):
        value = _inside(value)
    return value


def _inside(value: Mapping[str, Any]) -> Any:
    """Return the picture in a dictionary; the bytes of {bytes, path} come before the path."""
    found = [value[name] for name in NAMES if value.get(name) is not None]
    if not found:
        raise MediaError(
            f"an object with the entries {', '.join(value) or 'none'} is no picture: wanted one of "
            f"{', '.join(NAMES)}"
        )
    return found[0]


def _open(value: Any, fetch: bool, formats: tuple[str, ...] | None = None) -> tuple[Picture, str]:
    """Return a picture, not decoded yet, and its name in messages."""
    value = _unwrapped(value)
    if isinstance(value, Image.Image):
        return value, "a picture"
    name = "a picture given as bytes"
    if isinstance(value, (str, Path)):
        name = str(value)[:200]
        value = _content(str(value), name, fetch)
    if not isinstance(value, (bytes, bytearray)):
        raise MediaError(
            f"got {type(value).__name__}, wanted a path, bytes, a data URL or an object with one of them"
        )
    try:
        return Image.open(io.BytesIO(value), formats=formats), name
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        reason = "is no picture in a format that is known here"
        if isinstance(error, Image.DecompressionBombError):
            reason = "has too many pixels"
        raise MediaError(
            f"{name} {reason} ({len(value)} bytes); videos are given as lists of frames, or as GIF"
        ) from error


def _content(address: str, name: str, fetch: bool) -> bytes:
    if address.startswith("data:"):
        try:
            return base64.b64decode(address.partition(",")[2], validate=True)
        except ValueError as error:  # a letter that is not of base64, or not of ASCII
            raise MediaError(f"the data URL {name[:40]}… is no base64: {error}") from error
    if address.startswith(("http://", "https://")):
        if not fetch:
            raise MediaError(
                f"{name} is an address, and nothing is fetched while training: download the pictures, or set "
                f"{FETCH_KEY}=true"
            )
        return _fetched(address, FETCH_SECONDS)
    try:
        return Path(address.removeprefix("file://")).expanduser().read_bytes()
    except OSError as error:
        raise MediaError(f"{name} cannot be read: {error.strerror or error}") from error


def _fetched(address: str, seconds: float) -> bytes:
    """Return what is at an address; MediaError where it is not whole in `seconds`, or is too large."""
    found: Future[bytes] = Future()

    def work() -> None:
        try:
            found.set_result(asyncio.run(_streamed(address, seconds)))
        except BaseException as error:
            found.set_exception(error)

    # a thread of its own: an event loop may run in this one, and a look-up of a host cannot be cancelled
    threading.Thread(target=work, name="fetch a picture", daemon=True).start()
    try:
        return found.result(seconds)
    except MediaError:
        raise
    except TimeoutError as error:
        raise MediaError(f"{address[:200]} was not whole after {seconds:.3g} s") from error
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise MediaError(f"{address[:200]} cannot be fetched: {error}") from error


async def _streamed(address: str, seconds: float) -> bytes:
    content = bytearray()
    # the one deadline: those of httpx begin anew with every byte
    async with (
        asyncio.timeout(seconds),
        httpx.AsyncClient(follow_redirects=True, timeout=None) as client,
        client.stream("GET", address, headers={"Accept-Encoding": "identity"}) as answer,
    ):
        answer.raise_for_status()
        async for piece in answer.aiter_raw():
            content += piece
            if len(content) > MOST_BYTES:
                raise MediaError(f"{address[:200]} has more than {MOST_BYTES} bytes")
    return bytes(content)
