"""Staleness of trajectories and the mismatch by staleness, by hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.staleness import mismatch_by_staleness, tokens_by_staleness, trajectory_staleness

VERSIONS = torch.tensor([[4, 4, 5], [2, -1, 5], [5, 5, -1], [-1, -1, -1]], dtype=torch.int32)
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)


def test_of_trajectories_with_several_versions() -> None:
    found = trajectory_staleness(VERSIONS, MASK, 5)
    assert found.newest.tolist() == [0, 0, 0]
    assert found.oldest.tolist() == [1, 3, 0]
    assert found.spans.tolist() == [1, 3, 0]
    later = trajectory_staleness(VERSIONS, MASK, 7)
    assert later.newest.tolist() == [2, 2, 2]
    assert later.oldest.tolist() == [3, 5, 2] and torch.equal(later.spans, found.spans)


def test_of_no_tokens() -> None:
    found = trajectory_staleness(VERSIONS, torch.zeros_like(MASK), 5)
    assert [len(part) for part in found] == [0, 0, 0]
    assert mismatch_by_staleness(VERSIONS.float(), VERSIONS.float(), torch.zeros_like(MASK), VERSIONS) == {}
    assert tokens_by_staleness(torch.zeros_like(MASK), VERSIONS) == {}


def test_mismatch_by_staleness() -> None:
    old = torch.tensor([[-1.0, -2.0, -1.0], [-3.0, math.nan, -1.0], [-2.0, -2.0, math.nan], [math.nan] * 3])
    rollout = torch.tensor([[-1.5, -2.0, -1.0], [-2.0, 0.0, -1.0], [-2.0, -1.0, 0.0], [0.0] * 3])
    found = {
        age: {name: float(top) / float(bottom) for name, (top, bottom) in values.items()}
        for age, values in mismatch_by_staleness(old, rollout, MASK, 5 - VERSIONS.long()).items()
    }
    assert list(found) == [0, 1, 3]
    e = math.exp
    assert found[0] == pytest.approx({"k3_kl": (e(-1) - 1 + 1) / 4, "ratio": (3 + e(-1)) / 4})
    assert found[1] == pytest.approx({"k3_kl": (e(0.5) - 1.5) / 2, "ratio": (e(0.5) + 1) / 2})
    assert found[3] == pytest.approx({"k3_kl": e(-1), "ratio": e(-1)})


def test_tokens_by_staleness() -> None:
    found = tokens_by_staleness(MASK, 5 - VERSIONS.long())
    parts = {age: float(top) / float(bottom) for age, (top, bottom) in found.items()}
    assert list(parts) == [0, 1, 3] and parts == pytest.approx({0: 4 / 7, 1: 2 / 7, 3: 1 / 7})
