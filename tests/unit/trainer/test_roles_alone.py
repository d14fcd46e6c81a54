"""Calls of roles that share processes with engines: these stand meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridflow.observability.timing import Timer
from hybridflow.trainer.ppo.step import Overlap, RoleCall
from hybridflow.trainer.roles.roles import Roles

POOLS = {"actor": "train", "rollout": "generate", "reference": "generate", "reward_model": "generate"}


class Engines:
    """A rollout that notes when its engines stand."""

    role = "rollout"

    def __init__(self) -> None:
        self.events: list[str] = []

    def set_aside(self) -> Engines:
        return self

    def __enter__(self) -> None:
        self.events.append("stand")

    def __exit__(self, *_: object) -> None:
        self.events.append("go on")


def roles(pools: dict[str, str], engines: Engines) -> Roles:
    backend = SimpleNamespace(are_colocated=lambda first, second: pools[first] == pools[second])
    return Roles(cast(Any, SimpleNamespace(role="actor", backend=backend)), cast(Any, engines))


def test_engines_stand_while_a_role_on_their_processes_is_called() -> None:
    engines = Engines()
    together = roles(POOLS, engines)
    jobs = [
        RoleCall(role, "ref", lambda role=role: engines.events.append(role))  # type: ignore[misc]
        for role in ("actor", "reference")
    ]
    Overlap(lambda first, second: True, Timer(), together.alone)(jobs)
    assert engines.events == ["actor", "stand", "reference", "go on"]


@pytest.mark.parametrize(("role", "stands"), [("actor", False), ("reference", False), ("reward_model", True)])
def test_engines_on_the_actors_processes_stand_for_a_reward_model_alone(role: str, stands: bool) -> None:
    engines = Engines()
    with roles(dict.fromkeys(POOLS, "all"), engines).alone(role):
        assert engines.events == ["stand"] * stands
