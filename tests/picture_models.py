"""Tiny models that read pictures, and prompts with pictures, for tests of every room."""

from __future__ import annotations

import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from PIL import Image

from hybridflow.models.files.build import build_policy
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.protocol.prompt import MEDIA, Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from tiny_vlm import FAMILIES, create_tiny_vlm

__all__ = ["FAMILIES", "create_tiny_vlm"]


@cache
def picture_model(family: str = "qwen3_vl") -> Path:
    """A small model's folder, made once in a session."""
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{family}-"))
    return create_tiny_vlm(folder, family, hidden=32, vision_layers=2)


def picture_policy(family: str = "qwen3_vl", **changes: object) -> PolicyModel:
    """The policy of a small model, with weights so large that pictures and positions matter."""
    arguments: dict = {"device": "cpu", "probe": False, **changes}
    policy = build_policy(picture_model(family), **arguments)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return policy


def picture_prompt(policy: PolicyModel, picture: int, start: int = 2, after: int = 4) -> Prompt:
    """A prompt with one picture; equal numbers have equal pictures, and all have equal token ids."""
    vision = policy.vision
    assert vision is not None
    medium = vision.sample(start)
    pixels = medium.values["pixel_values"] + 0.3 * picture
    medium = replace(medium, digest=f"picture {picture}", values={**medium.values, "pixel_values": pixels})
    before = tuple(range(5, 5 + start))
    ids = (*before, *(vision.placeholder,) * medium.length, *range(20, 20 + after))
    return Prompt(ids, (medium,))


def picture_requests(policy: PolicyModel, pictures: list[int], tokens: int = 5) -> list[GenerationRequest]:
    """A request for each of `pictures`, and one without a picture at the end."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompts = [picture_prompt(policy, picture) for picture in pictures] + [Prompt((5, 6, 7))]
    return [GenerationRequest(number, prompt, sampling, seed=number) for number, prompt in enumerate(prompts)]


def rows_with_media(prompts: list[Prompt], responses: list[list[int]]) -> DataProto:
    """Rows as collate makes them."""
    columns = make_rows([prompt.token_ids for prompt in prompts], responses, 0)
    columns["loss_mask"] = columns["response_mask"].clone()
    return DataProto.from_dict(columns, {MEDIA: [prompt.media for prompt in prompts]})


def squares(*colours: tuple[int, int, int], side: int = 16) -> Image.Image:
    """A picture whose columns have these colours."""
    picture = Image.new("RGB", (len(colours), 1))
    picture.putdata(list(colours))
    return picture.resize((side, side), Image.Resampling.NEAREST)


@contextmanager
def picture_host(*answers: Iterable[bytes], pause: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a host whose n-th connection is answered with the pieces of the n-th of `answers`,
    the last for all others, with a pause before each; and the lines by which it was asked.

    The end waits until no connection is answered: a client that has given up must have hung up.
    """
    asked: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            lines = list(iter(self.rfile.readline, b"\r\n"))
            asked.append(lines[0].decode().strip())
            with suppress(OSError):
                for piece in answers[min(len(asked), len(answers)) - 1]:
                    time.sleep(pause)
                    self.wfile.write(piece)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/a.png", asked
        server.shutdown()
