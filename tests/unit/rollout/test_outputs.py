"""The output of a request between processes: few bytes, and the same output."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest

from hybridflow.rollout.base import GenerationOutput

FLOAT32 = np.linspace(-9.0, 0.0, 1000, dtype=np.float32).tolist()


def output(token_ids: list[int], log_probs: list[float], versions: list[int]) -> GenerationOutput:
    return GenerationOutput(3, token_ids, log_probs, "stop", versions, stop_reason="end", top_log_probs=None)


@pytest.mark.parametrize(
    ("highest", "log_probs", "versions", "num_bytes"),
    [
        (255, FLOAT32, [4] * 1000, 1 + 4),
        (65_535, FLOAT32, [4] * 400 + [5] * 600, 2 + 4),
        (150_000, FLOAT32, [70_000] * 1000, 4 + 4),
        (2**40, [value / 3 for value in FLOAT32], [*range(1000)], 8 + 8 + 8),
        (9, [math.nan, -math.inf, 1e300, -0.0] * 250, [-1, 2] * 500, 1 + 8 + 8),
    ],
)
def test_an_output_travels_in_few_bytes_and_arrives_as_it_was(
    highest: int, log_probs: list[float], versions: list[int], num_bytes: int
) -> None:
    sent = output([highest - place % 7 for place in range(1000)], log_probs, versions)
    pickled = pickle.dumps(sent, protocol=5)
    assert len(pickled) <= 1000 * num_bytes + 500
    got = pickle.loads(pickled)
    assert repr(got) == repr(sent), "also where NaN is not equal to itself"
    assert all(type(values) is list for values in (got.token_ids, got.log_probs, got.policy_versions))


def test_an_output_without_tokens_travels_too() -> None:
    failed = replace(output([], [], []), finish_reason="error", error="no room", refused=True)
    assert pickle.loads(pickle.dumps(failed)) == failed
