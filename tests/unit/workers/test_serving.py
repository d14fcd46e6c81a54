"""Serving without an end and weights in flight, in this process; `unit/controller/ray` has the same scenes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serving_scenes import SCENES, Groups, factories

from hybridflow.controller import LocalBackend
from hybridflow.errors import RolloutError

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))


class Apart(LocalBackend):
    """One process that says it is two."""

    def together(self, role: str, other: str) -> bool:
        return False


@pytest.mark.parametrize("scene", SCENES)
def test_in_this_process(scene: Callable[[Groups], None]) -> None:
    scene(Groups(Apart(factories)))


def test_a_shared_module_cannot_be_staged() -> None:
    groups = Groups(LocalBackend(factories))
    assert not groups.rollout.can_stage(groups.actor)
    with pytest.raises(RolloutError, match=r"version 3 cannot be staged.*trainer\.placement\.rollout"):
        groups.rollout.stage(groups.actor, 3)
