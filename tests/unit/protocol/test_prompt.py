"""Prompts: one identity for token ids and media, unit by unit."""

from __future__ import annotations

import random

import pytest
import torch

from hybridflow.controller.mesh import MeshInfo, plan_items
from hybridflow.errors import DataError
from hybridflow.protocol.balancing import Workload
from hybridflow.protocol.prompt import Medium, Prompt, token_ids_of
from hybridflow.rollout.base import GenerationRequest, SamplingParams

PLACEHOLDER = 9


def random_prompt(draw: random.Random) -> Prompt:
    """Text and pictures of few kinds, so that equal prompts and equal beginnings come about."""
    ids: list[int] = []
    media = []
    for _ in range(draw.randrange(1, 4)):
        if draw.random() < 0.5:
            length = draw.randrange(1, 3)
            media.append(Medium(len(ids), length, draw.choice("ab")))
            ids += [PLACEHOLDER] * length
        else:
            ids += [draw.randrange(2) for _ in range(draw.randrange(1, 3))]
    return Prompt(tuple(ids), tuple(media))


def described(prompt: Prompt) -> list[str]:
    """What stands at each place, in words: the slow definition of a unit."""
    words = [str(token) for token in prompt.token_ids]
    for medium in prompt.media:
        for place in range(medium.start, medium.start + medium.length):
            words[place] += f" of {medium.digest} at {place - medium.start}"
    return words


def test_keys_are_equal_exactly_where_ids_and_media_are() -> None:
    draw = random.Random(0)
    made = [random_prompt(draw) for _ in range(2000)]
    equal = 0
    for first, second in zip(made, reversed(made)):
        assert len(first.key) == len(first) and tuple(token_ids_of(first.key)) == first.token_ids
        same = described(first) == described(second)
        equal += same
        assert (first.key == second.key) == (first == second) == same
        assert not same or hash(first) == hash(second)
        for length in range(min(len(first), len(second))):
            assert (first.key[:length] == second.key[:length]) == (
                described(first)[:length] == described(second)[:length]
            )
    assert equal > 20


def test_without_media_the_key_is_the_ids_and_values_do_not_count() -> None:
    assert Prompt((3, 4)).key == (3, 4)
    one, other = (
        Prompt((3, PLACEHOLDER), (Medium(1, 1, "a", {"pixels": torch.full((2,), value)}),))
        for value in (0.0, 1.0)
    )
    assert one == other and one != Prompt((3, PLACEHOLDER))


def test_prompts_with_other_pictures_are_dealt_apart() -> None:
    ids = (3, PLACEHOLDER, 4)
    sampling = SamplingParams(4)
    requests = [
        GenerationRequest(number, Prompt(ids, (Medium(1, 1, digest),)), sampling, seed=number)
        for number, digest in enumerate("aabb")
    ]
    plan = plan_items(requests, MeshInfo(2, workload=Workload()))
    assert sorted(sorted(part) for part in plan) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "media",
    [
        (Medium(1, 0, "a"),),
        (Medium(1, 1, ""),),
        (Medium(-1, 2, "a"),),
        (Medium(2, 2, "a"),),
        (Medium(0, 2, "a"), Medium(1, 1, "b")),
        (Medium(2, 1, "a"), Medium(0, 1, "b")),
    ],
)
def test_media_that_do_not_fit_the_ids_are_refused(media: tuple[Medium, ...]) -> None:
    with pytest.raises(DataError, match="medium"):
        Prompt((PLACEHOLDER,) * 3, media)
